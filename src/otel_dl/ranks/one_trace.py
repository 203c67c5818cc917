"""What makes one trace of all ranks' spans: the run id, the clocks, the steps that all keep."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from otel_dl.ranks.clocks import Clocks
from otel_dl.ranks.peers import KeepRequests
from otel_dl.ranks.run_id import RunId

if TYPE_CHECKING:
    from otel_dl.ranks.store import JobStore
    from otel_dl.recording.run import Run


class OneTrace:
    """Takes part in the exchange, and writes every other tick at most: what comes behind it has its turn as well.

    `joining`, `joined` and `kept` are called by the thread that trains; `last`, in the exchange's, at the end.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.run_id = RunId(run)
        self.clocks = Clocks(run, self.run_id)
        self.keep_requests = KeepRequests(run, self._time_of_rank_0)
        self._parts = self.run_id, self.keep_requests, self.clocks
        self._wrote = False

    def joining(self, has_store: bool, rank: int, world: int) -> None:
        self.run_id.joining(has_store, rank, world)

    def joined(self) -> None:
        self.run_id.joined()

    def kept(self, number: int, reason: str, milliseconds: int) -> None:
        self.keep_requests.kept(number, reason, milliseconds)

    def connected(self, store: JobStore) -> None:
        for part in self._parts:
            part.connected(store)

    def write(self, store: JobStore) -> bool:
        self._wrote = not self._wrote and any(part.write(store) for part in self._parts)
        return self._wrote

    def read(self, store: JobStore) -> None:
        for part in self._parts:
            part.read(store)

    def last(self, store: JobStore) -> None:
        self.keep_requests.last(store)

    def stop(self, store: JobStore | None) -> None:
        """Ends the thread that answers other hosts."""
        self.clocks.stop(store)

    def after_fork(self) -> None:
        """In a forked child, which is a run of its own."""
        for part in self._parts:
            part.after_fork()

    def _time_of_rank_0(self) -> float:
        offset = self._run.clock[0] if self._run.clock is not None else 0
        return time.time() - offset / 1e9
