"""Phases under their own names in torch's profilers and in Nsight Systems.

While a profiler of torch's runs they are ranges in it as well, and with `OTEL_DL_NVTX=true` always NVTX ranges, as
steps are. Without either nothing is done here: who listens is told to the run when a profiler starts and when it
stops. torch's profilers have ranges for steps of their own, `ProfilerStep#N`, which a range of ours would cross.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from otel_dl.log import logger
from otel_dl.patches._patching import Patches

if TYPE_CHECKING:
    from otel_dl.recording.run import Run

Range = Callable[[str], Callable[[], None]]


def install(run: Run, patches: Patches) -> None:
    """Around `_run_on_profiler_start` and `_run_on_profiler_stop`, which `torch.profiler.profile`,
    `torch.autograd.profiler.profile`, `emit_nvtx` and `emit_itt` all call (torch/autograd/profiler.py, 2.4-2.15)."""
    import torch.autograd.profiler as profiler

    always, steps = (_safe(range, run, patches) for range in (_nvtx() if run.settings.nvtx else (None, None)))
    in_profile = _safe(_record_function(), run, patches)

    def told(name: str, range: Range | None) -> None:
        original = profiler.__dict__[name]

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            patches.guard(run.listen, range, steps)
            return original(*args, **kwargs)

        patches.replace(profiler, name, wrapper)

    told("_run_on_profiler_start", _both(in_profile, always))
    told("_run_on_profiler_stop", always)
    run.listen(always, steps)
    patches.when_restored(lambda after_fault: run.listen(None))


def _record_function() -> Range:
    """`torch.profiler.record_function` goes through the dispatcher (4 us, and a user's dispatch mode would see it);
    this one does not (0.5 us; torch/csrc/profiler/python/init.cpp, 2.4-2.15)."""
    import torch

    compiled: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    recording: Callable[[str], AbstractContextManager[object]] = compiled._profiler._RecordFunctionFast

    def begin(name: str) -> Callable[[], None]:
        record = recording(name)
        record.__enter__()

        def end() -> None:
            record.__exit__(None, None, None)

        return end

    return begin


def _nvtx() -> tuple[Range | None, Range | None]:
    """Of phases, and of steps: a user's own ranges may cross a step, and NVTX ends the thread's innermost one."""
    import torch.cuda.nvtx

    nvtx: Any = torch.cuda.nvtx
    push: Callable[[str], object] = nvtx.range_push
    pop: Callable[[], object] = nvtx.range_pop
    start: Callable[[str], int] = nvtx.range_start
    stop: Callable[[int], object] = nvtx.range_end
    try:
        push("otel_dl")
        pop()
    except RuntimeError as error:  # a build without CUDA: "NVTX functions not installed"
        logger.warning("otel-dl: OTEL_DL_NVTX=true has no effect here, this torch has no NVTX: %s", error)
        return None, None

    def end() -> None:
        pop()

    def phase(name: str) -> Callable[[], None]:
        push(name)
        return end

    def step(name: str) -> Callable[[], None]:
        number = start(name)

        def end() -> None:
            stop(number)

        return end

    return phase, step


def _both(inner: Range | None, outer: Range | None) -> Range | None:
    if inner is None or outer is None:
        return inner or outer

    def begin(name: str) -> Callable[[], None]:
        end_outer = outer(name)
        end_inner = inner(name)

        def end() -> None:
            end_inner()
            end_outer()

        return end

    return begin


def _nothing() -> None: ...


def _safe(range: Range | None, run: Run, patches: Patches) -> Range | None:
    """A fault in there is the profilers', and not that of the phase which begins or ends."""
    if range is None:
        return None

    def begin(name: str) -> Callable[[], None]:
        try:
            end = range(name)
        except Exception as error:
            patches.fault(error)
            return _nothing
        return functools.partial(patches.guard, end)

    return begin
