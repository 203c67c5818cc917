"""What went wrong between ranks, each thing once: a rank that did not come, all those that waited for it, and what
became of them.

Each rank that waits writes spans of its own (a failed `dist.<op>`, the phase and the step that it failed,
`train.stall`), which name the same group and the same number in it: that makes them one incident. So does a rank that
has died, whatever the others waited in for it, and a group that has failed: from then on all its collectives fail.

Who did not come is what these spans say of it (`dl.missing_ranks`), in the last of them that is to be believed: a rank
that comes to a collective when the others have given up says that they are missing.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from otel_dl.forensics.reader import Page
from otel_dl.semconv import COLLECTIVES, GROUPS, PHASES, MissingReason, SpanName
from otel_dl.viewing.reading import Span, number_of, text_of
from otel_dl.viewing.seen import Process, Step

MOST: Final = 20_000
"""Spans of a run from which incidents are made; further ones are counted."""
OF_RANKS: Final = ("_TIMEOUT", "_PEER_LOST")
"""Ends of an `error.type` that stands for other ranks which did not come."""
TERMINATED: Final = "SIGTERM"
"""`error.type` of a step that SIGTERM cut off."""


class NotCome(NamedTuple):
    """A rank that was missing, and why: `late`, `elsewhere`, `silent`, `dead`, `mismatch`, `unknown`."""

    rank: int
    reason: str
    words: str = ""
    """What it did instead, or how it ended, as told while others waited; "" where that is not known."""


class Waiter(NamedTuple):
    """A rank that waited."""

    rank: int
    name: str
    """Of the span: `dist.all_reduce`, …"""
    group: str
    seq: int | None
    step: int | None
    waited_ns: int
    error_type: str
    """What it failed with; empty where only a stall was told."""
    phase: str
    """Which it failed; "" where none did."""
    start_ns: int
    went_on: bool
    """Whether that came to its end without a failure, or a later step of it has begun."""
    startup_error: str
    """What ended its process before it had a first step; "" otherwise."""


class Culprit(NamedTuple):
    missing: NotCome
    failed_step: Step | None
    """Its own last step, where that failed, and not of this."""
    page: Page | None
    """Its status page, where its process is dead."""


@dataclasses.dataclass
class Incident:
    """`culprits` and `known`: who had not come, and whether that is known at all."""

    waiters: Sequence[Waiter]
    known: bool
    culprits: Sequence[Culprit]
    more: int
    """How many culprits there are beside those, where they were too many for a span."""
    words: str
    """What the last stall said, in full; of ends by SIGTERM alone, what one of them said of it."""
    start_ns: int
    end_ns: int
    trace_id: str
    """Of a step of one that waited, or of the last stall."""
    terminated: list[tuple[int, int]] = dataclasses.field(default_factory=list[tuple[int, int]])
    """(rank, step) of those that SIGTERM ended then."""
    dead: list[Page] = dataclasses.field(default_factory=list[Page])
    """Status pages of further ranks whose processes are dead."""


class Incidents(NamedTuple):
    found: Sequence[Incident]
    """By start."""
    left_out: int
    """Spans beyond `MOST`."""
    steps: Collection[str]
    """Ids of the failed `train.step` that these tell of."""

    @property
    def terminated(self) -> set[int]:
        """Ranks that SIGTERM ended."""
        return {rank for incident in self.found for rank, _ in incident.terminated}

    def tells_of(self, page: Page) -> bool:
        """Whether nothing remains to be said of it: so it is of an idle worker whose rank's end is told."""
        if page.path in self.pages:
            return True
        dead = {one.missing.rank for incident in self.found for one in incident.culprits if one.page is not None}
        return page.worker is not None and page.fetching is False and page.rank in dead | self.terminated

    @property
    def pages(self) -> set[str]:
        """Paths of the status pages that these tell of."""
        told = [one.page for incident in self.found for one in incident.culprits if one.page is not None]
        return {page.path for page in (*told, *(page for incident in self.found for page in incident.dead))}


