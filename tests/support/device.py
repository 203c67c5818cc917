"""A device that runs when it is told to: what is queued on its one stream, in order, by a clock of its own; and a
training that queues."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.inprocess import Recorded
from support.loops import Points, network, seed
from support.validate import from_sdk, validate
from torch import Tensor
from torch.utils.data import DataLoader

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
    run.device = time = DeviceTime(run, device, events)
    time.late_ns = 10**12  # the machine may be busy with other things
    return time


class Loop:
    """Steps that queue on the device, in milliseconds: 1 in `next`, 20 in forward, 300 in backward, 4000 in the
    optimizer, and 50000 after it. `turn` is called at the end of each."""

    def __init__(self, device: StandInDevice) -> None:
        seed()
        self.device = device
        self.model = network()
        self.losses: list[float] = []

        class Queueing(Points):
            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                device.work(0.25)
                return super().__getitem__(index)

        class QueueingSGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                device.work(4000)
                return super().step(closure)

        self._data = Queueing
        self.optimizer = QueueingSGD(self.model.parameters(), lr=0.1)
        self.model.register_forward_pre_hook(lambda *_: device.work(20))

    def batches(self, steps: int) -> Iterator[Any]:
        return iter(DataLoader(self._data(4 * steps), batch_size=4))

    def update(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        loss.register_hook(lambda _: self.device.work(300))
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.device.work(50_000)

    def __call__(self, steps: int, turn: Callable[[int], object] = lambda number: None) -> None:
        for number, (x, y) in enumerate(self.batches(steps)):
            self.update(x, y)
            turn(number)


WHOLE = 54_321.0
PHASES = {
    "dataloader.next": 1.0,
    "optimizer.zero_grad": 0.0,
    "forward": 20.0,
    "backward": 300.0,
    "optimizer.step": 4000.0,
}


def duration(span: Any) -> float | None:
    return span.attributes.get("dl.device.duration_ms")


def steps(recorded: Recorded) -> dict[int, Any]:
    return {span.attributes["dl.step"]: span for span in recorded.named("train.step")}


def phases(recorded: Recorded, number: int) -> dict[str, float | None]:
    trace_id = steps(recorded)[number].context.trace_id
    return {name: duration(span) for name in PHASES for span in recorded.named(name)
            if span.context.trace_id == trace_id}  # fmt: skip


def check(recorded: Recorded) -> None:
    assert validate([from_sdk(span) for span in recorded.spans], whole=False) == []


class AsynchronousDevice(StandInDevice):
    """One that works by itself, in real time, while the host does other things."""

    def __init__(self) -> None:
        super().__init__()
        self.free_at = 0.0
        """When it is done with what was queued so far: milliseconds of `time.perf_counter`."""

    def now(self) -> float:
        return time.perf_counter() * 1e3

    def work(self, ms: float) -> None:
        self.free_at = max(self.free_at, self.now()) + ms

    def event(self) -> Any:
        return AsynchronousEvent(self)

    def wait(self) -> None:
        """The script's own `torch.cuda.synchronize()`."""
        time.sleep(max(0.0, self.free_at - self.now()) / 1e3)


class AsynchronousEvent:
    def __init__(self, device: AsynchronousDevice) -> None:
        self._device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = max(self._device.free_at, self._device.now())

    def query(self) -> bool:
        return self._device.now() >= self.at

    def elapsed_time(self, end_event: AsynchronousEvent) -> float:
        return end_event.at - self.at
