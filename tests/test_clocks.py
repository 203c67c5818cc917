"""The offset of another host's clock, estimated over torch's own store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from otel_dl.ranks import clocks
from otel_dl.ranks.clocks import QUESTIONS, Clocks, estimate
from otel_dl.ranks.run_id import RunId
from otel_dl.ranks.store import JobStore
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.run import Run
from otel_dl.settings import Settings

AHEAD = 1_234_567_890
"""ns that the other host's clock is before rank 0's."""


@pytest.fixture
def server() -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)


class Rank:
    def __init__(self, server: Any, number: int, host: str, ahead: int = 0) -> None:
        self.store = JobStore(("127.0.0.1", server.port), "otel_dl/0/0/")
        self.run = Run(Settings(), NeverHead())
        run_id = RunId(self.run)
        run_id.joining(True, number, 3)
        run_id.host_of_rank_0 = "a"
        self.clocks = Clocks(self.run, run_id, lambda: time.time_ns() + ahead, host)
        self.clocks.connected(self.store)

    def tick(self) -> None:
        self.clocks.write(self.store)
        self.clocks.read(self.store)


@pytest.fixture
def ranks(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    """Rank 0, another one on its host, and two on a host whose clock is ahead."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(clocks, "monotonic", lambda: float(next(seconds)))
    ranks = [Rank(server, 0, "a"), Rank(server, 1, "a"), Rank(server, 2, "b", AHEAD), Rank(server, 3, "b", AHEAD)]
    yield ranks
    for rank in ranks:
        rank.clocks.stop(rank.store)


def test_the_clock_of_another_host_is_known_within_the_error_that_is_said(ranks: list[Rank]) -> None:
    for _ in range(4 * QUESTIONS):
        for rank in ranks:
            rank.tick()
    assert [rank.run.clock for rank in ranks[:2]] == [(0, 0)] * 2
    found = ranks[2].run.clock
    assert found is not None
    offset, error = found
    assert abs(offset - AHEAD) <= error
    assert ranks[3].run.clock == found, "one rank asks for its host"


def test_it_is_half_of_the_wait_at_most() -> None:
    assert estimate(100, 1_000, 300) == (-800, 100)
    for theirs_at in (100, 180, 300):
        offset, error = estimate(100, theirs_at + 800, 300)
        assert abs(offset + 800) <= error


def test_nobody_answers_where_all_ranks_are_on_one_host(server: Any) -> None:
    ranks = [Rank(server, 0, "a"), Rank(server, 1, "a")]
    for _ in range(3):
        for rank in ranks:
            rank.tick()
    assert ranks[0].clocks._answerer is None
    assert not ranks[0].store.has("clock/hosts")
