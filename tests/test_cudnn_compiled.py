"""Convolutions in compiled code: what the same network tells when Python runs it is the truth. And in modules that were
scripted or traced (`torch.jit`), of which nothing is told: they do what they do without. cuDNN is a stand-in.
"""

from __future__ import annotations

import io
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.convolving import convolving, is_followed
from support.loops import seed, sgd
from test_cudnn_spans import told
from test_synchronization import Alarm, alarm_at
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import otel_dl
from otel_dl.patches.cudnn import watch
from otel_dl.recording import native
from otel_dl.recording.keep import NeverHead

pytestmark = [
    pytest.mark.skipif(native.hooks is None, reason="convolutions are followed in C"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Converting a tensor"),
]

BATCHES = [4, 4, 6, 4, 6]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Network(nn.Module):
    """Convolutions of three kinds, of which only the first has an input that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.third = nn.Conv1d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).relu()).relu().flatten(2))


class Outer(nn.Module):
    """Python around a module that is not."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.before = nn.Conv2d(3, 3, 1)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))


def scripted() -> Any:
    return torch.jit.script(Network())


def traced() -> Any:
    return torch.jit.trace(Network(), torch.randn(1, 3, 8, 8), check_trace=False)


def compiled() -> Any:
    return torch.compile(Network(), backend="aot_eager")


def trained(make: Callable[[], Any]) -> list[Tensor]:
    """What the parameters are after a step for each batch."""
    seed()
    model = make()
    optimizer = sgd(model)
    for (size,) in DataLoader(TensorDataset(torch.tensor(BATCHES)), batch_size=1):
        optimizer.zero_grad()
        model(torch.randn(int(size), 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def told_of(make: Callable[[], Any], **settings: Any) -> list[list[str]]:
    with convolving(**settings) as recorded:
        trained(make)
        assert is_followed(), "no fault took the patch out"
        return [sorted(step) for step in told(recorded)]


def test_they_tell_what_the_same_network_tells_in_python() -> None:
    eager = told_of(Network)
    assert [sum(name.endswith("*") for name in step) for step in eager] == [8, 0, 8, 0, 0]
    assert [len(step) for step in eager] == [8] * 5
    assert told_of(compiled) == eager


@pytest.mark.long
def test_inductor_tells_what_the_same_network_tells_in_python() -> None:
    assert told_of(lambda: torch.compile(Network(), dynamic=False)) == told_of(Network)


def test_within_a_network_that_python_runs() -> None:
    assert told_of(lambda: Outer(compiled())) == told_of(lambda: Outer(Network()))


def test_in_steps_that_nobody_keeps_only_what_tunes_is_told() -> None:
    steps = told_of(compiled, head=NeverHead())
    assert [len(step) for step in steps] == [8, 8]
    assert all(name.endswith("*") for step in steps for name in step)


@pytest.mark.parametrize("make", [Network, scripted, traced, compiled])
def test_what_is_trained_is_the_same_bit_for_bit(make: Callable[[], Any]) -> None:
    without = trained(make)
    torch.compiler.reset()
    with convolving():
        under = trained(make)
    assert all(torch.equal(one, other) for one, other in zip(without, under, strict=True))


def test_aten_convolution_itself() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 3, 3))
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    with convolving() as recorded:
        with otel_dl.step():
            x = torch.randn(2, 3, 8, 8)
            F.conv2d(x, weight)
            torch.ops.aten.convolution(x, weight, *rest)
            torch.ops.aten.convolution.default(x, weight, *rest).sum().backward()
            torch.convolution(x, weight, *rest)
        (step,) = told(recorded)
    assert step[0] == "conv2d*"
    assert step.count("conv2d*") == 1
    assert step.count("conv2d") >= 2, "the packet is a function of its own, and does not pass by"
    assert step.count("conv2d_backward_weight*") == 1


def test_a_module_is_saved_traced_and_scripted_as_without() -> None:
    def made() -> list[str]:
        outer = Outer(scripted())
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(outer), buffer)
        buffer.seek(0)
        made = (torch.jit.trace(outer, torch.randn(2, 3, 8, 8)), torch.jit.load(buffer))
        return [re.sub(r"\.?___torch_mangle_\d+", "", str(module.inlined_graph)) for module in made]

    with torch.backends.cudnn.flags(enabled=True, benchmark=True):  # which is written into what is traced
        without = made()
    with convolving():
        assert made() == without


