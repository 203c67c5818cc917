"""ns that the device's own time costs a phase and a step, in hot loops: without a device, with one that takes no time.

What a real driver takes comes on top: `tests/gpu/device_time.py` measures it on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

from _measure import Sample, added, interleaved, machine, timed

from otel_dl.recording import native
from otel_dl.recording.context import get_current
from otel_dl.recording.device import OF_A_STEP, DeviceTime, Memory
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.lane import BACKWARD
from otel_dl.recording.records import Step, clock
from otel_dl.recording.run import Run
from otel_dl.settings import Settings

ROUNDS = 201
PHASES = OF_A_STEP // 2


class Event:
    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        return 1.0


class Device:
    type = "cuda"

    def is_on(self) -> bool:
        return True

    def current(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def event(self) -> Event:
        return Event()

    def memory(self, device: int) -> Memory:
        return Memory()

    def free(self, device: int) -> int | None:
        return None


def ordinary(device: bool, head: bool = False) -> tuple[Run, Step]:
    """A run in whose step phases are simply recorded."""
    run = Run(Settings(), NeverHead())
    run.stepper = lane = run.local.lane
    run.current = lane.step = step = Step(5, clock(), True, frozenset(), head)
    step.settled, step.context = True, get_current()
    if device:
        run.device = DeviceTime(run, Device())
        run.device.look_for_it()
        run.observers.step_begins(clock())
    return run, step


def phases(in_c: bool, device: bool, head: bool = False) -> Callable[[], Sample]:
    run, step = ordinary(device, head)
    lane = run.local.lane

    def in_python() -> None:
        lane.end(BACKWARD, lane.begin(BACKWARD))

    phase = in_python
    if in_c:
        phase = native.hooks.Phase(run.fast, BACKWARD, lambda: None, in_python, None, None, None)

    def sample() -> Sample:
        step.records.clear()
        run.observers.step_begins(clock())
        return timed(phase, PHASES)

    return sample


def steps(device: bool) -> Callable[[], Sample]:
    run, _ = ordinary(device)
    return lambda: timed(lambda: run.observers.step_becomes_next(clock()), PHASES)


def main() -> None:
    print(machine())
    samples = interleaved(
        {
            "a phase in C": phases(True, False),
            "… with a device": phases(True, True),
            "… whose step the head keeps": phases(True, True, head=True),
        },
        ROUNDS,
    )
    added(samples, "a phase in C")
    samples = interleaved(
        {
            "a phase in Python": phases(False, False),
            "… with a device": phases(False, True),
            "… whose step the head keeps": phases(False, True, head=True),
        },
        ROUNDS,
    )
    added(samples, "a phase in Python")
    added(interleaved({"the next step": steps(False), "… with a device": steps(True)}, ROUNDS), "the next step")


if __name__ == "__main__":
    main()
