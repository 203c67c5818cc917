"""The latest steps of this rank that it does not keep for itself: another rank may ask for one.

Where ranks share a run, an undecided step's records are put here instead of being thrown away. The thread that trains
appends, the builder's takes out what is old, the one that talks to other ranks keeps what is asked for.

A step that is slow, or in which one-time work ran, is decided by all ranks together (`ranks/peers.py`): it waits here
for their answer, so that what caps refuse is refused everywhere, and no step is exported by one rank alone. Where no
answer comes in its time, this rank decides alone.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from otel_dl.recording.records import Step
from otel_dl.semconv import KeepReason

if TYPE_CHECKING:
    from otel_dl.recording.collectives import Collective
    from otel_dl.recording.run import Run

HELD_NS: Final = 5_000_000_000
"""How long a step is held: a peer's request is a second old when it is written, and as much when it is read, if the
machine is not busy."""
LEAST_NS: Final = 3_000_000_000
"""What leaves earlier for lack of room is counted."""
_REMEMBERED: Final = 16_384
"""Numbers of kept steps, of which nobody has to ask."""

Recycled = tuple[int, int, int, int, list[tuple[Any, ...]], "list[Collective]"]
"""(number, start, end, records dropped, records, collectives) of an ordinary step."""
Entry = Recycled | Step

WAITS: Final = 1
"""Answer of `keep`: it is open, to come, or just being closed."""
KEPT: Final = 2
"""It is kept."""
GONE: Final = 3


class Held:
    """Begins with the first step that is opened in a shared run."""

    def __init__(self, run: Run, most: int) -> None:
        self._run = run
        self._fast = run.fast
        self._most = most
        self._steps: deque[Entry] = deque()
        self._kept: dict[int, None] = {}
        """Numbers of the latest steps that were kept when they were closed."""
        self._taken: dict[int, None] = {}
        """Of the latest that were kept after all."""
        self._lock = threading.Lock()
        """Never taken by a thread that trains."""
        self.early = 0
        """Steps that left before LEAST_NS."""
        self.refused = 0
        """Slow steps of this rank that were not kept for that: too many of all ranks were."""
        self.counts: Counter[str] = Counter()
        """Steps kept late, by reason."""
        run.keep.decide_together(self.counts)
        fast = run.fast
        fast.held_in = fast.held_out = fast.not_held = 0
        fast.held_most = most
        fast.hold = self._steps.append

    def __len__(self) -> int:
        return len(self._steps)

    # In the thread that trains.

    def recycled(self, step: Step, end: int) -> None:
        """`step` ends and its object becomes the next one: what `c/next.c::hold` does."""
        fast, weight = self._fast, len(step.records) + len(step.collectives)
        if fast.held_in - fast.held_out + weight > fast.held_most:
            fast.not_held += 1
            step.records.clear()
            step.collectives.clear()
            return
        fast.held_in += weight
        self._steps.append((step.number, step.start, end, step.dropped, step.records, step.collectives))
        step.records, step.collectives = [], []

    def closed(self, step: Step, reason: str) -> str:
        """`step` is closed, and this rank would keep it for `reason`; for which it does so now."""
        if reason and not self._run.keep.is_proposal(reason, step.number):
            self._kept[step.number] = None
            if len(self._kept) > _REMEMBERED:
                del self._kept[next(iter(self._kept))]
            if reason not in (KeepReason.HEAD, KeepReason.WARMUP):
                self._tell(step, reason)
            return reason
        fast, weight = self._fast, _weight(step)
        step.reason = reason
        if not reason and fast.held_in - fast.held_out + weight > fast.held_most:
            fast.not_held += 1
            return ""
        fast.held_in += weight
        self._steps.append(step)
        if reason:
            self._tell(step, reason)
        return ""

    def _tell(self, step: Step, reason: str) -> None:
        self._run.ranks.kept(step.number, reason, (step.end - step.start) // 1_000_000)

    # In the thread that talks to the other ranks.

    def keep(self, numbers: Iterable[int]) -> dict[int, int]:
        """These steps are kept, as others have it. Of each: WAITS (ask again), KEPT or GONE."""
        answers: dict[int, int] = {}
        with self._lock:
            decided = self._run.decided
            entries = {_number(entry): entry for entry in tuple(self._steps)}
            for number in numbers:
                if number in self._taken or number in self._kept:
                    answers[number] = KEPT
                elif number in entries:
                    self._take(entries[number], KeepReason.PEER)
                    answers[number] = KEPT
                else:
                    answers[number] = WAITS if number >= decided - 1 else GONE
        return answers

    def refuse(self, number: int) -> None:
        """Step `number`, which this rank has proposed, is not kept for that: too many were."""
        with self._lock:
            for entry in tuple(self._steps):
                if isinstance(entry, Step) and entry.number == number and entry.reason and number not in self._taken:
                    self._refuse(entry)

    # In the builder's.

    def trim(self, now: int, everything: bool = False) -> None:
        """Lets go what is old at `now` (reading of `clock`), and the oldest where little room is left."""
        fast, steps = self._fast, self._steps
        with self._lock:
            while steps:
                entry = steps[0]
                age = now - (entry.end if isinstance(entry, Step) else entry[2])
                if not everything and age <= HELD_NS and 4 * (fast.held_in - fast.held_out) <= 3 * self._most:
                    return
                steps.popleft()
                fast.held_out += _weight(entry)
                self.early += not everything and age < LEAST_NS
                if isinstance(entry, Step) and entry.reason and entry.number not in self._taken:
                    if self._run.keep.has_room(entry.reason, entry.end):
                        self._take(entry, entry.reason)
                    else:
                        self._refuse(entry)

    def _take(self, entry: Entry, reason: str) -> None:
        step = entry if isinstance(entry, Step) else _step(self._run, entry)
        step.reason = step.reason or reason  # slow for itself before slow for a peer
        self.counts[step.reason] += 1
        self._taken[step.number] = None
        if len(self._taken) > _REMEMBERED:
            del self._taken[next(iter(self._taken))]
        self._run.keep_late(step)

    def _refuse(self, step: Step) -> None:
        self.refused += 1
        step.reason = ""
        if step.head:
            self._take(step, KeepReason.HEAD)


def _number(entry: Entry) -> int:
    return entry.number if isinstance(entry, Step) else entry[0]


def _weight(entry: Entry) -> int:
    if isinstance(entry, Step):
        return len(entry.records) + len(entry.collectives) + len(entry.user_spans)
    return len(entry[4]) + len(entry[5])


def _step(run: Run, entry: Recycled) -> Step:
    number, start, end, dropped, records, collectives = entry
    step = Step(number, start, True, frozenset(), head=False)
    step.end, step.dropped, step.identity = end, dropped, run.identity
    step.records, step.collectives = records, collectives
    return step
