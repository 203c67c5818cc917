"""The sink where somebody else set up the SDK: spans go to that provider's processors, never faster than they drain."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence, Sized
from time import monotonic
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from otel_dl.export.exporter_sink import keep_random_apart
from otel_dl.export.queue_sink import BATCH, QueueSink, logger

_BLIND_PACE: Final = (512, 5.0)
"""(spans, seconds) for a batch processor whose queue can't be read: its default batch and schedule delay."""
_PATIENCE: Final = 0.2
"""Share of a deadline for which an export that was under way already may hold up the rest."""


class ProviderSink(QueueSink):
    """Hands spans to `provider`'s processors, at the end of their queue: sampler, limits and `on_start` are past.

    Its batch processors' queues (1.45: sdk/_shared_internal/__init__.py `BatchProcessor`) drop the oldest span when
    they are full, in silence and whoever it belongs to. Ours are held here, and never fill more than half of them.
    `exported` counts what was handed over: what becomes of it is the provider's.
    """

    def __init__(self, provider: Any, capacity: int) -> None:
        self._provider = provider
        super().__init__(capacity, BATCH, delay=0.05)

    def _open(self) -> None:
        pass

    def _deliver(self, spans: Sequence[ReadableSpan]) -> bool:
        on_end = self._provider._active_span_processor.on_end
        for span in spans:
            try:
                on_end(span)
            except Exception as error:
                # Whoever raised may have been the second of several: tried again, the first would have it twice.
                self._failed_with(f"{type(error).__name__}: {error}")
        return True

    def _room(self) -> int:
        if self._hurried():
            return self._room_at_the_end()
        self._held_up_since = None
        rooms: list[int] = []
        for processor in self._processors():
            queue, size = _queue_of(processor)
            if queue is not None and size is not None:
                rooms.append(max(1, size // 2) - len(queue))
            elif isinstance(processor, BatchSpanProcessor):
                rooms.append(self._blind_room())
        return min(rooms, default=self._batch)

    def _room_at_the_end(self) -> int:
        """Somebody waits, most likely for the end of the process: a batch at a time, and none behind a hanging export.

        The provider exports batch after batch, 10 s each where the receiver is silent, and its own end waits for all of
        them: what is handed over now is added to that.
        """
        now = monotonic()
        if any(_is_exporting(processor) for processor in self._processors()):
            if self._held_up_since is None:
                self._held_up_since = now
                self._patience = _PATIENCE * (self._hurry_until - now)
            elif now - self._held_up_since > self._patience:
                self._give_up()
            return 0
        self._held_up_since = None
        for _ in range(2):
            room = self._batch
            for processor in self._processors():
                queue, size = _queue_of(processor)
                if queue is not None and size is not None:
                    room = min(room, size // 2 or 1, _batch_of(processor)) - len(queue)
            if room > 0:
                return room
            # The processor's own schedule is up to 5 s away.
            with contextlib.suppress(Exception):
                self._settle()
        return 0

    def _processors(self) -> Sequence[Any]:
        return getattr(self._provider._active_span_processor, "_span_processors", ())

    def _blind_room(self) -> int:
        spans, seconds = _BLIND_PACE
        now = monotonic()
        if now < self._resume_at:
            return 0
        self._resume_at = now + seconds
        return spans

    def _settle(self) -> bool:
        # It ignores its own timeout (opentelemetry-python #4568): this thread may hang in it, `flush` does not.
        return self._provider.force_flush() is not False

    def _shut(self) -> None:
        """The provider is not ours to shut down."""

    def _target(self) -> str:
        return f"the TracerProvider that was set up ({type(self._provider).__qualname__})"

    def _failed_with(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "otel-dl: spans can't be handed to %s: %s. They are held and tried again.", self._target(), message
            )

    def _begin(self) -> None:
        super()._begin()
        self._resume_at = 0.0
        self._held_up_since: float | None = None
        self._patience = 0.0
        self._warned = False
        keep_random_apart()


def _batch_of(processor: Any) -> int:
    inner = getattr(processor, "_batch_processor", processor)
    size = getattr(inner, "_max_export_batch_size", getattr(inner, "max_export_batch_size", None))
    return size if isinstance(size, int) else BATCH


def _is_exporting(processor: Any) -> bool:
    lock = getattr(getattr(processor, "_batch_processor", None), "_export_lock", None)
    return lock is not None and lock.locked()


def _queue_of(processor: Any) -> tuple[Sized | None, int | None]:
    """The queue of a batch processor and the number it holds, (None, None) where they can't be read."""
    inner = getattr(processor, "_batch_processor", processor)
    queue = getattr(inner, "_queue", getattr(inner, "queue", None))
    size = getattr(inner, "_max_queue_size", getattr(inner, "max_queue_size", None))
    if isinstance(queue, Sized) and isinstance(size, int):
        return queue, size
    return None, None
