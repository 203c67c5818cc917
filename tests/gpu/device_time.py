"""The device's own time: against torch.profiler, what it costs, what it leaves alone."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from resnet import ResNet
from support.inprocess import Recorded, recording
from table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset

STEPS = 24
BATCH = 64
QUEUED_S = 0.5
"""Of work on the device, queued before what must not wait for it."""
WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Images(Dataset[Tensor]):
    """Noise; reading a batch takes `seconds`."""

    def __init__(self, batches: int, seconds: float = 0.0, batch: int = BATCH) -> None:
        self._image = torch.randn(3, 224, 224)
        self._count, self._seconds = batches * batch, seconds / batch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return self._image


class Training:
    """Steps of a ResNet of which the script names the phases, for the profiler."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = ResNet().cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.images = torch.randn(BATCH, 3, 224, 224, device="cuda")
        self.labels = torch.randint(0, 1000, (BATCH,), device="cuda")

    def run(self, data: Dataset[Tensor] | Tensor, before_next: Callable[[], object] = lambda: None) -> None:
        """Where `data` are no images, those that are on the device already are used."""
        batches = iter(DataLoader(data, batch_size=BATCH))  # type: ignore[arg-type]
        while True:
            before_next()
            with record_function("phase dataloader.next"):
                batch = next(batches, None)
            if batch is None:
                return
            batch = batch.cuda(non_blocking=True) if batch.dim() == 4 else self.images
            with record_function("phase optimizer.zero_grad"):
                self.optimizer.zero_grad()
            with record_function("phase forward"):
                output = self.model(batch)
            loss = nn.functional.cross_entropy(output, self.labels)
            with record_function("phase backward"):
                loss.backward()
            with record_function("phase optimizer.step"):
                self.optimizer.step()


# What the profiler says.


class Marks(NamedTuple):
    """When the device passes a mark that the host sets: then, or when all work that was launched before is done."""

    launches: Sequence[float]
    done: Sequence[float]
    """When the device was done with what was launched up to each of them."""

    @classmethod
    def of(cls, launched: Iterable[tuple[float, float]]) -> Marks:
        """`launched`: when, by the host, and when it was done, of each piece of work."""
        ordered = sorted(launched)
        done: list[float] = []
        for _, end in ordered:
            done.append(max(end, done[-1] if done else end))
        return cls([launch for launch, _ in ordered], done)

    def passed(self, instant: float) -> float:
        place = bisect_right(self.launches, instant)
        return max(instant, self.done[place - 1]) if place else instant


def profiled(trace: Mapping[str, Any]) -> dict[str, list[float]]:
    """Milliseconds on the device of each phase, by its name, out of a Chrome trace of torch.profiler."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ends = {
        event["args"]["correlation"]: event["ts"] + event["dur"]
        for event in events
        if event.get("cat") in WORK and "correlation" in event.get("args", {})
    }
    marks = Marks.of(
        (event["ts"], ends[event["args"]["correlation"]])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event.get("args", {}).get("correlation") in ends
    )
    found: dict[str, list[float]] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        if event.get("cat") == "user_annotation" and event["name"].startswith("phase "):
            took = marks.passed(event["ts"] + event["dur"]) - marks.passed(event["ts"])
            found.setdefault(event["name"].removeprefix("phase "), []).append(took / 1e3)
    return found


def durations(recorded: Recorded, name: str) -> list[float]:
    spans = sorted(recorded.named(name), key=lambda span: span.start_time or 0)
    return [span.attributes["dl.device.duration_ms"] for span in spans
            if span.attributes and "dl.device.duration_ms" in span.attributes]  # fmt: skip


def against_the_profiler(table: Table) -> None:
    training = Training()
    training.run(Images(4))
    torch.cuda.synchronize()
    everything = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with recording() as recorded, profile(activities=everything, acc_events=True) as profiler:
        training.run(Images(STEPS, seconds=0.02))
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        truth = profiled(json.loads(path.read_text()))
    for name in ("forward", "backward", "optimizer.step"):
        ours, theirs = durations(recorded, name), truth.get(name, [])
        if not ours or not theirs:
            table.add(f"{name}: device time", f"{len(ours)} spans", f"{len(theirs)} profiled", ok=False)
            continue
        # The first ones are the start.
        table.within(f"{name}: device time against torch.profiler (median)", statistics.median(ours[4:]),
                     statistics.median(theirs[4:]), 0.02)  # fmt: skip
    steps = durations(recorded, "train.step")
    table.add("steps with device time", len(steps), f"at least {STEPS - 1} of {STEPS}", len(steps) >= STEPS - 1)


def waiting_for_data(table: Table) -> None:
    """A wait of 20 ms for data: while much is queued, and while nothing is."""
    training = Training()
    training.run(Images(2))
    torch.cuda.synchronize()
    queue = cycles(0.04)
    for what, before in (("queued work", lambda: torch.cuda._sleep(queue)), ("an idle device", torch.cuda.synchronize)):
        with recording() as recorded:
            training.run(Images(12, seconds=0.02), before)
            torch.cuda.synchronize()
        host = [((span.end_time or 0) - (span.start_time or 0)) / 1e6 for span in recorded.named("dataloader.next")]
        device = durations(recorded, "dataloader.next")
        table.at_least(f"{what}: data wait by the host (median)", statistics.median(host), 20)
        if what == "queued work":
            table.at_most(f"{what}: data wait by the device (median)", statistics.median(device or [1e9]), 1)
        else:
            table.within(f"{what}: data wait by the device (median)", statistics.median(device or [0]),
                         statistics.median(host), 0.02)  # fmt: skip


def cycles(seconds: float) -> int:
    """For `torch.cuda._sleep`."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10_000_000)
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return round(100_000_000 * seconds * 1e3 / begin.elapsed_time(end))


