"""Methods of a tensor that read it, move it, or need to know its values: they wait for the device it is on.

`__array__` is not among them: it raises for a tensor on a device. `__getitem__` and `__setitem__` are seen only where
there is C, which finds a way around the class's dict: there they would make Python take a tensor for a sequence
(`PySequence_Check`), also once they are taken out, and torch reads a list of tensors in another way then. `wait_stream`
and `record` make the device wait, not the host. What C++ calls itself, and functions of the module torch
(`torch.nonzero`), are seen in the deep mode: torch finds a function of its own by identity (torch.jit.script,
`__torch_function__`), so nothing can stand in its place.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from otel_dl.patches.synchronization import method
from otel_dl.patches.synchronization.method import Form
from otel_dl.patches.synchronization.waiting import Does
from otel_dl.recording import native

if TYPE_CHECKING:
    from otel_dl.patches.synchronization.waiting import Args, Keywords, Waiting

READ: Final = (
    "__bool__", "__complex__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist",
)  # fmt: skip
COMPUTED: Final = (
    "__format__", "__repr__", "allclose", "argwhere", "bincount", "equal", "is_nonzero", "masked_select", "nonzero",
    "repeat_interleave", "unique", "unique_consecutive",
)  # fmt: skip
"""What comes out has a size, or is a value, that only the device knows."""


def device_of(tensor: Any) -> Any:
    """The `torch.device` that holds what is in `tensor`; None: the CPU does, or nothing (it is fake, or no tensor).
    No `__torch_function__` is asked."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    if not isinstance(tensor, c.TensorBase) or type(tensor) is FakeTensor:
        return None
    try:
        with c.DisableTorchFunction():
            device = c.TensorBase.device.__get__(tensor)
    except Exception:
        return None  # a subclass may have a device of its own making
    return None if device.type in ("cpu", "meta") else device


def install(waiting: Waiting) -> None:
    def own(args: Args, kwargs: Keywords, result: Any) -> Any:
        return device_of(args[0])

    def of_index(args: Args, kwargs: Keywords, result: Any) -> Any:
        return device_of(args[0]) if _is_known_to_the_device(args[1]) else None

    def patch(name: str, form: Form, device: Any, does: Does, counts: Any = None) -> None:
        keywords = {} if counts is None else {"counts": counts}
        around = functools.partial(waiting.around, f"Tensor.{name}", device=device, does=does, **keywords)
        method.replace(waiting, name, form, around)

    method.leave_to_dynamo(waiting.patches)
    for name in READ:
        patch(name, Form.READS, own, Does.COPIES)
    for name in COMPUTED:
        patch(name, Form.READS, own, Does.COMPUTES)
    patch("cuda", Form.ALWAYS, _moved, Does.COMPUTES, _blocks)
    if method.is_fast(waiting) or waiting.run.settings.sync == "deep":
        # Every batch, every sample passes by here: in Python they would cost more than a flag test.
        patch("to", Form.MOVES, _moved, Does.COMPUTES, _blocks)
        patch("copy_", Form.MOVES, _copied, Does.COMPUTES, _blocks)
    if method.is_fast(waiting):
        torchs = native.hooks.subscript
        reads = waiting.around("Tensor.__getitem__", torchs, of_index, Does.COMPUTES)
        writes = waiting.around("Tensor.__setitem__", torchs, of_index, Does.COMPUTES, _is_no_fill)
        method.replace_subscripts(waiting, reads, writes)


def _moved(args: Args, kwargs: Keywords, result: Any) -> Any:
    """Between the CPU and a device: between two of them, and on one, the host does not wait."""
    source, target = device_of(args[0]), device_of(result)
    return (source or target) if (source is None) != (target is None) and result is not None else None


def _copied(args: Args, kwargs: Keywords, result: Any) -> Any:
    return _moved(args[1:] or tuple(kwargs.values()), kwargs, result)


def _blocks(args: Args, kwargs: Keywords) -> bool:
    """Without, a copy returns at once; where it did not (pageable memory), it waited all the same."""
    return not (kwargs.get("non_blocking") or any(arg is True for arg in args[1:]))


def _is_no_fill(args: Args, kwargs: Keywords) -> bool:
    """`x[mask] = 1.0` is `masked_fill_`, which asks the device for nothing (ATen/native/TensorAdvancedIndexing.cpp:
    `canDispatchToMaskedFill`)."""
    import torch

    return not (isinstance(args[1], torch.Tensor) and isinstance(args[2], (bool, int, float, complex)))


def _is_known_to_the_device(index: Any) -> bool:
    """Whether an index has a part whose value, or number of hits, the host has to ask the device for; or one that has
    to be brought there."""
    import torch

    for each in index if isinstance(index, tuple) else (index,):  # pyright: ignore[reportUnknownVariableType]
        if isinstance(each, torch.Tensor):
            with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
                if each.dtype in (torch.bool, torch.uint8) or each.dim() == 0 or each.is_cpu:
                    return True
        elif not (each is None or each is Ellipsis or isinstance(each, (int, slice))):
            return True
    return False
