"""Sets of moments: sorted, disjoint (start, end) pairs, in nanoseconds."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
Moments = list[Interval]
"""Sorted by start; no two touch."""


def union(intervals: Iterable[Interval]) -> Moments:
    """Of any intervals, in any order."""
    moments: Moments = []
    for start, end in sorted(intervals):
        if moments and start <= moments[-1][1]:
            if end > moments[-1][1]:
                moments[-1] = moments[-1][0], end
        elif end > start:
            moments.append((start, end))
    return moments


def within(moments: Sequence[Interval], start: int, end: int) -> Moments:
    """Those of `moments` between `start` and `end`."""
    return [(max(a, start), min(b, end)) for a, b in moments if a < end and b > start]


def both(first: Sequence[Interval], second: Sequence[Interval]) -> Moments:
    return [piece for start, end in first for piece in within(second, start, end)]


def without(moments: Sequence[Interval], taken: Sequence[Interval]) -> Moments:
    """Those of `moments` that are not in `taken`."""
    left: Moments = []
    for start, end in moments:
        for a, b in within(taken, start, end):
            if a > start:
                left.append((start, a))
            start = b
        if end > start:
            left.append((start, end))
    return left


def total(moments: Iterable[Interval]) -> int:
    return sum(end - start for start, end in moments)


class Many:
    """Moments that may be millions: 16 bytes each. `add` them in about the order of their starts, then `settle`."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int) -> None:
        """What lies within the one that was added last is swallowed by it, as an operation by the one that calls it."""
        ends = self._ends
        if ends and self._starts[-1] <= start <= ends[-1]:
            if end > ends[-1]:
                ends[-1] = end
        else:
            self._starts.append(start)
            ends.append(end)

    def settle(self, others: Iterable[Many] = ()) -> None:
        """Takes in those of `others`, and puts all in order."""
        for other in others:
            self._starts.extend(other._starts)
            self._ends.extend(other._ends)
        moments = union(zip(self._starts, self._ends, strict=True))
        self._starts = array("q", (start for start, _ in moments))
        self._ends = array("q", (end for _, end in moments))

    def between(self, start: int, end: int) -> Moments:
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        return [(max(self._starts[i], start), min(self._ends[i], end)) for i in range(first, last)]

    def shift(self, offset: int) -> None:
        self._starts = array("q", (start + offset for start in self._starts))
        self._ends = array("q", (end + offset for end in self._ends))
