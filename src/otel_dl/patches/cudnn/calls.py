"""A call of `torch.conv2d` and its like, read: what of it reaches cuDNN, and whether cuDNN runs it at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from otel_dl.patches.cudnn.keys import FRESH, Call, Operand, Sizes, alignment, padded

_DTYPES: Final = ("float16", "bfloat16", "float32", "float64")
"""Those that cuDNN computes in (ATen/cudnn/Descriptors.cpp::getCudnnDataType); complex ones are torch's work."""

_PARAMETERS: Final = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED: Final = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_GENERAL: Final = (
    "input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups",
)  # fmt: skip
_DEFAULTS: Final[Mapping[str, Any]] = {
    "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0,
}  # fmt: skip


class Operation(NamedTuple):
    """One of torch's six functions."""

    name: str

    @property
    def transposed(self) -> bool:
        return "transpose" in self.name

    @property
    def dimensions(self) -> int:
        return int(self.name[-2])


OPERATIONS: Final = tuple(
    Operation(f"{form}{dimensions}d") for form in ("conv", "conv_transpose") for dimensions in (1, 2, 3)
)

PLAIN: Final = {operation.dimensions: operation for operation in OPERATIONS if not operation.transposed}
TRANSPOSED: Final = {operation.dimensions: operation for operation in OPERATIONS if operation.transposed}


class Flags(NamedTuple):
    """What is set for the whole process, or for autocast in this thread, and decides about a convolution."""

    enabled: bool
    deterministic: bool
    tf32: bool
    cast: Any
    """The dtype that autocast computes in; None where it is off."""


class Device:
    """Where cuDNN runs: CUDA. Each question is asked at every call and costs as little as it can."""

    name = "cuda"

    def __init__(self) -> None:
        import torch

        _C: Any = vars(torch)["_C"]
        self.benchmark: Callable[[], bool] = _C._get_cudnn_benchmark
        self._any_autocast: Callable[[], bool] = _C._is_any_autocast_enabled
        self._autocast: Callable[[str], bool] = torch.is_autocast_enabled
        self._autocast_dtype: Callable[[str], Any] = torch.get_autocast_dtype
        self._enabled: Callable[[], bool] = _C._get_cudnn_enabled
        self._deterministic: Callable[[], bool] = _C._get_cudnn_deterministic
        self._algorithms: Callable[[], bool] = _C._get_deterministic_algorithms
        # From 2.9 a precision an operation; asking for the one flag warns, or raises where they differ.
        precision: Callable[[str, str], str] | None = getattr(_C, "_get_fp32_precision_getter", None)
        self._tf32: Callable[[], bool] = (
            _C._get_cudnn_allow_tf32 if precision is None else lambda: precision("cuda", "conv") == "tf32"
        )

    def has(self, tensor: Any) -> bool:
        return tensor.is_cuda

    def flags(self) -> tuple[Any, ...]:
        """The `Flags`, as a tuple that is made in less time (aten/src/ATen/native/Convolution.cpp::convolution)."""
        return (
            self._enabled(),
            self._deterministic() or self._algorithms(),
            self._tf32(),
            self._autocast_dtype(self.name) if self._any_autocast() and self._autocast(self.name) else None,
        )

    def uses_cudnn(self, operation: Operation, arguments: Mapping[str, Any], call: Call) -> bool:
        """torch's own answer (Convolution.cpp::select_conv_backend): depthwise ones, empty batches and others run
        elsewhere. It depends on the dtype, so where autocast changes that, stand-ins without memory are asked about."""
        import torch

        x, w, bias = (arguments[name] for name in ("input", "weight", "bias"))
        dtype = getattr(torch, call.dtype)
        if x.dtype != dtype or w.dtype != dtype:
            from torch._subclasses.fake_tensor import FakeTensorMode

            with FakeTensorMode():
                x, w, bias = (
                    t if t is None else torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device)
                    for t in (x, w, bias)
                )
                return self._selects_cudnn(operation, x, w, bias, call)
        return self._selects_cudnn(operation, x, w, bias, call)

    def _selects_cudnn(self, operation: Operation, x: Any, w: Any, bias: Any, call: Call) -> bool:
        import torch

        _C: Any = vars(torch)["_C"]
        if x.dim() == operation.dimensions + 1:
            x = x.unsqueeze(0)
        backend = _C._select_conv_backend(
            x, w, bias, list(call.stride), list(call.padding), list(call.dilation), operation.transposed,
            list(call.output_padding), call.groups,
        )  # fmt: skip
        return backend in (_C._ConvBackend.Cudnn, _C._ConvBackend.CudnnTranspose)


