"""How far this host's clock is before rank 0's, asked over the job's store, and how sure that is.

On rank 0's host it is 0. Of every other host one rank asks: it draws a ticket, writes a question, waits for the answer
with rank 0's time T, and takes T for the middle of the time that it waited (Cristian, Probabilistic clock
synchronization, 1989): it is off by half of that time at most. Of several answers the one that came fastest counts. Its
host's other ranks read what it found.

A question is one tick's write; hosts ask at times of their own, so that rank 0 answers about one a second however many
there are. Rank 0 answers at once, in a thread of its own with a connection of its own, which exists where there are
other hosts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final

from otel_dl import threads
from otel_dl.ranks.run_id import RunId, host
from otel_dl.ranks.store import JobStore, StoreGone
from otel_dl.recording.records import clock, to_epoch_ns

if TYPE_CHECKING:
    from otel_dl.recording.run import Run

QUESTIONS: Final = 5
"""In a row: the best of them counts."""
AGAIN_S: Final = 300.0
_ANSWER_NS: Final = 100_000_000
"""How long a question looks for its answer at most: one that takes longer is worth nothing."""
_FOREVER_S: Final = 10 * 86_400.0
_END_S: Final = 0.2
_HOSTS: Final = "clock/hosts"
_TICKETS: Final = "clock/tickets"


def epoch_ns() -> int:
    """As in spans."""
    return to_epoch_ns(clock())


class Clocks:
    """Takes part in the exchange, once the run id is known."""

    def __init__(self, run: Run, run_id: RunId, now: Callable[[], int] = epoch_ns, here: str = "") -> None:
        self._run = run
        self._run_id = run_id
        self._now = now
        self._here = here or host()
        self._begin()

    def _begin(self) -> None:
        self._asks: bool | None = None
        """Whether this rank asks for its host; None: that is not known yet."""
        self._hosts = 1
        self._ticket = 0
        self._answers: list[tuple[int, int]] = []
        self._due = 0.0
        self._answerer: Answerer | None = None
        self._late = 0
        """The ticket for which rank 0 waited at the last tick, while there were later ones."""

    def connected(self, store: JobStore) -> None:
        self.stop(None)
        self._begin()
        self._same_host()

    @property
    def _is_elsewhere(self) -> bool:
        return self._run_id.host_of_rank_0 not in ("", self._here)

    def _same_host(self) -> None:
        if self._run_id.host_of_rank_0 == self._here:
            self._run.clock = 0, 0

    def write(self, store: JobStore) -> bool:
        if not self._is_elsewhere or self._asks is False or monotonic() < self._due:
            return False
        if self._asks is None:
            self._asks = store.add(f"clock/first/{self._here}") == 1
            if self._asks:
                self._hosts = store.add(_HOSTS)
                self._due = monotonic() + self._hosts
        elif not self._ticket:
            self._ticket = store.add(_TICKETS)
        else:
            self._ask(store)
        return True

    def read(self, store: JobStore) -> None:
        if not self._is_elsewhere:
            self._same_host()
            if self._run_id.rank == 0 and store.has(_HOSTS):
                self._serve(store)
        elif self._asks is False and monotonic() >= self._due:
            found = store.get(f"clock/of/{self._here}")
            if found is not None:
                offset, error = found.split()
                self._run.clock = int(offset), int(error)
                self._due = monotonic() + AGAIN_S

    def _ask(self, store: JobStore) -> None:
        """One question; after QUESTIONS of them, the best answer is told to this host's other ranks."""
        if len(self._answers) < QUESTIONS:
            ticket, self._ticket = self._ticket, 0
            asked = self._now()
            store.set(f"clock/q/{ticket}", "")
            self._due = monotonic() + self._hosts - 1
            until = asked + _ANSWER_NS
            while not store.has(f"clock/a/{ticket}"):
                if self._now() > until:
                    return
            answered = self._now()
            self._answers.append(estimate(asked, int(store.get(f"clock/a/{ticket}") or 0), answered))
            if len(self._answers) == QUESTIONS:
                self._ticket = -1  # the next write tells
            if self._run.clock is None or self._answers[-1][1] < self._run.clock[1]:
                self._run.clock = self._answers[-1]
            return
        self._ticket = 0
        self._run.clock = best = min(self._answers, key=lambda answer: answer[1])
        self._answers.clear()
        self._hosts = int(store.get(_HOSTS) or self._hosts)
        self._due = monotonic() + max(AGAIN_S, QUESTIONS * self._hosts)
        store.set(f"clock/of/{self._here}", f"{best[0]} {best[1]}")

    def _serve(self, store: JobStore) -> None:
        if self._answerer is None:
            self._answerer = Answerer(store.address, store.prefix, self._now)
        # A rank that died between its ticket and its question must not keep the others waiting: `add` of 0 reads.
        elif store.add(_TICKETS, 0) > self._answerer.ticket:
            late = self._answerer.ticket
            if late == self._late:
                store.set(f"clock/q/{late}", "")
            self._late = late

    def stop(self, store: JobStore | None) -> None:
        """Ends rank 0's thread."""
        answerer, self._answerer = self._answerer, None
        if answerer is not None:
            answerer.stop(store)

    def after_fork(self) -> None:
        self._begin()


def estimate(asked: int, theirs: int, answered: int) -> tuple[int, int]:
    """(own clock less theirs, how far off that is at most), from own readings before and after theirs, in ns."""
    return (asked + answered) // 2 - theirs, (answered - asked + 1) // 2


class Answerer:
    """Rank 0's thread that answers with its time."""

    def __init__(self, address: tuple[str, int], prefix: str, now: Callable[[], int]) -> None:
        self._address, self._prefix, self._now = address, prefix, now
        self._stopped = False
        self.ticket = 1
        """Whose question is next."""
        self._thread = threads.start("otel-dl-clock", self._loop)

    def stop(self, store: JobStore | None) -> None:
        """Through `store`, by the question that it waits for; without one it ends with the connection."""
        self._stopped = True
        if store is not None:
            store.set(f"clock/q/{self.ticket}", "")
            self._thread.join(_END_S)

    def _loop(self) -> None:
        with contextlib.suppress(StoreGone):  # the exchange finds out, and begins anew
            store = JobStore(self._address, self._prefix)
            while store.wait(f"clock/q/{self.ticket}", _FOREVER_S) and not self._stopped:
                store.set(f"clock/a/{self.ticket}", str(self._now()))
                self.ticket += 1
