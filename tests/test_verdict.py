"""Who is missing, out of what the ranks say: one row a situation, without processes."""

from __future__ import annotations

from typing import Any

import pytest

from otel_dl.ranks.verdict import LEFT, Issued, Life, RankStatus, Verdict, attributes, judge
from otel_dl.recording.ranks import Group, Wait

S = 1_000_000_000
NOW = 1_000 * S
SINCE = NOW - 10 * S
GROUP = Group("0", (0, 1, 2, 3), "gloo", 20.0)
WAIT = Wait("dist.all_reduce", GROUP, 431, 0, 4_000)
INIT = Wait("dist.init_process_group", GROUP, 0, 0)
HERE = Issued(431, "dist.all_reduce", 4_000)


def says(rank: int, latest: Issued | None, /, at: int = NOW - S // 2, **changes: Any) -> RankStatus:
    status = RankStatus(
        rank=rank, at=at, pid=1, step=87, doing="forward", since=NOW - 9 * S, where="train.py:41",
        issued={"0": latest} if latest is not None else {}, latest=None, waits=None, end="",
    )  # fmt: skip
    return status._replace(**changes)


def waits(rank: int, **changes: Any) -> RankStatus:
    return says(rank, HERE, waits=("dist.all_reduce", "0", 431), **changes)


def before(rank: int, **changes: Any) -> RankStatus:
    return says(rank, Issued(430, "dist.all_reduce", 4_000), **changes)


CASES = {
    "computes": (before(2), [(2, "late")]),
    "waits for data": (before(2, doing="dataloader.next"), [(2, "elsewhere")]),
    "in a collective of another group": (before(2, waits=("dist.barrier", "3", 7)), [(2, "elsewhere")]),
    "stopped before": (before(2, at=NOW, life=Life.STOPPED), [(2, "silent")]),
    "stopped inside": (waits(2, at=NOW, life=Life.STOPPED), [(2, "silent")]),
    "silent on another host": (before(2, at=NOW - 4 * S), [(2, "silent")]),
    "killed before": (before(2, life=Life.DEAD), [(2, "dead")]),
    "killed inside": (waits(2, life=Life.DEAD), [(2, "dead")]),
    "killed, its page tells of another group": (says(2, None, latest="3", life=Life.DEAD), [(2, "dead")]),
    "raised before": (before(2, life=Life.DEAD, end="ValueError"), [(2, "dead")]),
    "about to end, before": (before(2, life=Life.RUNS, end="ValueError"), [(2, "dead")]),
    "finished before, on another host": (before(2, end="finished", at=SINCE - 9 * S), [(2, "dead")]),
    "another operation": (says(2, Issued(431, "dist.broadcast", 4_000)), [(2, "mismatch")]),
    "another size": (says(2, Issued(431, "dist.all_reduce", 36)), [(2, "mismatch")]),
    "aborted for its size": (says(2, Issued(431, "dist.all_reduce", 36), life=Life.DEAD), [(2, "mismatch")]),
    "failed of the same, and ended": (waits(2, life=Life.DEAD, end="RuntimeError"), []),
    "ended by torchrun for it": (waits(2, life=Life.DEAD, end="SIGTERM"), []),
    "is through already": (says(2, Issued(432, "dist.all_reduce", 4_000)), []),
    "an old status, not old enough": (before(2, at=NOW - 5 * S // 2), None),
    "a status from before the wait": (before(2, at=SINCE - S), [(2, "silent")]),
    "only another group's latest is known": (before(2, latest="3", life=Life.RUNS), None),
    "on a host whose clock is not known": (before(2, at=0), None),
    "ended on such a host, before": (before(2, at=0, end="ValueError"), [(2, "dead")]),
    "has destroyed its groups before": (before(2, end=LEFT), [(2, "elsewhere")]),
    "has destroyed its groups after": (waits(2, end=LEFT, life=Life.RUNS), []),
    "another group's latest, and what it said a moment ago": (
        before(2, latest="3", life=Life.RUNS, whole_at=NOW - S),
        [(2, "late")],
    ),
    "another group's latest, and what it said before the wait": (
        before(2, latest="3", life=Life.RUNS, whole_at=SINCE - S),
        None,
    ),
    "ended, and what it had issued is not known": (says(2, None, latest="3", life=Life.DEAD, end="SIGTERM"), None),
}


@pytest.mark.parametrize("case", CASES)
def test_who_is_missing(case: str) -> None:
    status, expected = CASES[case]
    found = judge(WAIT, 0, {1: waits(1), 2: status, 3: waits(3)}, SINCE, NOW)
    assert _seen(found) == expected
    assert ("dl.missing_ranks" in attributes(found.seen_by(0))) == (expected is not None)


def _seen(found: Verdict) -> list[tuple[int, str]] | None:
    missing = found.seen_by(0)
    return None if missing is None else [(one.rank, one.reason) for one in missing]


def test_where_the_own_status_is_old_as_well_the_store_is_slow_and_nobody_is_silent() -> None:
    silent = before(2, at=NOW - 4 * S)
    for own, expected in ((NOW - S, [(2, "silent")]), (NOW - 5 * S // 2, None)):
        found = judge(WAIT, 0, {0: waits(0, at=own), 1: waits(1), 2: silent, 3: waits(3)}, SINCE, NOW)
        assert _seen(found) == expected


def test_one_unknown_makes_the_whole_list_unknown() -> None:
    found = judge(WAIT, 0, {1: before(1), 3: waits(3)}, SINCE, NOW)
    assert found.missing is None
    assert "rank 2 has given no sign" in found.words(0)


def test_a_store_that_is_gone_makes_the_list_unknown() -> None:
    found = judge(WAIT, 0, {}, SINCE, NOW, "the job's store is gone")
    assert found.missing is None
    assert found.words(0).endswith("is not known: the job's store is gone")


def test_a_rank_that_never_started_is_missing_at_init() -> None:
    started = {rank: says(rank, None, waits=("dist.init_process_group", "0", 0)) for rank in (1, 3)}
    assert _seen(judge(INIT, 0, started, SINCE, NOW)) == [(2, "silent")]
    assert judge(INIT, 0, started, NOW - S, NOW).missing is None, "it may be on its way"


def test_ranks_that_do_not_fit_together_are_missing_to_each_other() -> None:
    two = WAIT._replace(group=GROUP._replace(ranks=(0, 1)))
    found = Verdict.decode(judge(two, 0, {1: says(1, Issued(431, "dist.broadcast", 8))}, SINCE, NOW).encode().encode())
    assert [(one.rank, one.reason) for one in found.seen_by(0) or ()] == [(1, "mismatch")]
    assert [(one.rank, one.reason) for one in found.seen_by(1) or ()] == [(0, "mismatch")]


def test_one_that_died_of_what_does_not_fit_is_not_missing() -> None:
    """gloo aborts a rank that is sent too much."""
    said = {1: waits(1), 2: waits(2, life=Life.DEAD), 3: says(3, Issued(431, "dist.all_reduce", 36))}
    found = judge(WAIT, 0, said, SINCE, NOW)
    assert _seen(found) == [(3, "mismatch")]
    assert "rank 2 had come, and is dead" in found.words(0)


def test_the_words() -> None:
    data = before(2, doing="dataloader.next", since=NOW - 93 * S)
    found = judge(WAIT, 0, {1: waits(1), 2: data, 3: waits(3)}, SINCE, NOW)
    assert found.words(0) == ("so have ranks 1,3; rank 2 has been in dataloader.next at step 87 for 93 s (train.py:41)")


def test_the_words_outside_any_phase_tell_the_line() -> None:
    assert before(2, doing="").words(NOW) == "has been outside any phase at step 87 for 9.0 s (train.py:41)"
    assert before(2, doing="", step=None).words(NOW) == "has been outside any step for 9.0 s (train.py:41)"


def test_of_many_missing_ranks_some_are_told() -> None:
    wide = WAIT._replace(group=GROUP._replace(ranks=tuple(range(100))))
    found = judge(wide, 0, {rank: before(rank) for rank in range(1, 100)}, SINCE, NOW)
    told = attributes(found.seen_by(0))
    assert len(told["dl.missing_ranks"]) == len(told["dl.missing.reason"]) == 64
    assert told["dl.missing_ranks.count"] == 99
    assert told["dl.missing.words"][0] == "has been in forward at step 87 for 9.0 s (train.py:41)"
    assert [bool(words) for words in told["dl.missing.words"]] == [True] * 8 + [False] * 56
    assert "91 more (91 late)" in found.words(0)


@pytest.mark.parametrize("status", [before(2), waits(3, life=Life.DEAD, end="SIGTERM")])
def test_a_status_survives_its_way_through_the_store(status: RankStatus) -> None:
    assert RankStatus.decode(status.encode().encode()) == status


@pytest.mark.parametrize("late", [(), (3,), tuple(range(1, 10_000, 2)), tuple(range(1, 10_000))])
def test_a_verdict_over_ten_thousand_ranks_survives_its_way_and_is_small(late: tuple[int, ...]) -> None:
    wide = WAIT._replace(group=GROUP._replace(ranks=tuple(range(10_000))))
    statuses = {rank: waits(rank) for rank in range(10_000)} | {rank: before(rank) for rank in late}
    made = judge(wide, 0, statuses, SINCE, NOW)._replace(communicator=("ab" * 128, "0x1"))
    said = made.encode().encode()
    assert len(said) < (6_500 if len(late) == 5_000 else 1_700)
    found = Verdict.decode(said)
    assert (found.arrived, found.communicator) == (made.arrived, made.communicator)
    assert _seen(found) == _seen(made) == [(rank, "late") for rank in late]
    assert found.words(0) == made.words(0)
    assert attributes(found.seen_by(0)) == attributes(made.seen_by(0))


def test_a_verdict_that_nobody_can_make_survives_its_way() -> None:
    made = judge(WAIT, 0, {}, SINCE, NOW)
    assert made.missing is None
    assert Verdict.decode(made.encode().encode()) == made


def test_ranks_are_told_in_order_however_their_group_has_them() -> None:
    turned = WAIT._replace(group=GROUP._replace(ranks=(3, 2, 1, 0)))
    found = judge(turned, 0, {rank: before(rank) for rank in (1, 2, 3)}, SINCE, NOW)
    assert _seen(Verdict.decode(found.encode().encode())) == [(1, "late"), (2, "late"), (3, "late")]


def test_where_each_rank_gives_another_size_the_rare_ones_are_not_told_apart() -> None:
    wide = WAIT._replace(group=GROUP._replace(ranks=tuple(range(10_000))))
    statuses = {rank: says(rank, Issued(431, "dist.all_reduce", 4_000 + rank)) for rank in range(10_000)}
    said = judge(wide, 0, statuses, SINCE, NOW).encode().encode()
    assert len(said) < 4_000
    found = Verdict.decode(said)
    assert _seen(found) == [(rank, "mismatch") for rank in range(1, 10_000)]
    assert found.seen_by(9_999) is None, "whether it differs from 9,998 is not known any more"
    assert "is not known: of what the ranks have issued" in found.words(9_999)
