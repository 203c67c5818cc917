"""A fault of ours ends one target's patches and nothing else; what a signal handler raises inside our code arrives."""

from __future__ import annotations

import functools
import itertools
import operator
import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import pytest
import torch
from opentelemetry import context as context_api
from support import loops
from support.inprocess import Recorded, recording
from support.loops import FORMS, Picky, Points, loader, seed, sgd
from support.phases import lines
from torch import Tensor, nn
from torch.utils.data import DataLoader

import otel_dl
from otel_dl.faults import is_ours
from otel_dl.patches import compilation
from otel_dl.recording import context, lane, records
from otel_dl.recording.keep import Keep, SlowSteps
from otel_dl.recording.lane import Lane
from otel_dl.recording.run import Run, StepSpan

fail: Any = operator.concat
"""Raises TypeError whatever our code calls it with, and has no frame: to us a fault of our own."""

Outcome = tuple[list[float], list[bytes]]


@pytest.fixture(autouse=True)
def own_context() -> Iterator[None]:
    """Where `context.detach` itself is broken a step's context stays: not for the tests that follow."""
    token = context_api.attach(context_api.Context())
    yield
    context_api.detach(token)


def train(halfway: Callable[[], None] = lambda: None) -> Outcome:
    """Comes through every patched function, also by an exception; calls `halfway` when some steps have been done."""
    seed()
    model, criterion = Picky(6, 3), nn.CrossEntropyLoss()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data, held_out = DataLoader(Points(24, bad=21), batch_size=4), loader(2)
    losses: list[float] = []

    def closure(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        return loss

    for epoch in range(3):
        if epoch == 1:
            halfway()
        batches = iter(data)
        while True:
            try:
                x, y = next(batches)
            except StopIteration:
                break
            except ValueError:
                continue
            if len(losses) % 5 == 2:
                try:
                    model(x + 1000)
                except ValueError:
                    losses.append(-1)
            if len(losses) % 2:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss = optimizer.step(functools.partial(closure, x, y))
            scheduler.step()
            losses.append(loss.item())
        with torch.no_grad():
            losses += [criterion(model.eval()(x), y).item() for x, y in held_out]
        model.train()
    return losses, [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def bare() -> Outcome:
    return train()


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    former = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def functions(owner: Any) -> list[str]:
    return [
        name
        for name, value in vars(owner).items()
        if isinstance(value, (FunctionType, property)) and not name.startswith("__")
    ]


OWNERS: list[Any] = [Lane, Run, Keep, SlowSteps, StepSpan, context.DerivedSpan]
NOT_WITHIN_TRAINING = {"Run.finish", "Run.restart", "Run.recover", "Lane.finish"}

PLACES: list[tuple[Any, str]] = [
    place
    for place in [
        *((owner, name) for owner in OWNERS for name in functions(owner)),
        *((context, name) for name in ("attach", "detach", "current", "suppressed", "get_current", "_uncovered")),
        (lane, "clock"),
        (lane, "get_current"),
        (lane, "Failure"),
    ]
    if f"{getattr(place[0], '__name__', '')}.{place[1]}" not in NOT_WITHIN_TRAINING
]
places = pytest.mark.parametrize(
    ("owner", "name"), PLACES, ids=[f"{owner.__name__.rpartition('.')[2]}.{name}" for owner, name in PLACES]
)


ALL_TARGETS = {
    "collectives",
    "forward",
    "backward",
    "zero_grad",
    "lr_scheduler",
    "optimizer",
    "grad_scaler",
    "dataloader",
    "synchronization",
    "processes",
    "process groups",
    "profilers",
}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.args[0] for record in caplog.records if "a fault of ours in the instrumentation" in record.msg]


def installed(recorded: Recorded) -> set[str]:
    """Without one-time work: which of its targets there are depends on what is imported, and what was compiled."""
    targets = {patches.target for patches in recorded.session._patches if patches._saved or patches._cells}
    return targets - compilation.INSTALLERS.keys() - {"convolutions"}


@places
@pytest.mark.parametrize("when", ["from the start", "halfway"])
def test_a_fault_switches_off_its_target_and_training_goes_on(
    when: str, owner: Any, name: str, bare: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    with recording() as recorded, pytest.MonkeyPatch.context() as patch:
        before = installed(recorded)

        def break_it() -> None:
            patch.setattr(owner, name, fail)

        if when == "from the start":
            break_it()
            outcome = train()
        else:
            outcome = train(break_it)
        switched_off = before - installed(recorded)
        patch.undo()
    assert outcome == bare
    assert sorted(warnings(caplog)) == sorted(switched_off)


@pytest.mark.parametrize("name", ["begin", "end", "begin_next", "begin_optimizer", "fail"])
def test_what_other_targets_see_is_still_recorded(name: str) -> None:
    with recording() as recorded, pytest.MonkeyPatch.context() as patch:
        marks: list[int] = []

        def break_it() -> None:
            patch.setattr(Lane, name, fail)
            marks.append(lane.clock())

        train(break_it)
        patch.undo()
        still = installed(recorded)
    assert still
    after = records.to_epoch_ns(marks[0])
    late = {span.name for span in recorded.spans if span.start_time > after}
    expected = {
        "forward": "forward",
        "backward": "backward",
        "zero_grad": "optimizer.zero_grad",
        "optimizer": "optimizer.step",
        "dataloader": "dataloader.next",
        "lr_scheduler": "lr_scheduler.step",
    }
    assert {expected[target] for target in still & expected.keys()} <= late


@pytest.mark.parametrize("name", ["enter_step", "exit_step", "begin_span", "end_span"])
def test_a_fault_in_a_step_or_span_of_ones_own_leaves_it_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    forms = [FORMS["explicit_steps_with_a_loader"], FORMS["spans_of_ones_own"]]
    without = [train_form(form) for form in forms]
    with recording(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, name, fail)
        outcomes = [train_form(form) for form in forms]
        patch.undo()
    assert outcomes == without
    assert warnings(caplog) == ["otel_dl.step and otel_dl.span"]


def train_form(form: Any) -> Any:
    diary, weights = loops.train(form)
    return diary.losses, [weight.numpy().tobytes() for weight in weights]


# What is not ours.


class Timeout(Exception):
    """The user's."""


def raise_timeout(number: int, frame: Any) -> None:
    raise Timeout(number)


class Watch:
    def method(self, number: int, frame: Any) -> None:
        raise Timeout(number)

    def __call__(self, number: int, frame: Any) -> None:
        raise Timeout(number)


def with_more(reason: str, number: int, frame: Any) -> None:
    raise Timeout(reason)


def resets_itself(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Timeout(number)


def raises_in_the_library(number: int, frame: Any) -> None:
    queue.Queue[int]().get_nowait()


HANDLERS: dict[str, tuple[Any, type[BaseException]]] = {
    "function": (raise_timeout, Timeout),
    "bound method": (Watch().method, Timeout),
    "callable object": (Watch(), Timeout),
    "partial": (functools.partial(with_more, "late"), Timeout),
    "partial of a bound method": (functools.partial(Watch().method), Timeout),
    "lambda": (lambda number, frame: raise_timeout(number, frame), Timeout),
    "one that resets itself": (resets_itself, Timeout),
    "one that raises in the standard library": (raises_in_the_library, queue.Empty),
    "written in C": (functools.partial(operator.concat, 1), TypeError),
    "one that exits": (lambda number, frame: sys.exit(3), SystemExit),
    "Python's own for Ctrl-C": (signal.default_int_handler, KeyboardInterrupt),
}


def at_call(number: int, original: Callable[[], Any], happens: Callable[[], Any]) -> Any:
    """In the place of `original`: the same, but `happens` at this call. Without a frame, as our code in C would be."""
    before = itertools.islice(iter(original, object()), number)
    return itertools.chain(before, iter(happens, None), iter(original, object())).__next__


def raise_alarm() -> Callable[[], Any]:
    """Without a frame, too."""
    return map(signal.raise_signal, [signal.SIGALRM]).__next__


INSIDE = [(lane, "clock"), (lane, "get_current"), (context, "get_current")]
inside = pytest.mark.parametrize(("module", "name"), INSIDE, ids=["lane.clock", "lane.get_current", "context"])


def assert_goes_on_as_if_nothing_had_been(recorded: Recorded, patch: pytest.MonkeyPatch) -> None:
    patch.undo()
    assert installed(recorded) == ALL_TARGETS
    diary, _ = loops.train(FORMS["plain"])
    recorded.run.finish()
    recorded.session.flush(60)
    first, *others = lines(recorded.spans, "train.step")[-len(diary.steps) :]
    assert others == diary.steps[1:]
    # What the exception cut short was no step: its phases are the next one's.
    assert first.endswith(diary.steps[0])


@inside
@pytest.mark.parametrize("call", range(0, 100, 9))
def test_the_users_alarm_arrives_wherever_it_comes(
    call: int, module: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    raised: list[Timeout] = []
    arrived: list[Timeout] = []

    def handler(number: int, frame: Any) -> None:
        raised.append(Timeout())
        raise raised[0]

    signal.signal(signal.SIGALRM, handler)
    with recording() as recorded, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, at_call(call, getattr(module, name), raise_alarm()))
        try:
            train()
        except Timeout as error:
            arrived.append(error)
        assert arrived == raised
        assert_goes_on_as_if_nothing_had_been(recorded, patch)
    assert warnings(caplog) == []


RUNS_IN_EACH_CALL = tuple(os.path.join(os.path.dirname(otel_dl.__file__), name) for name in ("patches", "recording"))


def entered(frame: FrameType) -> tuple[str, str] | None:
    """The function of ours that begins here, and its caller."""
    name = frame.f_code.co_qualname
    if not frame.f_code.co_filename.startswith(RUNS_IN_EACH_CALL) or frame.f_back is None:
        return None
    if name == "Loaders._forget":
        return None  # called by a weak reference, out of which nothing can be raised
    return name, frame.f_back.f_code.co_qualname


@pytest.mark.parametrize("native", [True, False])
def test_the_users_alarm_arrives_as_a_function_of_ours_begins(native: bool, caplog: pytest.LogCaptureFixture) -> None:
    begun: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, arg: object) -> None:
        place = entered(frame)
        if place is not None:
            begun[place] = None

    def alarm(frame: FrameType, event: str, arg: object) -> None:
        if entered(frame) == place:
            sys.settrace(None)
            raise Timeout  # before its first line, as a signal handler that runs there

    with recording(native=native) as recorded:
        train()
        sys.settrace(note)
        train()
        sys.settrace(None)
        assert {caller for _, caller in begun} >= {"recorder.<locals>.recorded", "Patches.guard"}
        for place in begun:
            try:
                sys.settrace(alarm)
                with pytest.raises(Timeout):
                    train()
            finally:
                sys.settrace(None)
            assert recorded.run.local.lane.kinds == 0, f"no phase is open after {place}"
        assert_goes_on_as_if_nothing_had_been(recorded, pytest.MonkeyPatch())
    assert warnings(caplog) == []


@pytest.mark.parametrize(("handler", "kind"), HANDLERS.values(), ids=HANDLERS)
@pytest.mark.parametrize("call", [0, 5, 20, 40])
def test_whatever_the_handler_is_made_of(
    call: int, handler: Any, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    signal.signal(signal.SIGALRM, handler)
    with recording() as recorded, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "clock", at_call(call, lane.clock, raise_alarm()))
        with pytest.raises(kind):
            train()
        assert_goes_on_as_if_nothing_had_been(recorded, patch)
    assert warnings(caplog) == []


def test_a_handler_that_does_not_raise_changes_nothing(bare: Outcome, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, frame: calls.append(number))
    with recording(), pytest.MonkeyPatch.context() as patch:

        def clock() -> int:
            if not calls:
                signal.raise_signal(signal.SIGALRM)
            return records.clock()

        patch.setattr(lane, "clock", clock)
        outcome = train()
    assert (outcome, calls, warnings(caplog)) == (bare, [signal.SIGALRM], [])


def test_torchs_word_of_a_dead_worker_arrives(caplog: pytest.LogCaptureFixture) -> None:
    """The SIGCHLD of a worker that was killed comes while our code runs; torch's handler raises."""
    with recording() as recorded, pytest.MonkeyPatch.context() as patch:
        data = DataLoader(Points(64), batch_size=2, num_workers=1, multiprocessing_context="fork")
        batches = iter(data)
        x, _ = next(batches)
        (worker,) = batches._workers
        torchs = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.kill(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        signal.signal(signal.SIGCHLD, torchs)
        patch.setattr(lane, "clock", functools.partial(signal.raise_signal, signal.SIGCHLD))
        with pytest.raises(RuntimeError, match="is killed by signal"):
            nn.Linear(6, 3)(x)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        del batches
        assert_goes_on_as_if_nothing_had_been(recorded, patch)
    assert warnings(caplog) == []


def test_an_exception_of_training_is_the_same_object_with_the_same_cause() -> None:
    raised = ValueError("of the model's")
    cause = KeyError("before")

    class Raises(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise raised from cause

    with recording(), pytest.raises(ValueError, match=r"of the model's") as caught:
        Raises(1, 1)(torch.ones(1))
    assert caught.value is raised
    assert caught.value.__cause__ is cause
    assert caught.value.__context__ is None or caught.value.__context__ is cause


def test_a_fault_is_told_from_the_users_by_its_frames() -> None:
    def of(function: Callable[[], Any]) -> BaseException:
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            function()
        assert caught.tb is not None
        return caught.value.with_traceback(caught.tb.tb_next)  # without this frame

    assert is_ours(of(functools.partial(operator.concat, 1, 2)))
    assert is_ours(of(functools.partial(queue.Queue[int]().get_nowait)))
    assert not is_ours(of(lambda: 1 / 0))
    assert not is_ours(of(functools.partial(torch.nn.Linear, "x", 3)))
    assert not is_ours(of(functools.partial(sys.exit, 1)))
