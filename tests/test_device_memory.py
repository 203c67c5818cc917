"""What the device's allocator says: the peak of a step, retries, and where the memory ran out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.device import Loop, StandInDevice, check, steps, use
from support.inprocess import recording

from otel_dl.recording.device import Memory
from otel_dl.recording.lane import FORWARD

GIB = 2**30


def test_the_peak_is_told_of_the_step_that_raised_it_and_retries_are_counted(in_c: bool) -> None:
    device = StandInDevice(eager=True)
    peaks = {1: 5 * GIB, 3: 7 * GIB, 6: 1 * GIB}  # in step 6 the user resets it
    with recording(native=in_c) as recorded:
        use(recorded.run, device)
        loop = Loop(device)
        for number, batch in enumerate(loop.batches(9)):
            peak = peaks.get(number, device.said.peak)
            device.said = device.said._replace(peak=peak, retries=(device.said.retries or 0) + (number == 4))
            loop.update(*batch)
    said = {number: span.attributes for number, span in steps(recorded).items()}
    told = {number: each.get("dl.memory.peak_bytes") for number, each in said.items()}
    assert {number: peak for number, peak in told.items() if peak is not None} == {1: 5 * GIB, 3: 7 * GIB}
    assert [said[number]["dl.memory.alloc_retries"] for number in range(8)] == [0, 0, 0, 0, 1, 0, 0, 0]
    check(recorded)


@pytest.mark.parametrize("events", ["true", "false"])
def test_out_of_memory_says_where_and_what_the_allocator_had(in_c: bool, events: str) -> None:
    device = StandInDevice(eager=True)
    device.said = Memory(70 * GIB, 71 * GIB, 78 * GIB, 0, GIB // 2)
    with recording(native=in_c, device_events=events) as recorded:
        use(recorded.run, device, recorded.run.settings.device_events)
        loop = Loop(device)
        for number, (x, y) in enumerate(loop.batches(6)):
            if number == 3:

                def full(*_: Any) -> None:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

                hook = loop.model[2].register_forward_pre_hook(full)
                with pytest.raises(torch.OutOfMemoryError):
                    loop.update(x, y)
                hook.remove()
                device.said = device.said._replace(allocated=GIB)
            else:
                loop.update(x, y)
    told = "in forward on cuda:0, 70.00 GiB allocated, 78.00 GiB reserved, 0.50 GiB free; CUDA out of memory. Tried to"
    failed = [span for span in recorded.spans if span.attributes.get("error.type") == "torch.OutOfMemoryError"]
    assert {span.name for span in failed} == {"train.step", "forward"}
    for span in failed:
        assert span.status.description.startswith(told)


def test_of_nested_phases_the_innermost_says_where_the_memory_ran_out() -> None:
    device = StandInDevice()
    device.said = Memory(GIB, GIB, GIB, 0)
    with recording() as recorded:
        time = use(recorded.run, device)
        error = torch.OutOfMemoryError("full")
        inner = time.out_of_memory(error, FORWARD, outermost=False)
        device.said = Memory(0, GIB, GIB, 0)
        assert (
            time.out_of_memory(error, 16, outermost=True)
            == inner
            == ("in forward on cuda:0, 1.00 GiB allocated, 1.00 GiB reserved")
        )
        assert time.out_of_memory(error, 16, outermost=True).startswith("in optimizer.step on cuda:0, 0.00 GiB")


@pytest.mark.parametrize("call", ["is_on", "current", "memory", "free"])
def test_a_driver_that_fails_then_changes_nothing(in_c: bool, call: str) -> None:
    device = StandInDevice(eager=True)
    with recording(native=in_c, device_events="false") as recorded:
        use(recorded.run, device, False)
        loop = Loop(device)
        device.failing[call] = RuntimeError("no driver")
        batch = next(loop.batches(2))

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("full")

        loop.model.register_forward_pre_hook(full)
        with pytest.raises(torch.OutOfMemoryError, match=r"^full$"):
            loop.update(*batch)
    (failed,) = recorded.named("forward")
    assert failed.status.description == "full"
