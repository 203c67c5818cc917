"""Who is missing, out of what the ranks say of themselves: a query over their statuses, without any store.

A rank counts as missing only where that is shown. Where one rank's part is not known the whole list is not known:
a list that lacks a name is as wrong as one with a name too many.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from otel_dl.forensics.report import HOW_IS_NOT_KNOWN, describe
from otel_dl.forensics.samples import ranges
from otel_dl.recording.ranks import Wait
from otel_dl.semconv import MissingReason as Reason
from otel_dl.semconv import SpanName

FRESH_NS: Final = 2_000_000_000
"""So old may a status be that says what a rank does now."""
SILENT_NS: Final = 3_000_000_000
"""A rank that has said nothing for so long is silent: it says something once a second."""
TRANSFERS: Final = frozenset({SpanName.SEND, SpanName.RECV})
LEFT: Final = "has destroyed its process groups"
"""What stands as the end of a rank that lives, and is in none any more."""
NAMED: Final = 8
"""Ranks told one by one in words."""

SHAPES: Final = 64
"""Kinds of what ranks have issued that are told apart; where there are more, the rarer ones are one."""

_SAME_SIZE: Final = frozenset({SpanName.ALL_REDUCE, SpanName.REDUCE, SpanName.BROADCAST, SpanName.BARRIER})
"""Collectives to which each rank gives the same number of bytes."""
_OTHERS: Final = "something else"


class Life(Enum):
    UNKNOWN = 0
    """On another host."""
    RUNS = 1
    STOPPED = 2
    """By a signal or a debugger."""
    DEAD = 3


class Issued(NamedTuple):
    """The latest collective that a rank has issued in a group; `seq` 0: it has joined the group, and issued none."""

    seq: int
    name: str
    size: int
    """Bytes that it gives into it; -1: not known."""


class RankStatus(NamedTuple):
    """What one rank says of itself, or its status page of it."""

    rank: int
    at: int
    """When it said so, or when its page was read: nanoseconds since the epoch on rank 0's clock, as all times here. 0:
    how far its host's clock is off is not known, and so not how old this is."""
    pid: int
    step: int | None
    doing: str
    """The innermost open phase; "" where none is."""
    since: int
    """Since when (ns since the epoch); 0: not known."""
    where: str
    """The user's line, "train.py:41"; "" where not known."""
    issued: Mapping[str, Issued]
    """By group."""
    latest: str | None
    """The group of which `issued` is up to date: a page has the latest collective alone. None: it is of every group."""
    waits: tuple[str, str, int] | None
    """(span name, group, number) of what it waits in."""
    end: str
    """How it ended, in its own words: "finished", "SIGTERM", "ValueError"; "" where it has not, or could not say."""
    life: Life = Life.UNKNOWN
    whole_at: int = 0
    """When `issued` was known of every group, where `latest` says that it is not now."""
    died: str = ""
    """How a process ended that could not say so, by the kernel: "killed by SIGKILL"; "" where it is not known."""

    def encode(self) -> str:
        return json.dumps([*self[:11], self.life.value], separators=(",", ":"))

    @classmethod
    def decode(cls, text: bytes) -> RankStatus:
        """Raises ValueError, TypeError or KeyError where it is none."""
        rank, at, pid, step, doing, since, where, issued, latest, waits, end, life = json.loads(text)
        return cls(
            rank, at, pid, step, doing, since, where,
            {group: Issued._make(last) for group, last in issued.items()}, latest,
            tuple(waits) if waits is not None else None, end, Life(life),
        )  # fmt: skip

    def words(self, now: int, verb: str = "has been") -> str:
        """ "has been in dataloader.next at step 87 for 93 s (train.py:41)"."""
        if self.end == LEFT:
            return LEFT
        if self.end:
            return f"has ended ({self.end})" if self.life is Life.DEAD else f"is ending ({self.end})"
        said: list[str] = []
        if self.waits is not None:
            said.append(f"in {describe(*self.waits)}")
        elif self.doing:
            said.append(f"in {self.doing}")
        elif self.step is not None:
            said.append("outside any phase")
        else:
            said.append("outside any step")
        if self.step is not None:
            said.append(f"at step {self.step}")
        if self.since and self.life is not Life.DEAD:  # when it died is not known
            said.append(f"for {_seconds(now - self.since)}")
        if self.where:
            said.append(f"({self.where})")
        dead = f"is dead ({self.died or HOW_IS_NOT_KNOWN}); it was"
        verb = {Life.DEAD: dead, Life.STOPPED: "is stopped; it has been"}.get(self.life, verb)
        return " ".join((verb, *said))


class Finding(NamedTuple):
    rank: int
    reason: str
    words: str