class _Told(NamedTuple):
    """One span of one rank about something that needs the others. Times are of rank 0's clock where it is known."""

    rank: int
    span: str
    """Its name."""
    of: str
    """The name of what it is about."""
    group: str
    seq: int | None
    start: int
    end: int
    error_type: str
    missing: tuple[NotCome, ...] | None
    missing_count: int
    words: str
    trace_id: str
    span_id: str
    step: int | None
    own_start: int
    """By the rank's own clock, as `own_end`."""
    own_end: int
    final: int = 0
    """Of a stall, when what was stuck had come to its end all the same; 0: not known."""


class _Done(NamedTuple):
    """A span in which one can be stuck, that did not fail; ordered by its length."""

    duration: int
    rank: int
    name: str
    group: str
    seq: int
    """0: it has no number."""
    start: int
    end: int

    def is_what_was_stuck(self, stall: _Told) -> bool:
        same = self.name not in COLLECTIVES or (self.group, self.seq) == (stall.group, stall.seq or 0)
        return same and self.start <= stall.own_end <= self.end


class Collector:
    """Takes the spans of one run in any order."""

    def __init__(self) -> None:
        self._told: list[_Told] = []
        self._offsets: dict[int, int] = {}
        self._left_out = 0
        self._longest: list[_Done] = []
        """The longest ones, a heap."""

    def add(self, span: Span) -> bool:
        """True where it is one of these, so that it need not be counted as a failure elsewhere."""
        rank = number_of(span, "dl.rank")
        if "dl.clock.offset_ns" in span.attributes:
            self._offsets[rank] = number_of(span, "dl.clock.offset_ns")
        if span.name in COLLECTIVES | GROUPS | PHASES and not span.failed:
            group = text_of(span, "dl.group.id") if span.name in COLLECTIVES else ""
            seq = number_of(span, "dl.collective.seq")
            done = _Done(span.duration_ns, rank, span.name, group, seq, span.start_ns, span.end_ns)
            if len(self._longest) < MOST:
                heapq.heappush(self._longest, done)
            elif done > self._longest[0]:
                heapq.heapreplace(self._longest, done)
        if not _is_of_ranks(span):
            return False
        if len(self._told) >= MOST:
            self._left_out += 1
        else:
            self._told.append(_told(span, rank))
        return True

    def result(self, processes: Iterable[Process], pages: Iterable[Page] = ()) -> Incidents:
        """`processes`: the last of each rank counts. `pages`: those of the run."""
        last = {process.rank: process for process in processes}
        dead = {page.rank: page for page in pages if page.worker is None and page.alive() is False}
        groups = sorted((_Group(told) for told in self._grouped()), key=lambda group: group.start)
        found: list[Incident] = []
        steps: set[str] = set()
        for group in _merged(groups):
            incident = group.incident(last, dead)
            found.append(incident)
            steps |= {told.span_id for told in group.told if told.span == SpanName.STEP}
            steps |= {one.failed_step.span_id for one in incident.culprits if one.failed_step is not None}
        for rank, process in sorted(last.items()):
            step = process.last_step
            if step is None or step.error_type != TERMINATED or len(last) < 2:
                continue
            steps.add(step.span_id)
            ended = step.end_ns - self._offsets.get(rank, 0)
            before = [incident for incident in found if incident.start_ns <= ended]
            if not before:
                before = [Incident((), False, (), 0, "", ended, ended, "")]
                found = before + found
            before[-1].terminated.append((rank, step.number))
            # It says then which ranks it saw dead, if any.
            if not before[-1].waiters and len(step.message) > len(before[-1].words):
                before[-1].words = f"rank {rank}: {step.message}"
        if found:
            told = {one.missing.rank for incident in found for one in incident.culprits}
            waited = {waiter.rank for incident in found for waiter in incident.waiters}
            found[-1].dead += [page for rank, page in sorted(dead.items()) if rank not in told | waited]
        return Incidents(found, self._left_out, steps)

    def _grouped(self) -> Iterator[list[_Told]]:
        by_key: defaultdict[tuple[str, int | str], list[_Told]] = defaultdict(list)
        named: defaultdict[tuple[int, str], list[_Told]] = defaultdict(list)
        for told in self._told:
            if told.of and not told.seq:
                named[told.rank, told.group].append(told)
        longest: defaultdict[tuple[int, str], list[_Done]] = defaultdict(list)
        for done in self._longest:
            longest[done.rank, done.name].append(done)
        for told in self._told:
            offset = self._offsets.get(told.rank, 0)
            if told.span == SpanName.STALL:
                ends = (done.end - offset for done in longest[told.rank, told.of] if done.is_what_was_stuck(told))
                told = told._replace(final=max(ends, default=0))
            if not told.of and not told.seq:  # a phase or a step, of what has no number
                within = (each.of for each in named[told.rank, told.group] if told.start <= each.start)
                told = told._replace(of=next(within, ""))
            by_key[_key(told)].append(told._replace(start=told.start - offset, end=told.end - offset))
        for same in by_key.values():
            yield from _apart(same)


