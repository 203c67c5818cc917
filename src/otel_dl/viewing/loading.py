"""What traces say of the workers that read the batches: who is slow, on which samples, whether more would help."""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from otel_dl.forensics.ends import How
from otel_dl.semconv import SpanName
from otel_dl.viewing.reading import Span, ns_of

SLOW_FACTOR: Final = 1.5
"""A worker is slow whose median is so many times that of the others."""
SLOW_LEAST: Final = 7
"""Batches of a worker that tell, without the last ones of its epochs."""
SLOWEST: Final = 3
DIED: Final = 8
"""Ends of workers told at most."""
DIED_KEPT: Final = 10_000
WAIT_MATTERS: Final = 0.1
"""The share of a step's time from which on waiting for data is worth a change."""
BUSY: Final = 0.8
"""The share of their time from which on workers count as busy."""
STEPS_LEAST: Final = 20
"""Steps that tell what they wait for; of fewer, most are the start."""
SLOW_BATCH: Final = 4
"""A batch is slow that took so many times the median to read."""
CAUSE: Final = 0.5
"""The share of the waiting from which on something is named as what is waited for."""


class SlowWorker(NamedTuple):
    loader: int | None
    rank: int
    worker: int
    pid: int
    """The last of its processes."""
    processes: int
    """Workers that do not persist are a process anew each epoch."""
    median_ns: float
    others_ns: float


class Died(NamedTuple):
    """A worker that died."""

    words: str
    rank: int
    with_its_rank: bool
    """Whether it ended as a worker does whose rank is ended by SIGTERM."""


class SlowFetch(NamedTuple):
    duration_ns: int
    samples: str
    worker: int


class More(Enum):
    """Whether more workers would help."""

    NO_WAIT = "no"
    """The steps hardly wait for data."""
    YES = "yes"
    """Reading is the limit: the steps wait, and the workers are busy."""
    NOT_SHOWN = "not shown"
    """The steps wait, and the number of workers is not what is shown to be the reason."""


class Cause(Enum):
    """What most of the waiting was for."""

    START = "start"
    """The first batches of an epoch that started its workers anew, beside reading them."""
    HANDOVER = "handover"
    """The batch had been read when it was asked for."""
    SLOW_WORKER = "slow worker"
    SLOW_BATCHES = "slow batches"
    UNKNOWN = "unknown"


class Advice(NamedTuple):
    more: More
    cause: Cause
    share: float
    """Of the waiting, that `cause` explains."""
    wait: float
    """Share of the steps' time that they waited for data."""
    busy: float
    """Share of their time that the workers were reading."""
    workers: int
    """Those of one loader that run at a time."""
    starts: int
    """How often they were started."""
    fetch_ns: float
    """Reading a batch, in a worker, the mean."""
    computing_ns: float
    """What a step does beside waiting, the mean."""


class _Wait(NamedTuple):
    """One `dataloader.next`."""

    step: str
    loader: Any
    worker: tuple[Any, ...] | None
    place: int
    duration_ns: int
    fetch_ns: float | None
    """None: not known."""
    ready: bool
    """Whether the batch had been read before it was asked for."""


class Loading(NamedTuple):
    readers: int
    """Workers that have read batches, each counted once though it is another process each epoch."""
    busy: float | None
    """Of the workers whose whole life is known; None: of none."""
    free_shm: int | None
    """Bytes in /dev/shm when workers were started, the least of it."""
    ready: float | None
    """Batches that lay ready at a `next`, the median."""
    slow_workers: Sequence[SlowWorker]
    slow_fetches: Sequence[SlowFetch]
    advice: Advice | None
    """None where it takes numbers that are not known."""


