"""What stands in the place of a method of `torch.Tensor`, so that nobody can tell but who waits.

With C, what is written in C (all but printing and `unique`) is swapped behind its descriptor, and `x[mask]` behind the
slots of the classes (`recording/c/`: `descriptor.c`, `subscript.c`): no dict is changed. For the others, and without
C, there is `Method`.

A function there would be what torch hands to `__torch_function__`, and what `torch.Tensor.item` is: tables of the
user's and of torch's (`UninitializedTensorMixin._allowed_methods`, torchvision's tv_tensors), made before, would not
have it. So asked of the class it is the original, the identical object; a tensor on the CPU gets the original as well,
and only one that can wait gets a function of ours. torch then calls the original: what is overridden fires once.
`recording/c/method.c` has the same as `Method`; in Python it costs 0.25 us a call.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from enum import IntEnum
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from otel_dl.recording import native

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.patches.synchronization.waiting import Waiting


class Form(IntEnum):
    """What decides whether a call can wait; as in `recording/c/method.c`."""

    READS = 0
    """The tensor is not on the CPU."""
    MOVES = 1
    """An argument names another place than the tensor's."""
    ALWAYS = 2


class Method:
    """In Python. A call that can't wait may come to `waits` as well: that looks itself."""

    def __init__(self, original: Any, waits: Callable[..., Any], form: Form, overrides: Any, is_cpu: Any) -> None:
        self.original = original
        self.waits = waits
        self._reads = form is Form.READS
        self._overrides: Callable[[Any], bool] = overrides
        self._is_cpu: Callable[[Any], bool] = is_cpu.__get__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self.original.__get__(None, owner)
        if self._reads and not self._overrides(instance) and self._is_cpu(instance):
            return self.original.__get__(instance, owner)
        return MethodType(self.waits, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def __reduce__(self) -> Any:
        return copy.copy, (self.original,)  # a copy of it is itself; what is patched here is not where it is read again


def leave_to_dynamo(patches: Patches) -> None:
    """torch.compile looks names up in a class's dict itself, and does not bind what it finds: it gets the original
    as well (torch/_dynamo/variables/user_defined.py: `mro_lookup` in 2.15, `inspect.getattr_static` before)."""
    kinds = (Method,) if native.hooks is None else (Method, native.hooks.Method)

    def imported(module: Any) -> None:
        name = "mro_lookup" if hasattr(module, "mro_lookup") else "getattr_static"
        original: Any = getattr(module, name, inspect.getattr_static)

        @functools.wraps(original)
        def look_up(owner: Any, *args: Any) -> Any:
            found = original(owner, *args)
            return found.__get__(None, owner) if isinstance(found, kinds) else found

        if name == "mro_lookup":
            patches.replace(module, name, look_up)
        elif getattr(module, "inspect", None) is inspect:
            theirs = ModuleType("inspect")
            vars(theirs).update(vars(inspect), getattr_static=look_up)
            patches.replace(module, "inspect", theirs)

    patches.when_imported("torch._dynamo.variables.user_defined", imported)


def is_fast(waiting: Waiting) -> bool:
    """Whether there is C."""
    return native.hook("Method", waiting.run.settings.native) is not None


def replace(waiting: Waiting, name: str, form: Form, around: Callable[[Any], Callable[..., Any]]) -> None:
    """Puts what `around` makes of the method of `torch.Tensor` of this `name` in its place."""
    import torch

    original: Any = getattr(torch.Tensor, name)
    own: Any = native.hooks.own_method(original) if is_fast(waiting) else None
    if own is None:
        waiting.patches.replace(torch.Tensor, name, _method(waiting, original, form, around(original)))
        return
    waiting.patches.when_restored(lambda after_fault: native.hooks.swap_method(original))
    native.hooks.swap_method(original, _method(waiting, own, form, around(own)))


def replace_subscripts(waiting: Waiting, reads: Callable[..., Any], writes: Callable[..., Any]) -> None:
    """Calls `reads` for `x[index]` and `writes` for `x[index] = value`, where the tensor is not on the CPU and the
    index is more than numbers and slices. Only where there is C: `__getitem__` can't be in the class's dict."""
    import torch

    ours = [
        _method(waiting, getattr(torch.Tensor, name), Form.READS, waits)
        for name, waits in (("__getitem__", reads), ("__setitem__", writes))
    ]
    waiting.patches.when_restored(lambda after_fault: native.hooks.swap_subscripts())
    native.hooks.swap_subscripts(*ours)


def _method(waiting: Waiting, original: Any, form: Form, waits: Callable[..., Any]) -> Any:
    import torch

    c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    flag = c.TensorBase.__dict__["is_cpu"]
    in_c = native.hook("Method", waiting.run.settings.native)
    if in_c is None:
        return Method(original, waits, form, c._has_torch_function_unary, flag)
    harmless = (torch.dtype, torch.memory_format)
    return in_c(original, waits, int(form), c._has_torch_function_unary, flag, harmless, torch.device("cpu"))
