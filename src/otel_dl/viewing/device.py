"""What traces say of the device's own time: beside the host's, what the host's waiting for data means.

A phase's device time lies between the moments at which the device passes the phase's ends on its stream. So the host's
time of `dataloader.next` less the device's is what the device caught up meanwhile: work that had been queued before.
What remains to the device's own are copies that were queued there, and idling.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from otel_dl.semconv import SpanName
from otel_dl.viewing.reading import Span, ns_of, number_of


class Part(NamedTuple):
    """Of the steps' time, in shares of the host's and the device's."""

    name: str
    host: float
    device: float


class DeviceTimes(NamedTuple):
    steps: int
    """Those whose phases all have the device's time."""
    host_ns: float
    device_ns: float
    """Of a step, the mean."""
    parts: Sequence[Part]
    wait: Part
    """For data."""
    queued: float
    """Share of the host's time in which it waited for data while the device worked off what had been queued before."""


class DeviceMemory(NamedTuple):
    peak_bytes: int
    peak_step: int
    """The latest that raised it."""
    retries: int


class Collector:
    """Takes the spans of a run in any order."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[int, float]] = {}
        self._parts: defaultdict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
        self._lacking: set[str] = set()
        """Steps of which some phase has no time of the device."""
        self._peak = (0, 0)
        self._retries = 0

    def add(self, span: Span, part: str) -> None:
        """`part` is what the phase is called, "" where it is none that a step's time is divided into."""
        device_ns = ns_of(span, "dl.device.duration_ms")
        if span.name == SpanName.STEP:
            if device_ns is not None:
                self._steps[span.span_id] = span.duration_ns, device_ns
            self._peak = max(self._peak, (number_of(span, "dl.memory.peak_bytes"), number_of(span, "dl.step")))
            self._retries += number_of(span, "dl.memory.alloc_retries")
        elif part and device_ns is not None:
            host, device = self._parts[span.parent_id].get(part, (0, 0.0))
            self._parts[span.parent_id][part] = host + span.duration_ns, device + device_ns
        elif part:
            self._lacking.add(span.parent_id)

    def times(self, steps: Iterable[str], names: Iterable[str], waiting: str, other: str) -> DeviceTimes | None:
        """Of these `steps` (ids of spans), in parts of these `names`; `waiting` is that of `dataloader.next`."""
        chosen = [step for step in steps if step in self._steps and step in self._parts and step not in self._lacking]
        host = sum(self._steps[step][0] for step in chosen)
        device = sum(self._steps[step][1] for step in chosen)
        if not host or not device:
            return None
        on_host: Counter[str] = Counter()
        on_device: defaultdict[str, float] = defaultdict(float)
        caught_up = 0.0
        for step in chosen:
            for part, (of_host, of_device) in self._parts[step].items():
                on_host[part] += of_host
                on_device[part] += of_device
            waited, of_device = self._parts[step].get(waiting, (0, 0.0))
            caught_up += max(0.0, waited - of_device)
        parts = [Part(name, on_host[name] / host, on_device[name] / device) for name in names]
        rest = Part(other, max(0.0, 1 - sum(p.host for p in parts)), max(0.0, 1 - sum(p.device for p in parts)))
        wait = next((part for part in parts if part.name == waiting), Part(waiting, 0.0, 0.0))
        return DeviceTimes(
            len(chosen), host / len(chosen), device / len(chosen), [*parts, rest], wait, caught_up / host
        )

    def memory(self) -> DeviceMemory | None:
        return DeviceMemory(*self._peak, self._retries) if self._peak[0] or self._retries else None
