"""Convolutions by cuDNN in a trace: which are warm-up, with what key, under which phase; what is summed; what is not
seen. cuDNN is a stand-in here, everything else is real: the script says which calls it makes, and what is new to whom.
"""

from __future__ import annotations

import gc
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.convolving import convolving, is_followed
from support.inprocess import Recorded, recording
from support.loops import seed, sgd
from support.validate import from_sdk, validate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import otel_dl
from otel_dl.recording import native
from otel_dl.recording.keep import NeverHead

pytestmark = pytest.mark.skipif(native.hooks is None, reason="convolutions are followed in C")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def train(batches: list[int], model: nn.Module | None = None, x: Callable[[int], Tensor] | None = None) -> None:
    """A step for each size of a batch."""
    seed()
    model = model or network()
    optimizer = sgd(model)
    make = x or (lambda rows: torch.randn(rows, 3, 8, 8))
    for index in DataLoader(TensorDataset(torch.arange(len(batches))), batch_size=1):
        update(model, optimizer, make(batches[int(index[0])]))


def told(recorded: Recorded) -> list[list[str]]:
    """Of each kept step: the convolutions' names, `*` those that are warm-up."""
    check(recorded)
    return [
        [
            span.name.removeprefix("cudnn::") + ("*" if span.attributes["is_warmup"] else "")
            for span in sorted(convolutions(recorded), key=lambda span: span.start_time)
            if span.context.trace_id == step.context.trace_id
        ]
        for step in recorded.named("train.step")
    ]


def convolutions(recorded: Recorded) -> list[Any]:
    return [span for span in recorded.spans if span.name.startswith("cudnn::")]


def check(recorded: Recorded) -> None:
    recorded.finish()
    assert validate([from_sdk(span) for span in recorded.spans], whole=False) == []


def parent(recorded: Recorded, span: Any) -> str:
    return next(each.name for each in recorded.spans if each.context.span_id == span.parent.span_id)


