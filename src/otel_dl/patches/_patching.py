"""Exact save-and-restore of attributes, and the line between a fault of ours and an exception of somebody else's."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import sysconfig
from collections.abc import Callable
from types import CellType, CodeType, TracebackType
from typing import Any, Final

logger = logging.getLogger("otel_dl")

_MISSING: Final = object()

_OURS: Final = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in (
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["opentelemetry.context"].__file__ or "")))
        if "opentelemetry.context" in sys.modules
        else os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        sysconfig.get_path("stdlib"),
    )
)


class Patches:
    """The attributes that one target replaced. `restore` puts back the identical objects, in reverse order."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._saved: list[tuple[Any, str, Any, Any]] = []
        self._cells: list[tuple[CellType, Any, Any]] = []

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

    def fault(self, error: Exception) -> None:
        """Called with what was caught in our own code around the user's call.

        A fault of ours is logged once and takes this target's patches out. What a signal handler of the user's or
        torch's raised meanwhile is raised again.
        """
        if not is_ours(error):
            raise error
        first = bool(self._saved or self._cells)
        self.restore()
        if first:
            logger.warning(
                "otel-dl: a fault of ours in the instrumentation of %s; it is switched off for this process, training"
                " goes on. Please report it.",
                self.target,
                exc_info=error,
            )


def is_ours(error: BaseException) -> bool:
    """Whether every frame of the traceback is otel-dl's, OpenTelemetry's or the standard library's, and none is that
    of a signal handler."""
    handlers = _handler_codes()
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code in handlers or not _is_known(code):
            return False
        traceback = traceback.tb_next
    return True


def _is_known(code: CodeType) -> bool:
    path = os.path.realpath(code.co_filename)
    return path.startswith(_OURS) and "site-packages" not in path.removeprefix(
        next(prefix for prefix in _OURS if path.startswith(prefix))
    )


def _handler_codes() -> set[CodeType]:
    codes: set[CodeType] = set()
    for number in signal.valid_signals():
        with contextlib.suppress(ValueError, OSError):
            handler: Any = signal.getsignal(number)
            handler = getattr(handler, "func", handler)  # functools.partial
            handler = getattr(handler, "__func__", handler)  # a bound method
            code = getattr(handler, "__code__", None) or getattr(
                getattr(type(handler), "__call__", None), "__code__", None
            )
            if isinstance(code, CodeType):
                codes.add(code)
    return codes


Install = Callable[..., None]