class Collector:
    """Takes the spans of a run in any order."""

    def __init__(self) -> None:
        # A worker is (run, loader, rank, number), whatever its process: workers that do not persist get a new one each
        # epoch. A loader is its first two: it has the same number in every rank.
        self._by_worker: defaultdict[tuple[Any, ...], list[tuple[int | None, int]]] = defaultdict(list)
        """Of each batch that one read: its number in the epoch, how long that took."""
        self._processes: defaultdict[tuple[Any, ...], dict[int, int]] = defaultdict(dict)
        """Of each worker its pids, with the latest instant of each."""
        self._loader_of: dict[tuple[Any, ...], Any] = {}
        """(run, rank, host, pid) of a worker → its loader's number."""
        self._without: list[tuple[tuple[Any, ...], Span]] = []
        """Fetches that do not say of which loader, as no step took their batch: with the same."""
        self._fetches: list[SlowFetch] = []
        self._lives: defaultdict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """Of each loader's workers: busy, idle."""
        self._workers: dict[Any, int] = {}
        self._starts: Counter[tuple[Any, Any]] = Counter()
        """By loader and rank."""
        self._free: list[int] = []
        self._waits: list[_Wait] = []
        self._ready: list[int] = []
        self._died: list[Died] = []

    def add(self, span: Span) -> None:
        said = span.attributes
        rank = span.resource.get("dl.rank", 0)
        loader = span.resource.get("dl.run.id"), said.get("dl.loader.id")
        worker = (*loader, rank, said["dl.worker.id"]) if "dl.worker.id" in said else None
        process = loader[0], rank, span.resource.get("host.name"), said.get("dl.worker.pid")
        if worker is not None and loader[1] is not None and process[-1] is not None:
            self._loader_of[process] = loader[1]
        if span.name == SpanName.FETCH and worker is not None:
            if loader[1] is None:
                self._without.append((process, span))
                return
            self._fetch(worker, span)
        elif span.name == SpanName.WORKER:
            self._lives[loader][0] += said.get("dl.worker.busy_ms", 0.0)
            self._lives[loader][1] += said.get("dl.worker.idle_ms", 0.0)
            if span.message and len(self._died) < DIED_KEPT:
                self._died.append(Died(span.message, rank, _with_its_rank(span)))
        elif span.name == SpanName.START_WORKERS:
            self._workers[loader] = max(self._workers.get(loader, 0), said.get("dl.worker.count", 0))
            self._starts[loader, rank] += 1
            if "dl.shm.free_bytes" in said:
                self._free.append(said["dl.shm.free_bytes"])
        elif span.name == SpanName.NEXT:
            if "dl.queue.depth" in said:
                self._ready.append(said["dl.queue.depth"])
            self._waits.append(
                _Wait(
                    span.parent_id,
                    loader,
                    worker,
                    said.get("dl.batch.index", -1),
                    span.duration_ns,
                    ns_of(span, "dl.fetch.duration_ms"),
                    said.get("dl.fetch.ready_ms", 0) > 0,
                )
            )

    def _fetch(self, worker: tuple[Any, ...], span: Span) -> None:
        said = span.attributes
        self._by_worker[worker] += [] if span.failed else [(said.get("dl.batch.index"), span.duration_ns)]
        processes, pid = self._processes[worker], said.get("dl.worker.pid", 0)
        processes[pid] = max(processes.get(pid, 0), span.end_ns)
        samples = said.get("dl.sample.indices")
        if samples and not span.failed:
            self._fetches.append(SlowFetch(span.duration_ns, samples, said["dl.worker.id"]))
            self._fetches = heapq.nlargest(SLOWEST, self._fetches)

    def _give_loaders(self) -> None:
        """To the fetches that do not say theirs: that of other spans of their process, else the only one of the rank.
        A worker of two loaders is two."""
        of_rank: defaultdict[tuple[Any, ...], set[Any]] = defaultdict(set)
        for process, loader in self._loader_of.items():
            of_rank[process[:2]].add(loader)
        for process, span in self._without:
            loaders = of_rank[process[:2]]
            loader = self._loader_of.get(process, next(iter(loaders)) if len(loaders) == 1 else None)
            self._fetch((process[0], loader, process[1], span.attributes["dl.worker.id"]), span)
        self._without.clear()

    def died(self, terminated: Collection[int]) -> Sequence[Died]:
        """Without those that ended as launchers end their ranks, of the ranks `terminated`."""
        return [each for each in self._died if not (each.with_its_rank and each.rank in terminated)]

    def result(self, steps: Mapping[str, int], wait: float) -> Loading:
        """`steps`: how long each step took that counts, by its span; of their time the share `wait` is waiting."""
        self._give_loaders()
        slow = self._slow_workers()
        return Loading(
            readers=len(self._by_worker),
            busy=_busy(self._lives.values()),
            free_shm=min(self._free, default=None),
            ready=statistics.median(self._ready) if self._ready else None,
            slow_workers=heapq.nlargest(SLOWEST, slow.values(), key=lambda each: each.median_ns),
            slow_fetches=self._fetches,
            advice=self._advice(steps, wait, slow),
        )

    def _slow_workers(self) -> Mapping[tuple[Any, ...], SlowWorker]:
        """Each is compared with the other workers of its loader, in all ranks: another loader reads other data."""
        even = {who: _whole_batches(batches) for who, batches in self._by_worker.items()}
        medians = {who: statistics.median(times) for who, times in even.items() if len(times) >= SLOW_LEAST}
        loaders: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
        for who, median in medians.items():
            loaders[who[:2]].append(median)
        slow: dict[tuple[Any, ...], SlowWorker] = {}
        for who, median in medians.items():
            others = loaders[who[:2]].copy()
            others.remove(median)
            if others and median > SLOW_FACTOR * statistics.median(others):
                pids = self._processes[who]
                last = max(pids, key=pids.__getitem__)
                slow[who] = SlowWorker(who[1], who[2], who[3], last, len(pids), median, statistics.median(others))
        return slow

    def _advice(
        self, steps: Mapping[str, int], wait: float, slow: Mapping[tuple[Any, ...], SlowWorker]
    ) -> Advice | None:
        waits = [each for each in self._waits if each.step in steps]
        if len(steps) < STEPS_LEAST or not waits:
            return None
        # Of several loaders, the one that the steps wait for: the workers of another may well be idle meanwhile.
        by_loader: Counter[Any] = Counter()
        for each in waits:
            by_loader[each.loader] += each.duration_ns
        loader = max(by_loader, key=by_loader.__getitem__)
        times = [time for who, each in self._by_worker.items() if who[:2] == loader for _, time in each]
        busy = _busy([self._lives[loader]])
        workers = self._workers.get(loader)
        if busy is None or not workers or not times:
            return None
        starts = max((count for (whose, _), count in self._starts.items() if whose == loader), default=0)
        first = workers if starts > 1 else 0
        cause, share = _cause(waits, first, frozenset(slow), SLOW_BATCH * statistics.median(times))
        if wait < WAIT_MATTERS:
            more = More.NO_WAIT
        elif busy >= BUSY and cause not in (Cause.START, Cause.HANDOVER):
            more = More.YES
        else:
            more = More.NOT_SHOWN
        return Advice(
            more,
            cause,
            share,
            wait,
            busy,
            workers,
            starts,
            statistics.mean(times),
            max(0.0, statistics.mean(steps.values()) * (1 - wait)),
        )