class TestWarmUp:
    def test_the_first_call_of_each_key_and_not_the_next(self) -> None:
        with convolving() as recorded:
            train([4, 4, 4])
            new, *known = told(recorded)
        assert new == ["conv2d*", "conv2d_backward_weight*"]
        assert known == [["conv2d", "conv2d_backward_weight"]] * 2

    def test_a_batch_that_grows_and_a_ragged_last_one_with_what_changed(self) -> None:
        with convolving() as recorded:
            train([64, 64, 128, 64, 20])
            steps = told(recorded)
        assert [any("*" in name for name in step) for step in steps] == [True, False, True, False, True]
        changed = {
            (span.name, span.attributes["dl.conv.changed"])
            for span in convolutions(recorded)
            if "dl.conv.changed" in span.attributes
        }
        assert changed == {
            ("cudnn::conv2d", "x: 64,3,8,8 → 128,3,8,8"),
            ("cudnn::conv2d", "x: 64,3,8,8 → 20,3,8,8"),
            ("cudnn::conv2d_backward_weight", "x: 64,3,8,8 → 128,3,8,8"),
            ("cudnn::conv2d_backward_weight", "x: 64,3,8,8 → 20,3,8,8"),
        }

    def test_spans_stand_in_their_phase_with_the_key(self) -> None:
        with convolving() as recorded:
            train([4])
            check(recorded)
        assert [(span.name, parent(recorded, span)) for span in convolutions(recorded)] == [
            ("cudnn::conv2d", "forward"),
            ("cudnn::conv2d_backward_weight", "backward"),
        ]
        forward, backward = convolutions(recorded)
        assert forward.attributes["dl.conv.key"].startswith(
            "operation=forward device=0 dtype=float32 x=4,3,8,8 w=4,3,3,3"
        )
        assert backward.attributes["dl.conv.key"].startswith("operation=filter ")
        assert forward.attributes["dl.warmup.source"] == "predicted"
        assert "dl.conv.shared" not in forward.attributes
        assert "dl.conv.shared" not in backward.attributes

    def test_both_backward_directions_are_of_one_call(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), *network())
        with convolving() as recorded:
            train([4], model)
            check(recorded)
        assert len(convolutions(recorded)) == 5, "the input of the first one needs no gradient"
        both = [span for span in convolutions(recorded) if span.attributes.get("dl.conv.shared")]
        assert sorted(span.name for span in both) == ["cudnn::conv2d_backward_input", "cudnn::conv2d_backward_weight"]
        assert both[0].start_time == both[1].start_time
        assert both[0].end_time == both[1].end_time

    def test_phases_and_steps_are_warm_up_as_well(self) -> None:
        with convolving() as recorded:
            train([4, 4, 8])
            check(recorded)
        assert [span.attributes["is_warmup"] for span in recorded.named("train.step")] == [True, False, True]
        assert [span.attributes["is_warmup"] for span in recorded.named("optimizer.step")][1:] == [False, False]
        assert [span.attributes["is_warmup"] for span in recorded.named("backward")] == [True, False, True]

    def test_a_step_that_nobody_keeps_is_kept_for_it_and_has_no_others(self) -> None:
        with convolving(NeverHead()) as recorded:
            train([4, 4, 4, 8, 4])
            steps = told(recorded)
        assert [span.attributes["dl.step"] for span in recorded.named("train.step")] == [0, 3]
        assert steps == [["conv2d*", "conv2d_backward_weight*"]] * 2

    @pytest.mark.parametrize(
        ("layer", "shape"),
        [
            (nn.Conv1d(3, 4, 3), (2, 3, 8)),
            (nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
            (nn.Conv3d(3, 4, 3), (2, 3, 8, 8, 8)),
            (nn.ConvTranspose1d(3, 4, 3), (2, 3, 8)),
            (nn.ConvTranspose2d(3, 4, 3), (2, 3, 8, 8)),
            (nn.ConvTranspose3d(3, 4, 3), (2, 3, 8, 8, 8)),
            (nn.Conv2d(3, 4, 3, padding="same"), (2, 3, 8, 8)),
            (nn.Conv2d(3, 4, 2, padding="same"), (2, 3, 8, 8)),
            (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 8, 8)),
            (nn.Conv2d(3, 4, 3), (3, 8, 8)),
            (nn.ConvTranspose2d(3, 4, 3), (3, 8, 8)),
        ],
        ids=str,
    )
    def test_every_convolution(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        name = type(layer).__name__.replace("ConvTranspose", "conv_transpose").replace("Conv", "conv")
        with convolving() as recorded:
            optimizer = sgd(layer)
            for _ in range(2):
                x = torch.randn(shape, requires_grad=True)
                optimizer.zero_grad()
                layer(x).square().mean().backward()
                optimizer.step()
            steps = told(recorded)
        directions = {name, f"{name}_backward_input", f"{name}_backward_weight"}
        assert [set(step) for step in steps] == [{f"{each}*" for each in directions}, directions]

    def test_a_call_that_raises_is_an_error_and_new_again(self) -> None:
        layer = nn.Conv2d(3, 4, 9)
        with convolving() as recorded:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="Kernel size"):
                    train([2], nn.Sequential(layer))
            check(recorded)
        assert [span.attributes["is_warmup"] for span in convolutions(recorded)] == [True, True]
        assert [span.attributes["error.type"] for span in convolutions(recorded)] == ["RuntimeError"] * 2

    def test_what_torch_refuses_is_refused(self) -> None:
        x = torch.randn(2, 3, 8, 8)
        bad: list[Callable[[], object]] = [
            lambda: F.conv2d(),  # type: ignore[call-arg]
            lambda: F.conv2d(x),  # type: ignore[call-arg]
            lambda: F.conv2d(x, None),  # type: ignore[arg-type]
            lambda: F.conv2d(x, x, stride="a"),  # type: ignore[arg-type]
            lambda: F.conv2d(x, x, padding="none"),
            lambda: F.conv2d(x, x, bad=1),  # type: ignore[call-arg]
            lambda: F.conv2d(x, x, None, 1, 0, 1, 1, 1),  # type: ignore[call-arg]
            lambda: F.conv2d(x, x, input=x),  # type: ignore[call-arg]
            lambda: F.conv2d(x, torch.randn(3)),
            lambda: F.conv2d(x, torch.randn(4, 5, 3, 3)),
            lambda: F.conv2d(x, torch.randn(4, 3, 3, 3), stride=[1, 2, 3]),
            lambda: F.conv2d(x, torch.randn(4, 3, 3, 3), stride=0),
            lambda: F.conv2d(x, torch.randn(4, 3, 3, 3), groups=0),
            lambda: F.conv2d(x, torch.randn(4, 3, 3, 3).double()),
            lambda: F.conv_transpose2d(x, torch.randn(3, 3, 3, 3), output_padding=9),
            lambda: torch.convolution(x, x, None, [1], [0], [1], torch.ones(2), [0], 1),  # type: ignore[arg-type]
            lambda: torch.ops.aten.convolution_backward.default(),
            lambda: torch.ops.aten.convolution_backward.default(*[x] * 10, True),
            lambda: backward(x.to_sparse(), x, x),
        ]

        def raised(call: Callable[[], object]) -> tuple[type, str]:
            with pytest.raises(Exception) as caught:  # noqa: PT011
                call()
            return type(caught.value), str(caught.value)

        without = [raised(call) for call in bad]
        with convolving():
            assert [raised(call) for call in bad] == without
            assert is_followed(), "no fault took the patch out"

    def test_the_backward_itself_under_functorch_is_not_seen(self) -> None:
        grad, x, w = (torch.randn(2, *size) for size in ((2, 4, 6, 6), (2, 3, 8, 8), (4, 3, 3, 3)))
        without = torch.vmap(backward)(grad, x, w)
        with convolving() as recorded:
            with otel_dl.step():
                assert torch.equal(torch.vmap(backward)(grad, x, w), without)
            assert is_followed()
        assert convolutions(recorded) == []


