"""Methods of a tensor that read it, move it, or need to know its values: they wait for the device it is on.

`__array__` is not among them: it raises for a tensor on a device. `__getitem__` and `__setitem__` are seen only where
there is C, which finds a way around the class's dict: there they would make Python take a tensor for a sequence
(`PySequence_Check`), also once they are taken out, and torch reads a list of tensors in another way then. `wait_stream`
and `record` make the device wait, not the host. What C++ calls itself is seen in the deep mode.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from otel_dl.patches.synchronization import method
from otel_dl.patches.synchronization.devices import crossed, device_named, device_of, on_device
from otel_dl.patches.synchronization.functions import CONDITIONS, made, made_queue
from otel_dl.patches.synchronization.method import Form
from otel_dl.patches.synchronization.waiting import Call, Does, always, unknown
from otel_dl.recording import native

if TYPE_CHECKING:
    from otel_dl.patches.synchronization.waiting import Args, Keywords, Waiting

READ: Final = (
    "__bool__", "__complex__", "__float__", "__index__", "__int__", "cpu", "is_nonzero", "item", "numpy", "tolist",
)  # fmt: skip
COMPUTED: Final = (
    "__format__", "__repr__", "allclose", "argwhere", "bincount", "equal", "inverse", "masked_select", "nonzero",
    "pinverse", "repeat_interleave", "svd", "unique", "unique_consecutive",
)  # fmt: skip
"""What comes out has a size, or is a value or an error, that only the device knows: `functions` has the sources."""


def install(waiting: Waiting) -> None:
    def own(args: Args, kwargs: Keywords, result: Any = None) -> Any:
        return device_of(args[0])

    def of_index(args: Args, kwargs: Keywords, result: Any) -> Any:
        return device_of(args[0]) if _is_known_to_the_device(args[1]) else None

    def patch(form: Form, name: str, does: Does, device: Any, queue: Any = unknown, **more: Any) -> None:
        call = Call(f"Tensor.{name}", does, device, queue, **more)
        method.replace(waiting, name, form, functools.partial(waiting.around, call))

    method.leave_to_dynamo(waiting.patches)
    for name in READ:
        patch(Form.READS, name, Does.COPIES, own, own)
    for name in COMPUTED:
        patch(Form.READS, name, Does.COMPUTES, own, waits=CONDITIONS.get(name, always))
    patch(Form.READS, "new_tensor", Does.COPIES, _made_of_another, _made_of_another_queue)
    patch(Form.ALWAYS, "cuda", Does.COPIES, _moved, _to_cuda_queue, counts=_blocks)
    if method.is_fast(waiting) or waiting.run.settings.sync == "deep":
        # Every batch, every sample passes by here: in Python they would cost more than a flag test.
        patch(Form.MOVES, "to", Does.COPIES, _moved, _moved_queue, counts=_blocks)
        patch(Form.MOVES, "copy_", Does.COPIES, _copied, _copied_queue, counts=_blocks)
    if method.is_fast(waiting):
        torchs = native.hooks.subscript
        reads = Call("Tensor.__getitem__", Does.COMPUTES, of_index)
        writes = Call("Tensor.__setitem__", Does.COMPUTES, of_index, counts=_is_no_fill)
        method.replace_subscripts(waiting, waiting.around(reads, torchs), waiting.around(writes, torchs))


def _made_of_another(args: Args, kwargs: Keywords, result: Any) -> Any:
    return made(args[1:], kwargs, result)


def _made_of_another_queue(args: Args, kwargs: Keywords) -> Any:
    return made_queue(args[1:], kwargs, device_of(args[0]))


def _moved(args: Args, kwargs: Keywords, result: Any) -> Any:
    return crossed(device_of(args[0]), device_of(result)) if result is not None else None


def _copied(args: Args, kwargs: Keywords, result: Any) -> Any:
    return crossed(device_of(_source(args, kwargs)), device_of(args[0]))


def _source(args: Args, kwargs: Keywords) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("other")


def _moved_queue(args: Args, kwargs: Keywords, default: Any = None) -> Any:
    """`default` is where it goes if no argument says so; None: nowhere."""
    target = _named((*args[1:], *kwargs.values())) or default
    if target is None or not _blocks(args, kwargs):
        return None
    return crossed(device_of(args[0]), target if on_device(target) else None)


def _to_cuda_queue(args: Args, kwargs: Keywords) -> Any:
    import torch

    return _moved_queue(args, kwargs, torch.device("cuda"))


def _copied_queue(args: Args, kwargs: Keywords) -> Any:
    return _copied(args, kwargs, None) if _blocks(args, kwargs) else None


def _named(arguments: Iterable[Any]) -> Any:
    """The `torch.device` that one of the arguments of `to` or `cuda` names; None: none does."""
    import torch

    for given in arguments:
        if isinstance(given, torch.Tensor):
            return device_of(given) or torch.device("cpu")
        if isinstance(given, (str, torch.device)) or type(given) is int:
            return device_named(given)
    return None


def _blocks(args: Args, kwargs: Keywords) -> bool:
    """Without, a copy returns at once; where it did not (pageable memory), it waited all the same."""
    return not (kwargs.get("non_blocking") is True or any(arg is True for arg in args[1:]))


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
