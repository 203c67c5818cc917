"""A rank that keeps a step, and the others: their recorders in this process, against torch's own store."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest

from otel_dl.ranks.one_trace import OneTrace
from otel_dl.ranks.peers import LOG_BYTES, KeepRequests
from otel_dl.ranks.store import JobStore, StoreGone
from otel_dl.recording.failure import Failure
from otel_dl.recording.held import HELD_NS, LEAST_NS, Held
from otel_dl.recording.keep import CAP_PER_MINUTE, SLOW_FROM, SLOW_HISTORY, NeverHead
from otel_dl.recording.ranks import Ranks
from otel_dl.recording.records import Kind, Step
from otel_dl.recording.run import Run
from otel_dl.settings import Settings

MS = 1_000_000


class Requests(Ranks):
    def __init__(self, to: KeepRequests) -> None:
        self.kept = to.kept  # type: ignore[method-assign]


class Rank:
    """One rank whose head keeps nothing. Its steps take 1 ms, by a clock of the test's."""

    def __init__(self, store: JobStore, room: int = 10_000) -> None:
        self.store = store
        self.now = 0
        self.run = Run(Settings(), NeverHead())
        self.run.identity = self.run.identity._replace(run="one", shared=True, world_size=2)
        self.seconds = 90.0
        self.requests = KeepRequests(self.run, lambda: self.seconds)
        self.run.ranks = Requests(self.requests)
        self.held = self.run.held = Held(self.run, room)
        self.requests.connected(store)

    def step(self, milliseconds: int = 1, fails: bool = False, warm: bool = False) -> int:
        step = self.run.open(self.now, True, frozenset())
        self.now += milliseconds * MS
        step.records.append((Kind.FORWARD, step.start, self.now, None, None))
        step.warm = warm
        if fails:
            step.error = Failure("ValueError", "")
        self.run.close(step, self.now)
        return step.number

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def tick(self) -> bool:
        wrote = self.requests.write(self.store)
        self.requests.read(self.store)
        return wrote

    @property
    def kept(self) -> dict[int, str]:
        """Steps by number, with the reason. (The first is kept as warm-up by each.)"""
        return {step.number: step.reason for step in self.run.closed if isinstance(step, Step) and step.number}


@pytest.fixture
def server() -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)


def connect(server: Any) -> JobStore:
    """On a busy machine more than a second may pass."""
    for _ in range(10):
        with contextlib.suppress(StoreGone):
            return JobStore(("127.0.0.1", server.port), "otel_dl/0/0/")
    raise AssertionError("no connection")


@pytest.fixture
def ranks(server: Any) -> list[Rank]:
    return [Rank(connect(server)) for _ in range(2)]


def train(ranks: list[Rank], count: int) -> None:
    for rank in ranks:
        rank.steps(count)


def tick(ranks: list[Rank]) -> list[bool]:
    return [rank.tick() for rank in ranks] + [rank.tick() for rank in ranks]


def test_a_step_that_failed_on_one_rank_is_kept_by_the_other(ranks: list[Rank]) -> None:
    train(ranks, 10)
    number = ranks[0].step(fails=True)
    ranks[1].step()
    train(ranks, 10)
    tick(ranks)
    assert [rank.kept for rank in ranks] == [{number: "error"}, {number: "peer"}]
    assert len(ranks[1].run.closed[-1].records) == 1


def test_a_slow_step_is_kept_by_both(ranks: list[Rank]) -> None:
    train(ranks, SLOW_FROM)
    number = ranks[0].step(100)
    ranks[1].step()
    assert ranks[0].kept == {}, "not before it is known that all keep it"
    tick(ranks)
    assert [rank.kept for rank in ranks] == [{number: "slow"}, {number: "peer"}]


