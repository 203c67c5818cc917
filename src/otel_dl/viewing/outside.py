"""How much of a run lies in its steps, and what the rest went to: of one rank, by its own clock.

`train.startup` says when it began, and `train.shutdown` what the recorder knows of all steps, kept or not. Where that
is missing (the process was killed, or runs still) the steps themselves say it, if each of them was kept: its status
page says which one was the last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from otel_dl.semconv import USER_SCOPE, SpanName
from otel_dl.viewing.intervals import Interval, total, union, without
from otel_dl.viewing.reading import Span, ns_of, number_of
from otel_dl.viewing.within import Collector as Within
from otel_dl.viewing.within import Part

MOST: Final = 20_000
"""Steps, evaluations and starts of workers of a rank that are kept at most."""


class Longest(NamedTuple):
    """Stretch that is none of the others."""

    ns: float
    after: int
    """The number of the step before."""


class Divided(NamedTuple):
    """What the time of a run went to."""

    steps: int
    steps_ns: float
    evaluations: int
    evaluations_ns: float
    workers_ns: float
    startup_ns: float
    """Without the first step, and with what was evaluated before it."""
    outside_ns: float
    own: Mapping[str, float]
    """Of that, spans of the user's by name, most time first."""
    longest: Longest | None


class RunTime(NamedTuple):
    rank: int
    whole_ns: int
    """From the start of the process until the end, or until its last span."""
    is_whole: bool
    """Whether the traces hold the end."""
    divided: Divided | None
    """None: not known."""
    missing: str
    """What it would take, in words; "" where it is known."""


class _Rank:
    def __init__(self) -> None:
        self.startup: Span | None = None
        self.shutdown: Span | None = None
        self.steps: dict[int, Interval] = {}
        self.has_all_read = True
        self.evaluations: list[Interval] = []
        self.starts: list[Interval] = []
        self.last_ns = 0


class Collector:
    """Takes the spans of one run in any order."""

    def __init__(self) -> None:
        self._ranks: defaultdict[int, _Rank] = defaultdict(_Rank)

    def add(self, span: Span) -> None:
        if "dl.worker.id" in span.resource:
            return
        rank = self._ranks[number_of(span, "dl.rank")]
        rank.last_ns = max(rank.last_ns, span.end_ns)
        if span.name == SpanName.STARTUP:
            rank.startup = span
        elif span.name == SpanName.SHUTDOWN:
            rank.shutdown = span
        elif span.name == SpanName.STEP:
            if len(rank.steps) < MOST:
                rank.steps[number_of(span, "dl.step")] = span.start_ns, span.end_ns
            else:
                rank.has_all_read = False
        elif span.name in (SpanName.EVAL, SpanName.START_WORKERS):
            found = rank.evaluations if span.name == SpanName.EVAL else rank.starts
            if len(found) < MOST:
                found.append((span.start_ns, span.end_ns))
            else:
                rank.has_all_read = False

    def add_own(self, span: Span) -> None:
        """One of the user's."""
        if span.scope == USER_SCOPE and "dl.worker.id" not in span.resource:
            rank = self._ranks[number_of(span, "dl.rank")]
            rank.last_ns = max(rank.last_ns, span.end_ns)

    def between_steps(self, rank: int, within: Within) -> Sequence[Part]:
        """Evaluation, starts of workers and spans of the user's that lie in no step: (name, start, end)."""
        of = self._ranks.get(rank)
        if of is None:
            return ()
        own = within.intervals(of.startup.span_id) if of.startup is not None else ()
        known: list[Part] = [(SpanName.EVAL, *each) for each in union(of.evaluations)]
        known += [(SpanName.START_WORKERS, *each) for each in without(union(of.starts), union(of.evaluations))]
        taken = union((start, end) for _, start, end in known)
        begun = sorted(start for start, _ in of.steps.values())
        for name, start, end in own:
            if bisect_left(begun, start) == bisect_left(begun, end):  # else it is around steps, as of an epoch
                known += [(name, *piece) for piece in without([(start, end)], taken)]
        return sorted(known, key=lambda part: part[1])

    def result(self, within: Within, begun: Iterable[tuple[int, int]] = ()) -> RunTime | None:
        """Of the lowest rank whose start is known; None where none is. `begun`: ranks, and a step that each has open,
        as status pages have it."""
        known = [number for number, rank in self._ranks.items() if rank.startup is not None and rank.steps]
        if not known:
            return None
        number = min(known)
        rank = self._ranks[number]
        startup, shutdown = rank.startup, rank.shutdown
        assert startup is not None, "it is known"
        end_ns = shutdown.end_ns if shutdown is not None else rank.last_ns
        whole_ns = max(0, end_ns - startup.start_ns)
        first = rank.steps.get(0)
        divided: Divided | None = None
        missing = ""
        if first is None:
            missing = "the first step is not in these traces"
        elif shutdown is not None:
            divided = _as_recorded(shutdown)
        elif rank.has_all_read and {(number, len(rank.steps)), (number, len(rank.steps) - 1)} & set(begun):
            divided = _by_steps(rank, startup.end_ns, end_ns)
        else:
            missing = (
                "the end of the run is not in these traces (the process was killed, or runs still), and not all of its"
                " steps are, or it is not known that they are"
            )
        if divided is not None and first is not None:
            startup_ns = max(0, startup.duration_ns - (first[1] - first[0]))
            rest = divided.steps_ns + divided.evaluations_ns + divided.workers_ns + startup_ns
            outside_ns = max(0.0, whole_ns - rest)
            own = _own(self.between_steps(number, within), startup.end_ns)
            # Of those around steps that are not in the traces, how much lies in these is not known.
            if sum(own.values()) <= outside_ns:
                divided = divided._replace(own=own)
            divided = divided._replace(startup_ns=startup_ns, outside_ns=outside_ns)
        return RunTime(number, whole_ns, shutdown is not None, divided, missing)


