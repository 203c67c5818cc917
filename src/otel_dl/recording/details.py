"""What happens within phases and is none itself: a convolution, a wait for the device, a compilation.

A detail stands in the place of a record's kind, so that it shares the records' bounds and goes where they go. Whoever
notes one says as little as it can: what spans and attributes come of it is worked out for the steps that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from otel_dl.recording.records import Kind, Record


class Detail:
    """One of a family. Never changed once it is noted: one that says the same may be noted again. Compares by identity,
    as records are looked up by their kind."""

    __slots__ = ()

    family: ClassVar[str]
    """Of those that are summed: the phase has `dl.<family>.summed` and `dl.<family>.summed_ms`."""
    name: str
    """The span's."""
    warm: bool | None = None
    """Whether it is one-time work, in which case its phases and its step are warm-up as well; None: it does not say."""
    summed: bool = False
    """Whether it becomes no span, and is summed up on the phase it ran in."""
    count: int = 1
    spent: int | None = None
    """Of one that is summed and stands for several: how many, and how long they were in all (ns)."""

    def attributes(self) -> dict[str, Any]:
        """The span's, without `is_warmup`. Called by the builder's thread."""
        raise NotImplementedError


class Settled(NamedTuple):
    records: list[Record]
    """Those that become spans: by start, what is around before what is within."""
    warm: frozenset[int]
    """By `id`, the phases in which one-time work ran."""
    sums: Mapping[int, dict[str, Any]]
    """By `id` of the phase: the attributes that sum up what became no span; 0 is the step."""


def settle(records: Iterable[Record]) -> Settled:
    """What becomes of the records of a step or an evaluation."""
    spans: list[Record] = []
    warm: set[int] = set()
    sums: dict[int, dict[str, list[int]]] = {}
    around: list[Record] = []
    for record in nested(records):
        detail = record.kind
        if not isinstance(detail, Detail):
            spans.append(record)
            if record.kind != Kind.NEXT_ELSEWHERE and not isinstance(record.kind, str):
                around = [phase for phase in around if phase.end > record.start]
                around.append(record)
            continue
        within = [phase for phase in around if phase.end >= record.end and phase.start <= record.start]
        if detail.warm:
            warm.update(id(phase) for phase in within)
        if not detail.summed:
            spans.append(record)
            continue
        of_phase = sums.setdefault(id(within[-1]) if within else 0, {})
        total = of_phase.setdefault(detail.family, [0, 0])
        total[0] += detail.count
        total[1] += record.end - record.start if detail.spent is None else detail.spent
    return Settled(spans, frozenset(warm), {phase: _said(totals) for phase, totals in sums.items()})


def _said(totals: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for family, (count, duration) in totals.items():
        said[f"dl.{family}.summed"] = count
        said[f"dl.{family}.summed_ms"] = duration / 1e6
    return said


def nested(records: Iterable[Record]) -> list[Record]:
    """By start, what is around before what is within (on the hot path a record is written when it ends)."""
    records = list(records)
    order = sorted(range(len(records)), key=lambda i: (records[i].start, -records[i].end, -i))
    return [records[i] for i in order]
