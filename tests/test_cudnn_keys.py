"""The model of cuDNN's plan cache, case by case as torch's source has it (aten/src/ATen/native/cudnn/Conv_v8.cpp and
ConvShared.cpp, aten/src/ATen/native/ConvUtils.h and Convolution.cpp): which call finds the plan of which other one.

Operands are fake CUDA tensors: torch itself lays them out, casts them, and says by which backend it would run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from otel_dl.patches.cudnn import calls, keys
from otel_dl.patches.cudnn.calls import Flags
from otel_dl.patches.cudnn.keys import FORWARD, Key, Operand, Plans, alignment, limit, suggests_channels_last

FLAGS = Flags(enabled=True, deterministic=False, tf32=True, cast=None)
OPERATIONS = {operation.name: operation for operation in calls.OPERATIONS}


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def cuda(*sizes: int, dtype: torch.dtype = torch.float32, last: bool = False, device: str = "cuda:0") -> Any:
    made = torch.empty(sizes, dtype=dtype, device=device)
    form: Any = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(sizes))
    return made.to(memory_format=form) if last else made


def called(name: str, *args: Any, flags: Flags = FLAGS, **kwargs: Any) -> keys.Call:
    operation = OPERATIONS[name]
    arguments = calls.arguments_of(operation, args, kwargs)
    assert arguments is not None
    call = calls.read(operation, arguments, flags)
    assert call is not None
    return call


def key(name: str, *args: Any, direction: str = FORWARD, grad: Operand | None = None, **kwargs: Any) -> Key:
    call = called(name, *args, **kwargs)
    if direction != FORWARD and grad is None:
        sizes = keys.output_sizes(call)
        grad = Operand(sizes, tuple(torch.empty(sizes).stride()))
    return keys.keys(call, grad)[direction]


def conv2d(**changed: Any) -> Key:
    """An ordinary one, with something changed: an argument, a property of an operand, or a flag."""
    x: dict[str, Any] = {"n": 64, "c": 4, "h": 8, "w": 8, "dtype": torch.float32, "last": False, "device": "cuda:0"}
    w: dict[str, Any] = {"o": 8, "kernel": 3, "w_last": False, "groups": 1}
    flags = {"deterministic": False, "tf32": True}
    for given in (x, w, flags):
        given |= {name: changed.pop(name) for name in tuple(changed) if name in given}
    direction = changed.pop("direction", FORWARD)
    inputs = cuda(x["n"], x["c"], x["h"], x["w"], dtype=x["dtype"], last=x["last"], device=x["device"])
    weight = cuda(
        w["o"], x["c"] // w["groups"], w["kernel"], w["kernel"], dtype=x["dtype"], last=w["w_last"], device=x["device"]
    )
    return key(
        "conv2d", inputs, weight, groups=w["groups"], flags=FLAGS._replace(**flags), direction=direction, **changed
    )


NEW: dict[str, dict[str, Any]] = {
    "a larger batch": {"n": 128},
    "a ragged batch": {"n": 20},
    "a larger image": {"h": 9},
    "more output channels": {"o": 16},
    "a larger kernel": {"kernel": 5},
    "half": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "double": {"dtype": torch.float64},
    "channels_last input": {"last": True},
    "channels_last weight": {"w_last": True},
    "padding": {"padding": 1},
    "padding of one side": {"padding": (1, 0)},
    "stride": {"stride": 2},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "deterministic": {"deterministic": True},
    "without tf32": {"tf32": False},
    "another device": {"device": "cuda:1"},
    "backward of the input": {"direction": keys.BACKWARD_INPUT},
    "backward of the weight": {"direction": keys.BACKWARD_WEIGHT},
}
"""ConvolutionParams and CacheKey: whatever is in them makes another plan."""

KNOWN: dict[str, dict[str, Any]] = {
    "the same again": {},
    "numbers as sequences": {"stride": (1, 1), "padding": [0, 0], "dilation": (1,)},
    "with a bias": {"bias": "a bias"},
    "padding 'valid'": {"padding": "valid"},
}
"""The bias is added afterwards."""


@pytest.mark.parametrize("changed", NEW.values(), ids=NEW)
def test_new(changed: dict[str, Any]) -> None:
    assert conv2d(**changed) != conv2d()


@pytest.mark.parametrize("changed", KNOWN.values(), ids=KNOWN)
def test_known(changed: dict[str, Any]) -> None:
    assert conv2d(**changed) == conv2d()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        pytest.param({"last": True}, {"w_last": True}, True, id="either operand's channels_last is that of both"),
        pytest.param({"last": True, "dtype": torch.float64}, {"dtype": torch.float64}, True, id="but not in double"),
        pytest.param({"padding": "same"}, {"padding": 1}, True, id="'same' is a number where it can be halved"),
        pytest.param({"padding": "same", "kernel": 2}, {"padding": 0, "kernel": 2, "h": 9, "w": 9}, True, id="or pads"),
        pytest.param({"c": 1, "o": 1}, {"c": 1, "o": 1, "last": True}, False, id="the strides of one channel count"),
    ],
)
def test_pairs(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    assert (conv2d(**one) == conv2d(**other)) == same


class TestOfAnotherFunction:
    def test_a_1d_one_is_a_2d_one_of_height_1(self) -> None:
        one = key("conv1d", cuda(2, 3, 16), cuda(4, 3, 3), None, 2, 1)
        assert one == key("conv2d", cuda(2, 3, 1, 16), cuda(4, 3, 1, 3), None, (1, 2), (0, 1))

    @pytest.mark.parametrize("direction", [keys.BACKWARD_INPUT, keys.BACKWARD_WEIGHT])
    def test_and_so_is_its_backward(self, direction: str) -> None:
        one = key("conv1d", cuda(2, 3, 16), cuda(4, 3, 3), direction=direction)
        assert one == key("conv2d", cuda(2, 3, 1, 16), cuda(4, 3, 1, 3), direction=direction)

    def test_a_transposed_one_is_the_backward_of_one(self) -> None:
        transposed = key("conv_transpose2d", cuda(2, 4, 6, 6), cuda(4, 3, 3, 3))
        assert transposed == key("conv2d", cuda(2, 3, 8, 8), cuda(4, 3, 3, 3), direction=keys.BACKWARD_INPUT)

    def test_and_its_backward_is_a_forward(self) -> None:
        backward = key("conv_transpose2d", cuda(2, 4, 6, 6), cuda(4, 3, 3, 3), direction=keys.BACKWARD_INPUT)
        assert backward == key("conv2d", cuda(2, 3, 8, 8), cuda(4, 3, 3, 3))

    def test_output_padding_counts_by_the_size_it_makes(self) -> None:
        x, w = cuda(2, 4, 6, 6), cuda(4, 3, 3, 3)
        one = key("conv_transpose2d", x, w, None, 2, 0, 1)
        assert one != key("conv_transpose2d", x, w, None, 2, 0, 0)
        assert one == key("conv2d", cuda(2, 3, 14, 14), w, None, 2, direction=keys.BACKWARD_INPUT)

    def test_an_input_without_a_batch_is_a_batch_of_one(self) -> None:
        w = cuda(4, 3, 3, 3)
        assert key("conv2d", cuda(3, 8, 8), w) == key("conv2d", cuda(1, 3, 8, 8), w)


class TestAutocast:
    @pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
    def test_is_computed_in_its_dtype(self, cast: torch.dtype) -> None:
        under = key("conv2d", cuda(2, 3, 8, 8), cuda(4, 3, 3, 3), flags=FLAGS._replace(cast=cast))
        assert under == key("conv2d", cuda(2, 3, 8, 8, dtype=cast), cuda(4, 3, 3, 3, dtype=cast))

    def test_the_output_that_torch_makes_has_the_dtype(self) -> None:
        x, w = cuda(2, 3, 8, 8), cuda(4, 3, 3, 3, dtype=torch.float16)
        with torch.autocast("cuda", dtype=torch.float16):
            flags = Flags(*calls.Device().flags())
            if flags.cast is None:
                pytest.skip("this torch has no autocast for CUDA without a driver")
            assert f"torch.{called('conv2d', x, w, flags=flags).dtype}" == str(F.conv2d(x, w).dtype)

    def test_double_stays(self) -> None:
        double = {"dtype": torch.float64}
        under = key(
            "conv2d", cuda(2, 3, 8, 8, **double), cuda(4, 3, 3, 3, **double), flags=FLAGS._replace(cast=torch.half)
        )
        assert under.dtype == "float64"


class TestAlignment:
    @pytest.mark.parametrize(
        ("address", "bytes_"), [(0x7F00, 32), (0x7F10, 16), (0x7F08, 8), (0x7F04, 4), (0x7F02, 2), (0x7F01, 1), (0, 32)]
    )
    def test_as_the_key_has_it(self, address: int, bytes_: int) -> None:
        assert alignment(address) == bytes_

    def keys_of(self, x: Operand, w: Operand, grad: Operand) -> dict[str, tuple[int, ...]]:
        call = called("conv2d", cuda(2, 3, 8, 8), cuda(4, 3, 3, 3))._replace(x=x, w=w)
        both = {**keys.keys(call), **keys.keys(call, grad)}
        return {each.operation: each.aligned for each in both.values()}

    def test_of_each_operand(self) -> None:
        x, w, grad = (
            Operand((2, 3, 8, 8), (192, 64, 8, 1), 4),
            Operand((4, 3, 3, 3), (27, 9, 3, 1), 8),
            Operand((2, 4, 6, 6), (144, 36, 6, 1), 2),
        )
        assert self.keys_of(x, w, grad) == {"forward": (4, 8, 32), "data": (32, 8, 2), "filter": (4, 32, 2)}

    def test_what_is_copied_is_aligned_anew(self) -> None:
        x, w, grad = (
            Operand((2, 3, 8, 8), (192, 64, 1, 8), 4),
            Operand((4, 3, 3, 3), (27, 9, 1, 3), 8),
            Operand((2, 4, 6, 6), (0, 0, 0, 0), 2),
        )
        assert set(self.keys_of(x, w, grad).values()) == {(32, 32, 32)}


def _layouts() -> list[Any]:
    cases: list[Any] = []
    for sizes in (
        (2, 3, 4, 5),
        (1, 3, 4, 5),
        (2, 1, 4, 5),
        (2, 3, 1, 1),
        (1, 1, 1, 1),
        (2, 3, 4, 5, 6),
        (2, 1, 1, 5, 1),
    ):
        plain = torch.empty(sizes)
        last: Any = torch.channels_last if len(sizes) == 4 else torch.channels_last_3d
        cases += [plain, plain.to(memory_format=last), plain.transpose(1, 2), plain.transpose(0, 1), plain[..., ::2]]
        cases += [plain[:1].expand(sizes), plain.to(memory_format=last)[:, :, 1:]]
    return cases


def test_layouts_are_those_that_torch_suggests() -> None:
    """Upsampling lays out what it makes as `suggest_memory_format` says (ATen/native/UpSampleNearest2d.cpp)."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        for tensor in _layouts():
            if 0 in tensor.shape:
                continue
            made = F.interpolate(tensor, size=[2 * size for size in tensor.shape[2:]])
            ours = suggests_channels_last(tuple(tensor.shape), tensor.stride())
            form: Any = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
            where = f"{tuple(tensor.shape)} {tensor.stride()}"
            assert made.is_contiguous(memory_format=form if ours else torch.contiguous_format), where


