"""The steps of a trace as `compare` needs them: their phases, and the one-time work and the waiting in them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from otel_dl.semconv import CONVOLUTIONS, ONE_TIME, PHASES, SCOPE, KeepReason, SpanName
from otel_dl.viewing.intervals import Interval, Moments, union, within, without
from otel_dl.viewing.reading import Span, ns_of, number_of, text_of

BETWEEN: Final = "between phases"
"""The part of a step that is none of its phases."""

_DEVICE: Final = "dl.device.duration_ms"
_EVEN: Final = (KeepReason.HEAD, KeepReason.WARMUP, "")
"""Steps that are kept for these reasons are no choice of slow ones."""


class Piece(NamedTuple):
    """A stretch of a step: of one phase, or between two. Pieces of a step are disjoint and fill it."""

    name: str
    start: int
    end: int
    after: str
    """The phase before it, "" at the beginning of the step."""


class OnDevice(NamedTuple):
    """A phase, or the step, with the time that passed on the device between its two ends there."""

    name: str
    start: int
    end: int
    ns: float


@dataclasses.dataclass
class Step:
    number: int
    trace_id: str
    start: int
    end: int
    reason: str
    warm: bool
    """Whether one-time work ran in it, as the trace says."""
    pieces: list[Piece]
    one_time: Moments
    """Compilation, autotuning, capture."""
    waiting: Moments
    """The host waits for the device."""
    on_device: list[OnDevice]
    """The step, and its phases, as far as the trace knows the device's time of them."""

    @property
    def even(self) -> bool:
        return self.reason in _EVEN

    def phases(self) -> Iterable[Piece]:
        return (piece for piece in self.pieces if piece.name != BETWEEN)


@dataclasses.dataclass
class Process:
    """One process of one run."""

    pid: int
    rank: int
    run: str
    host: str
    steps: list[Step] = dataclasses.field(default_factory=list[Step])
    """By their start."""

    @property
    def time(self) -> Interval:
        return self.steps[0].start, self.steps[-1].end


class _Light(NamedTuple):
    """A span without what is not needed: a trace may have a million."""

    name: str
    span_id: str
    parent_id: str
    start: int
    end: int
    device_ns: float | None


def processes(spans: Iterable[Span]) -> list[Process]:
    """Each process of each run that has steps in the trace, with its steps."""
    first: dict[tuple[str, int], Span] = {}
    others: dict[tuple[str, int], list[_Light]] = defaultdict(list)
    for span in spans:
        if span.scope != SCOPE:
            continue
        key = span.trace_id, number_of(span, "process.pid")
        if span.name == SpanName.STEP:
            first[key] = span
        elif span.name in PHASES or _is_one_time(span.name, span.attributes) or span.name == SpanName.SYNCHRONIZE:
            light = _Light(span.name, span.span_id, span.parent_id, span.start_ns, span.end_ns, ns_of(span, _DEVICE))
            others[key].append(light)
    found: dict[tuple[str, int], Process] = {}
    for (trace_id, pid), span in first.items():
        run = text_of(span, "dl.run.id")
        process = found.get((run, pid))
        if process is None:
            process = Process(pid, number_of(span, "dl.rank"), run, text_of(span, "host.name"))
            found[run, pid] = process
        process.steps.append(_step(span, others.pop((trace_id, pid), [])))
    for process in found.values():
        process.steps.sort(key=lambda step: step.start)
    return list(found.values())


def _is_one_time(name: str, attributes: Mapping[str, object]) -> bool:
    return name in ONE_TIME or (name in CONVOLUTIONS and attributes.get("is_warmup") is True)


def _step(span: Span, inner: list[_Light]) -> Step:
    start, end = span.start_ns, max(span.end_ns, span.start_ns)
    children = sorted(
        (each for each in inner if each.name in PHASES and each.parent_id == span.span_id),
        key=lambda each: (each.start, -each.end),
    )
    return Step(
        number=number_of(span, "dl.step"),
        trace_id=span.trace_id,
        start=start,
        end=end,
        reason=text_of(span, "dl.keep.reason"),
        warm=span.attributes.get("is_warmup") is True,
        pieces=_pieces(start, end, children),
        one_time=union(
            (each.start, each.end) for each in inner if each.name not in PHASES and each.name != SpanName.SYNCHRONIZE
        ),
        waiting=union((each.start, each.end) for each in inner if each.name == SpanName.SYNCHRONIZE),
        on_device=[
            OnDevice(name, begun, ended, ns)
            for name, begun, ended, ns in (
                (SpanName.STEP, start, end, ns_of(span, _DEVICE)),
                *((each.name, each.start, each.end, each.device_ns) for each in children),
            )
            if ns is not None
        ],
    )


def _pieces(start: int, end: int, children: list[_Light]) -> list[Piece]:
    """Where two overlap (a batch that another thread read), the moment is of the one that began first."""
    pieces: list[Piece] = []
    taken: Moments = []
    for child in children:
        for a, b in without(within([(child.start, child.end)], start, end), taken):
            pieces.append(Piece(child.name, a, b, ""))
        taken = union([*taken, (child.start, child.end)])
    pieces += [Piece(BETWEEN, a, b, "") for a, b in without([(start, end)], taken)]
    pieces.sort(key=lambda piece: piece.start)
    former = ""
    for i, piece in enumerate(pieces):
        pieces[i] = piece._replace(after=former)
        former = piece.name if piece.name != BETWEEN else former
    return pieces
