"""Which lines of the user's wait for a device, and for how long a step."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from otel_dl.semconv import SpanName
from otel_dl.viewing.reading import Span, ns_of, number_of, text_of

MOST: Final = 1_000
"""Different lines that are kept of a run; the waits of further ones are counted."""


class Line(NamedTuple):
    """Where it is waited, and by what."""

    file: str
    """Empty where the line is not the user's: torch waits by itself."""
    number: int
    operation: str


@dataclasses.dataclass
class Waited:
    """Of one line, in the steps that are looked at."""

    line: Line
    count: int = 0
    total_ns: int = 0
    queued_ns: int | None = None
    """How much of that was for work that had been queued before, in those waits that say it; None: none does."""
    split: int = 0
    """How many say it."""


class Waiting(NamedTuple):
    lines: Sequence[Waited]
    """The longest first."""
    short_count: int
    short_ns: int
    """Waits that were too short for a span of their own."""
    steps: int
    """Of one rank each; what is counted here is of these."""
    duration_ns: int
    """Of all of these."""
    left_out: int


class Collector:
    """Takes the spans of one run in any order."""

    def __init__(self) -> None:
        self._waits: defaultdict[tuple[str, int], dict[Line, Waited]] = defaultdict(dict)
        """By trace and rank: a step."""
        self._short: defaultdict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
        self._lines: dict[Line, Line] = {}
        self._left_out = 0

    def add(self, span: Span) -> None:
        step = span.trace_id, number_of(span, "dl.rank")
        if "dl.sync.summed" in span.attributes:
            short = self._short[step]
            short[0] += number_of(span, "dl.sync.summed")
            short[1] += int(ns_of(span, "dl.sync.summed_ms") or 0)
        if span.name != SpanName.SYNCHRONIZE:
            return
        line = Line(text_of(span, "code.file.path"), number_of(span, "code.line.number"), text_of(span, "dl.sync.op"))
        if line not in self._lines and len(self._lines) >= MOST:
            self._left_out += 1
            return
        line = self._lines.setdefault(line, line)
        waited = self._waits[step].setdefault(line, Waited(line))
        waited.count += 1
        waited.total_ns += span.duration_ns
        queued_ns = ns_of(span, "dl.sync.wait_ms")
        if queued_ns is not None:
            waited.split += 1
            waited.queued_ns = (waited.queued_ns or 0) + int(queued_ns)

    def result(self, steps: Collection[tuple[str, int]], duration_ns: int) -> Waiting:
        """Of these `steps`, (trace id, rank) each, which took `duration_ns` in all."""
        lines: dict[Line, Waited] = {}
        short_count = short_ns = 0
        for step in steps:
            for line, one in self._waits.get(step, {}).items():
                sum_of = lines.setdefault(line, Waited(line))
                sum_of.count += one.count
                sum_of.total_ns += one.total_ns
                sum_of.split += one.split
                if one.queued_ns is not None:
                    sum_of.queued_ns = (sum_of.queued_ns or 0) + one.queued_ns
            count, total = self._short.get(step, (0, 0))
            short_count += count
            short_ns += total
        longest = sorted(lines.values(), key=lambda waited: -waited.total_ns)
        return Waiting(longest, short_count, short_ns, len(steps), duration_ns, self._left_out)
