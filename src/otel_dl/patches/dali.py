"""DALI's iterators for PyTorch: a loader whose `next()` waits for a pipeline that runs on the device.

`nvidia.dali.plugin.pytorch.DALIGenericIterator` is its own iterator. An epoch of it ends with StopIteration: it ignores
a `reset()` before, and the next batch after is the next epoch's. Its constructor calls `__next__` once, for the batch
that the first one then has ready. What `__next__` waits in is `_get_outputs` of its base class, no public name: without
it there is no `dali.run`. (Read in NVIDIA/DALI, dali/python/nvidia/dali/plugin/pytorch/__init__.py and
base_iterator.py of 2024.) Not run with DALI: the tests have a stand-in of the same shape.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from otel_dl.log import logger
from otel_dl.patches.dataloader import INFO, Loaders, Next, begin_epoch
from otel_dl.patches.recorder import recorder
from otel_dl.recording.details import Detail
from otel_dl.recording.failure import Failure
from otel_dl.recording.lane import NEXT, is_failure
from otel_dl.recording.records import clock
from otel_dl.semconv import SpanName

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.patches.workers import Watch
    from otel_dl.recording.lane import Lane
    from otel_dl.recording.run import Run


class Outputs(Detail):
    """`dali.run`: the pipelines' outputs are waited for."""

    __slots__ = ("_device",)
    family = "dali"
    name = SpanName.DALI_RUN

    def __init__(self, device: str) -> None:
        self._device = device

    def attributes(self) -> dict[str, Any]:
        return {"dl.device": self._device} if self._device else {}


class _Next(Next):
    """Begins an epoch with the first batch after the last one's end."""

    def __init__(self, watch: Watch, loaders: Loaders) -> None:
        super().__init__(watch)
        self._loaders = loaders

    def begin(self, lane: Lane, subject: Any) -> tuple[int, int] | None:
        if getattr(subject, INFO, None) is None:
            begin_epoch(subject, subject, self._loaders)
        return super().begin(lane, subject)

    def fail(self, lane: Lane, kind: int, subject: Any, start: int, error: BaseException) -> None:
        super().fail(lane, kind, subject, start, error)
        if isinstance(error, StopIteration):
            subject.__dict__.pop(INFO, None)


def install(run: Run, patches: Patches, watch: Watch, loaders: Loaders) -> None:
    """Once `nvidia.dali.plugin.pytorch` is imported."""

    def imported(module: Any) -> None:
        try:
            _install(run, patches, watch, loaders, module.DALIGenericIterator)
        except Exception:
            patches.restore()
            logger.warning(
                "otel-dl: this DALI lacks what the instrumentation of its iterators needs; that part is off.",
                exc_info=True,
            )

    patches.when_imported("nvidia.dali.plugin.pytorch", imported)


def _install(run: Run, patches: Patches, watch: Watch, loaders: Loaders, iterator: Any) -> None:
    original_next = _own(iterator, "__next__")
    patches.replace(iterator, INFO, None)
    patches.replace(iterator, "__next__", recorder(run, patches, _Next(watch, loaders), original_next, "Next"))
    _install_construction(run, patches, iterator)
    original = getattr(iterator, "_get_outputs", None)
    if original is None:
        return

    def note(self: Any, start: int, error: BaseException | None) -> None:
        lane: Lane = run.local.lane
        if run.active and lane.bounds and not isinstance(error, StopIteration):
            failure = Failure.of(error) if error is not None and is_failure(error) else None
            run.note(Outputs(_device(self)), start, clock(), failure)

    @functools.wraps(original)
    def _get_outputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            patches.guard(note, self, start, error)
            raise
        patches.guard(note, self, start, None)
        return result

    patches.replace(iterator, "_get_outputs", _get_outputs)


def _install_construction(run: Run, patches: Patches, iterator: Any) -> None:
    original_init = _own(iterator, "__init__")

    @functools.wraps(original_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        lane: Lane = run.local.lane
        kinds = lane.kinds
        lane.kinds = kinds | NEXT  # as within a `next()`: what it reads here is given to nobody yet
        try:
            original_init(self, *args, **kwargs)
        finally:
            lane.kinds = kinds

    patches.replace(iterator, "__init__", __init__)


def _own(kind: Any, name: str) -> Any:
    return vars(kind)[name]  # pyright: ignore[reportUnknownVariableType]


def _device(iterator: Any) -> str:
    """Of the first pipeline; empty where it runs on the CPU."""
    pipelines = getattr(iterator, "_pipes", None)
    device = getattr(pipelines[0], "device_id", None) if pipelines else None
    return f"cuda:{device}" if isinstance(device, int) else ""