def arguments_of(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """By name; None for those that torch refuses."""
    names = _TRANSPOSED if operation.transposed else _PARAMETERS
    given: dict[str, Any] = dict(zip(names, args, strict=False))
    if len(args) > len(names) or given.keys() & kwargs.keys():
        return None
    given |= kwargs
    if given.keys() - set(names) or not {"input", "weight"} <= given.keys():
        return None
    return {name: _DEFAULTS[name] for name in names[2:]} | given


def of_general(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Operation, tuple[Any, ...]] | None:
    """`aten::convolution` is all six in one: which it is, with the arguments of that one. None for what it refuses."""
    given: dict[str, Any] = dict(zip(_GENERAL, args, strict=False)) | dict(kwargs)
    try:
        dimensions = given["weight"].dim() - 2
        transposed = given["transposed"]
        if not (1 <= dimensions <= 3 and isinstance(transposed, bool)):
            return None
        if transposed:
            operation, names = TRANSPOSED[dimensions], _TRANSPOSED
        else:
            operation, names = PLAIN[dimensions], _PARAMETERS
        values = (given[name] for name in names)
        return operation, tuple(tuple(value) if isinstance(value, list) else value for value in values)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    except (AttributeError, KeyError):
        return None


def read(operation: Operation, arguments: Mapping[str, Any], flags: Flags) -> Call | None:
    """The call as cuDNN would get it; None for one that torch refuses, or runs otherwise."""
    x, w = arguments["input"], arguments["weight"]
    dimensions = operation.dimensions
    if w.dim() != dimensions + 2 or x.dim() not in (dimensions + 1, dimensions + 2) or 0 in x.shape:
        return None
    cast = flags.cast
    dtype = _computed_in(x, cast)
    if dtype != _computed_in(w, cast) or dtype not in _DTYPES:
        return None
    operand = _operand(x, dtype)
    if x.dim() == dimensions + 1:
        operand = operand._replace(
            sizes=(1, *operand.sizes), strides=(operand.sizes[0] * operand.strides[0], *operand.strides)
        )
    stride, dilation = (_each(arguments[name], dimensions) for name in ("stride", "dilation"))
    padding: Any = arguments["padding"]
    weight = _operand(w, dtype)
    if isinstance(padding, str):
        operand, padding = _pad(operand, weight, padding, dilation)
    return Call(
        operation.transposed, x.device.index or 0, dtype, operand, weight, stride, _each(padding, dimensions),
        dilation, _each(arguments.get("output_padding", 0), dimensions), int(arguments["groups"]),
        flags.deterministic, flags.tf32,
    )  # fmt: skip


def _pad(x: Operand, w: Operand, padding: str, dilation: Sizes) -> tuple[Operand, Sizes]:
    """Convolution.cpp::_convolution_same: what can't be halved is added to the input at its end."""
    if padding != "same":
        return x, (0,) * len(dilation)
    total = [each * (size - 1) for each, size in zip(dilation, w.sizes[2:], strict=True)]
    more = [each % 2 for each in total]
    return (padded(x, more) if any(more) else x), tuple(each // 2 for each in total)


def _computed_in(tensor: Any, cast: Any) -> str:
    """aten/src/ATen/autocast_mode.h::cached_cast: autocast leaves float64 and integers as they are."""
    own = str(tensor.dtype).removeprefix("torch.")
    if cast is None or own == "float64" or not tensor.is_floating_point():
        return own
    return str(cast).removeprefix("torch.")


def _operand(tensor: Any, dtype: str) -> Operand:
    """A cast makes a new tensor, laid out as the old one."""
    own = str(tensor.dtype).removeprefix("torch.")
    return operand_of(tensor) if own == dtype else operand_of(tensor)._replace(aligned=FRESH)


def operand_of(tensor: Any) -> Operand:
    """Raises RuntimeError where there is no memory behind it (functorch's)."""
    return Operand(tuple(tensor.shape), tensor.stride(), alignment(tensor.data_ptr()))


def _each(value: Any, dimensions: int) -> Sizes:
    """A number stands for one a dimension, and so does a sequence of one."""
    if isinstance(value, int):
        return (value,) * dimensions
    values = tuple(int(each) for each in value)
    return values * dimensions if len(values) == 1 else values