def never_waits(table: Table) -> None:
    """Small steps behind half a second of work on the device, and the end of the run."""
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8, device="cuda")
    batches = DataLoader(torch.zeros(40, 1), batch_size=1)
    queue = cycles(QUEUED_S)

    def train() -> None:
        for _ in batches:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    train()
    torch.cuda.synchronize()
    with recording():
        torch.cuda._sleep(queue)
        done = torch.cuda.Event()
        done.record()
        began = time.perf_counter()
        train()
        took = time.perf_counter() - began
        waited = done.query()
    table.add("40 steps behind 500 ms of queued work: waited for the device", waited, False, not waited)
    table.at_most("40 steps behind 500 ms of queued work: host", took * 1e3, QUEUED_S * 1e3 / 2)
    torch.cuda.synchronize()


def captures(table: Table) -> None:
    """A forward that is captured into a graph while events of earlier steps are on their way."""
    model = nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with recording() as recorded:
        for number, _ in enumerate(DataLoader(torch.zeros(12, 1), batch_size=1)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if number == 5:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side), torch.no_grad():
                    model(x)
                torch.cuda.current_stream().wait_stream(side)
                torch.cuda._sleep(50_000_000)  # so that events are on their way
                with torch.cuda.graph(graph), torch.no_grad():
                    output = model(x)
        graph.replay()
        torch.cuda.synchronize()
        same = torch.equal(output, model(x))
        on = recorded.run.device._driver is not None
    table.add(
        "a graph that is captured within a step: replays, events go on", f"{same}, {on}", "True, True", same and on
    )


def memory(table: Table) -> None:
    model = nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 1024, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    peaks: list[int] = []
    with recording() as recorded:
        for number, _ in enumerate(DataLoader(torch.zeros(6, 1), batch_size=1)):
            optimizer.zero_grad()
            model(x).sum().backward()
            if number in (2, 4):
                torch.empty(number << 28, dtype=torch.uint8, device="cuda")
            optimizer.step()
            peaks.append(torch.cuda.max_memory_allocated())
        torch.cuda.synchronize()
    told = {span.attributes["dl.step"]: span.attributes.get("dl.memory.peak_bytes")
            for span in recorded.named("train.step") if span.attributes}  # fmt: skip
    for number in (2, 4):
        table.add(f"peak memory of step {number}", told.get(number), peaks[number], told.get(number) == peaks[number])
    table.add("peak memory of a step below it", told.get(3), None, told.get(3) is None)

    class Full(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(torch.empty(1 << 45, dtype=torch.uint8, device="cuda"))

    with recording() as recorded:
        try:
            for _ in DataLoader(torch.zeros(3, 1), batch_size=1):
                Full(8, 8)(x)
        except torch.OutOfMemoryError:
            pass
    said = [span.status.description or "" for span in recorded.named("forward")]
    ok = len(said) == 1 and said[0].startswith("in forward on cuda:0") and "GiB free" in said[0]
    table.add("out of memory says", said[0][:80] if said else None, "in forward on cuda:0, … GiB free", ok)


def overhead(table: Table) -> None:
    """Of everything that otel-dl does, on steps that are all kept: pairs of rounds, with and without."""
    training = Training()
    data = torch.zeros(20 * BATCH, 1)

    def wall() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        training.run(data)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / 20

    wall()
    shares: list[float] = []
    without = [0.0]
    for turn in range(10):
        if turn % 2:
            alone = wall()
        with recording():
            ours = wall()
        if not turn % 2:
            alone = wall()
        without.append(alone)
        shares.append(ours / alone - 1)
    step = statistics.median(without[1:]) * 1e3
    table.at_most(f"overhead on a ResNet-18 step of {step:.1f} ms, all kept (median of 10 pairs)",
                  statistics.median(shares) * 100, 1, "%")  # fmt: skip


CHECKS = (
    against_the_profiler,
    waiting_for_data,
    never_waits,
    captures,
    memory,
    overhead,
)
