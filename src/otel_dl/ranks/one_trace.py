"""What makes one trace of all ranks' spans: the run id, the clocks, the steps that all keep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from otel_dl.ranks.clocks import Clocks
from otel_dl.ranks.peers import KeepRequests
from otel_dl.ranks.run_id import RunId

if TYPE_CHECKING:
    from otel_dl.ranks.exchange import Participant
    from otel_dl.ranks.store import JobStore
    from otel_dl.recording.run import Run


class OneTrace:
    """`participants` belong into the exchange, in this order; `last` is called at the end, after the run's last step
    was closed, in the exchange's thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.run_id = RunId(run)
        self.clocks = Clocks(run, self.run_id)
        self.keep_requests = KeepRequests(run, self._time_of_rank_0)

    @property
    def participants(self) -> Sequence[Participant]:
        return self.run_id, self.keep_requests, self.clocks

    def last(self, store: JobStore | None) -> None:
        if store is not None:
            self.keep_requests.last(store)
        self.clocks.stop()

    def after_fork(self) -> None:
        """In a forked child, which is a run of its own."""
        self.__init__(self._run)

    def _time_of_rank_0(self) -> float:
        offset = self._run.clock[0] if self._run.clock is not None else 0
        return time.time() - offset / 1e9