def backward(grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
    rest = [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
    return torch.ops.aten.convolution_backward.default(grad, x, w, *rest)[0]


class TestFunctions:
    """The other ways to the same call."""

    def calls(self, call: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
        with convolving() as recorded:
            weight = nn.Parameter(torch.randn(4, 3, 3, 3))
            with otel_dl.step():
                call(torch.randn(2, 3, 8, 8), weight).square().mean().backward()
            (step,) = told(recorded)
        return step

    @pytest.mark.parametrize(
        "call",
        [
            lambda x, w: F.conv2d(x, w),
            lambda x, w: torch.conv2d(x, w),
            lambda x, w: F.conv2d(input=x, weight=w),
            lambda x, w: F.conv2d(x, weight=w, stride=[1, 1]),
            lambda x, w: F.conv2d(x, w, None, [1, 1], [0, 0]),
        ],
    )
    def test_is_seen(self, call: Callable[[Tensor, Tensor], Tensor]) -> None:
        assert self.calls(call) == ["conv2d*", "conv2d_backward_weight*"]

    def test_a_list_of_numbers_is_the_same_key_each_time(self) -> None:
        weight = torch.randn(4, 3, 3, 3)
        with convolving() as recorded:
            with otel_dl.step():
                for stride in ([1, 1], (1, 1), 1, [1]):
                    F.conv2d(torch.randn(2, 3, 8, 8), weight, stride=stride)
            (step,) = told(recorded)
        assert step == ["conv2d*", "conv2d", "conv2d", "conv2d"]

    def test_a_subclass_of_tensor_that_sees_functions(self) -> None:
        class Seeing(Tensor):
            seen: list[bool] = []  # noqa: RUF012

            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if getattr(func, "__name__", "") == "conv2d":
                    cls.seen.append(func is F.conv2d and func is torch.conv2d)
                return super().__torch_function__(func, types, args, kwargs or {})

        step = self.calls(lambda x, w: F.conv2d(x.as_subclass(Seeing), w))
        assert step == ["conv2d*", "conv2d_backward_weight*"]
        assert Seeing.seen == [True]

    def test_a_subclass_of_the_module(self) -> None:
        class Standardized(nn.Conv2d):
            def forward(self, input: Tensor) -> Tensor:
                weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
                return self._conv_forward(input, weight, self.bias)

        with convolving() as recorded:
            train([4, 4], nn.Sequential(Standardized(3, 4, 3), nn.Flatten()))
            assert [len(step) for step in told(recorded)] == [2, 2]

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
    def test_what_is_traced_is_not_told_and_traced_as_it_is(self) -> None:
        def traced() -> str:
            return str(torch.jit.trace(F.conv2d, (x, weight)).graph)

        x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            without = traced()
        with convolving() as recorded:
            with otel_dl.step():
                assert traced() == without
                F.conv2d(x, weight)
            (step,) = told(recorded)
        assert step.count("conv2d*") == 1, "the calls by which torch checks what it traced may be told"

    def test_a_mode_is_told_what_it_is_without(self) -> None:
        class Mode(torch.overrides.TorchFunctionMode):
            seen: list[tuple[Any, ...]] = []  # noqa: RUF012

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.seen.append((func is F.conv2d, types, len(args), kwargs, sys._getframe(1).f_code.co_name))
                return func(*args, **(kwargs or {}))

        def call(x: Tensor, weight: Tensor) -> Tensor:
            with Mode():
                return F.conv2d(x, weight)

        assert self.calls(call) == ["conv2d*", "conv2d_backward_weight*"]
        assert Mode.seen == [(True, (), 2, None, "call")]

    def test_fake_tensors_and_functorch_run_nothing_that_can_be_told(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        weight = torch.randn(4, 3, 3, 3)
        with convolving() as recorded:
            with otel_dl.step():
                torch.vmap(lambda x: F.conv2d(x, weight))(torch.randn(2, 1, 3, 8, 8))
                torch.func.grad(lambda w: F.conv2d(torch.randn(1, 3, 8, 8), w).sum())(weight)
                with FakeTensorMode():
                    F.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3))
            assert is_followed(), "no fault took the patch out"
            assert told(recorded) == [[]]


@pytest.mark.parametrize(
    "broken",
    [
        "otel_dl.patches.cudnn.calls.Device.flags",
        "otel_dl.patches.cudnn.keys.Plans.find",
        "otel_dl.patches.cudnn.watch.Form.warm_up",
        "otel_dl.patches.cudnn.spans.Steps.add",
        "otel_dl.patches.cudnn.watch.Watch.ran",
        "otel_dl.patches.cudnn.watch.operand_of",
        "otel_dl.patches.cudnn.watch._node",
    ],
)
def test_a_fault_of_ours_takes_the_patch_out_and_training_goes_on(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def weights() -> list[bytes]:
        model = network()
        train([4, 4, 8], model)
        return [p.detach().numpy().tobytes() for p in model.parameters()]

    seed()
    without = weights()
    seed()
    with convolving():
        monkeypatch.setattr(broken, operator.concat)  # raises, and has no frame: to us a fault of our own
        assert weights() == without
        assert not is_followed()
    assert [record.args[0] for record in caplog.records if "a fault of ours" in record.msg] == ["convolutions"]  # type: ignore[index]


class TestKeysOfThreads:
    def test_each_thread_has_its_own(self) -> None:
        weight = torch.randn(4, 3, 3, 3)

        def call() -> None:
            F.conv2d(torch.randn(2, 3, 8, 8), weight)

        with convolving() as recorded:
            with otel_dl.step():
                for _ in range(2):
                    call()
                thread = threading.Thread(target=lambda: (call(), call()))
                thread.start()
                thread.join()
            assert told(recorded) == [["conv2d*", "conv2d", "conv2d*", "conv2d"]]

    def test_checkpointing_recomputes_within_backward(self) -> None:
        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

            def forward(self, x: Tensor) -> Any:
                return checkpoint(self.layer, x, use_reentrant=False)

        with convolving() as recorded:
            train([4, 4], Checkpointed())
            first, second = told(recorded)
        # On the CPU autograd runs in the calling thread, where the key is known.
        assert first == ["conv2d*", "conv2d", "conv2d_backward_weight*"]
        assert second == ["conv2d", "conv2d", "conv2d_backward_weight"]

    def test_checkpointing_in_a_thread_of_autograd_is_new_there(self) -> None:
        """On a device autograd has a thread of its own; a thread that calls backward stands for it."""
        layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        with convolving() as recorded:
            optimizer = sgd(layer)
            with otel_dl.step():
                result: Any = checkpoint(layer, torch.randn(2, 3, 8, 8), use_reentrant=False)
                thread = threading.Thread(target=lambda: result.sum().backward())
                thread.start()
                thread.join()
                optimizer.step()
            assert told(recorded) == [["conv2d*", "conv2d*", "conv2d_backward_weight*"]]


class TestWhatIsInTheKey:
    def second(self, first: Callable[[], Any], again: Callable[[], Any]) -> str:
        """Whether the second call is new, and what changed."""
        with convolving() as recorded:
            with otel_dl.step():
                first()
                again()
            check(recorded)
        *_, last = sorted(convolutions(recorded), key=lambda span: span.start_time)
        return last.attributes.get("dl.conv.changed", "new" if last.attributes["is_warmup"] else "known")

    def test_autocast_computes_in_another_dtype(self) -> None:
        layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)

        def cast() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                layer(x)

        assert self.second(lambda: layer(x), cast) == "dtype: float32 → bfloat16"
        assert self.second(cast, cast) == "known"
        # What is cast to it finds the plan of what had it.
        half = (x.bfloat16(), layer.weight.bfloat16())
        assert self.second(cast, lambda: F.conv2d(*half)) == "known"

    def test_channels_last(self) -> None:
        layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
        last = x.to(memory_format=torch.channels_last)
        assert self.second(lambda: layer(x), lambda: layer(last)) == "layout: contiguous → channels_last"
        # An input that is laid out otherwise is copied.
        assert self.second(lambda: layer(x), lambda: layer(x.transpose(2, 3))) == "known"

    def test_deterministic(self) -> None:
        layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)

        def deterministic() -> None:
            torch.use_deterministic_algorithms(True)
            try:
                layer(x)
            finally:
                torch.use_deterministic_algorithms(False)

        assert self.second(lambda: layer(x), deterministic) == "deterministic: false → true"

    def test_alignment(self) -> None:
        layer = nn.Conv2d(3, 4, 3)
        memory = torch.empty(2 * 3 * 8 * 8 + 64)
        skip = -memory.data_ptr() // 4 % 8
        even = memory[skip:][: 2 * 3 * 8 * 8].view(2, 3, 8, 8)
        odd = memory[skip + 1 :][: 2 * 3 * 8 * 8].view(2, 3, 8, 8)
        assert self.second(lambda: layer(even), lambda: layer(odd)) == "aligned: 32,32,32 → 4,32,32"


class TestBenchmark:
    """Switched on and off."""

    def test_off_nothing_is_told(self) -> None:
        with convolving(benchmark=False) as recorded:
            train([4, 4, 8])
            assert told(recorded) == [[], [], []]

    def test_plans_chosen_while_it_was_off_are_found_again(self) -> None:
        layer = nn.Conv2d(3, 4, 3)
        with convolving() as recorded:
            with otel_dl.step():
                layer(torch.randn(2, 3, 8, 8)).sum().backward()
                with torch.backends.cudnn.flags(enabled=True, benchmark=False):
                    layer(torch.randn(4, 3, 8, 8)).sum().backward()
                layer(torch.randn(4, 3, 8, 8)).sum().backward()
            (step,) = told(recorded)
        assert step.count("conv2d*") == step.count("conv2d_backward_weight*") == 1

    def test_cudnn_switched_off_midway(self) -> None:
        asked: list[bool] = []
        layer = nn.Conv2d(3, 4, 3)

        def uses_cudnn(*_: Any) -> bool:
            asked.append(torch.backends.cudnn.enabled)
            return torch.backends.cudnn.enabled

        with pytest.MonkeyPatch.context() as patch, convolving() as recorded:
            patch.setattr("support.convolving.OnTheCpu.uses_cudnn", uses_cudnn)
            with otel_dl.step():
                layer(torch.randn(2, 3, 8, 8))
                with torch.backends.cudnn.flags(enabled=False, benchmark=True):
                    layer(torch.randn(2, 3, 8, 8))
                layer(torch.randn(2, 3, 8, 8))
            assert told(recorded) == [["conv2d*", "conv2d"]]
        assert asked == [True, False]

    def test_without_a_device_there_is_none(self) -> None:
        """The CPU is no place for cuDNN, whatever the flag says."""
        with torch.backends.cudnn.flags(enabled=True, benchmark=True), recording() as recorded:
            train([4, 4])
            assert told(recorded) == [[], []]


def test_without_c_there_is_none_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "otel_dl"), convolving(native=False) as recorded:
        assert not is_followed()
        train([4, 4])
        assert told(recorded) == [[], []]
    (line,) = (record.getMessage() for record in caplog.records if "convolutions are not followed" in record.msg)
    assert "OTEL_DL_NATIVE=false" in line