def _whole_batches(batches: Sequence[tuple[int | None, int]]) -> Sequence[int]:
    """How long those took that are surely of full size. A worker's last batch of an epoch may be smaller: the loader's
    last one is, and of an iterable dataset that of each worker. What has no number may be such a one."""
    last = max((place for place, _ in batches if place is not None), default=None)
    return [duration_ns for place, duration_ns in batches if place is not None and place != last]


def _with_its_rank(span: Span) -> bool:
    """A launcher signals the whole process group; torch's handler of SIGTERM in a worker ends it with 0
    (torch/csrc/DataLoader.cpp, 2.15), and a training process that ends kills its workers."""
    said = span.attributes
    how = said.get("dl.worker.end")
    return (
        said.get("dl.worker.signal") == "SIGTERM"
        or how == How.KILLED_BY_PARENT.value
        or (how == How.EXIT.value and said.get("dl.worker.exit_code") == 0)
    )


def _busy(lives: Iterable[Sequence[float]]) -> float | None:
    busy = idle = 0.0
    for life in lives:
        busy += life[0]
        idle += life[1]
    return busy / (busy + idle) if busy + idle else None


def _cause(
    waits: Iterable[_Wait], first: int, slow: Collection[tuple[Any, ...]], slow_ns: float
) -> tuple[Cause, float]:
    """What most of the waiting was for, and its share. The `first` batches of an epoch wait for their workers to start;
    those that took over `slow_ns` to read are slow."""
    parts: Counter[Cause] = Counter()
    for wait in waits:
        left = wait.duration_ns
        if wait.worker is None or wait.fetch_ns is None:
            parts[Cause.UNKNOWN] += left
            continue
        if wait.ready:
            parts[Cause.HANDOVER] += left
            continue
        if 0 <= wait.place < first:
            start = max(0, left - round(wait.fetch_ns))
            parts[Cause.START] += start
            left -= start
        if wait.worker in slow:
            parts[Cause.SLOW_WORKER] += left
        elif wait.fetch_ns > slow_ns:
            parts[Cause.SLOW_BATCHES] += left
        else:
            parts[Cause.UNKNOWN] += left
    whole = parts.total()
    cause = max(parts, key=parts.__getitem__, default=Cause.UNKNOWN)
    share = parts[cause] / whole if whole else 0.0
    return (cause, share) if share >= CAUSE else (Cause.UNKNOWN, 0.0)
