"""The device's time of each phase as the trace has it, beside the kernels that the profile has for it.

The trace's (`dl.device.duration_ms`) lies between two events on the stream that is current at the phase's ends: from
when the device has done what was queued before until it has done what the phase queued, with whatever it idles
meanwhile. The profile's is how long kernels ran that the host launched between the phase's ends, on any stream.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from otel_dl.semconv import SpanName
from otel_dl.viewing.comparing.pairing import Pairing
from otel_dl.viewing.intervals import total


class DeviceRow(NamedTuple):
    """One phase, or the step. Times are nanoseconds a step, the mean of the steps that have it."""

    name: str
    trace: float
    kernels: float
    steps: int


def device_rows(pairing: Pairing) -> list[DeviceRow]:
    """Of the profiled steps of which the trace knows the device's time: the step first, then its phases, in their
    order. Empty where it knows none."""
    traced: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for step in pairing.steps:
        steps.update({each.name for each in step.on_device})
        for each in step.on_device:
            traced[each.name] += round(each.ns)
            kernels[each.name] += total(pairing.profile.kernels.launched_between(each.start, each.end))
    return [
        DeviceRow(name, traced[name] / steps[name], kernels[name] / steps[name], steps[name])
        for name in dict.fromkeys([SpanName.STEP, *traced])
        if steps[name]
    ]
