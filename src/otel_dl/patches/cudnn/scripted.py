"""Convolutions in modules that were scripted or traced (`torch.jit`), whose code torch runs without Python.

Under a dispatch mode each of its operations comes by Python, so that the followed ones are seen. That costs some
microseconds an operation, so it is done where there may be something to tell: the first time that a thread calls a
module with inputs of these forms, and in steps that the head sampler keeps.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.patches.cudnn.watch import Scripted, Watch

_MOST: Final = 10_000
"""Forms of calls that a thread remembers, and nodes of a graph that are looked at."""
_NO_WORDS: Final = "RuntimeError: \n"
_NODES: Final = ("ConvolutionBackward0", "ConvolutionBackward1")
"""Of `aten::convolution`, and of `aten::_convolution`, which is what was traced."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.known: set[Any] = set()
        self.error: Exception | None = None
        """What an operation has raised."""


def install(watch: Watch, patches: Patches) -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    module: Any = torch.jit.ScriptModule
    modules: Any = torch.nn.Module
    c: Any = vars(torch)["_C"]
    modes: tuple[Callable[[], int], ...] = c._len_torch_dispatch_stack, c._len_torch_function_stack
    thread = _Thread()
    of_another: Callable[..., Any] | None = module.__dict__.get("__call__")

    class PassesByPython(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            try:
                return func(*args, **(kwargs or {}))
            except Exception as error:
                thread.error = error
                raise

    mode = PassesByPython()

    def begin(self: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scripted | None:
        """None where there is nothing to tell, or a mode or tensor of somebody else's shows it, or hides it."""
        if any(mode() for mode in modes) or not watch.may_begin_scripted(tuple(_tensors([args, kwargs]))):
            return None
        try:
            like = id(self), torch.is_grad_enabled(), watch.flags(), *_forms(args), *_forms(kwargs)
        except RuntimeError:
            return None  # a tensor that is more than one piece of memory: functorch's, sparse, nested, fake
        if like in thread.known:
            return watch.begin_scripted() if watch.is_wanted() else None
        if len(thread.known) >= _MOST:
            thread.known.clear()
        thread.known.add(like)
        return watch.begin_scripted()

    @functools.wraps(module.__call__)
    def scripted(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        call = of_another if of_another is not None else modules.__call__
        begun: Scripted | None = None
        if watch.benchmark():
            try:
                begun = begin(self, args, kwargs)
            except BaseException as error:
                patches.fault(error)
        if begun is None:
            return call(self, *args, **kwargs)
        result: Any = None
        # Not `with mode`, whose Python torch.compile would compile.
        c._push_on_torch_dispatch_stack(mode)
        try:
            result = call(self, *args, **kwargs)
        except RuntimeError as error:
            _complete(error, thread.error)
            raise
        finally:
            c._pop_torch_dispatch_stack(None)
            thread.error = None
            try:
                watch.end_scripted(begun, _nodes(result, begun.first))
            except BaseException as error:
                patches.fault(error)
        return result

    patches.replace(module, "__call__", scripted)


def _complete(error: RuntimeError, cause: Exception | None) -> None:
    """The interpreter puts what was raised behind its own words, but where it came by Python finds no words in it
    (torch/csrc/jit/runtime/interpreter.cpp: handleError, of a python_error)."""
    words = str(error)
    if cause is not None and error is not cause and words.endswith(_NO_WORDS):
        error.args = (f"{words.removesuffix(chr(10))}{cause}\n", *error.args[1:])


def _forms(values: Any) -> Iterator[Any]:
    """What tells calls apart that may need different plans."""
    import torch

    if isinstance(values, torch.Tensor):
        yield values.shape, values.stride(), values.dtype, values.device, values.data_ptr() & 31, values.requires_grad
    elif isinstance(values, dict):
        for key, value in values.items():  # pyright: ignore[reportUnknownVariableType]
            yield key
            yield from _forms(value)
    elif isinstance(values, (list, tuple)):
        for value in values:  # pyright: ignore[reportUnknownVariableType]
            yield from _forms(value)
    else:
        yield values if isinstance(values, (bool, int, float, str)) else type(values)


def _tensors(values: Any) -> Iterator[Any]:
    import torch

    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]


def _nodes(result: Any, first: int) -> list[Any]:
    """Those of convolutions in the graph of `result`, made since autograd numbered a node `first`, in the order in
    which they were made."""
    waiting = [tensor.grad_fn for tensor in _tensors(result)]
    seen: set[Any] = set()
    found: list[Any] = []
    while waiting and len(seen) < _MOST:
        node = waiting.pop()
        if node is None or node in seen or node._sequence_nr() < first:
            continue
        seen.add(node)
        if node.name() in _NODES:
            found.append(node)
        waiting.extend(following for following, _ in node.next_functions)
    return sorted(found, key=lambda node: node._sequence_nr())
