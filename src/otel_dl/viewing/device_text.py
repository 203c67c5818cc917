"""What the summary says of the device, as rows of text."""

from __future__ import annotations

from collections.abc import Iterator

from otel_dl.viewing.device import DeviceMemory, DeviceTimes
from otel_dl.viewing.words import duration, of_ranks, percent, plural

_WAIT_TOLD = 0.05
"""Share of a step's time from which on it is told whose waiting for data is: the host's, or the device's too."""


def rows(times: DeviceTimes | None, memory: DeviceMemory | None, ranks: int = 1) -> Iterator[tuple[str, str]]:
    """(label, text)"""
    if times is not None:
        yield from _times(times, ranks)
    if memory is not None:
        yield "Device memory", _memory(memory)


def _times(times: DeviceTimes, ranks: int) -> Iterator[tuple[str, str]]:
    parts = ", ".join(f"{part.name} {percent(part.host)} | {percent(part.device)}" for part in times.parts)
    mean = f"the mean of {times.steps:,}{of_ranks(ranks)}"
    yield (
        "Host | device",
        f"{parts} (of {duration(times.host_ns)} | {duration(times.device_ns)} a step, {mean})",
    )
    wait = times.wait
    if times.queued >= _WAIT_TOLD:
        yield (
            "Host | device",
            "while the host waits for data the device works off what was queued before, for"
            f" {percent(times.queued)} of the time: {percent(wait.device)} of its own time is all that faster"
            " loading could save it",
        )
    elif wait.device >= _WAIT_TOLD:
        yield (
            "Host | device",
            f"the device waits for data as the host does: {percent(wait.device)} of its own time, copies that were"
            " queued meanwhile included",
        )


def _memory(memory: DeviceMemory) -> str:
    parts: list[str] = []
    if memory.peak_bytes:
        parts.append(f"at most {memory.peak_bytes / 2**30:.2f} GiB given out, reached in step {memory.peak_step}")
    if memory.retries:
        parts.append(
            f"{memory.retries:,} allocation{plural(memory.retries)} had to free cached blocks first (each waits for"
            " the device)"
        )
    return "; ".join(parts)