class _Group:
    """What was told of one incident."""

    def __init__(self, told: Sequence[_Told]) -> None:
        self.told = list(told)
        self.start = min(each.start for each in told)
        self.key = _key(self.told[0])
        self.known, self.missing, self.more = self._who()

    @property
    def failed(self) -> bool:
        return any(each.error_type and each.span != SpanName.STALL for each in self.told)

    def belongs_to(self, former: _Group) -> bool:
        """Whether it is the same incident as one that began before."""
        if self.key == former.key:
            return False
        ranks = {one.rank for one in self.missing}
        if not ranks or ranks != {one.rank for one in former.missing}:
            return False
        dead = all(one.reason == MissingReason.DEAD for one in (*self.missing, *former.missing))
        return dead or (former.failed and {told.group for told in self.told} <= {told.group for told in former.told})

    def take(self, later: _Group) -> None:
        self.told += later.told

    def _who(self) -> tuple[bool, Sequence[NotCome], int]:
        """Whether it is known who had not come; who that was; how many more."""
        known = sorted((each for each in self.told if each.missing is not None), key=lambda each: each.end)
        if not known:
            return False, (), 0
        came: dict[int, int] = {}
        for each in self.told:
            came[each.rank] = min(each.start, came.get(each.rank, each.start))
        misfits = {
            one.rank: one for each in known for one in each.missing or () if one.reason == MissingReason.MISMATCH
        }
        if misfits:
            return True, [misfits[rank] for rank in sorted(misfits)], 0
        accused = {
            one.rank for each in known for one in each.missing or () if came.get(one.rank, each.start + 1) > each.start
        }
        believed = [each for each in known if each.rank not in accused] or known
        last = believed[-1]
        words = {one.rank: one.words for each in believed for one in each.missing or () if one.words}
        missing = [one._replace(words=one.words or words.get(one.rank, "")) for one in last.missing or ()]
        return True, missing, max(0, last.missing_count - len(missing))

    def incident(self, last: Mapping[int, Process], dead: Mapping[int, Page]) -> Incident:
        of_rank: defaultdict[int, list[_Told]] = defaultdict(list)
        for each in self.told:
            of_rank[each.rank].append(each)
        waiters = [_waiter(rank, of_rank[rank], last.get(rank)) for rank in sorted(of_rank)]
        stalls = sorted((each for each in self.told if each.words), key=lambda each: each.end)
        own = {each.span_id for each in self.told}
        culprits: list[Culprit] = []
        for one in self.missing:
            process = last.get(one.rank)
            step = process.last_step if process is not None else None
            if step is not None and (step.error_type in ("", TERMINATED) or step.span_id in own):
                step = None
            culprits.append(Culprit(one, step, dead.get(one.rank)))
        steps = [each for each in self.told if each.span == SpanName.STEP]
        return Incident(
            waiters=waiters,
            known=self.known,
            culprits=culprits,
            more=self.more,
            words=stalls[-1].words if stalls else "",
            start_ns=self.start,
            end_ns=max(each.end for each in self.told),
            trace_id=(steps or self.told)[0].trace_id,
        )


