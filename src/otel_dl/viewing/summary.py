"""What a person wants to know about a run, computed from its spans: pure data, without any wording.

Steps are spans `train.step`; a phase counts for a step when it is a direct child of it, or of a span of the
user's in it: a forward within a backward (activation checkpointing) is not counted twice. Durations are nanoseconds.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from otel_dl.forensics.reader import Page
from otel_dl.semconv import PHASES, SCOPE, KeepReason, SpanName
from otel_dl.viewing import (
    arrivals,
    compilations,
    device,
    failures,
    incidents,
    loading,
    outside,
    seen,
    waiting,
    warmup,
    within,
)
from otel_dl.viewing.arrivals import OUTSIDE, Arrivals
from otel_dl.viewing.compilations import Compilations
from otel_dl.viewing.device import DeviceMemory, DeviceTimes
from otel_dl.viewing.incidents import Incidents
from otel_dl.viewing.loading import Loading
from otel_dl.viewing.outside import RunTime
from otel_dl.viewing.reading import Span, number_of, text_of
from otel_dl.viewing.seen import Process, Ranks
from otel_dl.viewing.waiting import Waiting
from otel_dl.viewing.warmup import Warmup
from otel_dl.viewing.within import OwnSpans

PARTS: Mapping[str, str] = {
    SpanName.NEXT: "data wait",
    SpanName.FORWARD: "forward",
    SpanName.BACKWARD: "backward",
    SpanName.OPTIMIZER_STEP: "optimizer",
    SpanName.ZERO_GRAD: "zero_grad",
}
"""The phases that a step's time is divided into, with what they are called; the rest is `OTHER`."""

OTHER = "other"
SLOWEST = 5
"""Slowest steps listed."""

_REASONS = (
    KeepReason.ERROR,
    KeepReason.REQUESTED,
    KeepReason.SLOW,
    KeepReason.PEER,
    KeepReason.WARMUP,
    KeepReason.HEAD,
)


class Step(NamedTuple):
    """One rank's `train.step`."""

    rank: int
    number: int
    trace_id: str
    span_id: str
    duration_ns: int
    keep_reason: str
    failed: bool
    error_type: str
    longest: str = ""
    """The part that took most of its time: a phase's span, one of the user's own, or `OUTSIDE`."""
    share: float = 0.0
    """Of its time, that this took."""
    failed_in: str = ""
    """What in it failed with the same error, in words; "" where nothing did."""


class Distribution(NamedTuple):
    """Of `size` durations. `p99_ns` is the nearest-rank percentile: a value that occurred."""

    size: int
    median_ns: float
    p99_ns: int


class Times(NamedTuple):
    """Durations and shares of a set of steps."""

    steps: Distribution
    by_head: bool
    """True: of the steps kept by the head sampler, an even sample. False: of all kept steps: there were none such."""
    shares: Mapping[str, float]
    """Part of a step → its share of these steps' time, 0 to 1."""


class Own(NamedTuple):
    """`Arrivals.own` of those steps of a rank whose times are told, as far as they could be compared, and the whole
    time of the same steps."""

    own: Distribution
    whole: Distribution


class Rank(NamedTuple):
    rank: int
    kept: int
    total: int
    times: Times
    own: Own | None
    """None where none of the steps of `times` could be compared."""


class Fetches(NamedTuple):
    """`dataloader.fetch`: reading a batch, by workers or by the training processes themselves."""

    times: Distribution
    workers: int
    """Workers that read them, each counted once though it is another process each epoch; 0: the training processes."""


class Evaluation(NamedTuple):
    stretches: int
    total_ns: int