class Verdict(NamedTuple):
    at: int
    """Nanoseconds since the epoch, on rank 0's clock."""
    by: int
    missing: tuple[Finding, ...] | None
    """By rank. None: nobody can know."""
    arrived: tuple[int, ...]
    why: str
    """Why nobody can know, or what is peculiar where nobody is missing."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Where ranks issued what does not fit together under this number: what, and who."""
    communicator: tuple[str, str] | None = None
    """The group's `nccl.Communicator`: one rank looks for it."""

    def encode(self) -> str:
        """Every waiting rank reads it: ranks are ranges, and words are those that are told alone."""
        named: Sequence[Finding] | None = None
        more: dict[str, list[int]] = {}
        if self.missing is not None:
            named = self.missing[:NAMED]
            for one in self.missing[NAMED:]:
                more.setdefault(one.reason, []).append(one.rank)
        said = (
            self.at, self.by, named, {reason: _packed(who) for reason, who in more.items()}, _packed(self.arrived),
            self.why, [(what, _packed(who)) for what, who in self.shapes], self.communicator,
        )  # fmt: skip
        return json.dumps(said, separators=(",", ":"))

    @classmethod
    def decode(cls, text: bytes) -> Verdict:
        """Of the ranks missing all but the first NAMED have lost their words. Raises ValueError or TypeError where it
        is none."""
        at, by, named, more, arrived, why, shapes, communicator = json.loads(text)
        missing: tuple[Finding, ...] | None = None
        if named is not None:
            others = (Finding(rank, reason, "") for reason, who in more.items() for rank in _unpacked(who))
            missing = (*map(Finding._make, named), *sorted(others))
        return cls(
            at, by, missing, _unpacked(arrived), why, tuple((what, _unpacked(who)) for what, who in shapes),
            None if communicator is None else (communicator[0], communicator[1]),
        )  # fmt: skip

    def seen_by(self, rank: int) -> tuple[Finding, ...] | None:
        """Who is missing from where `rank` stands: ranks that issued something else are missing to each other."""
        if self.missing is None or not self.shapes:
            return self.missing
        own = next((what for what, who in self.shapes if rank in who), self.shapes[0][0])
        if own == _OTHERS:
            return None  # they may differ from each other
        others = tuple(
            Finding(one, Reason.MISMATCH, f"has issued {what} under this number")
            for what, who in self.shapes
            if what != own
            for one in who
        )
        return tuple(sorted(self.missing + others))

    def words(self, rank: int) -> str:
        """ "so have ranks 1,3; rank 2 has been in dataloader.next …", for `rank`, which has waited."""
        missing = self.seen_by(rank)
        told: list[str] = []
        others = sorted({*self.arrived} - {rank} - {one.rank for one in missing or ()})
        if others:
            told.append(f"so {'has' if len(others) == 1 else 'have'} {_ranks(others)}")
        if missing is None:
            why = self.why or "of what the ranks have issued under this number hardly any two are the same"
            told.append(f"which ranks are missing is not known: {why}")
        else:
            told += [f"rank {one.rank} {one.words}" for one in missing[:NAMED]]
            if len(missing) > NAMED:
                reasons = Counter(one.reason for one in missing[NAMED:])
                told.append(
                    f"so are {len(missing) - NAMED} more ("
                    + ", ".join(f"{count} {reason}" for reason, count in reasons.items())
                    + ")"
                )
            if self.why:
                told.append(self.why)
        return "; ".join(told)


