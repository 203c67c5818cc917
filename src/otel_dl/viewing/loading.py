"""What traces say of the workers that read the batches: who is slow, on which samples, whether more would help."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from otel_dl.semconv import SpanName
from otel_dl.viewing.reading import Span

SLOW_FACTOR: Final = 1.5
"""A worker is slow whose median is so many times that of the others."""
SLOW_LEAST: Final = 5
"""Batches of a worker that tell."""
SLOWEST: Final = 3
DIED: Final = 8
"""Ends of workers told at most."""
WAIT_MATTERS: Final = 0.1
"""The share of a step's time from which on waiting for data is worth a change."""
BUSY: Final = 0.8
"""The share of their time from which on workers count as busy."""


class SlowWorker(NamedTuple):
    worker: int
    pid: int
    median_ns: float
    others_ns: float


class SlowFetch(NamedTuple):
    duration_ns: int
    samples: str
    worker: int


class More(Enum):
    """Whether more workers would help."""

    NO_WAIT = "no"
    """The steps hardly wait for data."""
    YES = "yes"
    IDLE = "no, idle"
    """The steps wait although the workers have time: for something else than reading."""


class Advice(NamedTuple):
    more: More
    wait: float
    """Share of the steps' time that they waited for data."""
    busy: float
    """Share of their time that the workers were reading."""
    workers: int
    """Those of one loader that run at a time."""
    wanted: int
    """How many could keep up with the steps, as long as there are processors for them."""


class Loading(NamedTuple):
    busy: float | None
    """Of the workers whose whole life is known; None: of none."""
    free_shm: int | None
    """Bytes in /dev/shm when workers were started, the least of it."""
    ready: float | None
    """Batches that lay ready at a `next`, the median."""
    slow_workers: Sequence[SlowWorker]
    slow_fetches: Sequence[SlowFetch]
    died: Sequence[str]
    """Words for each worker that died, `DIED` at most."""
    advice: Advice | None
    """None where it takes numbers that are not known."""


class Collector:
    """Takes the spans of a run in any order."""

    def __init__(self) -> None:
        self._by_worker: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        self._fetches: list[SlowFetch] = []
        self._busy = self._idle = 0.0
        self._workers = 0
        self._free: list[int] = []
        self._ready: list[int] = []
        self._died: list[str] = []

    def add(self, span: Span) -> None:
        said = span.attributes
        if span.name == SpanName.FETCH and "dl.worker.id" in said:
            who = span.resource.get("host.name"), said.get("dl.worker.pid", 0), said["dl.worker.id"]
            self._by_worker[who].append(span.duration_ns)
            samples = said.get("dl.sample.indices")
            if samples and not span.failed:
                self._fetches.append(SlowFetch(span.duration_ns, samples, said["dl.worker.id"]))
                self._fetches = heapq.nlargest(SLOWEST, self._fetches)
        elif span.name == SpanName.WORKER:
            self._busy += said.get("dl.worker.busy_ms", 0.0)
            self._idle += said.get("dl.worker.idle_ms", 0.0)
            if span.message and len(self._died) < DIED:
                self._died.append(span.message)
        elif span.name == SpanName.START_WORKERS:
            self._workers = max(self._workers, said.get("dl.worker.count", 0))
            if "dl.shm.free_bytes" in said:
                self._free.append(said["dl.shm.free_bytes"])
        elif span.name == SpanName.NEXT and "dl.queue.depth" in said:
            self._ready.append(said["dl.queue.depth"])

    def result(self, step_ns: float | None, wait: float | None) -> Loading:
        """`step_ns`: the median time of a step, of which the share `wait` is waiting for data."""
        lived = self._busy + self._idle
        busy = self._busy / lived if lived else None
        return Loading(
            busy=busy,
            free_shm=min(self._free, default=None),
            ready=statistics.median(self._ready) if self._ready else None,
            slow_workers=self._slow_workers(),
            slow_fetches=self._fetches,
            died=self._died,
            advice=self._advice(step_ns, wait, busy),
        )

    def _slow_workers(self) -> list[SlowWorker]:
        medians = {who: statistics.median(times) for who, times in self._by_worker.items() if len(times) >= SLOW_LEAST}
        slow: list[SlowWorker] = []
        for who, median in medians.items():
            others = [other for key, other in medians.items() if key != who]
            if others and median > SLOW_FACTOR * statistics.median(others):
                slow.append(SlowWorker(who[2], who[1], median, statistics.median(others)))
        return heapq.nlargest(SLOWEST, slow, key=lambda each: each.median_ns)

    def _advice(self, step_ns: float | None, wait: float | None, busy: float | None) -> Advice | None:
        times = [duration for each in self._by_worker.values() for duration in each]
        if step_ns is None or wait is None or busy is None or not self._workers or not times:
            return None
        computing = step_ns * (1 - wait)
        wanted = math.ceil(statistics.mean(times) / computing) if computing else self._workers
        more = More.NO_WAIT if wait < WAIT_MATTERS else More.YES if busy >= BUSY else More.IDLE
        return Advice(more, wait, busy, self._workers, max(wanted, self._workers + 1) if more is More.YES else wanted)
