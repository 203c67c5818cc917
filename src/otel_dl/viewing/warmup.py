"""One-time work: what it cost, where, and whether tuning convolutions can have paid.

Several operations may have been one call (both backward directions of a convolution), and one may lie within another
(autotuning in a compilation): time counts once.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final, NamedTuple

from otel_dl.semconv import CONVOLUTIONS, ONE_TIME, PHASES, SpanName
from otel_dl.viewing.intervals import Interval, total, union
from otel_dl.viewing.reading import Span, number_of, text_of

BENCHMARK: Final = "cuDNN benchmark"
STILL: Final = 0.25
"""Share of the steps in the second half of a run that tune: from there on its shapes keep changing."""

_Of = tuple[str, int]
"""Trace id and rank: a step."""


class Work(NamedTuple):
    """One-time work of one kind: how many spans, and how long."""

    spans: int
    time_ns: int
    evaluation: int = 0
    """How many of the spans are in `train.eval`."""


class Benchmark(NamedTuple):
    """That tuning costs more than it brings, with what it follows from: in each step that found all its plans it would
    have to have saved `needed_ns`, which is more than the whole of such a step."""

    keys: int
    """Different ones that were tuned for."""
    time_ns: int
    steps: int
    """Those kept in which it tuned."""
    of: int
    """Steps that the rank had, at least."""
    needed_ns: float | None
    """None: there was no step in which it did not tune."""
    steady_ns: float | None
    """Median of the steps without any one-time work."""


class Warmup(NamedTuple):
    time_ns: int
    steps: int
    """Kept steps in which one-time work ran; a step of several ranks counts once."""
    kinds: Mapping[str, Work]
    parts: Mapping[str, int]
    """Span name of the phase → how long; "" is outside any."""
    predicted: bool
    """Whether some of it is known from keys alone."""
    benchmark: Benchmark | None


class Collector:
    """Takes the spans of one run in any order."""

    def __init__(self) -> None:
        self._within: defaultdict[str, set[Interval]] = defaultdict(set)
        """By the id of the span around."""
        self._kinds: defaultdict[str, set[tuple[str, int, int]]] = defaultdict(set)
        self._counts: Counter[str] = Counter()
        self._phases: dict[str, str] = {}
        self._steps: dict[_Of, tuple[int, int, bool]] = {}
        """Number, duration, whether it is warm-up."""
        self._worked: Counter[tuple[_Of, str]] = Counter()
        """By kind."""
        self._evaluations: set[_Of] = set()
        self._tuned: defaultdict[_Of, set[Interval]] = defaultdict(set)
        self._keys: defaultdict[int, set[str]] = defaultdict(set)
        self._predicted = False

    def add(self, span: Span) -> None:
        of = span.trace_id, number_of(span, "dl.rank")
        warm = span.attributes.get("is_warmup") is True
        if span.name == SpanName.STEP:
            self._steps[of] = number_of(span, "dl.step"), span.duration_ns, warm
        elif span.name == SpanName.EVAL:
            self._evaluations.add(of)
        elif span.name in PHASES:
            if warm:
                self._phases[span.span_id] = span.name
        elif span.name in ONE_TIME or (warm and span.name in CONVOLUTIONS):
            interval = span.start_ns, span.end_ns
            kind = BENCHMARK if span.name in CONVOLUTIONS else span.name
            self._within[span.parent_id].add(interval)
            self._kinds[kind].add((span.parent_id, *interval))
            self._counts[kind] += 1
            self._worked[of, kind] += 1
            if kind == BENCHMARK:
                self._tuned[of].add(interval)
                self._keys[of[1]].add(text_of(span, "dl.conv.key"))
                self._predicted |= text_of(span, "dl.warmup.source") == "predicted"

    def result(self) -> Warmup | None:
        """None where no one-time work was found."""
        if not self._worked:
            return None
        parts: Counter[str] = Counter()
        for parent, intervals in self._within.items():
            parts[self._phases.get(parent, "")] += total(union(intervals))
        return Warmup(
            time_ns=parts.total(),
            steps=len({self._steps[of][0] for of, _ in self._worked if of in self._steps}),
            kinds={
                kind: Work(self._counts[kind], self._in_all(kind), self._in_evaluation(kind))
                for kind in sorted(self._kinds)
            },
            parts=parts,
            predicted=self._predicted,
            benchmark=self._benchmark(),
        )

    def _in_evaluation(self, kind: str) -> int:
        return sum(count for (of, which), count in self._worked.items() if which == kind and of in self._evaluations)

    def _in_all(self, kind: str) -> int:
        by_parent: defaultdict[str, set[Interval]] = defaultdict(set)
        for parent, start, end in self._kinds[kind]:
            by_parent[parent].add((start, end))
        return sum(total(union(intervals)) for intervals in by_parent.values())

    def _benchmark(self) -> Benchmark | None:
        """Of the rank that tuned in the most steps. Counts are of what was kept: tuning may have cost more."""
        tuned: defaultdict[int, list[_Of]] = defaultdict(list)
        for of in self._tuned:
            if of in self._steps:
                tuned[of[1]].append(of)
        if not tuned:
            return None
        rank, of_rank = max(tuned.items(), key=lambda item: (len(item[1]), -item[0]))
        of_all = max(number + 1 for (_, of), (number, _, _) in self._steps.items() if of == rank)
        late = sum(self._steps[of][0] >= of_all / 2 for of in of_rank)
        if late < 2 or late < STILL * (of_all - of_all // 2):
            return None  # it has settled
        time_ns = sum(total(union(self._tuned[of])) for of in of_rank)
        rest = of_all - len(of_rank)
        steady = [duration for (_, of), (_, duration, warm) in self._steps.items() if of == rank and not warm]
        steady_ns = statistics.median(steady) if steady else None
        needed_ns = time_ns / rest if rest else None
        if needed_ns is not None and (steady_ns is None or needed_ns <= steady_ns):
            return None  # nothing shows it
        return Benchmark(len(self._keys[rank]), time_ns, len(of_rank), of_all, needed_ns, steady_ns)
