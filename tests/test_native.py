"""What is recorded in C is what Python would have recorded; and a hook is to everybody the function it stands for."""

from __future__ import annotations

import copy
import gc
import hashlib
import inspect
import os
import pickle
import shutil
import signal
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.utils import suppress_instrumentation
from support.inprocess import Recorded, recording
from support.loops import FORMS, LONG, Picky, Points, seed, sgd, train, update
from support.phases import lines
from torch import nn
from torch.utils.data import DataLoader

import otel_dl
from otel_dl.forensics import layout, reader, writer
from otel_dl.forensics.writer import StatusPage
from otel_dl.recording import native
from otel_dl.recording.context import variable
from otel_dl.recording.held import Held
from otel_dl.recording.keep import AdaptiveHead, NeverHead
from otel_dl.recording.lane import Lane
from otel_dl.recording.native import FastPath, LaneState, StepState
from otel_dl.recording.records import Kind
from otel_dl.recording.run import Run
from otel_dl.settings import Settings
from otel_dl.workers import loop as loops
from otel_dl.workers import ring
from otel_dl.workers.carrier import Carrier
from otel_dl.workers.environment import Environment
from otel_dl.workers.loop import DataQueue, IndexQueue, Worker
from otel_dl.workers.relay import Relay
from otel_dl.workers.writer import Writer


def test_it_is_compiled_where_there_is_a_compiler() -> None:
    if shutil.which("cc") is None or sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("no C compiler, or a Python without the GIL: Python records")
    assert native.hooks is not None
    sources = sorted(Path(native.__file__).with_name("c").glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    assert digest == native.hooks.SOURCE, "it is older than its sources: install the package again"


@pytest.mark.skipif(native.hooks is None, reason="nothing is compiled")
def test_what_c_and_python_both_say_is_the_same() -> None:
    found = {name: value for name, value in vars(native.hooks).items() if isinstance(value, int)}
    wanted = {
        **{name: int(Kind[name]) for name in ("NEXT", "FORWARD", "EVAL_FORWARD", "NEUTRAL_FORWARD")},
        **{
            name: getattr(layout, name)
            for name in ("STEP", "PHASES", "BATCH", "SAMPLES", "SAMPLES_MOST", "DONE", "SIZE")
        },
        **{name: getattr(layout, name) for name in ("SIZE", "FORM_NONE", "FORM_INTEGERS", "FETCH", "CHECK")},
        "RING_HEAD": ring._HEAD,
        "RING_FIRST": ring._FIRST,
        "RING_SLOTS": ring.SLOTS,
        "SLOW": loops.SLOW,
        "WARM": loops.WARM,
    }
    assert found == wanted


compiled = pytest.mark.skipif(native.hooks is None, reason="nothing is compiled")


class Few(NeverHead):
    """One step in five: so most are ordinary ones, which become one another."""

    def step(self, number: int) -> bool:
        return number % 5 == 3

    def no_earlier(self, number: int) -> int:
        return number + (3 - number) % 5


def told(recorded: Recorded) -> list[Any]:
    steps = recorded.named("train.step")
    assert steps == sorted(steps, key=lambda step: step.start_time)
    return [
        *((step.attributes["dl.step"], step.attributes["dl.keep.reason"], step.status.status_code) for step in steps),
        *lines(recorded.spans, "train.step"),
        *lines(recorded.spans, "train.eval"),
        *(
            (span.attributes.get("dl.batch"), span.attributes.get("dl.epoch"))
            for span in recorded.spans
            if span.name == "dataloader.next"
        ),
        recorded.run.number,
    ]


@compiled
@pytest.mark.parametrize("name", [name for name in FORMS if name not in LONG])
def test_what_few_kept_steps_tell_is_what_they_tell_in_python(name: str) -> None:
    outcomes: list[list[Any]] = []
    for in_c in (True, False):
        with recording(Few(), native=in_c) as recorded:
            train(FORMS[name])
        outcomes.append(told(recorded))
    assert outcomes[0] == outcomes[1]


def loop(steps: int, after: Callable[[int], object] = lambda number: None) -> None:
    seed()
    model = Picky(6, 3)
    optimizer = sgd(model)
    for number, (x, y) in enumerate(DataLoader(Points(4 * steps), batch_size=4)):
        update(model, optimizer, x, y)
        after(number)


@compiled
def test_ordinary_phases_never_come_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    with recording(NeverHead()):

        def watch(number: int) -> None:
            if number != 150:
                return
            for name in ("begin", "begin_untrained", "begin_optimizer", "end_optimizer"):
                monkeypatch.setattr(Lane, name, lambda self, *args, name=name: asked.append(name) or 0)

        loop(300, watch)
    assert asked == []


@pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])
def test_an_ordinary_step_that_is_slow_is_kept(in_c: bool) -> None:
    with recording(NeverHead(), native=in_c) as recorded:

        def stretch(number: int) -> None:
            if number in (50, 222):  # the rule holds from step 100 on
                assert recorded.run.current is not None
                recorded.run.current.start -= 10**9

        loop(300, stretch)
    kept = [(span.attributes["dl.step"], span.attributes["dl.keep.reason"]) for span in recorded.named("train.step")]
    assert (222, "slow") in kept
    assert kept[0] == (0, "warmup")
    assert 50 not in dict(kept)


@pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])
def test_what_happens_in_an_ordinary_step_takes_it_out_of_the_ordinary(in_c: bool) -> None:
    seed()
    model = Picky(6, 3)
    optimizer = sgd(model)
    with recording(NeverHead(), native=in_c) as recorded:
        for number, (x, y) in enumerate(DataLoader(Points(200), batch_size=4)):
            if number == 20:
                with pytest.raises(ValueError, match="too large"):
                    model(x + 1000)
            if number == 30:
                with suppress_instrumentation():
                    model(x)
            if number == 40:
                model.eval()(x)
                model.train()
            update(model, optimizer, x, y)
    found = dict(
        zip(
            (span.attributes["dl.step"] for span in recorded.named("train.step")),
            lines(recorded.spans, "train.step"),
            strict=True,
        )
    )
    assert found[20].startswith("next forward!")
    assert recorded.run.number == 50


@compiled
class TestAsAFunction:
    def test_it_is_bound_named_documented_and_has_the_signature(self) -> None:
        original = nn.Module.__call__
        arguments = inspect.getfullargspec(original)
        with recording():
            hook = nn.Module.__call__
            assert hook is not original
            assert inspect.getfullargspec(hook) == inspect.getfullargspec(nn.Linear(2, 2)) == arguments
            bound = nn.Linear(2, 2).__call__
            assert isinstance(bound, types.MethodType)
            assert bound.__func__ is hook
            assert inspect.signature(hook) == inspect.signature(original)
            assert hook.__name__ == original.__name__
            assert hook.__module__ == original.__module__
            assert hook.__doc__ == original.__doc__
            assert inspect.unwrap(hook) is original
            assert callable(hook)
            assert weakref.ref(hook)() is hook
        assert nn.Module.__call__ is original

    def test_it_is_pickled_by_its_name_or_as_what_it_stands_for_and_copied_as_itself(self) -> None:
        original = nn.Module.__call__
        with recording():
            hook = nn.Module.__call__
            named = pickle.dumps(hook)
            assert pickle.loads(named) is hook
            function = type(iter(DataLoader(Points(2)))).__next__
            assert pickle.loads(pickle.dumps(function)) is function
        assert pickle.loads(named) is original
        with recording():
            assert pickle.loads(pickle.dumps(hook)) is original  # another one stands there now
            hook = nn.Module.__call__
            assert copy.copy(hook) is copy.deepcopy(hook) is hook

    def test_keywords_and_wrong_arguments_arrive(self) -> None:
        class Model(nn.Module):
            def forward(self, x: int, *, scale: int = 1) -> int:
                return x * scale

        model = Model()
        with recording():
            loop(3)
            assert model(3, scale=5) == 15
            assert model(x=3) == 3
            with pytest.raises(TypeError, match="unexpected keyword argument 'factor'"):
                model(3, factor=2)
            call: Any = nn.Module.__call__
            with pytest.raises(TypeError):
                call()
            step: Any = DataLoader(Points(2)).__iter__().__class__.__next__
            with pytest.raises(TypeError):
                step()
            with pytest.raises(TypeError):
                step(iter(DataLoader(Points(2))), 3)