def _as_recorded(shutdown: Span) -> Divided:
    longest_ns = ns_of(shutdown, "dl.run.longest_outside_ms") or 0
    after = shutdown.attributes.get("dl.run.longest_outside_after")
    return Divided(
        number_of(shutdown, "dl.run.steps"),
        ns_of(shutdown, "dl.run.steps_ms") or 0,
        number_of(shutdown, "dl.run.evals"),
        ns_of(shutdown, "dl.run.evals_ms") or 0,
        ns_of(shutdown, "dl.run.start_workers_ms") or 0,
        0,
        0,
        {},
        Longest(longest_ns, after) if isinstance(after, int) else None,
    )


def _by_steps(rank: _Rank, since: int, until: int) -> Divided:
    """All steps are there. Of what came before `since`, the end of the first one, only that counts."""
    steps = union(rank.steps.values())
    after = [(since, until)]
    evaluated = [each for each in union(rank.evaluations) if each[0] >= since]
    in_evaluation = without(evaluated, steps)
    starting = without([each for each in union(rank.starts) if each[0] >= since], union([*steps, *evaluated]))
    idle = without(without(after, steps), union([*in_evaluation, *starting]))
    ends = sorted((end, number) for number, (_, end) in rank.steps.items())
    longest: Counter[int] = Counter()
    for start, end in idle:
        longest[ends[max(0, bisect_right(ends, start, key=lambda each: each[0]) - 1)][1]] += end - start
    most = max(longest.items(), key=lambda item: item[1], default=None)
    return Divided(
        len(rank.steps), total(steps), len(evaluated), total(in_evaluation), total(starting), 0, 0, {},
        Longest(most[1], most[0]) if most is not None else None,
    )  # fmt: skip


def _own(parts: Sequence[Part], since: int) -> Mapping[str, float]:
    """The user's spans that began after `since`."""
    times: Counter[str] = Counter()
    for name, start, end in parts:
        if name not in (SpanName.EVAL, SpanName.START_WORKERS) and start >= since:
            times[name] += end - start
    return {name: ns for name, ns in times.most_common() if ns}
