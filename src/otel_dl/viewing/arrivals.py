"""Which rank arrived last at the collectives, by how much, and what of its step had taken longer.

An all-reduce makes all ranks' steps take equally long, so the slow rank can't be seen in the length of a step; it shows
as the one for which the others wait. Times of ranks are put on rank 0's clock first (`dl.clock.offset_ns`: this rank's
clock less rank 0's, so a time less its offset is rank 0's).

Spans of one group with one number and one name, in one run, are one collective. Where not all its ranks are there,
nothing is said of it, nor of its step: one that is missing may be the one that was late. Nor is anybody named who came
after another rank by less than the errors of their clocks. Transfers between two ranks (send, recv) are left out: a
span does not say which two.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from otel_dl.semconv import COLLECTIVES, FIRST_SPANS, KeepReason, SpanName
from otel_dl.viewing import within
from otel_dl.viewing.intervals import union, without
from otel_dl.viewing.reading import Span, number_of, text_of

MOST: Final = 8_000_000
"""Spans of collectives that are compared in a run at most; each takes 48 bytes."""
SAME_HOST_ERROR: Final = 100_000
"""How far apart, in ns, the clocks of two processes of one host are taken to be where no offset was estimated."""
SHOWN_AS_LONGER: Final = 0.5
"""A phase explains a lateness when it was longer than the others' by this share of it."""

OUTSIDE: Final = "outside any phase"
_OPS: Final = tuple(sorted(COLLECTIVES - {SpanName.SEND, SpanName.RECV}))
_OP_BITS: Final = 4
_FAILED: Final = 2
_ASYNC: Final = 1
_UNKNOWN: Final = -1
_WARM: Final = 1
_HEAD: Final = 2


class Arrival(NamedTuple):
    """Of one kept step: the rank that arrived last."""

    step: int
    """As the lowest of the ranks counts."""
    rank: int
    late_ns: float
    """How long the others waited for it (the median of them), in all."""
    collectives: int
    """At how many it was the last."""
    of: int
    """How many the step has."""
    share: float
    """`late_ns` of the step's duration (the longest of the ranks')."""
    longer: str
    """The phase (`forward`, …), span of the user's own, what lies between two steps (`train.eval`,
    `dataloader.start_workers`), or `OUTSIDE` that took longer on it than on the others, by most of `late_ns`; "" where
    the numbers show none."""


class Late(NamedTuple):
    """Of one rank, over all steps in which it arrived last."""

    rank: int
    steps: int
    late_ns: float
    share: float
    """Of the time of all steps that could be compared."""
    longer: Mapping[str, int]
    """What took longer → in how many of these steps; "" stands for: not known."""


class Operation(NamedTuple):
    """What the ranks' spans of one name consist of."""

    name: str
    collectives: int
    """Each once for all its ranks."""
    wait_ns: Sequence[int]
    """Of each rank in each: from its issue to the last rank's, see `_Part.waited`."""
    transfer_ns: Sequence[int]
    """From then to its completion."""


class Arrivals(NamedTuple):
    compared: int
    """Kept steps whose collectives have all their ranks."""
    steps: Sequence[Arrival]
    """Those in which a rank arrived last for sure, by number."""
    ranks: Sequence[Late]
    """Most time first."""
    even: int
    """Steps compared in which no rank was later than another by more than the clocks' errors."""
    unclear: Sequence[int]
    """Steps of which nothing is said: the offsets of clocks of different hosts are not known."""
    lacking: Sequence[int]
    """Steps of which nothing is said: ranks of their collectives are missing."""
    operations: Sequence[Operation]
    own: Mapping[int, Mapping[str, int]]
    """Rank → of each step compared, by the id of its span, its own time: the step's without what it waited, in
    collectives, for ranks that came later."""
    warmup: int
    """Steps left out, as they are warm-up: compilers and tuners take each rank another time."""
    even_sample: int
    """Of the steps compared, those that the head sampler kept in each rank."""
    ran: int
    """Steps that the run had, at least, kept or not."""
    left_out: int
    """Spans of collectives beyond `MOST`."""