class TestBackend:
    """Whether cuDNN runs it at all: torch's own answer, for which nothing needs to run."""

    def runs(self, name: str, *args: Any, cast: Any = None, **kwargs: Any) -> bool:
        operation = OPERATIONS[name]
        arguments = calls.arguments_of(operation, args, kwargs)
        assert arguments is not None
        call = calls.read(operation, arguments, FLAGS._replace(cast=cast))
        try:
            return call is not None and calls.Device().uses_cudnn(operation, arguments, call)
        except RuntimeError as error:
            if "driver" not in str(error):
                raise
            pytest.skip("this torch asks the driver")

    pytestmark = pytest.mark.skipif(not torch.backends.cudnn.is_available(), reason="torch was built without cuDNN")

    def test_an_ordinary_one(self) -> None:
        assert self.runs("conv2d", cuda(2, 3, 8, 8), cuda(4, 3, 3, 3))

    def test_of_each_function(self) -> None:
        for dimensions in (1, 2, 3):
            x, w = cuda(2, 3, *(8,) * dimensions), cuda(3, 3, *(3,) * dimensions)
            assert self.runs(f"conv{dimensions}d", x, w)
            assert self.runs(f"conv_transpose{dimensions}d", x, w)
            assert self.runs(f"conv{dimensions}d", cuda(3, *(8,) * dimensions), w)

    def test_a_depthwise_one_in_float_is_not(self) -> None:
        assert not self.runs("conv2d", cuda(2, 64, 8, 8), cuda(64, 1, 3, 3), groups=64)

    def test_under_autocast_torch_is_asked_about_what_it_computes_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A depthwise one in half may be cuDNN's, which torch asks the device's properties about."""
        asked: list[Any] = []

        def selects(device: Any, operation: Any, x: Any, w: Any, bias: Any, call: Any) -> bool:
            asked.extend((x.dtype, w.dtype, bias.dtype, x.stride(), x.device.type))
            return True

        monkeypatch.setattr(calls.Device, "_selects_cudnn", selects)
        x, w, bias = cuda(2, 64, 8, 8, last=True), cuda(64, 1, 3, 3), cuda(64)
        assert self.runs("conv2d", x, w, bias, groups=64, cast=torch.float16)
        assert asked == [torch.float16, torch.float16, torch.float16, x.stride(), "cuda"]

    def test_a_depthwise_one_that_is_channels_last_is(self) -> None:
        assert self.runs("conv2d", cuda(2, 64, 8, 8, last=True), cuda(64, 1, 3, 3), groups=64)

    def test_an_empty_batch_is_not(self) -> None:
        assert not self.runs("conv2d", cuda(0, 3, 8, 8), cuda(4, 3, 3, 3))

    def test_complex_numbers_are_not(self) -> None:
        complex_ = {"dtype": torch.complex64}
        assert not self.runs("conv2d", cuda(2, 3, 8, 8, **complex_), cuda(4, 3, 3, 3, **complex_))

    def test_with_cudnn_switched_off_none_is(self) -> None:
        with torch.backends.cudnn.flags(enabled=False):
            assert not self.runs("conv2d", cuda(2, 3, 8, 8), cuda(4, 3, 3, 3))


class TestPlans:
    def test_the_one_not_used_for_longest_is_forgotten(self) -> None:
        plans = Plans(2)
        plans.add("a")
        plans.add("b")
        assert plans.find("a")
        plans.add("c")
        assert [plans.find(each) for each in "abc"] == [True, False, True]

    def test_choosing_again_is_using_as_well(self) -> None:
        plans = Plans(2)
        for each in "aba":
            plans.add(each)
        plans.add("c")
        assert [plans.find(each) for each in "abc"] == [True, False, True]

    def test_a_limit_of_0_is_none(self) -> None:
        plans = Plans(0)
        for each in range(20_000):
            plans.add(each)
        assert plans.find(0)

    def test_below_0_nothing_is_cached(self) -> None:
        plans = Plans(-1)
        plans.add("a")
        assert not plans.find("a")

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (None, 10_000), ("", 10_000), ("500", 500), (" 500", 500), ("+5", 5), ("-1", -1), ("0", 0), ("12ab", 12),
            ("many", 10_000), ("-", 10_000), ("99999999999", 10_000), ("5.9", 5),
        ],
    )  # fmt: skip
    def test_the_variable_is_read_as_torch_reads_it(self, text: str | None, expected: int) -> None:
        assert limit({} if text is None else {keys.LIMIT_VARIABLE: text}) == expected


def test_what_changed_is_told_by_name() -> None:
    assert keys.changes(conv2d(), conv2d(n=128)) == "x: 64,4,8,8 → 128,4,8,8"
    assert keys.changes(conv2d(), conv2d(last=True, stride=2)) == (
        "layout: contiguous → channels_last; stride: 1,1 → 2,2"
    )


def test_output_sizes_are_those_that_torch_makes() -> None:
    for name, args, kwargs in (
        ("conv2d", (cuda(2, 4, 9, 8), cuda(6, 2, 3, 2)), {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}),
        ("conv1d", (cuda(2, 4, 9), cuda(6, 4, 3)), {"padding": "same"}),
        ("conv3d", (cuda(2, 4, 9, 8, 7), cuda(6, 4, 3, 2, 1)), {"stride": (1, 2, 3)}),
        ("conv_transpose2d", (cuda(2, 4, 9, 8), cuda(4, 3, 3, 2)), {"stride": 2, "output_padding": 1, "groups": 2}),
        ("conv_transpose1d", (cuda(2, 4, 9), cuda(4, 3, 3)), {"dilation": 2, "padding": 1}),
        ("conv_transpose3d", (cuda(2, 4, 5, 6, 7), cuda(4, 3, 3, 2, 1)), {"stride": 2}),
    ):
        made = getattr(F, name)(*args, **kwargs)
        assert keys.output_sizes(called(name, *args, **kwargs)) == tuple(made.shape), name
