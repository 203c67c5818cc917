"""What lies in a step: its phases, and the user's own spans, which count as phases by their names there.

A phase within one of the user's spans is the step's all the same. Of a span of the user's counts what lies outside the
phases, and of those within each other the outermost.
"""

from __future__ import annotations

import contextlib
import statistics
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from otel_dl.semconv import PHASES
from otel_dl.viewing.intervals import union, without
from otel_dl.viewing.reading import Span

MOST: Final = 500_000
"""Spans of the user's that are kept of a run; further ones are only counted."""
NAMES: Final = 100
"""Names of the user's that are told apart; spans of further ones are only counted."""

_PHASES: Final = tuple(sorted(PHASES))

Part = tuple[str, int, int]
"""Name, start, end."""


class OwnSpans(NamedTuple):
    """Those of one name."""

    name: str
    spans: int
    median_ns: float
    total_ns: int


class Collector:
    """Takes the spans of one run in any order."""

    def __init__(self) -> None:
        self.count = 0
        """Of the user's own spans."""
        self._own: dict[str, array[int]] = {}
        """Name → of each: how long it took."""
        self._rows: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        """Id of a span → of each span directly in it: which phase, or which name after those; start, end."""
        self._parents: dict[str, str] = {}
        """Id of a span of the user's → of the one around it."""

    def add_phase(self, span: Span) -> None:
        with contextlib.suppress(OverflowError):  # numbers that no recorder writes
            self._rows[span.parent_id] += array("q", (_PHASES.index(span.name), span.start_ns, span.end_ns))

    def add_own(self, span: Span) -> None:
        self.count += 1
        known = span.name in self._own or len(self._own) < NAMES
        if not known or len(self._parents) >= MOST:
            return
        with contextlib.suppress(OverflowError):
            self._own.setdefault(span.name, array("q")).append(span.duration_ns)
            number = len(_PHASES) + list(self._own).index(span.name)
            self._parents[span.span_id] = span.parent_id
            if span.parent_id:
                self._rows[span.parent_id] += array("q", (number, span.start_ns, span.end_ns))

    def take(self, nameless: Collector) -> None:
        """The spans of the user's own that name no run, as they are this one's."""
        self.count += nameless.count
        for name, durations in nameless._own.items():
            if name in self._own or len(self._own) < NAMES:
                self._own.setdefault(name, array("q")).extend(durations)
        names = list(self._own)
        numbers = [names.index(name) if name in self._own else None for name in nameless._own]
        self._parents |= nameless._parents
        for parent, rows in nameless._rows.items():
            for i in range(0, len(rows), 3):
                number = numbers[rows[i] - len(_PHASES)]
                if number is not None:
                    self._rows[parent].extend((len(_PHASES) + number, rows[i + 1], rows[i + 2]))

    def settle(self) -> None:
        """Once all have been taken: what lies in a span of the user's is given to the one around."""
        for parent in [parent for parent in self._rows if parent in self._parents]:
            rows = self._rows.pop(parent)
            around = self.around(parent)
            for i in range(0, len(rows), 3):
                if rows[i] < len(_PHASES):
                    self._rows[around].extend(rows[i : i + 3])

    def around(self, span_id: str) -> str:
        """The span, or where it is one of the user's the first around it that is not."""
        seen: set[str] = set()
        while span_id in self._parents and span_id not in seen:
            seen.add(span_id)
            span_id = self._parents[span_id]
        return span_id

    def intervals(self, span_id: str) -> Sequence[Part]:
        """Of the parts of a step, phases first; what of the user's spans lies outside them follows, in pieces."""
        rows, names = self._rows.get(span_id, array("q")), list(self._own)
        every = [rows[i : i + 3] for i in range(0, len(rows), 3)]
        phases = [(_PHASES[which], start, end) for which, start, end in every if which < len(_PHASES)]
        taken = [(start, end) for _, start, end in phases]
        found = list(phases)
        for which, start, end in sorted(every, key=lambda row: (row[1], -row[2])):
            if which >= len(_PHASES):
                pieces = without([(start, end)], union(taken))
                found += [(names[which - len(_PHASES)], *piece) for piece in pieces]
                taken += pieces
        return found

    def own(self) -> Sequence[OwnSpans]:
        """By name, most time first."""
        found = [
            OwnSpans(name, len(times), statistics.median(times), sum(times))
            for name, times in self._own.items()
            if times
        ]
        return sorted(found, key=lambda each: -each.total_ns)