class Lost(NamedTuple):
    """A training process that died before it had exported what it had kept."""

    rank: int
    open_step: int
    """By its status page."""
    exported: int | None
    """The number of its last exported step."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of one run."""

    run: str
    start_ns: int
    """Of the first span that was kept, epoch ns."""
    kept: int
    """Steps of which something was kept; a step of several ranks counts once."""
    total: int
    """Highest number of a kept step, or of one that a status page names, plus 1: the run had at least so many."""
    keep_reasons: Mapping[str, int]
    run_time: RunTime | None
    """None where its beginning is not known."""
    times: Times | None
    ranks: Sequence[Rank]
    missing: Ranks
    arrivals: Arrivals
    incidents: Incidents
    """Of waits for other ranks, and of ends by SIGTERM."""
    processes: Sequence[Process]
    """What was last seen of each training process, by rank."""
    slowest: Sequence[Step]
    failed: Sequence[Step]
    """Those that `incidents` do not tell of."""
    evaluation: Evaluation
    fetches: Sequence[Fetches]
    """Those by workers, then those by training processes; without those of which there were none."""
    failed_elsewhere: Mapping[tuple[str, str], int]
    """(span name, error.type) → how many failed spans of otel-dl's beside what `failed`, `died`, `incidents` tell."""
    died: Sequence[str]
    """Words for each worker that died, `loading.DIED` at most, without those that SIGTERM ended with their rank."""
    loading: Loading
    compilations: Compilations
    warmup: Warmup | None
    """One-time work; None where there was none."""
    waiting: Waiting
    """For a device."""
    device: DeviceTimes | None
    """None where the device's own time is not known."""
    memory: DeviceMemory | None
    user_spans: int
    own_spans: Sequence[OwnSpans]
    """Those of the user's by name, most time first."""
    lost: Sequence[Lost]
    """By rank."""
    dropped: int
    """Records that were dropped for lack of room, as the traces say."""


def summarize(spans: Iterable[Span], pages: Sequence[Page] = ()) -> list[Summary]:
    """Of each run, by start. Consumes `spans` once, in any order; keeps under 2 KB a step and rank.

    Spans of the user's own whose resource names no run are those of the one run; of several, they come first, as a
    summary without a run. `pages`: the status pages that lie beside the spans.
    """
    runs: dict[str, _Run] = {}
    for span in spans:
        name = text_of(span, "dl.run.id")
        run = runs.get(name)
        if run is None:
            run = runs[name] = _Run(name)
        run.add(span)
    nameless = runs.get("")
    if nameless is not None and len(runs) == 2 and nameless.start_ns is None:
        del runs[""]
        (run,) = runs.values()
        run.within.take(nameless.within)
    return [run.result(pages) for run in sorted(runs.values(), key=lambda run: run.start_ns or 0)] or [
        _Run("").result(pages)
    ]


