"""Who is told of the boundaries of phases and steps while they happen: device events, ranges in profilers.

Where nobody is, which is the rule on a CPU, it costs a test for None (in C: for NULL). Only the thread that bounds
steps tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from otel_dl.recording.records import NAMES

if TYPE_CHECKING:
    from otel_dl.recording.native import FastPath

Observer = Callable[[int, bool, int], None]
"""(kind, whether it begins, reading of `clock`), of a phase its `Kind`, of a step STEP.

It catches its own faults: one that comes out of it is taken for one of the patch that it was called by.
"""

STEP: Final = 0


class Observers:
    """Those of one run, composed."""

    def __init__(self, fast: FastPath) -> None:
        self._fast = fast
        self._lock = threading.RLock()
        self._of_phases: tuple[Observer, ...] = ()
        self._of_steps: tuple[Observer, ...] = ()
        fast.on_phase = fast.on_step = None

    def of_phases(self, observer: Observer, wanted: bool = True) -> None:
        """`observer` is told of phases from now on, or (not `wanted`) no more; it may say so itself."""
        with self._lock:
            self._of_phases = _with(self._of_phases, observer, wanted)
            self._fast.on_phase = _composed(self._of_phases)

    def of_steps(self, observer: Observer, wanted: bool = True) -> None:
        """The same of steps."""
        with self._lock:
            self._of_steps = _with(self._of_steps, observer, wanted)
            self._fast.on_step = _composed(self._of_steps)

    def leave(self) -> None:
        """Nobody is told any more: the run ends in another thread than the one that tells."""
        with self._lock:
            self._of_phases = self._of_steps = ()
            self._fast.on_phase = self._fast.on_step = None

    def forked(self) -> None:
        """In a forked child: the lock may be held by a thread that is none here."""
        self._lock = threading.RLock()

    def phases_end(self, kinds: int, instant: int) -> None:
        """Those of these kinds were left half done. In which order they were open is not known."""
        for kind in reversed(NAMES):  # an EVAL_FORWARD before a FORWARD, whose bit it has as well
            if kinds & kind == kind and self._fast.on_phase is not None:
                kinds &= ~kind
                self._fast.on_phase(kind, False, instant)

    def step_begins(self, instant: int) -> None:
        """At `instant`, which may lie in the past, as that of an end: a boundary may be known only later."""
        if self._fast.on_step is not None:
            self._fast.on_step(STEP, True, instant)

    def step_ends(self, instant: int) -> None:
        if self._fast.on_step is not None:
            self._fast.on_step(STEP, False, instant)

    def step_becomes_next(self, instant: int) -> None:
        """An ordinary step ends and the next one begins."""
        if self._fast.on_step is not None:
            self._fast.on_step(STEP, False, instant)
            self._fast.on_step(STEP, True, instant)


def _with(observers: tuple[Observer, ...], observer: Observer, wanted: bool) -> tuple[Observer, ...]:
    others = tuple(each for each in observers if each != observer)
    return (*others, observer) if wanted else others


def _composed(observers: tuple[Observer, ...]) -> Observer | None:
    if len(observers) < 2:
        return observers[0] if observers else None

    def all_of_them(kind: int, begins: bool, instant: int) -> None:
        for observer in observers if begins else reversed(observers):
            observer(kind, begins, instant)

    return all_of_them
