"""Which steps are exported: the head decision when a step begins, the reason when it ends."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections import Counter, deque
from typing import Final, Protocol

from otel_dl.recording import ids
from otel_dl.recording.records import Step
from otel_dl.semconv import KeepReason, SpanName

CREDIT: Final = 1_000
"""The first steps of a run, all of which are kept where no sampler is set."""
EVERY: Final = 64
"""After them one step in so many; a power of two, so that the choices of ranks are nested."""

SLOW_FACTOR: Final = 3
SLOW_HISTORY: Final = 1_000
SLOW_FROM: Final = 100

CAP_PER_MINUTE: Final = 6
CAP_PER_RUN: Final = 1_000
_GOLDEN: Final = 0x9E3779B1
"""2 ** 32 by the golden ratio: scatters consecutive numbers (Knuth, The Art of Computer Programming, 6.4)."""
_MINUTE_NS: Final = 60_000_000_000


class Head(Protocol):
    """The decision that is made when a trace begins."""

    adaptive: bool
    """Whether it is otel-dl's own, made without a sampler."""
    off: bool
    """Whether nothing at all is exported, whatever the reason."""

    def step(self, number: int) -> bool: ...

    def no_earlier(self, number: int) -> int:
        """The first step from `number` on that `step` may say yes to: how long nobody has to ask."""
        ...

    def other(self, trace_id: int, name: str) -> bool:
        """The decision for a trace of another kind (evaluation, a batch), by its id."""
        ...


class AdaptiveHead:
    """Short runs whole, then a fixed share: what counts where no sampler is set."""

    adaptive = True
    off = False

    def step(self, number: int) -> bool:
        return number < CREDIT or number % EVERY == 0

    def no_earlier(self, number: int) -> int:
        return number if number < CREDIT else -(-number // EVERY) * EVERY

    def other(self, trace_id: int, name: str) -> bool:
        return True


def batch_sampled(head: Head, nonce: str, round: int, index: int) -> bool:
    """The decision for the trace of a batch that a worker reads, known before the batch has a step.

    Where no sampler is set: the first ones, as with steps, then a fixed share, which every process that knows the batch
    computes alike, and which is spread over all workers.
    """
    if head.adaptive:
        return (round == 0 and index < CREDIT) or ((index + round) * _GOLDEN >> 16) % EVERY == 0
    # No id is derived where the answer is known.
    return not isinstance(head, NeverHead) and head.other(ids.batch_trace_id(nonce, round, index), SpanName.FETCH)


class NeverHead:
    """A ratio of 0 (a TRACEPARENT that is not sampled), or nothing at all (`always_off`)."""

    adaptive = False

    def __init__(self, off: bool = False) -> None:
        self.off = off

    def step(self, number: int) -> bool:
        return False

    def no_earlier(self, number: int) -> int:
        return sys.maxsize

    def other(self, trace_id: int, name: str) -> bool:
        return False


class SlowSteps:
    """Tells a slow step: over 3 times the 99th percentile of the last 1,000 steps, from 100 on.

    Exact, and cheap for the ordinary step: a duration (ns) up to `limit` is certainly not slow, and whoever finds it so
    appends it to `new`; any other is shown to `add`. `sort_in` is called after TOGETHER steps at the latest. For each
    new duration moves a percentile down by one rank at most: that is how far `limit` stays below the rule's own.
    """

    TOGETHER: Final = 32

    def __init__(self) -> None:
        self.limit = -1
        self.new: list[int] = []
        self.count = self.total_ns = 0
        """Of all that were sorted in: how many, and how long they took in all."""
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, duration: int) -> bool:
        """Whether `duration` is slow against the steps before; it belongs to the history from now on."""
        self.sort_in()
        ordered = self._sorted
        count = len(ordered)
        self.new.append(duration)
        return count >= SLOW_FROM and duration > SLOW_FACTOR * ordered[count * 99 // 100]

    def sort_in(self) -> None:
        """Sorts the new durations in, and sets `limit` anew."""
        ordered = self._sorted
        self.count += len(self.new)
        self.total_ns += sum(self.new)
        for duration in self.new:
            if len(ordered) == SLOW_HISTORY:
                del ordered[bisect_left(ordered, self._recent.popleft())]
            self._recent.append(duration)
            insort(ordered, duration)
        self.new.clear()
        rank = len(ordered) * 99 // 100 - self.TOGETHER
        self.limit = SLOW_FACTOR * ordered[rank] if len(ordered) >= SLOW_FROM else -1


class Keep:
    """Decides at the end of a step, and counts what it decided."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.kept: Counter[str] = Counter()
        self.capped: Counter[str] = Counter()
        self.slow = SlowSteps()
        self._recent: dict[str, deque[int]] = {
            reason: deque(maxlen=CAP_PER_MINUTE) for reason in (KeepReason.SLOW, KeepReason.WARMUP)
        }
        self._late: Counter[str] | None = None

    def decide_together(self, late: Counter[str]) -> None:
        """From now on `slow` and `warmup` are proposals to all ranks, whose cap holds; what is kept then is counted in
        `late`."""
        self._late = late

    def decide(self, step: Step) -> str:
        """The reason for which `step` is exported, empty where it is not: the first that holds."""
        slow = self.slow.add(step.end - step.start)
        if slow and self._late is not None:
            slow = self._late[KeepReason.SLOW] + self._late[KeepReason.PEER] < CAP_PER_RUN
        if step.number and step.error is None and not (slow or step.head or step.requested or step.warm):
            return ""
        if self.head.off:
            return ""
        reason = ""
        if step.error is not None:
            reason = KeepReason.ERROR
        elif step.requested:
            reason = KeepReason.REQUESTED
        elif slow and self._may(KeepReason.SLOW, step):
            reason = KeepReason.SLOW
        elif (step.number == 0 or step.warm) and self._may(KeepReason.WARMUP, step):
            reason = KeepReason.WARMUP
        elif step.head:
            reason = KeepReason.HEAD
        if reason and not self.is_proposal(reason, step.number):
            self.kept[reason] += 1
        return reason

    def is_proposal(self, reason: str, number: int) -> bool:
        """Whether all ranks decide together if step `number` is kept for this. The first is warm-up on each."""
        return self._late is not None and (reason == KeepReason.SLOW or (reason == KeepReason.WARMUP and number > 0))

    def _may(self, reason: str, step: Step) -> bool:
        return self.is_proposal(reason, step.number) or self.has_room(reason, step.end)

    def has_room(self, reason: str, now: int) -> bool:
        """Whether one more may be kept for `reason` at `now`, which then is."""
        recent = self._recent[reason]
        if self.kept[reason] >= CAP_PER_RUN or (len(recent) == CAP_PER_MINUTE and now - recent[0] < _MINUTE_NS):
            self.capped[reason] += 1
            return False
        recent.append(now)
        return True