class _Run:
    """What is kept of the spans of one run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start_ns: int | None = None
        """Of its first span; None: it has none of otel-dl's own."""
        self.within = within.Collector()
        self._steps: list[Step] = []
        self._phases: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._by_workers: list[int] = []
        self._by_training: list[int] = []
        self._failures = failures.Collector()
        self._loading = loading.Collector()
        self._compilations = compilations.Collector()
        self._arrivals = arrivals.Collector()
        self._device = device.Collector()
        self._seen = seen.Collector()
        self._incidents = incidents.Collector()
        self._warmup = warmup.Collector()
        self._waiting = waiting.Collector()
        self._outside = outside.Collector()
        self._evaluations = self._evaluation_ns = self._dropped = 0

    def add(self, span: Span) -> None:
        if span.scope != SCOPE:
            self.within.add_own(span)
            self._outside.add_own(span)
            return
        self.start_ns = span.start_ns if self.start_ns is None else min(self.start_ns, span.start_ns)
        self._dropped += number_of(span, "otel_dl.dropped")
        self._loading.add(span)
        self._compilations.add(span)
        self._arrivals.add(span)
        self._waiting.add(span)
        self._device.add(span, PARTS.get(span.name, ""))
        self._seen.add(span)
        self._warmup.add(span)
        self._outside.add(span)
        is_told = self._incidents.add(span)
        if span.name in PHASES:
            self.within.add_phase(span)
        if span.name == SpanName.STEP:
            self._steps.append(_step(span))
        elif span.name in PARTS:
            self._phases[span.parent_id][PARTS[span.name]] += span.duration_ns
        elif span.name == SpanName.FETCH:
            if "dl.worker.id" in span.attributes:
                self._by_workers.append(span.duration_ns)
            else:
                self._by_training.append(span.duration_ns)
        elif span.name == SpanName.EVAL:
            self._evaluations += 1
            self._evaluation_ns += span.duration_ns
        if span.failed and span.name != SpanName.STEP and not is_told:
            self._failures.add(span)

    def _phases_of_steps(self) -> Mapping[str, Counter[str]]:
        """Those within a span of the user's are of what is around that."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for parent, times in self._phases.items():
            found[self.within.around(parent)].update(times)
        return found

    def _with_longest(self, step: Step) -> Step:
        parts: Counter[str] = Counter()
        for name, start, end in self.within.intervals(step.span_id):
            parts[name] += end - start
        parts[OUTSIDE] = max(0, step.duration_ns - parts.total())
        longest, nanoseconds = max(parts.items(), key=lambda item: item[1])
        return step._replace(longest=longest, share=nanoseconds / step.duration_ns if step.duration_ns > 0 else 0.0)

    def result(self, pages: Sequence[Page]) -> Summary:
        self.within.settle()
        steps, phases = self._steps, self._phases_of_steps()
        reasons = _keep_reasons(steps)
        times = _times(steps, phases) if steps else None
        even = {step.span_id: step.duration_ns for step in _even(steps)}
        on_device = self._device.times(even, PARTS.values(), PARTS[SpanName.NEXT], OTHER)
        wait = times.shares[PARTS[SpanName.NEXT]] if times is not None else 0.0
        compared = self._arrivals.result(self.within, lambda rank: self._outside.between_steps(rank, self.within))
        processes = self._seen.processes()
        pages = [page for page in pages if page.run == self.name]
        told = self._incidents.result(processes, pages)
        begun = [(page.rank, page.step) for page in pages if page.worker is None and page.step is not None]
        died = [each.words for each in self._loading.died(told.terminated)]
        failed_in, elsewhere = self._failures.result(
            {(step.trace_id, step.rank): (step.span_id, step.error_type) for step in steps if step.failed},
            {each.words for each in self._loading.died(())},
        )
        for waiter in (waiter for incident in told.found for waiter in incident.waiters if waiter.startup_error):
            elsewhere[SpanName.STARTUP, waiter.startup_error] -= 1  # told there
        # While the device works off what was queued before, nothing waits for data that loading could shorten.
        loaded = self._loading.result(even, wait if on_device is None else min(wait, on_device.wait.device))
        by_rank: defaultdict[int, list[Step]] = defaultdict(list)
        for step in steps:
            by_rank[step.rank].append(step)
        return Summary(
            run=self.name,
            start_ns=self.start_ns or 0,
            kept=len(reasons),
            total=max(_total(steps), *(step + 1 for _, step in begun), 0),
            keep_reasons=Counter(reasons.values()),
            run_time=self._outside.result(self.within, begun),
            times=times,
            ranks=[
                _rank(rank, by_rank[rank], phases, compared.own.get(rank, {}))._replace(
                    total=max(_total(by_rank[rank]), *(step + 1 for whose, step in begun if whose == rank), 0)
                )
                for rank in sorted(by_rank)
            ],
            missing=self._seen.ranks(),
            arrivals=compared,
            incidents=told,
            processes=processes,
            slowest=[
                self._with_longest(step) for step in heapq.nlargest(SLOWEST, steps, key=lambda step: step.duration_ns)
            ],
            failed=sorted(
                (
                    step._replace(failed_in=failed_in.get(step.span_id, ""))
                    for step in steps
                    if step.failed and step.span_id not in told.steps
                ),
                key=lambda step: (step.number, step.rank),
            ),
            evaluation=Evaluation(self._evaluations, self._evaluation_ns),
            fetches=[
                Fetches(distribution(each), count)
                for each, count in ((self._by_workers, loaded.readers), (self._by_training, 0))
                if each
            ],
            failed_elsewhere=+elsewhere,
            died=died[: loading.DIED],
            compilations=self._compilations.result(),
            warmup=self._warmup.result(),
            loading=loaded,
            device=on_device,
            memory=self._device.memory(),
            waiting=self._waiting.result({(step.trace_id, step.rank) for step in _even(steps)}, sum(even.values())),
            user_spans=self.within.count,
            own_spans=self.within.own(),
            lost=sorted(_lost(pages, processes), key=lambda lost: lost.rank),
            dropped=self._dropped,
        )


def _step(span: Span) -> Step:
    return Step(
        rank=number_of(span, "dl.rank"),
        number=number_of(span, "dl.step"),
        trace_id=span.trace_id,
        span_id=span.span_id,
        duration_ns=span.duration_ns,
        keep_reason=text_of(span, "dl.keep.reason"),
        failed=span.failed,
        error_type=text_of(span, "error.type"),
    )


def _lost(pages: Iterable[Page], processes: Iterable[Process]) -> Iterator[Lost]:
    """A process takes its page away once its last span is written: what has left one was killed."""
    last: dict[tuple[int, int], int] = {}
    for process in processes:
        if process.last_step is not None:
            last[process.rank, process.pid] = process.last_step.number
    for page in pages:
        if page.worker is None and page.step is not None and page.alive() is False:
            exported = last.get((page.rank, page.pid))
            if exported is None or exported < page.step:
                yield Lost(page.rank, page.step, exported)


def _keep_reasons(steps: Iterable[Step]) -> Mapping[int, str]:
    """Number of a step → why it was kept; where its ranks differ, the one that is tried first."""
    reasons: dict[int, str] = {}
    for step in steps:
        former = reasons.get(step.number, step.keep_reason)
        reasons[step.number] = min(former, step.keep_reason, key=_precedence)
    return reasons


def _precedence(reason: str) -> int:
    return _REASONS.index(reason) if reason in _REASONS else len(_REASONS)


def _rank(rank: int, steps: Sequence[Step], phases: Mapping[str, Mapping[str, int]], own: Mapping[str, int]) -> Rank:
    compared = [step for step in _even(steps) if step.span_id in own]
    return Rank(
        rank,
        len({step.number for step in steps}),
        _total(steps),
        _times(steps, phases),
        Own(
            distribution([own[step.span_id] for step in compared]),
            distribution([step.duration_ns for step in compared]),
        )
        if compared
        else None,
    )


def _total(steps: Iterable[Step]) -> int:
    return max((step.number + 1 for step in steps), default=0)


def _times(steps: Sequence[Step], phases: Mapping[str, Mapping[str, int]]) -> Times:
    chosen = _even(steps)
    whole = sum(step.duration_ns for step in chosen)
    parts: Counter[str] = Counter(dict.fromkeys(PARTS.values(), 0))
    for step in chosen:
        parts.update(phases.get(step.span_id, {}))
    # Phases of several threads may overlap: then there is no other time, and the shares add up to more than 1.
    parts[OTHER] = max(0, whole - parts.total())
    shares = {part: nanoseconds / whole if whole else 0.0 for part, nanoseconds in parts.items()}
    return Times(
        distribution([step.duration_ns for step in chosen]),
        any(step.keep_reason == KeepReason.HEAD for step in chosen),
        shares,
    )


def _even(steps: Sequence[Step]) -> Sequence[Step]:
    """Those kept by the head sampler, an even sample; all where there are none such."""
    return [step for step in steps if step.keep_reason == KeepReason.HEAD] or steps


def distribution(durations: Sequence[int]) -> Distribution:
    ordered = sorted(durations)
    return Distribution(
        size=len(ordered),
        median_ns=statistics.median(ordered),
        p99_ns=ordered[math.ceil(0.99 * len(ordered)) - 1],
    )
