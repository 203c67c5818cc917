"""torch.compile leaves our code alone.

After a graph break the interpreter runs the rest of a compiled function, and torch.compile takes every Python function
that is called there for one to compile: ours as well, one by one, and what they call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from inspect import unwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import wrapt

from otel_dl.log import logger
from otel_dl.patches import __name__ as WRAPPERS

_PACKAGE: Final = __name__.partition(".")[0]
_CALLED_BACK: Final = (
    *(f"{WRAPPERS}.cudnn.{name}" for name in ("calls", "keys", "spans", "watch")),
    *(f"{WRAPPERS}.synchronization.{name}" for name in ("devices", "functions", "split")),
)
"""Modules among the wrappers' that wrap nothing: they are called before and after, from C."""


def install() -> None:
    """Once torch's compiler is imported. Nothing is patched, so nothing is to be put back."""
    wrapt.register_post_import_hook(_leave_alone, "torch._dynamo.eval_frame")


def _leave_alone(eval_frame: Any) -> None:
    try:
        _skip(eval_frame)
    except Exception:
        # Here an exception would be that of the user's import.
        logger.info("otel-dl: torch.compile may compile functions of ours, which costs time once.", exc_info=True)


def _skip(eval_frame: Any) -> None:
    for name, module in tuple(sys.modules.items()):
        if name == _PACKAGE or name.startswith(f"{_PACKAGE}."):
            # A wrapper calls what torch.compile would look at without it. It can still be traced through, for that is
            # another way: only a frame of its own is never compiled.
            wraps = name.startswith(WRAPPERS) and name not in _CALLED_BACK
            skip = eval_frame.skip_code if wraps else _skip_with_callees(eval_frame)
            for code in _codes(module, module):
                skip(code)


def _skip_with_callees(eval_frame: Any) -> Callable[[CodeType], object]:
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # torch 2.4
        return eval_frame.skip_code
    skip = eval_frame.FrameAction.SKIP
    strategy = eval_frame.FrameExecStrategy(skip, skip)

    def skip_with_callees(code: CodeType) -> None:
        eval_frame.set_code_exec_strategy(code, strategy)

    return skip_with_callees


def _codes(holder: ModuleType | type, module: ModuleType) -> Iterator[CodeType]:
    """The code of every function that `module` defines, those within functions and classes included."""
    for value in tuple(vars(holder).values()):
        value = unwrap(getattr(value, "fget", getattr(value, "__func__", value)))
        # By its globals, for a decorator's function bears the name of our module, and its code is everybody's: skipping
        # `contextlib.contextmanager`'s would be for each of torch's and the user's too.
        if isinstance(value, FunctionType) and value.__globals__ is vars(module):
            yield from _nested(value.__code__)
        elif isinstance(value, type) and value.__module__ == module.__name__:
            yield from _codes(value, module)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
