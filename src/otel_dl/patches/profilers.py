"""Phases under their own names in torch's profilers and in Nsight Systems.

While a profiler of torch's runs they are ranges in it as well, and with `OTEL_DL_NVTX=true` always NVTX ranges, as
steps are. Without either nothing is done here: the run's phases are observed from a profiler's start to its stop.
torch's profilers have ranges for steps of their own, `ProfilerStep#N`, which a range of ours would cross.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from otel_dl.log import logger
from otel_dl.patches._patching import Patches
from otel_dl.recording.records import NAMES
from otel_dl.semconv import SpanName

if TYPE_CHECKING:
    from otel_dl.recording.run import Run

Begin = Callable[[str], Callable[[], object]]
"""Begins a range of this name; returns what ends it."""


class _Ranges(threading.local):
    """The open ones of this thread: their kinds, and what ends them; the innermost last."""

    def __init__(self) -> None:
        self.open: list[tuple[int, Callable[[], object]]] = []


class _Phases:
    """Observes phases, as ranges that nest within their thread.

    A fault in there is the profilers', and not that of the phase which begins or ends.
    """

    def __init__(self, run: Run, patches: Patches, begin: Begin) -> None:
        self._run, self._patches, self._begin = run, patches, begin
        self._ranges = _Ranges()
        self._listening = False

    def start(self) -> None:
        self._listening = True
        self._run.observers.of_phases(self._observe)

    def stop(self) -> None:
        """No more begin; what is open ends when its phase does."""
        self._listening = False
        if not self._ranges.open:
            self._run.observers.of_phases(self._observe, False)

    def _observe(self, kind: int, begins: bool, instant: int) -> None:
        self._patches.guard(self._change, kind, begins)

    def _change(self, kind: int, begins: bool) -> None:
        ranges = self._ranges.open
        if any(kind == each for each, _ in ranges):
            # With those within it, and itself if it begins again: our code was left half done there.
            ended = 0
            while ended != kind:
                ended, end = ranges.pop()
                end()
        if begins and self._listening:
            ranges.append((kind, self._begin(NAMES[kind])))
        elif not ranges and not self._listening:
            self._run.observers.of_phases(self._observe, False)


class _Steps:
    """Observes steps, as ranges that nest in nothing."""

    def __init__(self, run: Run, patches: Patches, begin: Begin) -> None:
        self._run, self._patches, self._begin = run, patches, begin
        self._end: Callable[[], object] | None = None

    def start(self) -> None:
        self._run.observers.of_steps(self._observe)

    def stop(self) -> None:
        self._run.observers.of_steps(self._observe, False)
        self._patches.guard(self._change, False)

    def _observe(self, kind: int, begins: bool, instant: int) -> None:
        self._patches.guard(self._change, begins)

    def _change(self, begins: bool) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()
        if begins:
            self._end = self._begin(SpanName.STEP)


def install(run: Run, patches: Patches) -> None:
    """Around `_run_on_profiler_start` and `_run_on_profiler_stop`, which `torch.profiler.profile`,
    `torch.autograd.profiler.profile`, `emit_nvtx` and `emit_itt` all call (torch/autograd/profiler.py, 2.4-2.15)."""
    import torch.autograd.profiler as profiler

    observing: list[_Phases | _Steps] = []
    if run.settings.nvtx and _has_nvtx():
        observing += [_Steps(run, patches, _nvtx_step), _Phases(run, patches, _nvtx_phase)]
        for each in observing:
            each.start()
    profiled = _Phases(run, patches, _record_function())
    observing.append(profiled)

    def told(name: str, change: Callable[[], None]) -> None:
        original = profiler.__dict__[name]

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            patches.guard(change)
            return original(*args, **kwargs)

        patches.replace(profiler, name, wrapper)

    told("_run_on_profiler_start", profiled.start)
    told("_run_on_profiler_stop", profiled.stop)

    def restored(after_fault: bool) -> None:
        for each in observing:
            each.stop()

    patches.when_restored(restored)


def _record_function() -> Begin:
    """`torch.profiler.record_function` goes through the dispatcher (4 us, and a user's dispatch mode would see it);
    this one does not (0.5 us; torch/csrc/profiler/python/init.cpp, 2.4-2.15)."""
    import torch

    compiled: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    recording: Callable[[str], AbstractContextManager[object]] = compiled._profiler._RecordFunctionFast

    def begin(name: str) -> Callable[[], object]:
        record = recording(name)
        record.__enter__()
        return functools.partial(record.__exit__, None, None, None)

    return begin


def _nvtx() -> Any:
    import torch.cuda.nvtx

    return torch.cuda.nvtx


def _has_nvtx() -> bool:
    try:
        _nvtx().range_push("otel_dl")
        _nvtx().range_pop()
    except RuntimeError as error:  # a build without CUDA: "NVTX functions not installed"
        logger.warning("otel-dl: OTEL_DL_NVTX=true has no effect here, this torch has no NVTX: %s", error)
        return False
    return True


def _nvtx_phase(name: str) -> Callable[[], object]:
    nvtx = _nvtx()
    nvtx.range_push(name)
    return nvtx.range_pop


def _nvtx_step(name: str) -> Callable[[], object]:
    """A user's own ranges may cross a step, and `range_pop` ends the thread's innermost one."""
    nvtx = _nvtx()
    return functools.partial(nvtx.range_end, nvtx.range_start(name))
