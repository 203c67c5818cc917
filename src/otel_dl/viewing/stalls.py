"""What has not come: stalls, failed collectives with the ranks that did not arrive, ranks of which nothing was read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from otel_dl.semconv import COLLECTIVES, FIRST_SPANS, GROUPS, SpanName
from otel_dl.viewing.reading import Span, number_of, text_of

MOST: Final = 1_000
"""Different ones that are kept of a run; further ones are counted."""


class NotCome(NamedTuple):
    """A rank that was missing, and why: `late`, `elsewhere`, `silent`, `dead`, `mismatch`, `unknown`."""

    rank: int
    reason: str


@dataclasses.dataclass
class Stall:
    """One report of a stall, or one failure, of all ranks that have told of it."""

    name: str
    """Of the span."""
    error_type: str
    """Empty while it may still come."""
    words: str
    group: str
    seq: int | None
    missing: Sequence[NotCome]
    missing_count: int
    """How many those are; more than in `missing` where they were too many for a span."""
    known: bool
    """Whether the spans say who is missing at all."""
    ranks: set[int] = dataclasses.field(default_factory=set[int])
    """Those that tell of it."""
    count: int = 0
    start_ns: int = 0


class Ranks(NamedTuple):
    world: int
    """How many the run says it has, at most."""
    unread: Sequence[int]
    """Those of which not one span was read."""
    without_step: Sequence[int]
    """Those of which something was read, but no step, where there are steps of others."""


class Collector:
    """Takes the spans of one run in any order."""

    def __init__(self) -> None:
        self._stalls: dict[tuple[object, ...], Stall] = {}
        self._ranks: set[int] = set()
        self._with_step: set[int] = set()
        self._world = 0
        self.left_out = 0
        """Stalls and failures beyond `MOST`."""

    def add(self, span: Span) -> bool:
        """True where it is one of these, so that it need not be counted as a failure elsewhere."""
        rank = number_of(span, "dl.rank")
        self._ranks.add(rank)
        if span.name in FIRST_SPANS:
            self._world = max(self._world, number_of(span, "dl.world_size"))
        if span.name == SpanName.STEP:
            self._with_step.add(rank)
        if span.name != SpanName.STALL and not (span.failed and span.name in COLLECTIVES | GROUPS):
            return False
        said = span.attributes
        ranks, reasons = said.get("dl.missing_ranks"), said.get("dl.missing.reason")
        missing = [
            NotCome(missed, str(reason))
            for missed, reason in itertools.zip_longest(_list(ranks), _list(reasons), fillvalue="unknown")
            if isinstance(missed, int)
        ]
        stall = Stall(
            name=span.name,
            error_type=text_of(span, "error.type"),
            words=span.message,
            group=text_of(span, "dl.group.id"),
            seq=number_of(span, "dl.collective.seq") if "dl.collective.seq" in said else None,
            missing=missing,
            missing_count=max(len(missing), number_of(span, "dl.missing_ranks.count")),
            known=isinstance(ranks, list),
        )
        # Ranks that tell the same are one line. A stall is its words; a failure's are each rank's own exception.
        words = span.message if span.name == SpanName.STALL else ""
        key = (stall.name, stall.error_type, stall.group, stall.seq, tuple(missing), stall.known, words)
        if key not in self._stalls and len(self._stalls) >= MOST:
            self.left_out += 1
            return True
        found = self._stalls.setdefault(key, stall)
        found.start_ns = min(found.start_ns or span.start_ns, span.start_ns)
        found.ranks.add(rank)
        found.count += 1
        return True

    def stalls(self) -> Sequence[Stall]:
        """By start."""
        return sorted(self._stalls.values(), key=lambda stall: stall.start_ns)

    def ranks(self) -> Ranks:
        # A world size is a number that somebody has set: it must not make a list of a billion.
        world = min(self._world, 1_000_000)
        return Ranks(
            self._world,
            [rank for rank in range(world) if rank not in self._ranks],
            sorted(self._ranks - self._with_step) if self._with_step else [],
        )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]


def as_ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
