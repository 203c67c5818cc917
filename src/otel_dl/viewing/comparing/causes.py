"""Why a phase takes another time in the trace than in the profile: pure arithmetic over the two.

The trace's time of a phase is its mean over all kept steps; the profile's the mean over the steps that it shows, of its
range on the host, or, where there is work of a device in it, of the time that the device ran what the phase launched.
Between the two lie:

    mean over all steps  -  one-time work in them               }
                         -  what the profiler adds to a step    }  = mean over the profiled steps
    profiled span        -  range, or device                       = moment by moment, `_on_host` and `_on_device`

Each moment of a profiled span in which the profile has nothing for the phase has one cause, and so has each moment that
the profile has beyond the span (with a minus). What has none is `REST`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from otel_dl.semconv import SpanName
from otel_dl.viewing.comparing.device import DeviceRow, device_rows
from otel_dl.viewing.comparing.pairing import Pairing
from otel_dl.viewing.comparing.steps import BETWEEN, Piece, Step
from otel_dl.viewing.intervals import Interval, Moments, both, total, union, within, without

WARM_UP: Final = "warm-up"
OVERHEAD: Final = "profiler overhead"
OTHER_STEPS: Final = "unprofiled steps differ"
"""The steps outside the profile take another time than those inside, and no more so than they differ anyway."""
START_STOP: Final = "profiler start and stop"
EDGES: Final = "around the profiler's range"
LATE: Final = "the profiler's range began late"
"""The span had begun, and something held the thread up before it could begin the range."""
NO_OPERATION: Final = "no torch operation"
HOST: Final = "host, not known what it did"
"""The profile does not show what the host did."""
QUEUED_BEFORE: Final = "queueing: earlier work ran"
QUEUED_AFTER: Final = "queueing: ran after the host went on"
GAPS: Final = "launch gaps"
SYNCHRONISATION: Final = "synchronisation"
BEFORE_KERNELS: Final = "before the first kernel"
AFTER_KERNELS: Final = "after the last kernel"
NO_KERNEL: Final = "no work for the device"
REST: Final = "unexplained"

_SURE: Final = 2.0
"""Standard deviations that a difference has to exceed."""
_OWN, _TORCHS, _OPERATIONS = "range", "range of torch's", "operations"
"""What a span is paired with."""
_RANGE_NS: Final = 20_000
"""What entering or leaving a range takes at most."""
_AGREE_NS: Final = 100_000
"""So far may spans begin before their ranges (median) where the clocks agree."""


@dataclasses.dataclass
class Row:
    """One phase, or what lies between phases. Times are nanoseconds a step."""

    name: str
    trace: float
    profile: float
    causes: dict[str, float]

    @property
    def difference(self) -> float:
        return self.trace - self.profile

    @property
    def rest(self) -> float:
        return self.causes.get(REST, 0.0)


class Gap(NamedTuple):
    """A stretch between two phases in which the profile shows no operation, the longest of a step."""

    after: str
    function: str
    """The Python function that took it, where the profile has the stack."""


class Overhead(NamedTuple):
    """What a profiled step takes longer than the others."""

    ns: float
    longer: float
    """Share of the pairs of a profiled step and another in which the profiled one is the longer."""
    sure: bool
    """Whether that is more than chance makes of steps that differ anyway."""


@dataclasses.dataclass
class Comparison:
    pairing: Pairing
    on_device: bool
    rows: list[Row]
    """In the order in which a step has them; what lies between phases last."""
    step_ns: float
    """Mean of the kept steps."""
    overhead: Overhead | None
    """None: not known."""
    gaps: list[tuple[Gap, float]]
    """ns a step, the longest first."""
    one_time: dict[int, float]
    """Steps in which one-time work ran, by number, and how long (ns)."""
    device: list[DeviceRow]
    """Empty where the trace has no time of the device."""

    @property
    def total(self) -> Row:
        causes = _sum(*(row.causes for row in self.rows))
        return Row(SpanName.STEP, sum(r.trace for r in self.rows), sum(r.profile for r in self.rows), causes)


def compare(pairing: Pairing) -> Comparison:
    kept = [step for step in pairing.process.steps if step.even or step in pairing.steps]
    names = _names(kept)
    on_device = len(pairing.profile.kernels) > 0
    apart = _Apart(pairing, kept, names)
    rows: list[Row] = []
    seen = _Seen(pairing, on_device)
    overhead = apart.overhead()
    for name in names:
        mean = seen.means[name]
        apart_causes = apart.causes(name, overhead is not None and overhead.sure)
        rows.append(Row(name, apart.mean(name), mean.profile, _sum(apart_causes, mean.causes)))
    return Comparison(
        pairing, on_device, rows, max(1.0, statistics.fmean(step.end - step.start for step in kept)), overhead,
        sorted(((gap, ns / len(pairing.steps)) for gap, ns in seen.gaps.items()), key=lambda item: -item[1]),
        {step.number: ns for step in kept if (ns := apart.one_time_of(step)) or step.warm},
        device_rows(pairing),
    )  # fmt: skip


def _sum(*causes: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in causes:
        for cause, ns in each.items():
            found[cause] = found.get(cause, 0.0) + ns
    return {cause: ns for cause, ns in found.items() if ns}


def _names(steps: Iterable[Step]) -> list[str]:
    """Of all phases, in the order in which most steps have them; what is between them last."""
    places: dict[str, list[int]] = defaultdict(list)
    for step in steps:
        for place, piece in enumerate(step.pieces):
            places[piece.name].append(place)
    names = sorted(places, key=lambda name: statistics.median(places[name]))
    return [*(name for name in names if name != BETWEEN), BETWEEN]


class _Apart:
    """The profiled steps beside all others: one-time work, and what the profiler adds."""

    def __init__(self, pairing: Pairing, kept: Sequence[Step], names: Sequence[str]) -> None:
        self._pairing = pairing
        self._names = names
        self._kept = kept
        inside = {step.number for step in pairing.steps}
        touched = {step.number for step in pairing.touched}
        self._inside = [step for step in kept if step.number in inside]
        self._touched = [step for step in kept if step.number in touched]
        self._others = [step for step in kept if step.number not in inside | touched]
        self._times = {id(step): _times(step, names) for step in kept}
        usual = self._usual()
        self._one_time = {id(step): self._one_time_in(step, usual) for step in kept}
        self._beyond = {id(step): _beyond(step, pairing) if step.number in inside else 0 for step in kept}

    def _usual(self) -> dict[str, float]:
        plain = [step for step in self._kept if not step.warm and not step.one_time]
        outside = {id(step) for step in self._others}
        steps = [step for step in plain if id(step) in outside] or plain
        return (
            {name: statistics.median(self._times[id(s)][name] for s in steps) for name in self._names} if steps else {}
        )

    def one_time_of(self, step: Step) -> float:
        return sum(self._one_time[id(step)].values())

    def _one_time_in(self, step: Step, usual: dict[str, float]) -> dict[str, float]:
        """By phase: what compiled or autotuned; in a step with lazy start-up, whatever it took more than usual."""
        known = union([*step.one_time, *self._pairing.profile.compiling.between(step.start, step.end)])
        found = dict.fromkeys(self._names, 0.0)
        for piece in step.pieces:
            found[piece.name] += total(within(known, piece.start, piece.end))
        if step.warm and usual and (step.number == 0 or not known):
            for name in self._names:
                found[name] = max(found[name], self._times[id(step)][name] - usual[name])
        return found

    def mean(self, name: str) -> float:
        return statistics.fmean(self._times[id(step)][name] for step in self._kept)

    def _lasting(self, step: Step, name: str) -> float:
        """Its time without what is there once, and without what is in no profile."""
        beyond = self._beyond[id(step)] if name == BETWEEN else 0
        return self._times[id(step)][name] - self._one_time[id(step)][name] - beyond

    def causes(self, name: str, sure: bool) -> dict[str, float]:
        """What the mean over all steps has more than the mean over the profiled ones."""
        of_all = statistics.fmean(self._one_time[id(step)][name] for step in self._kept)
        of_inside = statistics.fmean(self._one_time[id(step)][name] for step in self._inside)
        inside = statistics.fmean(self._lasting(step, name) for step in self._inside)
        causes = {WARM_UP: of_all - of_inside}

        def share(steps: Sequence[Step]) -> float:
            return sum(self._lasting(step, name) - inside for step in steps) / len(self._kept)

        others, touched = share(self._others), share(self._touched)
        causes[OVERHEAD if sure and others < 0 else OTHER_STEPS] = others
        # The profiler starts and stops outside of any phase.
        cause = START_STOP if name == BETWEEN else OTHER_STEPS
        causes[cause] = causes.get(cause, 0.0) + touched
        if name == BETWEEN:
            beyond = [self._beyond[id(step)] for step in self._inside]
            causes[START_STOP] += sum(beyond) / len(self._kept) - statistics.fmean(beyond)
        return causes

    def overhead(self) -> Overhead | None:
        """Of a step; None where there are no steps to compare with."""
        inside, others = (
            [sum(self._lasting(step, name) for name in self._names) for step in steps]
            for steps in (self._inside, self._others)
        )
        if not others:
            return None
        # Mann and Whitney's test: a few steps that something held up change nothing in it.
        pairs = len(inside) * len(others)
        longer = sum((mine > other) + 0.5 * (mine == other) for mine in inside for other in others)
        spread = math.sqrt(pairs * (len(inside) + len(others) + 1) / 12)
        added = statistics.fmean(inside) - statistics.fmean(others)
        return Overhead(added, longer / pairs, added > 0 and longer - pairs / 2 > _SURE * spread)


def _times(step: Step, names: Iterable[str]) -> dict[str, float]:
    times = dict.fromkeys(names, 0.0)
    for piece in step.pieces:
        times[piece.name] += piece.end - piece.start
    return times


def _beyond(step: Step, pairing: Pairing) -> int:
    """What of a profiled step lies before the profile begins or behind its end, between phases."""
    profile = pairing.profile
    return sum(
        total(without([(piece.start, piece.end)], [(profile.first, profile.last)]))
        for piece in step.pieces
        if piece.name == BETWEEN
    )


class _Mean(NamedTuple):
    profile: float
    causes: dict[str, float]


class _Seen:
    """What the profile has in its steps, phase by phase."""

    def __init__(self, pairing: Pairing, on_device: bool) -> None:
        self._pairing = pairing
        self._profile = pairing.profile
        self.gaps: Counter[Gap] = Counter()
        times: Counter[str] = Counter()
        causes: dict[str, Counter[str]] = defaultdict(Counter)
        look: Callable[[Step, Piece], tuple[int, dict[str, int]]] = self._on_device if on_device else self._on_host
        for step in pairing.steps:
            for piece in step.pieces:
                time, why = look(step, piece)
                times[piece.name] += time
                causes[piece.name].update(why)
        count = len(pairing.steps)
        names = {piece.name for step in pairing.process.steps for piece in step.pieces} | {BETWEEN}
        self.means = {
            name: _Mean(times[name] / count, {cause: ns / count for cause, ns in causes[name].items()})
            for name in names
        }

    def _on_host(self, step: Step, piece: Piece) -> tuple[int, dict[str, int]]:
        whole = [(piece.start, piece.end)]
        if piece.name == BETWEEN:
            shown = self._profile.operations.between(piece.start, piece.end)
            beyond = total(without(whole, [(self._profile.first, self._profile.last)]))
            idle = without(within(whole, self._profile.first, self._profile.last), shown)
            self._note(piece, idle)
            cause = NO_OPERATION if self._profile.shows_operations else HOST
            return total(shown), {START_STOP: beyond, cause: total(idle)}
        ranges, what = self._ranges(piece)
        outside = without(whole, ranges)
        if not ranges:
            return 0, {REST: total(outside)}
        causes: Counter[str] = Counter()
        for start, end in outside:
            causes[self._outside(start, end, what, end == ranges[0][0])] += end - start
        causes[EDGES] -= total(without(ranges, whole))
        return total(ranges), dict(causes)

    def _outside(self, start: int, end: int, what: str, before: bool) -> str:
        """Why the span is longer than what it is paired with: `before` that begins, or behind its end."""
        if end - start <= _RANGE_NS:
            return EDGES
        if what == _OWN:
            # Nothing of the user's runs between the two: they are begun one after the other, and the clocks agree.
            return LATE if before and abs(self._pairing.apart) <= _AGREE_NS else REST
        return EDGES if what == _TORCHS and self._profile.operations.between(start, end) else NO_OPERATION

    def _ranges(self, piece: Piece) -> tuple[Moments, str]:
        for source, what in ((self._profile.own, _OWN), (self._profile.torchs, _TORCHS)):
            if piece.name in source:
                found = source[piece.name].overlapping(piece.start, piece.end)
                # One that only touches it is a neighbour's.
                mine = [r for r in found if 2 * total(within([r], piece.start, piece.end)) >= r.end - r.start]
                if mine:
                    return union(mine), what
        shown = self._profile.operations.between(piece.start, piece.end)
        return ([(shown[0][0], shown[-1][1])] if shown else []), _OPERATIONS

    def _note(self, piece: Piece, idle: Moments) -> None:
        for gap in idle:
            self.gaps[Gap(piece.after, self._profile.functions.named(gap))] += gap[1] - gap[0]

    def _on_device(self, step: Step, piece: Piece) -> tuple[int, dict[str, int]]:
        whole: Moments = [(piece.start, piece.end)]
        profile = self._profile
        mine = profile.kernels.launched_between(piece.start, piece.end)
        causes: dict[str, int] = {QUEUED_AFTER: -total(without(mine, whole))}
        left = without(whole, mine)

        def take(cause: str, moments: Sequence[Interval]) -> None:
            nonlocal left
            causes[cause] = causes.get(cause, 0) + total(both(left, moments))
            left = without(left, moments)

        start, end = piece.start, piece.end
        if piece.name == BETWEEN:
            take(START_STOP, without(whole, [(profile.first, profile.last)]))
        take(WARM_UP, union([*within(step.one_time, start, end), *profile.compiling.between(start, end)]))
        take(SYNCHRONISATION, union([*within(step.waiting, start, end), *profile.waiting.between(start, end)]))
        take(QUEUED_BEFORE, profile.kernels.busy.between(start, end))
        if mine:
            take(GAPS, [(mine[0][0], mine[-1][1])])
            take(BEFORE_KERNELS, [(start, mine[0][0])])
            take(AFTER_KERNELS, [(mine[-1][1], end)])
        take(NO_KERNEL, whole)
        return total(mine), causes
