"""Exact save-and-restore of attributes, and what follows from a fault of ours."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from types import CellType
from typing import Any, Final

import wrapt

from otel_dl import threads
from otel_dl.faults import is_ours
from otel_dl.log import logger

_MISSING: Final = object()


_IMPORT_S: Final = 5.0
"""How long another thread's import is waited for; what it imports is patched later than that, too."""
_bootstrap: Any = vars(importlib)["_bootstrap"]


def _is_importing(module: Any) -> bool:
    """Whether some thread is."""
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


def _imports_itself(module: str) -> bool:
    """Whether this thread is importing the module of this name (importlib/_bootstrap.py, 3.10 to 3.14)."""
    return _bootstrap._get_module_lock(module).owner == threading.get_ident()


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
        self._awaited: dict[str, Callable[[Any], None]] = {}
        self._undo: list[Callable[[bool], None]] = []

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

    def when_imported(self, module: str, action: Callable[[Any], None]) -> None:
        """Calls `action` with the module of this name, now or when it is imported, until `restore`."""
        self._awaited[module] = action
        this = weakref.ref(self)  # what waits for an import that never comes would be kept for ever
        registering = True

        def imported(found: Any) -> None:
            if registering and _is_importing(found):
                # In a thread of its own: this one may be importing it, or have what that import waits for.
                waiting = threads.start("otel-dl-import", whole, found)
                if not _imports_itself(module):
                    waiting.join(_IMPORT_S)
                return
            patches = this()
            if patches is not None and module in patches._awaited:
                patches._awaited.pop(module)(found)

        def whole(found: Any) -> None:
            try:
                _bootstrap._lock_unlock_module(module)
                if sys.modules.get(module) is found:  # else its import has failed
                    imported(found)
            except Exception:
                logger.info("otel-dl: %s could not be patched once it was imported.", module, exc_info=True)

        wrapt.register_post_import_hook(imported, module)
        registering = False

    def when_restored(self, undo: Callable[[bool], None]) -> None:
        """Calls `undo` at each `restore`, to take back what is no attribute; with True after a fault of ours, when it
        may be called from within what it takes back."""
        self._undo.append(undo)

    def restore(self, after_fault: bool = False) -> None:
        self._awaited.clear()
        for undo in self._undo:
            undo(after_fault)
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

    def guard(self, notice: Callable[..., Any], *args: Any) -> None:
        """Calls `notice` around the user's call; see `fault`."""
        try:
            notice(*args)
        except BaseException as error:
            self.fault(error)

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
        self.restore(after_fault=True)
        if not self._faulty:
            self._faulty = True
            logger.warning(
                "otel-dl: a fault of ours in the instrumentation of %s; it is switched off for this process, training"
                " goes on. Please report it.",
                self.target,
                exc_info=error,
            )
