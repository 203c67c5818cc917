"""Exact save-and-restore of attributes, and the line between a fault of ours and an exception of somebody else's."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import CellType, CodeType, MethodType, TracebackType
from typing import Any, Final

import opentelemetry

from otel_dl.log import logger

_MISSING: Final = object()


def _folders(*paths: str) -> tuple[str, ...]:
    return tuple(os.path.join(os.path.realpath(path), "") for path in paths)


_OURS: Final = _folders(os.path.dirname(os.path.dirname(__file__)), *opentelemetry.__path__)
_MODULES: Final = {"otel_dl", "opentelemetry", *sys.stdlib_module_names}
"""Whose exception classes a fault of ours may have."""
_STDLIB: Final = _folders(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


class Patches:
    """The attributes that one target replaced. `restore` puts back the identical objects, in reverse order.

    `recover` is called where our code was left half done, by a fault or by what a signal handler raised.
    """

    def __init__(self, target: str, recover: Callable[[], None] = lambda: None) -> None:
        self.target = target
        self._recover = recover
        self._faulty = False
        self._saved: list[tuple[Any, str, Any, Any]] = []
        self._cells: list[tuple[CellType, Any, Any]] = []

    def __reduce__(self) -> tuple[type[Patches], tuple[str]]:
        # See Run.__reduce__: what is patched here is not patched where it is read again.
        return Patches, (self.target,)

    def replace(self, owner: Any, name: str, replacement: Any) -> Any:
        """Sets `owner.name`, a class's or module's own attribute or an inherited one; returns what stood there.

        What stood there is the entry of `owner.__dict__` (a staticmethod stays one), or what it inherits.
        """
        saved = owner.__dict__.get(name, _MISSING)
        setattr(owner, name, replacement)
        self._saved.append((owner, name, saved, owner.__dict__.get(name)))
        return saved

    def replace_cell(self, cell: CellType, replacement: Any) -> None:
        """Sets what a closure's cell holds: reaches the function through every alias that was ever taken of it."""
        self._cells.append((cell, cell.cell_contents, replacement))
        cell.cell_contents = replacement

    def restore(self) -> None:
        while self._saved:
            owner, name, saved, ours = self._saved.pop()
            if owner.__dict__.get(name) is not ours:
                # Somebody patched on top of us: taking ours out would take theirs out as well.
                logger.info("otel-dl: %s.%s was patched again by others and stays.", owner, name)
                continue
            if saved is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, saved)
        while self._cells:
            cell, saved, ours = self._cells.pop()
            if cell.cell_contents is ours:
                cell.cell_contents = saved

    def fault(self, error: BaseException) -> None:
        """Called with what was caught in our own code around the user's call.

        A fault of ours is logged once and takes this target's patches out. What a signal handler of the user's or
        torch's raised meanwhile is raised again.
        """
        if isinstance(error, (RecursionError, MemoryError)):
            # Nobody's fault: this call is not recorded, and whether there is room for the user's shows now.
            with contextlib.suppress(RecursionError, MemoryError):
                self._recover()
            return
        self._recover()
        if not is_ours(error):
            raise error
        self.restore()
        if not self._faulty:
            self._faulty = True
            logger.warning(
                "otel-dl: a fault of ours in the instrumentation of %s; it is switched off for this process, training"
                " goes on. Please report it.",
                self.target,
                exc_info=error,
            )


def is_ours(error: BaseException) -> bool:
    """Whether every frame of the traceback is otel-dl's, OpenTelemetry's or the standard library's, and none is that
    of a signal handler. A handler without a frame, written in C, can't be told from us: then it counts as its own."""
    if type(error).__module__.partition(".")[0] not in _MODULES:
        return False  # a class of somebody else's: thrown into this thread by PyThreadState_SetAsyncExc, perhaps
    if not isinstance(error, Exception) or any(_is_in_c(handler) for handler in _handlers()):
        return False
    handlers = _handler_codes()
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code in handlers or not _is_known(code):
            return False
        traceback = traceback.tb_next
    return True


def _is_known(code: CodeType) -> bool:
    if code.co_filename.startswith("<frozen "):
        return True
    path = os.path.realpath(code.co_filename)
    return path.startswith(_OURS) or (path.startswith(_STDLIB) and "site-packages" not in path)


def _handlers() -> Iterator[Any]:
    """What Python calls for a signal, without partial and method around it."""
    for number in signal.valid_signals():
        with contextlib.suppress(ValueError, OSError):
            handler: Any = signal.getsignal(number)
            while isinstance(handler, (functools.partial, MethodType)):
                handler = handler.func if isinstance(handler, functools.partial) else handler.__func__
            if callable(handler):
                yield handler


def _code(handler: Any) -> CodeType | None:
    code = getattr(handler, "__code__", None)
    if code is None:
        method: Any = type(handler).__call__
        code = getattr(method, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_in_c(handler: Any) -> bool:
    return _code(handler) is None and handler is not signal.default_int_handler


def _handler_codes() -> set[CodeType]:
    return {code for code in map(_code, _handlers()) if code is not None}