def test_a_step_that_is_slow_on_both_is_so_on_both_and_counts_once(ranks: list[Rank]) -> None:
    train(ranks, SLOW_HISTORY)
    numbers: list[int] = []
    for _ in range(CAP_PER_MINUTE):
        numbers.append(max(rank.step(100) for rank in ranks))
        train(ranks, 50)
    tick(ranks)
    assert [rank.kept for rank in ranks] == [dict.fromkeys(numbers, "slow")] * 2


def test_a_step_that_is_slow_for_all_is_proposed_by_the_first_alone(ranks: list[Rank]) -> None:
    train(ranks, SLOW_HISTORY)
    number = max(rank.step(100) for rank in ranks)
    assert tick(ranks) == [True, False, False, False]
    assert [rank.kept for rank in ranks] == [{number: "slow"}] * 2


def test_of_a_log_that_is_full_all_ranks_take_the_same_and_what_is_behind_is_counted(ranks: list[Rank]) -> None:
    train(ranks, 3_000)
    first, second = ranks
    for number in range(1, 3_000):
        (first if number % 2 else second).requests.kept(number, "error", 1)
    # Neither sees in time what the other writes: both have read, then both write.
    seconds = list(second.requests._own)
    second.requests._own.clear()
    assert first.requests.write(first.store)
    log = first.store.get("keep/1") or b""
    assert len(log) > LOG_BYTES
    second.store.append("keep/1", "".join(f"{kind}{number}:1 " for kind, number, _ in seconds))
    second.requests._written.update({number: ("e", 1) for _, number, _ in seconds})
    for rank in ranks:
        rank.requests.read(rank.store)
    taken = log[:LOG_BYTES].count(b" ")
    assert [len(rank.requests._seen) for rank in ranks] == [taken, taken]
    assert first.requests._seen == second.requests._seen
    assert [rank.run.dropped["requests to other ranks to keep a step"] for rank in ranks] == [
        1_500 - taken,
        len(seconds),
    ]
    assert [rank.requests._written for rank in ranks] == [{}, {}]


def test_a_slow_step_that_found_no_room_in_the_log_is_kept_by_nobody(ranks: list[Rank]) -> None:
    train(ranks, SLOW_HISTORY)
    ranks[0].store.append("keep/1", "e1:1 " * LOG_BYTES)
    number = ranks[0].step(100)
    ranks[1].step()
    assert tick(ranks) == [False] * 4
    for rank in ranks:
        rank.held.trim(rank.now, everything=True)
    assert [number in rank.kept for rank in ranks] == [False, False]
    assert ranks[0].run.dropped["requests to other ranks to keep a step"] == 1


def test_a_step_with_one_time_work_is_kept_by_both(ranks: list[Rank]) -> None:
    first, second = ranks
    train(ranks, 10)
    first.step(warm=True)
    second.step()
    train(ranks, 2)
    assert first.kept == second.kept == {}, "nobody has agreed yet"
    tick(ranks)
    tick(ranks)
    assert (first.kept, second.kept) == ({10: "warmup"}, {10: "peer"})


def test_of_ever_changing_shapes_all_ranks_keep_the_same_few(ranks: list[Rank]) -> None:
    first, second = ranks
    for _ in range(100):
        first.step(warm=True)
        second.step()
    for _ in range(3):
        tick(ranks)
    assert len(first.kept) == CAP_PER_MINUTE
    assert first.kept.keys() == second.kept.keys()


def test_logs_that_nobody_reads_any_more_are_deleted(ranks: list[Rank], server: Any) -> None:
    first, second = ranks
    second.run.identity = second.run.identity._replace(rank=1)
    before = server.num_keys()
    for minute in range(30):
        for rank in ranks:
            rank.seconds = 60.0 * minute
        first.step(fails=True)
        second.step()
        for _ in range(3):
            tick(ranks)
    assert len(second.kept) == 29, "the first step is warm-up on each"
    assert server.num_keys() - before < 10


