"""The host waits for a device: `cuda.synchronize`."""

from __future__ import annotations

from typing import Any, Final

from otel_dl.places import Place, code_attributes
from otel_dl.recording.details import Detail
from otel_dl.semconv import SpanName


class Wait(Detail):
    """One that lasted long enough for a span."""

    __slots__ = ("copied", "device", "duration", "operation", "place", "summed")
    family = "sync"
    name = SpanName.SYNCHRONIZE

    def __init__(self, operation: str, device: str, place: Place | None, duration: int) -> None:
        self.operation = operation
        self.device = device
        """Empty where it is not known."""
        self.place = place
        self.duration = duration
        """ns."""
        self.copied: int | None = None
        """How much of it was copying (ns), once that is known: the one thing that is said later, by the device."""
        self.summed = False

    def attributes(self) -> dict[str, Any]:
        said: dict[str, Any] = {"dl.sync.op": self.operation}
        if self.device:
            said["dl.device"] = self.device
        place, copied = self.place, self.copied
        if place is not None:
            said |= code_attributes(place.file, place.line, place.function)
        if copied is not None:
            copied = min(copied, self.duration)
            said["dl.sync.wait_ms"] = (self.duration - copied) / 1e6
            if copied:
                said["dl.sync.copy_ms"] = copied / 1e6
        return said


class _ShortWait(Wait):
    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("", "", None, 0)
        self.summed = True


SHORT: Final = _ShortWait()
"""Any that was shorter: all of them are summed up."""