class TestManyOfThem:
    def deep(self) -> nn.Sequential:
        return nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(40)))

    def test_so_many_spans_in_a_step_and_the_rest_summed_on_its_phases(self) -> None:
        with convolving() as recorded:
            train([2, 2], self.deep())
            check(recorded)
        _, step = recorded.named("train.step")
        steady = [span for span in convolutions(recorded) if span.context.trace_id == step.context.trace_id]
        assert len(steady) == 64
        forward, backward = (
            next(span for span in recorded.named(name) if span.context.trace_id == step.context.trace_id)
            for name in ("forward", "backward")
        )
        assert "dl.conv.summed" not in forward.attributes
        # 40 in forward, and in backward 40 weights and 39 inputs.
        assert backward.attributes["dl.conv.summed"] == 40 + 79 - 64
        assert backward.attributes["dl.conv.summed_ms"] > 0
        assert step.attributes["otel_dl.dropped"] == 0

    def test_the_setting(self) -> None:
        with convolving(conv_spans=0) as recorded:
            train([2, 2], self.deep())
            check(recorded)
        _, step = recorded.named("train.step")
        summed = {
            span.name: span.attributes["dl.conv.summed"]
            for span in recorded.spans
            if span.context.trace_id == step.context.trace_id and "dl.conv.summed" in span.attributes
        }
        assert summed == {"forward": 40, "backward": 79}