class _Part(NamedTuple):
    """One rank in one collective; times in ns, `issue` and `end` on rank 0's clock."""

    rank: int
    place: int
    issue: int
    end: int
    error: int
    local: int
    """`issue` on its own clock."""
    failed: bool

    def waited(self, last: _Part) -> int:
        """How long it was held up by the rank that came last: from its own issue until then.

        Not at all where it had completed before: the source of a broadcast has done before a late one comes. What has
        failed before then had waited until it failed.
        """
        if self.end < last.issue - self.error - last.error and not self.failed:
            return 0
        return max(0, min(self.end, last.issue) - self.issue)


class _Collective(NamedTuple):
    group: str
    op: int
    waits_at_once: bool
    bucket: int
    parts: Sequence[_Part]
    last: _Part
    named: bool
    """Whether `last` is the last for sure."""
    late_ns: float
    waited: Mapping[int, int]
    """Rank → ns."""


class Collector:
    """Takes the spans of one run in any order; keeps 48 bytes a collective and rank, about 600 a step and rank."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """Hash of (trace, rank) → its place in the columns that follow."""
        self._steps = array("q")
        self._offsets = array("q")
        self._errors = array("q")
        self._starts = array("q")
        self._durations = array("q")
        self._kinds = array("q")
        """Whether the step is warm-up (`_WARM`), or kept by the head sampler (`_HEAD`)."""
        self._lasts = array("q")
        """The end of its last collective."""
        self._numbered: dict[int, int] = {}
        """Hash of (rank, number of the step) → place."""
        self._spans: dict[int, str] = {}
        """Place → id of the `train.step`."""
        self._hosts: dict[int, str] = {}
        self._within = within.Collector()
        self._between: Callable[[int], Sequence[within.Part]] = _nothing
        self._rows: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        """Group → six numbers a span, see `_add_collective`."""
        self._sizes: dict[str, int] = {}
        self._count = 0

    def add(self, span: Span) -> None:
        with contextlib.suppress(OverflowError):  # numbers that no recorder writes
            self._add(span)

    def _add(self, span: Span) -> None:
        if span.name in COLLECTIVES:
            self._add_collective(span)
        elif span.name in FIRST_SPANS:
            place = self._place(span)
            if span.name == SpanName.STEP:
                self._steps[place] = number_of(span, "dl.step")
                self._starts[place] = span.start_ns
                self._durations[place] = span.duration_ns
                reason = text_of(span, "dl.keep.reason")
                if reason == KeepReason.WARMUP or span.attributes.get("is_warmup") is True:
                    self._kinds[place] = _WARM
                elif reason == KeepReason.HEAD:
                    self._kinds[place] = _HEAD
                self._numbered[hash((number_of(span, "dl.rank"), self._steps[place]))] = place
                self._spans[place] = span.span_id
            if "dl.clock.offset_ns" in span.attributes:
                self._offsets[place] = number_of(span, "dl.clock.offset_ns")
                self._errors[place] = number_of(span, "dl.clock.error_ns")
            self._hosts[number_of(span, "dl.rank")] = text_of(span, "host.name")

    def _place(self, span: Span) -> int:
        key = hash((span.trace_id, number_of(span, "dl.rank")))
        place = self._places.setdefault(key, len(self._steps))
        if place == len(self._steps):
            for column in (self._steps, self._errors, self._starts, self._durations, self._lasts):
                column.append(_UNKNOWN)
            self._offsets.append(0)
            self._kinds.append(0)
        return place

    def _add_collective(self, span: Span) -> None:
        said = span.attributes
        if span.name not in _OPS or not {"dl.group.id", "dl.group.size", "dl.collective.seq"} <= said.keys():
            return
        self._count += 1
        if self._count > MOST:
            return
        group = text_of(span, "dl.group.id")
        self._sizes[group] = max(self._sizes.get(group, 0), number_of(span, "dl.group.size"))
        arrived = said.get("dl.collective.arrived_ns")
        place = self._place(span)
        self._lasts[place] = max(self._lasts[place], span.end_ns)
        row = (
            number_of(span, "dl.collective.seq") << _OP_BITS | _OPS.index(span.name),
            number_of(span, "dl.rank"),
            place,
            arrived if isinstance(arrived, int) else span.start_ns,
            span.end_ns,
            (number_of(span, "dl.bucket.index") if "dl.bucket.index" in said else -1) << 2
            | (_FAILED if span.failed else 0)
            | (_ASYNC if said.get("dl.collective.async") else 0),
        )
        self._rows[group].extend(array("q", row))

    def result(
        self, parts: within.Collector, between: Callable[[int], Sequence[within.Part]] | None = None
    ) -> Arrivals:
        """`parts`: what lies in the steps; `between`: of a rank, what lies in none, by start."""
        self._within = parts
        if between is not None:
            self._between = functools.cache(between)
        by_step: defaultdict[int, list[tuple[str, Sequence[int]]]] = defaultdict(list)
        lacking: set[int] = set()
        warm: set[int] = set()
        uneven: set[int] = set()
        for group, rows in self._rows.items():
            order = sorted(range(0, len(rows), 6), key=rows.__getitem__)
            for _, same in itertools.groupby(order, key=rows.__getitem__):
                at = sorted(same, key=lambda i: rows[i + 1])
                # Where the lowest rank has none (it has run out of batches, others go on), the next one's counts.
                step = next((self._steps[rows[i + 2]] for i in at if self._steps[rows[i + 2]] >= 0), None)
                if step is None:
                    continue
                by_step[step].append((group, at))
                kinds = {self._kinds[rows[i + 2]] for i in at}
                if _WARM in kinds:
                    warm.add(step)
                if kinds != {_HEAD}:
                    uneven.add(step)
                if not self._is_whole(group, at):
                    lacking.add(step)

        lacking -= warm
        found: list[Arrival] = []
        own: defaultdict[int, dict[str, int]] = defaultdict(dict)
        unclear: list[int] = []
        waits: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        transfers: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        counts: Counter[int] = Counter()
        whole = 0.0
        told: set[int] = set()
        for step in sorted(by_step.keys() - lacking):
            is_whole = all(self._is_whole(group, at) for group, at in by_step[step])
            if step in warm and not is_whole:
                continue
            collectives = [self._collective(group, at) for group, at in by_step[step]]
            known = [each for each in collectives if each is not None]
            for each in known:
                counts[each.op] += 1
                for part in each.parts:
                    waits[each.op].append(each.waited[part.rank])
                    transfers[each.op].append(max(0, part.end - part.issue - each.waited[part.rank]))
            if step in warm:
                continue
            if len(known) < len(collectives):
                unclear.append(step)
                continue
            told.add(step)
            duration = self._duration(known)
            whole += duration
            arrival, waited = self._arrival(step, known, duration)
            for rank, (place, nanoseconds) in waited.items():
                if self._durations[place] >= 0:
                    own[rank][self._spans[place]] = max(0, self._durations[place] - nanoseconds)
            if arrival is not None:
                found.append(arrival)
        compared = len(told)
        return Arrivals(
            compared=compared,
            steps=found,
            ranks=_by_rank(found, whole),
            even=compared - len(found),
            unclear=unclear,
            lacking=sorted(lacking),
            operations=[Operation(_OPS[op], counts[op], waits[op], transfers[op]) for op in sorted(counts)],
            own=own,
            warmup=len(warm),
            even_sample=len(told - uneven),
            ran=max((number + 1 for number in self._steps), default=0),
            left_out=max(0, self._count - MOST),
        )

    def _is_whole(self, group: str, at: Sequence[int]) -> bool:
        """A number twice on one rank: the group was made anew, and which belongs to which can't be told."""
        rows = self._rows[group]
        return len(at) == self._sizes[group] and len({rows[i + 1] for i in at}) == len(at)

    def _collective(self, group: str, at: Sequence[int]) -> _Collective | None:
        """None where the clocks of its ranks can't be compared."""
        rows = self._rows[group]
        one_host = len({self._hosts.get(rows[i + 1]) for i in at}) == 1
        parts: list[_Part] = []
        for i in at:
            _, rank, place, issue, end, flags = rows[i : i + 6]
            error = self._errors[place]
            if error < 0:
                if not one_host and rank != 0:
                    return None
                error = 0 if rank == 0 else SAME_HOST_ERROR
            offset = self._offsets[place]
            parts.append(_Part(rank, place, issue - offset, end - offset, error, issue, bool(flags & _FAILED)))
        last = max(parts, key=lambda part: part.issue)
        others = [part for part in parts if part is not last]
        waited = {part.rank: part.waited(last) for part in parts}
        late = statistics.median(waited[part.rank] for part in others) if others else 0.0
        return _Collective(
            group,
            rows[at[0]] & ((1 << _OP_BITS) - 1),
            not any(rows[i + 5] & _ASYNC for i in at),
            max(rows[i + 5] >> 2 for i in at),
            parts,
            last,
            bool(others)
            and all(last.issue - part.issue > last.error + part.error for part in others)
            and late > last.error + max(part.error for part in others),
            late,
            waited,
        )

    def _duration(self, collectives: Sequence[_Collective]) -> float:
        """Of the rank whose step is the longest: others may have begun it late."""
        places = {part.place for each in collectives for part in each.parts}
        return max((self._durations[place] for place in places), default=0)

    def _arrival(
        self, step: int, collectives: Sequence[_Collective], duration: float
    ) -> tuple[Arrival | None, Mapping[int, tuple[int, int]]]:
        """Of one step, whose collectives are given group by group in the order of their numbers: who arrived last; and
        of each rank its place, and how long it waited in all.

        After a collective that the caller waits for, all ranks go on together: who is late at the next one has lost
        that time since, so lateness adds up. It doesn't where the caller goes on at once (DDP's buckets): who is late
        at the first is late at each that follows, by the same time; of those the greatest counts. That is never more
        than was lost. So it is between groups: who is late in one is late in the next, for the others of that one, so
        the greatest counts; and who is late in one group because it has waited in another has not lost that time
        itself, so what it waited more than the others there is taken off.
        """
        chains = sorted(_chains(collectives), key=lambda chain: chain[-1].last.issue)
        totals: defaultdict[int, Counter[str]] = defaultdict(Counter)
        last_at: Counter[int] = Counter()
        waited: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """Rank → group → ns in this step."""
        settled: Counter[tuple[int, str]] = Counter()
        blocked: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Place → instant of its own clock, ns that it waited from then on."""
        for chain in chains:
            group, members = chain[0].group, [part.rank for part in chain[0].parts]
            elsewhere = {rank: waited[rank].total() - waited[rank][group] for rank in members}
            carried = {rank: elsewhere[rank] - settled[rank, group] for rank in members}
            lost: Counter[int] = Counter()
            for each in chain:
                if not each.named:
                    continue
                rank = each.last.rank
                common = statistics.median(carried[other] for other in members if other != rank)
                late = each.late_ns - max(0, carried[rank] - common)
                if late > each.last.error + max(part.error for part in each.parts if part is not each.last):
                    last_at[rank] += 1
                    lost[rank] = max(lost[rank], round(late))
            for rank, late in lost.items():
                totals[rank][group] += late
            for rank in members:
                longest = max(chain, key=lambda each: each.waited[rank])
                waited[rank][group] += longest.waited[rank]
                settled[rank, group] = elsewhere[rank]
                part = next(part for part in longest.parts if part.rank == rank)
                blocked[part.place].append((part.local, longest.waited[rank]))
        waits = {
            part.rank: (part.place, sum(ns for _, ns in blocked[part.place]))
            for each in collectives
            for part in each.parts
        }
        if not totals:
            return None, waits
        late_of = {rank: max(by_group.values()) for rank, by_group in totals.items()}
        rank = max(late_of, key=late_of.__getitem__)
        arrival = Arrival(
            step,
            rank,
            late_of[rank],
            last_at[rank],
            len(collectives),
            late_of[rank] / duration if duration > 0 else 0.0,
            self._longer(rank, late_of[rank], collectives, blocked),
        )
        return arrival, waits

    def _longer(
        self,
        rank: int,
        late: float,
        collectives: Sequence[_Collective],
        blocked: Mapping[int, Sequence[tuple[int, int]]],
    ) -> str:
        """The part that took longer on `rank` than on the others (the median of them) since the last collective of the
        step before, without what each waited for others meanwhile. Where that step is not known of each, since this
        one has begun."""
        places = {part.rank: part.place for each in collectives for part in each.parts}
        if any(self._steps[place] < 0 for place in places.values()):
            return ""
        former = {who: self._former(who, place) for who, place in places.items()}
        known = None not in former.values()
        own = {
            who: self._own_times(who, place, former[who] if known else None, blocked.get(place, ()))
            for who, place in places.items()
        }
        mine = own.pop(rank)
        more = {
            part: mine[part] - statistics.median(times[part] for times in own.values())
            for part in sorted(set(mine).union(*own.values()))
        }
        part = max(more, key=more.__getitem__)
        return part if more[part] >= SHOWN_AS_LONGER * late else ""

    def _former(self, rank: int, place: int) -> int | None:
        """The place of the rank's step before, where that has collectives."""
        former = self._numbered.get(hash((rank, self._steps[place] - 1)))
        if former is None or self._lasts[former] < 0:
            return None
        # One of a later attempt may have the same number.
        return former if self._lasts[former] <= self._starts[place] else None

    def _own_times(self, rank: int, place: int, former: int | None, blocked: Sequence[tuple[int, int]]) -> Counter[str]:
        """Until the last collective of the step, all by the rank's own clock."""
        since, until = self._starts[place] if former is None else self._lasts[former], self._lasts[place]
        spans = [
            (part, max(start, since), min(end, until))
            for step in (former, place)
            if step is not None
            for part, start, end in self._within.intervals(self._spans[step])
        ]
        in_steps = union((start, end) for _, start, end in spans)
        spans += [
            (part, *piece)
            for part, start, end in self._between(rank)
            if start < until and end > since
            for piece in without([(max(start, since), min(end, until))], in_steps)
        ]
        times: Counter[str] = Counter()
        for part, start, end in spans:
            times[part] += max(0, end - start)
        times[OUTSIDE] = until - since - times.total()
        for at, waited in blocked:
            times[next((part for part, start, end in spans if start <= at <= end), OUTSIDE)] -= waited
        return times


def _nothing(rank: int) -> Sequence[within.Part]:
    return ()


def _chains(collectives: Sequence[_Collective]) -> Iterator[list[_Collective]]:
    """Collectives of one group among which no rank has waited for the others: each list ends with one that the caller
    waits for, or with the last of DDP's buckets, for which `backward` waits."""
    chain: list[_Collective] = []
    for each in collectives:
        if chain:
            former = chain[-1]
            backward_has_ended = former.bucket >= 0 and each.bucket <= former.bucket
            if former.group != each.group or former.waits_at_once or backward_has_ended:
                yield chain
                chain = []
        chain.append(each)
    if chain:
        yield chain


def _by_rank(steps: Sequence[Arrival], whole: float) -> Sequence[Late]:
    ranks: defaultdict[int, list[Arrival]] = defaultdict(list)
    for arrival in steps:
        ranks[arrival.rank].append(arrival)
    late = [
        Late(
            rank,
            len(each),
            total := sum(arrival.late_ns for arrival in each),
            total / whole if whole else 0.0,
            Counter(arrival.longer for arrival in each),
        )
        for rank, each in ranks.items()
    ]
    return sorted(late, key=lambda each: -each.late_ns)
