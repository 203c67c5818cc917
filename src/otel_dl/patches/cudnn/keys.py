"""What cuDNN's plan cache tells apart: torch's own key of a convolution, worked out from its operands.

A model of `CacheKeyWrapper` and `BenchmarkCache` in torch's aten/src/ATen/native/cudnn/Conv_v8.cpp and of what
ConvShared.cpp, ConvUtils.h and Convolution.cpp do to the operands before (read as of torch 2.1 and main
after 2.15; the parts that are modelled are the same in all). Pure: no torch in here.

- The key is operation (forward, data, filter), device, dtype, sizes of x and w, memory format, padding, stride,
  dilation, groups, deterministic, allow_tf32, and how x, w and y are aligned. `benchmark` and `benchmark_limit` are not
  in it: a plan that the heuristics chose is found again when benchmark is on.
- A transposed convolution runs the data operation, its backward the forward one; a 1d one runs as 2d. So different
  functions of torch find each other's plans.
- The cache is thread-local and never cleared.

Not modelled: a plan that is found but runs out of memory is tuned again; main after 2.15 has a second cache for
forwards with a bias.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, NamedTuple

Sizes = tuple[int, ...]

DEFAULT_LIMIT: Final = 10_000
"""Plans of a thread (Conv_v8.cpp::_parseChosenLRUCacheLimit)."""
LIMIT_VARIABLE: Final = "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT"
FRESH: Final = 32
"""How a block of the caching allocator is aligned, as far as the key looks (it gives out multiples of 512 bytes)."""

FORWARD: Final = ""
BACKWARD_INPUT: Final = "_backward_input"
BACKWARD_WEIGHT: Final = "_backward_weight"
"""Directions, as the suffixes of their spans' names."""


class Operand(NamedTuple):
    """What the key sees of a tensor; strides count elements, `aligned` is in bytes."""

    sizes: Sizes
    strides: Sizes
    aligned: int = FRESH


class Call(NamedTuple):
    """A convolution, as it reaches cuDNN: batched, with one value a dimension, in the dtype it is computed in."""

    transposed: bool
    device: int
    dtype: str
    x: Operand
    w: Operand
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    output_padding: Sizes
    groups: int
    deterministic: bool
    tf32: bool


class Key(NamedTuple):
    """One entry of the cache. `aligned`: x, w, y."""

    operation: str
    device: int
    dtype: str
    x: Sizes
    w: Sizes
    layout: str
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int
    deterministic: bool
    tf32: bool
    aligned: Sizes

    def __str__(self) -> str:
        return " ".join(f"{name}={_text(value)}" for name, value in self._asdict().items())


def changes(former: Key, key: Key) -> str:
    """What differs: `x: 64,3,8,8 → 128,3,8,8`."""
    return "; ".join(
        f"{name}: {_text(before)} → {_text(now)}"
        for name, before, now in zip(Key._fields, former, key, strict=True)
        if before != now
    )


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(each) for each in value)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return str(value).lower() if isinstance(value, bool) else str(value)


def keys(call: Call, grad: Operand | None = None) -> Mapping[str, Key]:
    """By direction. The backward ones need `grad`, the gradient of the output as it reaches the convolution."""
    call = _as_2d(call)
    layout = _layout(call)
    x, w = _aligned(call.x, layout), _aligned(call.w, layout)
    out = output_sizes(call)
    if grad is None:
        if call.transposed:
            return {FORWARD: _key(call, "data", layout, out, (FRESH, w, x))}
        return {FORWARD: _key(call, "forward", layout, call.x.sizes, (x, w, FRESH))}
    if len(grad.sizes) == 3:
        grad = _operand_2d(grad)
    # Made to have the input's memory format first (ConvShared.cpp::cudnn_convolution_backward).
    y = _aligned(grad, layout)
    if call.transposed:
        return {
            BACKWARD_INPUT: _key(call, "forward", layout, out, (y, w, FRESH)),
            BACKWARD_WEIGHT: _key(call, "filter", layout, out, (y, FRESH, x)),
        }
    return {
        BACKWARD_INPUT: _key(call, "data", layout, call.x.sizes, (FRESH, w, y)),
        BACKWARD_WEIGHT: _key(call, "filter", layout, call.x.sizes, (x, FRESH, y)),
    }


def _key(call: Call, operation: str, layout: str, x: Sizes, aligned: Sizes) -> Key:
    return Key(
        operation, call.device, call.dtype, x, call.w.sizes, layout, call.stride, call.padding, call.dilation,
        call.groups, call.deterministic, call.tf32, aligned,
    )  # fmt: skip