class TestAutograd:
    def test_gradients_are_the_same_and_no_tensor_is_kept(self) -> None:
        def gradients() -> tuple[list[bytes], list[bool]]:
            seed()
            model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3))
            x = torch.randn(2, 3, 8, 8, requires_grad=True)
            middle = model[0](x)
            result = model[1](middle)
            kept = [weakref.ref(each) for each in (middle, result, x)]
            result.square().mean().backward(retain_graph=True)
            result.sum().backward()
            grads = [p.grad.numpy().tobytes() for p in (*model.parameters(), x) if p.grad is not None]
            del middle, result, x
            return grads, [each() is None for each in kept]

        gc.disable()
        try:
            without = gradients()
            assert without[1] == [True, True, True]
            with convolving():
                assert gradients() == without
        finally:
            gc.enable()

    def test_a_tensor_given_by_name_is_not_kept(self) -> None:
        with convolving():
            x, w, bias = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
            F.conv2d(input=x, weight=w, bias=bias)
            kept = [weakref.ref(each) for each in (x, w, bias)]
            del x, w, bias
            assert [each() for each in kept] == [None] * 3

    def test_double_backward(self) -> None:
        def second() -> bytes:
            seed()
            w = torch.randn(4, 3, 3, 3, requires_grad=True)
            (first,) = torch.autograd.grad(F.conv2d(torch.randn(2, 3, 8, 8), w).square().sum(), w, create_graph=True)
            (grad,) = torch.autograd.grad(first.square().sum(), w)
            return grad.numpy().tobytes()

        without = second()
        with convolving():
            assert second() == without