def test_of_many_slow_ones_all_ranks_keep_the_same_few(ranks: list[Rank]) -> None:
    train(ranks, SLOW_HISTORY)
    for turn in range(2 * CAP_PER_MINUTE):
        for number, rank in enumerate(ranks):
            rank.step(100 if number == turn % 2 else 1)
        train(ranks, 20)
    tick(ranks)
    kept = [rank.kept for rank in ranks]
    assert len(kept[0]) == CAP_PER_MINUTE
    assert kept[0].keys() == kept[1].keys()
    assert sum(rank.held.refused for rank in ranks) == CAP_PER_MINUTE
    ranks[0].held.trim(ranks[0].now, everything=True)
    assert len(ranks[0].kept) == CAP_PER_MINUTE, "what was refused stays so"


def test_one_that_lasts_twice_as_long_as_all_before_it_is_kept_all_the_same(ranks: list[Rank]) -> None:
    train(ranks, SLOW_HISTORY)
    for _ in range(CAP_PER_MINUTE + 1):
        ranks[0].step(100)
        ranks[1].step()
        train(ranks, 20)
    tick(ranks)
    longer, not_long_enough = max((rank.step(200), rank.step(399)) for rank in ranks)
    train(ranks, 20)
    tick(ranks)
    assert [rank.kept[longer] for rank in ranks] == ["slow", "slow"]
    assert [not_long_enough in rank.kept for rank in ranks] == [False, False]


def test_a_step_that_is_still_to_come_is_kept_when_it_has_come(ranks: list[Rank]) -> None:
    ahead, behind = ranks
    ahead.steps(10)
    number = ahead.step(fails=True)
    behind.steps(5)
    tick(ranks)
    assert behind.kept == {}
    behind.steps(10)
    tick(ranks)
    assert behind.kept == {number: "peer"}


def test_one_that_is_no_longer_held_is_counted(ranks: list[Rank]) -> None:
    ranks[1].steps(11)
    ranks[1].now += HELD_NS + MS
    ranks[1].held.trim(ranks[1].now)
    ranks[0].steps(9)
    ranks[0].step(fails=True)
    tick(ranks)
    tick(ranks)
    assert ranks[1].kept == {}
    assert ranks[1].run.dropped == {"steps that other ranks keep, and that were no longer held": 1}


def test_steps_are_held_for_three_seconds_at_least(ranks: list[Rank]) -> None:
    rank = ranks[0]
    rank.steps(1_000)
    rank.held.trim(LEAST_NS)
    assert len(rank.held) == 999
    assert rank.held.early == 0
    rank.held.trim(HELD_NS + 500 * MS)
    assert len(rank.held) == pytest.approx(500, abs=2)


def test_within_a_bound_and_what_leaves_early_is_counted(server: Any) -> None:
    rank = Rank(connect(server), room=100)
    rank.steps(1 + 150)
    assert len(rank.held) == 100
    assert rank.run.fast.not_held == 50
    rank.held.trim(rank.now)
    assert len(rank.held) == 75
    assert rank.held.early == 25
    rank.steps(50)
    assert len(rank.held) == 100


def test_without_an_answer_a_rank_decides_alone(ranks: list[Rank]) -> None:
    rank = ranks[0]
    rank.steps(SLOW_FROM)
    number = rank.step(100)
    rank.steps(10)
    rank.held.trim(rank.now + HELD_NS + MS)
    assert rank.kept == {number: "slow"}


def test_what_has_nothing_to_ask_writes_nothing(ranks: list[Rank]) -> None:
    train(ranks, 20)
    assert not any(tick(ranks))
    ranks[0].step(fails=True)
    assert tick(ranks) == [True, False, False, False]


def test_it_leaves_the_next_tick_to_others(ranks: list[Rank]) -> None:
    store, run = ranks[0].store, ranks[0].run
    parts = OneTrace(run)
    parts.connected(store)
    wrote = []
    for number in range(4):
        parts.kept(number, "error", 1)
        wrote.append(parts.write(store))
    assert wrote == [True, False, True, False]