def judge(
    wait: Wait, by: int, statuses: Mapping[int, RankStatus], since: int, now: int, others_unknown: str = ""
) -> Verdict:
    """Rank `by`, which is in `wait` since `since`, looks at the `statuses` at `now`. `others_unknown`: why those can't
    be known that have no status."""
    if wait.name in TRANSFERS:
        return Verdict(now, by, None, (by,), "of a transfer between two ranks only one side is seen")
    missing: list[Finding] = []
    arrived: list[int] = []
    ended: list[str] = []
    doubtful: list[str] = []
    # A store that is too slow makes all of them look silent; so it does this one, which is not.
    is_slow = by in statuses and now - statuses[by].at > FRESH_NS
    own = _shape(wait.name, wait.size)
    shapes: dict[str, list[int]] = {own: [by]}
    for rank in sorted(wait.group.ranks):
        status = statuses.get(rank)
        if rank == by:
            arrived.append(rank)
            continue
        if status is None:
            if wait.seq == 0 and not others_unknown and now - since >= SILENT_NS:
                missing.append(Finding(rank, Reason.SILENT, "has given no sign of itself yet"))
            else:
                doubtful.append(others_unknown or f"rank {rank} has given no sign of itself")
            continue
        age = now - status.at
        has = _has_issued(status, wait, max(since, now - FRESH_NS))
        known = status.life is not Life.UNKNOWN or (status.at >= since and age <= FRESH_NS)
        issued = status.issued.get(wait.group.id)
        there = issued is not None and issued.name and issued.seq == wait.seq
        shape = _shape(issued.name, issued.size) if issued is not None and there else ""
        if shape and shape != own:
            arrived.append(rank)
            shapes.setdefault(shape, []).append(rank)
        elif status.life is Life.DEAD or status.end:
            if has and status.end:
                ended.append(f"rank {rank} had come, and {status.words(now)}")  # of the same, or for it
            elif has is None and status.end:
                doubtful.append(f"whether rank {rank}, which has ended ({status.end}), had come is not known")
            else:
                left = status.end == LEFT and status.life is not Life.DEAD
                missing.append(Finding(rank, Reason.ELSEWHERE if left else Reason.DEAD, status.words(now)))
        elif status.life is Life.STOPPED:
            missing.append(Finding(rank, Reason.SILENT, status.words(now)))
        elif not known and status.at and age > SILENT_NS and not is_slow:
            words = f"has given no sign of itself for {_seconds(age)}; {status.words(status.at, 'it was')}"
            missing.append(Finding(rank, Reason.SILENT, words))
        elif not known or has is None:
            if known:
                doubtful.append(f"whether rank {rank} has come is not known: it has {status.words(now)[4:]}")
            else:
                old = f"it has said nothing for {_seconds(age)}" if status.at else "nor how far its clock is off"
                doubtful.append(f"what rank {rank} does now is not known ({old})")
        elif not has:
            busy = status.waits is not None or status.doing == SpanName.NEXT
            missing.append(Finding(rank, Reason.ELSEWHERE if busy else Reason.LATE, status.words(now)))
        else:
            arrived.append(rank)
            if shape:
                shapes[shape].append(rank)
    differing = _differing(shapes)
    if differing:
        # gloo aborts a rank that is sent too much: one that had come, and died without a word, died of that.
        died = {one.rank for one in missing if _has_issued(statuses[one.rank], wait, now)} - set(arrived)
        ended += [f"rank {rank} had come, and is dead" for rank in sorted(died)]
        missing = [one for one in missing if one.rank not in died]
    misfits = {rank for _, who in differing for rank in who}
    if doubtful:
        return Verdict(now, by, None, tuple(arrived), _some(doubtful))
    why = _some(ended)
    if not (missing or differing or ended):
        why = "no rank is missing: all have issued it, and live"
    return Verdict(
        now, by, tuple(missing), tuple(rank for rank in arrived if rank not in misfits or rank == by), why, differing
    )


def _has_issued(status: RankStatus, wait: Wait, since: int) -> bool | None:
    """Whether this rank has come to where `wait` is, by what is not older than `since`; None: not known."""
    issued = status.issued.get(wait.group.id)
    if wait.seq == 0:
        return issued is not None or (status.waits is not None and status.waits[0] == wait.name)
    if issued is not None and issued.seq >= wait.seq:
        return True
    is_whole = status.latest is None or status.latest == wait.group.id or status.whole_at >= since
    return False if is_whole else None


def _shape(name: str, size: int) -> str:
    operation = name.removeprefix("dist.")
    return f"{operation} of {size} bytes" if name in _SAME_SIZE and size >= 0 else operation


def _differing(shapes: Mapping[str, Sequence[int]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Those of `shapes` where there is more than one: the most common first."""
    if len(shapes) < 2:
        return ()
    common = sorted(shapes.items(), key=lambda item: -len(item[1]))
    if len(common) > SHAPES:
        common[SHAPES:] = [(_OTHERS, sorted(rank for _, who in common[SHAPES:] for rank in who))]
    return tuple((what, tuple(who)) for what, who in common)


def _packed(ranks: Sequence[int]) -> str:
    """Ranges; a bit each ("0x…") where that is shorter, as of every second rank."""
    text = ranges(ranks, len(ranks), sys.maxsize)
    if len(text) <= max(ranks, default=0) // 4:
        return text
    bits = bytearray(max(ranks, default=0) // 8 + 1)
    for rank in ranks:
        bits[rank // 8] |= 1 << rank % 8
    return min(text, hex(int.from_bytes(bits, "little")), key=len)


def _unpacked(text: str) -> tuple[int, ...]:
    if text.startswith("0x"):
        return tuple(rank for rank, bit in enumerate(reversed(f"{int(text, 16):b}")) if bit == "1")
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {ranges(tuple(ranks), len(ranks))}"


def _some(words: Iterable[str]) -> str:
    each = list(dict.fromkeys(words))
    return ", ".join(each[:3]) + (f", and {len(each) - 3} more" if len(each) > 3 else "")


def _seconds(nanoseconds: int) -> str:
    seconds = max(0, nanoseconds) / 1e9
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def attributes(missing: Sequence[Finding] | None, most: int = 64) -> dict[str, Any]:
    """`dl.missing_ranks` and what belongs to it; nothing where nobody can know."""
    if missing is None:
        return {}
    return {
        "dl.missing_ranks": [one.rank for one in missing[:most]],
        "dl.missing_ranks.count": len(missing),
        "dl.missing.reason": [one.reason for one in missing[:most]],
        "dl.missing.words": [one.words if at < NAMED else "" for at, one in enumerate(missing[:most])],
    }
