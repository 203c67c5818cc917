"""A device that runs when it is told to: what is queued on its one stream, in order, by a clock of its own."""

from __future__ import annotations

from collections import deque
from typing import Any

from otel_dl.recording.device import DeviceTime, Memory
from otel_dl.recording.run import Run


class StandInEvent:
    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self._at: float | None = None
        self.index: int | None = None

    def record(self) -> None:
        device = self._device
        device.called("record")
        assert self.index in (None, device.index), "torch: an event can only be recorded again on its own device"
        self.index = device.index
        self._at = None
        device.recorded += 1
        device.queue.append(self)
        if device.eager:
            device.run()

    def passed(self, at: float) -> None:
        self._at = at

    def query(self) -> bool:
        self._device.called("query")
        assert not self._device.capturing, "a query breaks a capture"
        return self._at is not None

    def elapsed_time(self, end_event: StandInEvent) -> float:
        self._device.called("elapsed_time")
        assert self.index == end_event.index, "torch: events of different devices"
        if self._at is None or end_event._at is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end_event._at - self._at

    def synchronize(self) -> None:
        self._device.waited += 1


class StandInDevice:
    """`work` queues, `run` lets the device do what is queued. With `eager` it is never behind."""

    type = "cuda"

    def __init__(self, eager: bool = False) -> None:
        self.eager = eager
        self.queue: deque[StandInEvent | float] = deque()
        self.clock = 0.0
        self.on = True
        self.index = 0
        self.capturing = False
        self.made = 0
        """Events."""
        self.recorded = 0
        self.waited = 0
        self.failing: dict[str, BaseException] = {}
        """What a call of this name raises."""
        self.calls: list[str] = []
        self.said = Memory(0, 0, 0, 0)
        """By its allocator."""

    def called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise self.failing[name]

    def work(self, ms: float) -> None:
        self.queue.append(ms)
        if self.eager:
            self.run()

    def run(self) -> None:
        while self.queue:
            self.step()

    def step(self) -> None:
        next_one = self.queue.popleft()
        if isinstance(next_one, float | int):
            self.clock += next_one
        else:
            next_one.passed(self.clock)

    # As `recording.device.DeviceEvents`.

    def is_on(self) -> bool:
        self.called("is_on")
        return self.on

    def current(self) -> int:
        self.called("current")
        return self.index

    def is_capturing(self) -> bool:
        self.called("is_capturing")
        return self.capturing

    def event(self) -> StandInEvent:
        self.called("event")
        self.made += 1
        return StandInEvent(self)

    def memory(self, device: int) -> Memory:
        self.called("memory")
        return self.said

    def free(self, device: int) -> int | None:
        self.called("free")
        return self.said.free


def use(run: Run, device: Any, events: bool = True) -> DeviceTime:
    """`run` has this device."""
    run.device = DeviceTime(run, device, events)
    return run.device