@pytest.mark.parametrize("reading", [0, 1])
def test_after_the_users_alarm_others_are_told(reading: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with convolving() as recorded:
        with otel_dl.step(), monkeypatch.context() as patch:
            patch.setattr(watch, "clock", alarm_at(reading, watch.clock))
            with pytest.raises(Alarm):
                torch.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3))
        with otel_dl.step():
            torch.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3))
        assert len(told(recorded)[-1]) == 1


def test_a_graph_break_more_or_less_there_is_none() -> None:
    def breaks() -> tuple[Any, ...]:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(Outer(model), backend="eager")(torch.randn(2, 3, 8, 8))
        counters = torch._dynamo.utils.counters
        # torch 2.4 has no way to say that what is called from a function is to be left alone as well.
        frames = counters["frames"]["ok"] if hasattr(torch._dynamo.eval_frame, "set_code_exec_strategy") else 0
        return dict(counters["graph_break"]), counters["stats"]["unique_graphs"], frames

    model = scripted()
    without = breaks()
    with convolving():
        assert breaks() == without


# Code that `torch.jit` runs. Under a dispatch mode its operations would come by Python, and not be what they are.


class Scaled(Network):
    """Its graph, when it was traced, has numbers that are tensors."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y * 2 + y * 2.5).add_(1).div(y.abs() * 2 + 1)


class Refused(Network):
    def forward(self, x: Tensor) -> Tensor:
        return torch.kthvalue(self.first(x) > 0, 1)[0]


class Forks(Network):
    def forward(self, x: Tensor) -> Tensor:
        return torch.jit.wait(torch.jit.fork(self.first, x))


class Long(Network):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for _ in range(3_000):
            y = self.first(x)
        return y


def both(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What comes of it, or is raised, without and with a session."""

    def came() -> Any:
        seed()
        try:
            return call()
        except BaseException as error:
            return type(error), re.sub(r"___torch_mangle_\d+", "", str(error))

    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        without = came()
    with convolving() as recorded:
        with otel_dl.step():
            under = came()
        assert is_followed(), "no fault took the patch out"
        assert told(recorded) == [[]]
    return without, under


@pytest.mark.parametrize("batch_norm", [False, True])
def test_what_was_traced_runs_as_without(batch_norm: bool) -> None:
    def trained() -> list[bytes]:
        network = nn.Sequential(Scaled(), nn.BatchNorm1d(2)) if batch_norm else Scaled()
        model: Any = torch.jit.trace(network, torch.randn(1, 3, 8, 8), check_trace=False)
        for size in BATCHES:
            model(torch.randn(size, 3, 8, 8)).square().mean().backward()
        return [(tensor if tensor.grad is None else tensor.grad).numpy().tobytes() for tensor in model.parameters()]

    without, under = both(trained)
    assert isinstance(without, list)
    assert under == without


@pytest.mark.parametrize("kind", [Network, Forks, Refused])
def test_a_scripted_module_raises_what_it_raises_without(kind: type[Network]) -> None:
    x = torch.randn(2, 3 if kind is Refused else 5, 8, 8)
    without, under = both(lambda: torch.jit.script(kind())(x))
    assert issubclass(without[0], RuntimeError)  # of Refused a NotImplementedError in torch 2.15
    assert under == without


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_a_signal_handler_that_raises_while_scripted_code_runs_raises_that(raised: type[BaseException]) -> None:
    def handler(number: int, frame: object) -> None:
        raise raised("by the handler")

    model, x = torch.jit.script(Long()), torch.randn(2, 3, 8, 8)
    former = signal.signal(signal.SIGUSR1, handler)

    def called() -> None:
        sender = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1))
        sender.start()
        try:
            model(x)
        finally:
            sender.join()

    try:
        without, under = both(called)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert under == without == (raised, "by the handler")