@compiled
class TestMisuse:
    def test_state_of_the_wrong_kind_is_refused_or_nothing_is_ordinary(self) -> None:
        with pytest.raises(TypeError, match="ContextVar"):
            FastPath("no variable", 16)  # type: ignore[arg-type]
        fast = FastPath(variable, 16)
        with pytest.raises(TypeError, match="LaneState"):
            fast.follow("no lane")  # type: ignore[arg-type]
        lane = LaneState()
        fast.follow(lane)  # type: ignore[arg-type]
        arguments = (fast, 16, lambda: "original", lambda: "in Python", None, None, None)
        hook = native.hooks.Phase(*arguments)
        for step in (None, "no step", StepState()):
            lane.step = step
            assert hook() == "in Python"
        lane.step.settled = True
        assert hook() == "in Python"  # it has no list of records
        lane.step.records, lane.step.context = [], variable.get() if variable is not None else None
        assert hook() == "original"
        assert [record[0] for record in lane.step.records] == [16]

    def test_a_hook_that_was_not_made_or_is_made_twice_says_so(self) -> None:
        kind = native.hooks.Phase
        with pytest.raises(TypeError, match="not initialised"):
            kind.__new__(kind)()
        with pytest.raises(TypeError):
            kind(1, 2, 3)
        fast = FastPath(variable, 16)
        hook = kind(fast, 16, len, len, len, len, len)
        with pytest.raises(TypeError, match="once"):
            hook.__init__(fast, 16, len, len, len, len, len)


def references(in_c: bool) -> tuple[list[int], weakref.ref[Any]]:
    """How many more references there are to what every event touches, after 500 steps more."""
    seed()
    model = Picky(6, 3)
    optimizer = sgd(model)
    found: list[list[int]] = []
    with recording(NeverHead(), native=in_c) as recorded:
        things = (recorded.run.fast, recorded.run.local.lane, model, optimizer, nn.Module.__call__, None, False, "", 0)
        for _ in range(3):
            for number, (x, y) in enumerate(DataLoader(Points(2_000), batch_size=4)):
                if number % 50 == 7:
                    with pytest.raises(ValueError, match="too large"):
                        model(x + 1000)
                update(model, optimizer, x, y)
            gc.collect()
            found.append([sys.getrefcount(thing) for thing in things])
    return [after - before for before, after in zip(*found[1:], strict=True)], weakref.ref(recorded.run)


@compiled
def test_no_reference_is_lost_and_nothing_is_kept_alive() -> None:
    in_python, _ = references(in_c=False)
    in_c, run = references(in_c=True)
    # Kept steps hold some: those that failed, and on a busy machine slow ones. One too many for each of 500 steps or
    # more, in any of 2,500 events, would be 500.
    assert all(abs(one - other) < 300 for one, other in zip(in_c, in_python, strict=True)), (in_c, in_python)
    for thread in threading.enumerate():
        if thread.name.startswith("otel-dl"):
            thread.join(10)  # it was told to end, and holds the run until it does
    gc.collect()
    assert run() is None


@pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])
def test_a_thread_that_does_not_train_is_not_taken_for_the_one_that_does(in_c: bool) -> None:
    from concurrent.futures import ThreadPoolExecutor

    other = nn.Linear(6, 3)
    with ThreadPoolExecutor(1) as pool, recording(native=in_c) as recorded:
        loop(20, lambda number: pool.submit(other, torch.randn(1, 6)).result().sum().item())
    assert set(lines(recorded.spans, "train.step")) == {"next zero_grad forward backward optimizer"}


class Unsampled(NeverHead):
    adaptive = True


@pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])
def test_a_thread_is_not_taken_for_a_former_one_whose_ident_it_has(in_c: bool) -> None:
    """Training runs in a thread and ends in the middle of a step; another thread then evaluates."""
    seed()
    model, other = Picky(6, 3), nn.Linear(6, 3)
    optimizer = sgd(model)
    idents: list[int] = []

    def training() -> None:
        idents.append(threading.get_ident())
        for number, (x, y) in enumerate(batches):
            update(model, optimizer, x, y)
            if number == 9:
                otel_dl.keep()
                return

    def evaluation() -> None:
        idents.append(threading.get_ident())
        other(torch.randn(1, 6))

    batches = iter(DataLoader(Points(80), batch_size=4))
    # Nothing of a step is in the context, by which the threads could be told apart.
    with recording(Unsampled(), foreign=True, native=in_c) as recorded:
        for target in (training, evaluation):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    if idents[0] != idents[1]:
        pytest.skip("this system gives each thread an ident of its own")
    assert set(lines(recorded.spans, "train.step")) == {"next zero_grad forward backward optimizer"}


class Wrapped:
    """As torch's ExceptionWrapper."""

    def __init__(self) -> None:
        self.exc_type = KeyError
        self.exc_msg = "Caught KeyError in DataLoader worker process 0.\nTraceback\nKeyError: 'no such sample'\n"


Wrapped.__name__ = "ExceptionWrapper"
Ended = type("_IterableDatasetStopIteration", (), {})
Resume = type("_ResumeIteration", (), {})


