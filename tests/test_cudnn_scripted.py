"""Convolutions that Python does not call: in modules that were scripted or traced, and in compiled code. What the same
network tells when Python runs it is the truth. cuDNN is a stand-in, everything else is real.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.convolving import convolving, is_followed
from support.loops import seed, sgd
from test_cudnn_spans import told
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import otel_dl
from otel_dl.recording import native
from otel_dl.recording.keep import NeverHead

pytestmark = [
    pytest.mark.skipif(native.hooks is None, reason="convolutions are followed in C"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
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


MAKERS = [scripted, traced, compiled]


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


@pytest.mark.parametrize("make", MAKERS)
def test_they_tell_what_the_same_network_tells_in_python(make: Callable[[], Any]) -> None:
    eager = told_of(Network)
    assert [sum(name.endswith("*") for name in step) for step in eager] == [8, 0, 8, 0, 0]
    assert [len(step) for step in eager] == [8] * 5
    assert told_of(make) == eager


@pytest.mark.long
def test_inductor_tells_what_the_same_network_tells_in_python() -> None:
    assert told_of(lambda: torch.compile(Network(), dynamic=False)) == told_of(Network)


@pytest.mark.parametrize("make", MAKERS)
def test_within_a_network_that_python_runs(make: Callable[[], Any]) -> None:
    assert told_of(lambda: Outer(make())) == told_of(lambda: Outer(Network()))


@pytest.mark.parametrize("make", MAKERS)
def test_in_steps_that_nobody_keeps_only_what_tunes_is_told(make: Callable[[], Any]) -> None:
    steps = told_of(make, head=NeverHead())
    assert [len(step) for step in steps] == [8, 8]
    assert all(name.endswith("*") for step in steps for name in step)


@pytest.mark.parametrize("make", [Network, *MAKERS])
def test_what_is_trained_is_the_same_bit_for_bit(make: Callable[[], Any]) -> None:
    without = trained(make)
    torch.compiler.reset()
    with convolving():
        under = trained(make)
    assert all(torch.equal(one, other) for one, other in zip(without, under, strict=True))


def test_a_scripted_module_that_raises_says_what_it_says_and_is_told_again() -> None:
    def message(model: Any) -> str:
        with pytest.raises(RuntimeError) as caught:
            model(torch.randn(2, 5, 8, 8))
        return str(caught.value)

    model = scripted()
    without = message(model)
    with convolving() as recorded:
        with otel_dl.step():
            assert message(model) == without
        with otel_dl.step():
            model(torch.randn(2, 3, 8, 8)).sum().backward()
        steps = told(recorded)
    assert [len(step) for step in steps] == [1, 8], "a convolution that fails is told in Python, too"


def test_somebody_elses_mode_sees_what_it_sees_without_and_nothing_is_told_twice() -> None:
    class Mode(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def seen(model: Any) -> list[str]:
        with Mode() as mode:
            model(torch.randn(2, 3, 8, 8)).sum().backward()
        model.zero_grad()
        return mode.seen

    for model in (Network(), scripted()):
        seen(model)  # its gradients are there from now on
        without = seen(model)
        with convolving() as recorded:
            with otel_dl.step():
                assert seen(model) == without
            (step,) = told(recorded)
        assert [name for name in step if "backward" not in name] == ["conv2d*", "conv_transpose2d*", "conv1d*"]


def test_somebody_elses_function_mode_or_tensor_sees_what_it_sees_without() -> None:
    calls: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(repr(func))
            return func(*args, **(kwargs or {}))

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(repr(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    def seen() -> list[str]:
        calls.clear()
        x = torch.randn(2, 3, 8, 8)
        with Mode():
            model(x)
        model(x.as_subclass(Own))
        listed([x.as_subclass(Own)])
        return calls.copy()

    model, listed = scripted(), torch.jit.script(Listed())
    without = seen()
    with convolving():
        with otel_dl.step():
            assert seen() == without
        assert is_followed()


class Listed(nn.Module):
    def forward(self, xs: list[Tensor]) -> Tensor:
        return xs[0]


def of_functorch() -> None:
    torch.vmap(scripted())(torch.randn(5, 2, 3, 8, 8))


def sparse() -> None:
    torch.jit.script(nn.Identity())(torch.eye(3).to_sparse())


def nested() -> None:
    torch.jit.script(nn.Identity())(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def fake() -> None:
    with FakeTensorMode():
        x = torch.ones(3)
    torch.jit.script(nn.Identity())(x)


@pytest.mark.parametrize("call", [of_functorch, sparse, nested, fake])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_other_kinds_are_no_fault(call: Callable[[], None]) -> None:
    with convolving() as recorded:
        with otel_dl.step():
            call()
        assert is_followed()
        with otel_dl.step():
            scripted()(torch.randn(2, 3, 8, 8))
        assert [len(step) for step in told(recorded)][-1] == 3


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


def test_off_it_is_as_it_was() -> None:
    call = torch.jit.ScriptModule.__call__
    with convolving():
        assert torch.jit.ScriptModule.__call__ is not call
    assert "__call__" not in vars(torch.jit.ScriptModule)
    assert torch.jit.ScriptModule.__call__ is call
