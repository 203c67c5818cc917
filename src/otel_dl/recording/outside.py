"""What a run's time goes to outside of its steps, and the spans that the user names there.

The time in steps is known of all of them, kept or not (`keep.SlowSteps` is shown each); what lies between two steps is
evaluation, the start of workers, or something else, of which the longest stretch is remembered.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from otel_dl.recording.records import OwnSpan, RunEnded

if TYPE_CHECKING:
    from otel_dl.recording.failure import Failure
    from otel_dl.recording.keep import SlowSteps
    from otel_dl.recording.records import Evaluation, WorkersStarted

OF_A_NAME: Final = 200
"""Spans of one name outside of steps, of a run at most: a loop outside of any step must not take the others' room."""
OF_ALL: Final = 1_000
_STARTS: Final = 256
"""Starts of workers between two steps that are looked at one by one."""


class Outside:
    """Of one run. Told by the thread that bounds steps, in the order in which things end."""

    def __init__(self) -> None:
        self.evaluations = 0
        self.evaluations_ns = 0
        self.workers_ns = 0
        self.longest_ns = 0
        """The longest stretch between two steps, or after the last one, without evaluation and starts of workers."""
        self.longest_after = -1
        """The number of the step before it."""
        self._last: tuple[int, int] | None = None
        """(number, end) of the step that ended last; None before the first one, which ends the start-up."""
        self._between = False
        """Whether what follows it is none of a step yet, as far as is known."""
        self._evaluated_ns = 0
        """Since then."""
        self._started: list[tuple[int, int]] = []
        """Since then, but for those within an evaluation."""

    # Time.

    def step_begins(self, start: int) -> None:
        """The step after the last one has begun at `start`, for sure."""
        if self._between:
            self._between = False
            self._settle(start)

    def step_ends(self, number: int, end: int) -> None:
        self._last = number, end
        self._between = True

    def step_begins_later(self, number: int, start: int) -> None:
        """Step `number`, which had begun at `start`, when the one before became it, has not: nothing of it, or
        evaluation, came then."""
        if self._last is not None and not self._between:
            self.step_ends(number - 1, start)

    def evaluated(self, evaluation: Evaluation, step_start: int | None) -> None:
        """A stretch of evaluation is over; `step_start` is that of the step that is open."""
        if self._between and (step_start is None or evaluation.start < step_start):
            start, end = evaluation.start, evaluation.end
            self.evaluations += 1
            self._evaluated_ns += end - start
            self._started = [each for each in self._started if not start <= each[0] < end]

    def workers_started(self, started: WorkersStarted) -> None:
        """While no step was open."""
        if self._between and len(self._started) < _STARTS:
            self._started.append((started.start, started.end))

    def _settle(self, until: int) -> None:
        assert self._last is not None, "a step has ended"
        number, since = self._last
        started_ns = sum(end - start for start, end in self._started)
        self.evaluations_ns += self._evaluated_ns
        self.workers_ns += started_ns
        rest = until - since - self._evaluated_ns - started_ns
        if rest > self.longest_ns:
            self.longest_ns, self.longest_after = rest, number
        self._evaluated_ns = 0
        self._started.clear()

    def ended(self, end: int, steps: SlowSteps, left_out: int) -> RunEnded | None:
        """The run has ended at `end`; None where no step has before. `left_out`: spans of the user's."""
        if self._last is None:
            return None
        self.step_begins(end)
        steps.sort_in()
        return RunEnded(
            self._last[1], end, steps.count, steps.total_ns, self.evaluations, self.evaluations_ns, self.workers_ns,
            self.longest_ns, self.longest_after, left_out,
        )  # fmt: skip


Own = tuple["OwnSpans", str, int, int, "Own | None"]
"""A span that the user names outside of steps, while it is open: whose it is, its name, number and start, and the one
around it. (An object with a class of its own costs 300 ns more.)"""

_innermost: ContextVar[Own | None] = ContextVar("otel_dl.span", default=None)
"""In this thread or asyncio task. It may have ended: a generator, or a task, closes its own when it likes."""


class OwnSpans:
    """Spans that the user names outside of steps, of one run, as far as there is room."""

    def __init__(self) -> None:
        self._names: Counter[str] = Counter()
        self._count = 0
        self._open: dict[int, Own] = {}
        """By number, from 1 on."""
        self.left_out = 0

    def begin(self, name: str, start: int) -> Own | None:
        """None where there is no room for one more of this name."""
        if self._count >= OF_ALL or self._names[name] >= OF_A_NAME:
            self.left_out += 1
            return None
        self._names[name] += 1
        self._count += 1
        around = _innermost.get()
        while around is not None and not (around[0] is self and around[2] in self._open):
            around = around[4]
        number = self._count
        self._open[number] = own = self, name, number, start, around
        _innermost.set(own)
        return own

    def end(self, own: Own, end: int, error: Failure | None) -> OwnSpan | None:
        """None where it is of another run, or the run has ended before it did."""
        spans, name, number, start, around = own
        if spans is not self or self._open.pop(number, None) is None:
            return None
        if _innermost.get() is own:
            _innermost.set(around)
        return OwnSpan(name, start, end, error, number, around[2] if around is not None else 0)

    def cut_off(self, end: int, error: Failure | None) -> list[OwnSpan]:
        """The run ends: those that are open, without which what lies in them would lie in nothing."""
        ended = (self.end(own, end, error) for own in list(self._open.values()))
        return [own for own in ended if own is not None]


def forget_innermost() -> None:
    """Our code was left half done in this thread: what begins in it next lies in none of those that it has open."""
    _innermost.set(None)
