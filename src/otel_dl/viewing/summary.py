"""What a person wants to know about a run, computed from its spans: pure data, without any wording.

Steps are spans `train.step`; a phase counts for a step when it is a direct child of it, so that a forward within a
backward (activation checkpointing) is not counted twice. Durations are nanoseconds.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from otel_dl.semconv import SCOPE, KeepReason, SpanName
from otel_dl.viewing.loading import Collector, Loading
from otel_dl.viewing.reading import Span

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

    run: str
    rank: int
    number: int
    trace_id: str
    span_id: str
    duration_ns: int
    keep_reason: str
    failed: bool
    error_type: str


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


class Rank(NamedTuple):
    rank: int
    kept: int
    total: int
    times: Times


class Fetches(NamedTuple):
    """`dataloader.fetch`: reading a batch, by workers or by the training processes themselves."""

    times: Distribution
    workers: int
    """Workers that read them, each counted once though it is another process each epoch; 0: the training processes."""


class Evaluation(NamedTuple):
    stretches: int
    total_ns: int


@dataclasses.dataclass(frozen=True)
class Summary:
    runs: Sequence[str]
    kept: int
    """Steps of which something was kept; a step of several ranks counts once."""
    total: int
    """Highest number of a kept step, plus 1, summed over runs: the run had at least so many."""
    keep_reasons: Mapping[str, int]
    times: Times | None
    ranks: Sequence[Rank]
    slowest: Sequence[Step]
    failed: Sequence[Step]
    evaluation: Evaluation
    fetches: Sequence[Fetches]
    """Those by workers, then those by training processes; without those of which there were none."""
    failed_elsewhere: Mapping[tuple[str, str], int]
    """(span name, error.type) → how many failed spans of otel-dl's outside `train.step` itself."""
    loading: Loading
    user_spans: int
    dropped: int
    """Records that were dropped for lack of room, as the traces say."""


def summarize(spans: Iterable[Span]) -> Summary:
    """Consumes `spans` once, in any order; keeps a few hundred bytes a step."""
    steps: list[Step] = []
    phases: defaultdict[str, Counter[str]] = defaultdict(Counter)
    by_workers: list[int] = []
    by_training: list[int] = []
    workers: set[tuple[object, ...]] = set()
    runs: dict[str, None] = {}
    failed_elsewhere: Counter[tuple[str, str]] = Counter()
    loading = Collector()
    evaluations = evaluation_ns = user_spans = dropped = 0

    for span in spans:
        if span.scope != SCOPE:
            user_spans += 1
            continue
        runs.setdefault(_text(span, "dl.run.id"))
        dropped += _number(span, "otel_dl.dropped")
        loading.add(span)
        if span.name == SpanName.STEP:
            steps.append(_step(span))
        elif span.name in PARTS:
            phases[span.parent_id][PARTS[span.name]] += span.duration_ns
        elif span.name == SpanName.FETCH:
            if "dl.worker.id" in span.attributes:
                by_workers.append(span.duration_ns)
                loader, worker = span.attributes.get("dl.loader.id"), span.attributes["dl.worker.id"]
                workers.add((_text(span, "dl.run.id"), loader, _number(span, "dl.rank"), worker))
            else:
                by_training.append(span.duration_ns)
        elif span.name == SpanName.EVAL:
            evaluations += 1
            evaluation_ns += span.duration_ns
        if span.failed and span.name != SpanName.STEP:
            failed_elsewhere[span.name, _text(span, "error.type")] += 1

    reasons = _keep_reasons(steps)
    times = _times(steps, phases) if steps else None
    by_rank: defaultdict[int, list[Step]] = defaultdict(list)
    for step in steps:
        by_rank[step.rank].append(step)
    return Summary(
        runs=[run for run in runs if run],
        kept=len(reasons),
        total=_total(steps),
        keep_reasons=Counter(reasons.values()),
        times=times,
        ranks=[_rank(rank, by_rank[rank], phases) for rank in sorted(by_rank)],
        slowest=heapq.nlargest(SLOWEST, steps, key=lambda step: step.duration_ns),
        failed=sorted((s for s in steps if s.failed), key=lambda step: (step.run, step.number, step.rank)),
        evaluation=Evaluation(evaluations, evaluation_ns),
        fetches=[
            Fetches(_distribution(times), count)
            for times, count in ((by_workers, len(workers)), (by_training, 0))
            if times
        ],
        failed_elsewhere=failed_elsewhere,
        loading=loading.result(
            {step.span_id: step.duration_ns for step in _even(steps)},
            times.shares[PARTS[SpanName.NEXT]] if times is not None else 0.0,
        ),
        user_spans=user_spans,
        dropped=dropped,
    )


def _step(span: Span) -> Step:
    return Step(
        run=_text(span, "dl.run.id"),
        rank=_number(span, "dl.rank"),
        number=_number(span, "dl.step"),
        trace_id=span.trace_id,
        span_id=span.span_id,
        duration_ns=span.duration_ns,
        keep_reason=_text(span, "dl.keep.reason"),
        failed=span.failed,
        error_type=_text(span, "error.type"),
    )


def _keep_reasons(steps: Iterable[Step]) -> Mapping[tuple[str, int], str]:
    """(run, number) of a step → why it was kept; where its ranks differ, the one that is tried first."""
    reasons: dict[tuple[str, int], str] = {}
    for step in steps:
        key = (step.run, step.number)
        reasons[key] = min(reasons.get(key, step.keep_reason), step.keep_reason, key=_precedence)
    return reasons


def _precedence(reason: str) -> int:
    return _REASONS.index(reason) if reason in _REASONS else len(_REASONS)


def _rank(rank: int, steps: Sequence[Step], phases: Mapping[str, Mapping[str, int]]) -> Rank:
    return Rank(rank, len({(step.run, step.number) for step in steps}), _total(steps), _times(steps, phases))


def _total(steps: Iterable[Step]) -> int:
    totals: dict[str, int] = {}
    for step in steps:
        totals[step.run] = max(totals.get(step.run, 0), step.number + 1)
    return sum(totals.values())


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
        _distribution([step.duration_ns for step in chosen]),
        any(step.keep_reason == KeepReason.HEAD for step in chosen),
        shares,
    )


def _even(steps: Sequence[Step]) -> Sequence[Step]:
    """Those kept by the head sampler, an even sample; all where there are none such."""
    return [step for step in steps if step.keep_reason == KeepReason.HEAD] or steps


def _distribution(durations: Sequence[int]) -> Distribution:
    ordered = sorted(durations)
    return Distribution(
        size=len(ordered),
        median_ns=statistics.median(ordered),
        p99_ns=ordered[math.ceil(0.99 * len(ordered)) - 1],
    )


def _text(span: Span, name: str) -> str:
    """The attribute of the span, else of its resource, else ""."""
    value = span.attributes.get(name, span.resource.get(name, ""))
    return value if isinstance(value, str) else str(value)


def _number(span: Span, name: str) -> int:
    value = span.attributes.get(name, span.resource.get(name, 0))
    return value if isinstance(value, int) else 0