def _waiter(rank: int, mine: Sequence[_Told], process: Process | None) -> Waiter:
    waits = [each for each in mine if each.span not in PHASES | {SpanName.STEP}] or mine
    about = min(waits, key=lambda each: each.start)
    step = next((each for each in mine if each.span == SpanName.STEP), None)
    failed = [each for each in (step, *mine) if each is not None and each.error_type and each.span != SpanName.STALL]
    number = step.step if step is not None else None
    if number is None and process is not None and process.last_step is not None:
        open_then = process.last_step.start_ns <= about.own_start <= process.last_step.end_ns
        number = process.last_step.number if open_then else None
    return Waiter(
        rank, about.of, about.group, about.seq, number,
        max(max(each.end, each.final) - each.start for each in waits),
        failed[0].error_type if failed else "",
        next((each.span for each in mine if each.span in PHASES), ""),
        about.start,
        any(each.final for each in waits)
        or (process is not None and process.last_step is not None and process.last_step.start_ns > about.own_end),
        process.startup_error if process is not None and about.of in GROUPS else "",
    )  # fmt: skip


def _key(told: _Told) -> tuple[str, int | str]:
    """What does not fit together has one number and several names."""
    return told.group, told.seq or told.of


def _apart(same: Iterable[_Told]) -> Iterator[list[_Told]]:
    """What was told of one number of one group: a rank fails once of a collective, so where it does again the group was
    made anew, and it is another collective."""
    chunks: list[list[_Told]] = [[]]
    seen: set[tuple[int, str]] = set()
    of_rank: defaultdict[int, list[tuple[_Told, list[_Told]]]] = defaultdict(list)
    around: list[_Told] = []
    for told in sorted(same, key=lambda told: told.start):
        if told.span not in COLLECTIVES | GROUPS:
            around.append(told)
            continue
        if (told.rank, told.span) in seen:
            chunks.append([])
            seen.clear()
        seen.add((told.rank, told.span))
        chunks[-1].append(told)
        of_rank[told.rank].append((told, chunks[-1]))
    first = [chunk[0].start for chunk in chunks if chunk]
    for told in around:
        own = (chunk for each, chunk in of_rank[told.rank] if each.start <= told.end and told.start <= each.end)
        by_time = chunks[max(0, bisect.bisect_right(first, told.end) - 1)]
        next(own, by_time).append(told)
    yield from chunks


def _merged(groups: Sequence[_Group]) -> Sequence[_Group]:
    """`groups`, by start, without those that belong to an earlier one, which takes them."""
    found: list[_Group] = []
    for group in groups:
        former = next((each for each in reversed(found) if group.belongs_to(each)), None)
        if former is not None:
            former.take(group)
        else:
            found.append(group)
    return found


def _is_of_ranks(span: Span) -> bool:
    """Whether it tells of others that were waited for. A collective also fails for what its own rank did wrong."""
    if span.name == SpanName.STALL:
        return True
    if not span.failed or span.name not in COLLECTIVES | GROUPS | PHASES | {SpanName.STEP}:
        return False
    return "dl.missing_ranks" in span.attributes or text_of(span, "error.type").endswith(OF_RANKS)


def _told(span: Span, rank: int) -> _Told:
    said = span.attributes
    ranks = said.get("dl.missing_ranks")
    missing: tuple[NotCome, ...] | None = None
    if isinstance(ranks, list):
        columns = (_list(ranks), _list(said.get("dl.missing.reason")), _list(said.get("dl.missing.words")))
        missing = tuple(
            NotCome(one, str(reason or MissingReason.UNKNOWN), str(words or ""))
            for one, reason, words in itertools.zip_longest(*columns)
            if isinstance(one, int)
        )
    is_stall = span.name == SpanName.STALL
    of = text_of(span, "dl.stall.in") if is_stall else span.name if span.name in COLLECTIVES | GROUPS else ""
    return _Told(
        rank=rank,
        span=span.name,
        of=of,
        group="" if of == SpanName.INIT_PROCESS_GROUP else text_of(span, "dl.group.id"),
        seq=number_of(span, "dl.collective.seq") or None,
        start=span.start_ns,
        end=span.end_ns,
        error_type=(text_of(span, "error.type") or "error") if span.failed or not is_stall else "",
        missing=missing,
        missing_count=max(len(missing or ()), number_of(span, "dl.missing_ranks.count")),
        words=span.message if is_stall else "",
        trace_id=span.trace_id,
        span_id=span.span_id,
        step=number_of(span, "dl.step") if span.name == SpanName.STEP else None,
        own_start=span.start_ns,
        own_end=span.end_ns,
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]