class FakeQueue:
    """A queue of torch's: what is taken from it comes from `messages`, what is put into it goes to `taken`."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = messages
        self.taken: list[Any] = []

    def get(self, timeout: float) -> Any:
        return self.messages.pop(0)

    def put(self, message: Any) -> None:
        self.taken.append(message)


def reported(in_c: bool, stateful: bool, folder: Path) -> tuple[list[Any], list[Any]]:
    """What a worker tells of a sequence of fetches: (its page after each event, what its parent has in the end)."""
    run = Run(Settings(native=in_c), AdaptiveHead())
    relay = Relay(run)
    nonce = "n" * 32
    path = folder / f"{in_c}.status"
    writer.create(str(path), run.identity, worker=0, nonce=nonce, tail=ring.SIZE)
    (descriptor,) = relay.open(nonce, 1, [str(path)])
    assert descriptor is not None
    carrier = Carrier.make(run, nonce, [str(path)])
    worker = Worker(carrier, 0, Writer(os.dup(descriptor)), StatusPage(str(path), ring.SIZE), stateful)
    worker.look_after(Environment(carrier.environment, lambda warning: None))
    batches: list[tuple[Any, Any]] = [
        *((index, index * 2) for index in range(3)),
        (3, [7, 8, 9]),
        (4, (7, 8)),
        (5, [None, None]),
        (6, ["a", "b"]),
        (7, [1.5]),
        (8, [2**70]),
        (9, list(range(500))),
        (10, []),
        (2**31, [1]),
        (2**31 + 1, [True]),
    ]
    passed_over, last = 2**31 + 2, 2**31 + 3
    answers: dict[int, Any] = {1: Wrapped(), 3: Ended()}
    messages: list[Any] = []
    for batch in batches:
        messages += [batch, Resume()] if batch[0] == 5 else [batch]
    index_queue, data_queue = FakeQueue([*messages, (passed_over, [1]), (last, [2]), None]), FakeQueue([])
    indices, data = IndexQueue(index_queue, worker), DataQueue(data_queue, worker)
    pages: list[Any] = []

    def look() -> None:
        page = reader.read(str(path))
        assert page is not None
        assert page.phases is not None
        done = page.done and (page.done.round, page.done.place, page.done.fetches)
        batch = page.batch and page.batch._replace(start=0)
        pages.append(([phase.name for phase in page.phases], batch, done, worker.batch))

    token = context_api.attach(Context())
    try:
        while (message := indices.get(timeout=5)) is not None:
            look()
            if not isinstance(message, tuple):
                continue
            index, _ = message
            if index == 0:
                os.environ["ADDED_BY_A_DATASET"] = "1"
            if index == 2:
                worker.room()
            if index == 6:
                pages.append(trace.get_current_span().get_span_context().trace_id)
            if index == 9:
                context_api.attach(Context({"a user's": "value"}))
            if index == passed_over:
                continue  # torch passes over what it has no use for any more
            answer = answers.get(index, "a batch")
            data.put((index, (answer, 0, {}) if stateful else answer))
            look()
            pages.append(trace.get_current_span().get_span_context().trace_id)
        data.put(None)
        relay.drain(final=True)
        found = [
            fetch and fetch._replace(pid=0, start=0, end=0)
            for fetch in (relay.take((nonce, round, index)) for round in (0, 1) for index, _ in [*batches, (last, 0)])
        ]
        return [*pages, [type(message) for message in data_queue.taken]], [*found, worker.fetches, dict(relay.dropped)]
    finally:
        context_api.detach(token)
        os.environ.pop("ADDED_BY_A_DATASET", None)
        relay.close()


@compiled
@pytest.mark.parametrize("stateful", [False, True], ids=["torch", "torchdata"])
def test_what_a_worker_tells_is_what_it_tells_in_python(stateful: bool, tmp_path: Path) -> None:
    in_c, in_python = reported(True, stateful, tmp_path), reported(False, stateful, tmp_path)
    assert in_c == in_python
    assert sum(fetch is not None for fetch in in_c[1][:-2]) == 13


@pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])
def test_what_a_signal_handler_raises_while_a_modules_attributes_are_looked_at_arrives(in_c: bool) -> None:
    """Those of a scripted module, or a property, are Python code, in which Ctrl-C may come."""

    class Interrupted(Picky):
        armed = False

        @property
        def training(self) -> bool:
            if self.armed:
                type(self).armed = False
                signal.raise_signal(signal.SIGINT)
            return True

        @training.setter
        def training(self, mode: bool) -> None:
            pass

    seed()
    model = Interrupted(6, 3)
    optimizer = sgd(model)
    done = 0
    with recording(native=in_c), pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for x, y in DataLoader(Points(200), batch_size=4):
            Interrupted.armed = done == 20
            update(model, optimizer, x, y)
            done += 1
    assert done == 20


class Unfinished(nn.Module):
    """It has none of the attributes that `super().__init__()` makes."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_module_without_the_attributes_that_are_looked_at_does_what_it_does_without(in_c: bool) -> None:
    frozen: Any = torch.jit.freeze(torch.jit.script(nn.Linear(6, 6).eval()))
    with pytest.raises(AttributeError) as without:
        Unfinished()(1)
    seed()
    model = nn.Linear(6, 3)
    optimizer = sgd(model)
    with recording(native=in_c) as recorded:
        for x, y in DataLoader(Points(40), batch_size=4):
            with pytest.raises(AttributeError) as within:
                Unfinished()(1)
            assert str(within.value) == str(without.value)
            update(model, optimizer, frozen(x), y)
    assert len(recorded.named("train.step")) == 10


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])
def test_a_step_with_collectives_is_an_ordinary_one(in_c: bool, group: None) -> None:
    steps: list[Any] = []
    with recording(NeverHead(), native=in_c) as recorded:

        def reduce(number: int) -> None:
            dist.all_reduce(torch.ones(1))
            step = recorded.run.current
            assert step is not None
            assert len(step.collectives) == 1
            steps.append(step)

        loop(300, reduce)
    # Those that took long are ended, and another one is begun.
    assert len({id(step) for step in steps[150:]}) < 50
    assert len(steps) == 300


@compiled
def test_steps_that_are_held_for_other_ranks_are_the_same(group: None) -> None:
    outcomes: list[Any] = []
    for in_c in (True, False):
        with recording(NeverHead(), native=in_c) as recorded:
            recorded.run.held = held = Held(recorded.run, 2_000)
            loop(1_500, lambda number: dist.all_reduce(torch.ones(1)))
            entries = [entry for entry in held._steps if isinstance(entry, tuple)]
            # Ordinary ones that took long are closed, and held as the steps that they are.
            assert len(entries) > 100
            for number, start, end, dropped, records, collectives in entries:
                assert dropped == 0
                assert [start <= collective.start <= collective.end <= end for collective in collectives] == [True]
                assert start <= records[0][1] <= records[-1][2] <= end, f"step {number}"
            outcomes.append({tuple(record[0] for record in entry[4]) for entry in entries})
            # A slow one is held beyond that, until all ranks have agreed whether it is kept.
            assert sum(len(records) + len(collectives) for *_, records, collectives in entries) <= 2_000
    assert outcomes[0] == outcomes[1]