def output_sizes(call: Call) -> Sizes:
    """ConvUtils.h::conv_output_size, and conv_input_size for transposed ones."""
    spatial: list[int] = []
    for d, size in enumerate(call.x.sizes[2:]):
        kernel = call.dilation[d] * (call.w.sizes[d + 2] - 1) + 1
        if call.transposed:
            spatial.append((size - 1) * call.stride[d] - 2 * call.padding[d] + kernel + call.output_padding[d])
        else:
            spatial.append((size + 2 * call.padding[d] - kernel) // call.stride[d] + 1)
    channels = call.w.sizes[1] * call.groups if call.transposed else call.w.sizes[0]
    return (call.x.sizes[0], channels, *spatial)


def _as_2d(call: Call) -> Call:
    """Convolution.cpp::view1d_as_2d."""
    if len(call.x.sizes) != 3:
        return call
    return call._replace(
        x=_operand_2d(call.x),
        w=_operand_2d(call.w),
        stride=(1, *call.stride),
        padding=(0, *call.padding),
        dilation=(1, *call.dilation),
        output_padding=(0, *call.output_padding),
    )


def _operand_2d(operand: Operand) -> Operand:
    """`unsqueeze(2)`: the stride that torch gives it is that of a dimension of size 1 there."""
    (n, c, width), (of_n, of_c, of_width) = operand.sizes, operand.strides
    return operand._replace(sizes=(n, c, 1, width), strides=(of_n, of_c, width * of_width, of_width))


def padded(operand: Operand, more: Sequence[int]) -> Operand:
    """`operand` once `constant_pad_nd` has added so much at the end of each spatial dimension: a new tensor, laid out
    as it suggests."""
    n, c, *spatial = operand.sizes
    sizes = (n, c, *(size + add for size, add in zip(spatial, more, strict=True)))
    return Operand(sizes, _dense(sizes, suggests_channels_last(operand.sizes, operand.strides)))


def _layout(call: Call) -> str:
    """ConvUtils.h::cudnn_conv_suggest_memory_format."""
    if call.dtype != "float64" and (
        suggests_channels_last(call.x.sizes, call.x.strides) or suggests_channels_last(call.w.sizes, call.w.strides)
    ):
        return "channels_last"
    return "contiguous"


def suggests_channels_last(sizes: Sizes, strides: Sizes) -> bool:
    """c10/core/MemoryFormat.h::is_channels_last_strides_2d_s4 and its 3d form."""
    if len(sizes) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for d in (1, *range(len(sizes) - 1, 1, -1), 0):
        if sizes[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * max(1, sizes[d])
    return True


def _aligned(operand: Operand, layout: str) -> int:
    """Of the tensor that `contiguous(layout)` makes of it: itself, or a new one."""
    dense = _dense(operand.sizes, layout == "channels_last")
    same = all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(operand.sizes, operand.strides, dense, strict=True)
    )
    return operand.aligned if same or 0 in operand.sizes else FRESH


def _dense(sizes: Sizes, channels_last: bool) -> Sizes:
    order = range(len(sizes) - 1, -1, -1)
    if channels_last and len(sizes) > 3:
        order = (1, *range(len(sizes) - 1, 1, -1), 0)
    strides = [0] * len(sizes)
    stride = 1
    for d in order:
        strides[d] = stride
        stride *= sizes[d]
    return tuple(strides)


def alignment(address: int) -> int:
    """Conv_v8.cpp::getAlignment: the largest power of two up to 32 that divides it."""
    return min(FRESH, address & -address) if address else FRESH


def limit(environ: Mapping[str, str]) -> int:
    """How many plans a thread caches: 0 is any number, below 0 none. What follows a number is passed over, as by
    `std::stoi`; anything else leaves the default."""
    text = environ.get(LIMIT_VARIABLE, "").lstrip(" \t\n\v\f\r")
    sign, digits = (text[:1], text[1:]) if text[:1] in ("+", "-") else ("", text)
    end = next((i for i, char in enumerate(digits) if not ("0" <= char <= "9")), len(digits))
    value = int(sign + digits[:end]) if end else DEFAULT_LIMIT
    return value if -(2**31) <= value < 2**31 else DEFAULT_LIMIT


class Plans:
    """The plans that one thread has cached, with the rule by which the cache forgets: the one not used for longest."""

    def __init__(self, most: int = DEFAULT_LIMIT) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, None] = OrderedDict()

    def find(self, key: Hashable) -> bool:
        """Whether there is a plan; then it counts as used."""
        if key not in self._found:
            return False
        if self._most:
            self._found.move_to_end(key)
        return True

    def add(self, key: Hashable) -> None:
        """One was chosen, and has run."""
        if self._most < 0:
            return
        if self._most and key not in self._found and len(self._found) >= self._most:
            self._found.popitem(last=False)
        self._found[key] = None
        self._found.move_to_end(key)
