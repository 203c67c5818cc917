"""One rank of a job misbehaves: what the exceptions and last reports of the others say of it, by real gloo processes.

The truth is what the script under test writes down (`tests/scripts/rank_ends.py`): who did what.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.rank_jobs import Case, Outcome, run

BUSY = frozenset({"late", "elsewhere"})
SILENT = frozenset({"silent"})
DEAD = frozenset({"dead"})
NOBODY = frozenset[str]()
MISMATCH = frozenset({"mismatch"})

QUICK = (
    Case("killed", reasons=DEAD),
    Case("sleeps", reasons=BUSY, limit=4),
)
ENDS = (
    Case("never", reasons=SILENT),
    Case("starts late"),
    Case("sleeps", reasons=BUSY),
    Case("late"),
    Case("stopped before", reasons=SILENT),
    Case("stopped inside", reasons=SILENT),
    Case("killed", reasons=DEAD),
    Case("crashes", reasons=DEAD),
    Case("raises", reasons=DEAD),
    Case("uneven", reasons=BUSY),
    Case("mismatch", reasons=MISMATCH),
    Case("store goes", reasons=BUSY),
)
ELSEWHERE = (
    *(Case(scenario, at, reasons=reasons)
      for at in ("ddp", "async") for scenario, reasons in (("sleeps", BUSY), ("killed", DEAD), ("late", NOBODY))),
    *(Case(scenario, "plain", 0, reasons=reasons)
      for scenario, reasons in (("sleeps", BUSY), ("stopped before", SILENT), ("killed", DEAD), ("crashes", DEAD),
                                ("raises", DEAD))),
)  # fmt: skip


def table(cases: list[Case], directory: Path, at_once: int = 2) -> list[Outcome]:
    with ThreadPoolExecutor(at_once) as pool:
        outcomes = list(pool.map(run, cases, [directory / str(number) for number in range(len(cases))]))
    print()
    for outcome in outcomes:
        if not outcome.told:
            print(f"{outcome.case}  all ranks went on: {outcome.done}")
        for told in outcome.told:
            print(f"{outcome.case}  rank {told.rank}: {told.by:7} {told.error_type:15} {told.missing}"
                  f" {told.after:4.2f} s  {told.words[9:]}")  # fmt: skip
    return outcomes


def check(outcome: Outcome) -> None:
    case = outcome.case
    context = f"{case} {outcome.codes}\n{outcome.output[-6000:]}"
    survivors = {code for rank, code in outcome.codes.items() if rank != case.who}
    if case.scenario != "mismatch":
        assert survivors <= {1 if case.reasons else 0}, context
    if not case.reasons:
        assert outcome.done == list(range(case.world)), context
        assert not outcome.told, context
        return
    assert len(outcome.told) == case.world - 1, context
    if case.scenario == "mismatch":
        # Of two that do not fit together gloo aborts the one that receives too much: it says nothing more (SIGABRT).
        assert any(_by_culprit(outcome, names) or names == {case.who: "mismatch"} for names in outcome.claims), context
        return
    early = [told for told in outcome.told if told.ended_early]
    assert not early or any(told.missing is not None or f"rank {case.who} " in told.words for told in early), context
    for told in outcome.told:
        if told.ended_early and told.missing is None:
            assert told.by == "nothing" or f"rank {case.who} " in told.words, (
                f"rank {told.rank}: {told.words}\n{context}"
            )
            continue
        assert told.by != "nothing", f"rank {told.rank} says nothing\n{context}"
        # Never a wrong set; that it is not known stands where the store has gone with the culprit.
        unknown = (
            case.culprit == 0 or case.scenario == "store goes" or (case.starter, case.scenario) == ("hosts", "killed")
        )
        assert told.missing is not None or unknown, f"rank {told.rank}: {told.words}\n{context}"
    for names in filter(None, outcome.claims):  # the culprit itself, where it comes late, finds nobody missing
        assert set(names) == {case.who}, f"{names}\n{context}"
        assert names[case.who] in case.reasons, f"{names}\n{context}"


def _by_culprit(outcome: Outcome, names: dict[int, str]) -> bool:
    """What does not fit together is missing to each other: the culprit names the others."""
    return outcome.case.scenario == "mismatch" and set(names.values()) == {"mismatch"}


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_others_name_who_is_missing(case: Case, tmp_path: Path) -> None:
    (outcome,) = table([case], tmp_path)
    check(outcome)


def chosen(*scenarios: str, **changes: Any) -> list[Case]:
    return [case._replace(**changes) for case in ENDS if case.scenario in scenarios]


def started_by(starter: str) -> list[Case]:
    some = chosen("sleeps", "killed", "raises", "stopped before", "late", world=3, starter=starter)
    return [*some, Case("killed", "ddp", world=3, starter=starter, reasons=DEAD)]


TABLES = {
    "2 ranks": list(ENDS),
    "4 ranks": chosen("never", "sleeps", "stopped inside", "killed", "raises", "mismatch", world=4),
    "8 ranks": chosen("never", "sleeps", "killed", "stopped before", world=8, limit=20, starter="torchrun"),
    "in backward, in a wait, rank 0": list(ELSEWHERE),
    "torchrun": started_by("torchrun"),
    "spawn": started_by("spawn"),
    # No rank can read another's page: what is known is what each has said, by the store.
    "hosts": chosen(
        "sleeps", "late", "stopped before", "stopped inside", "killed", "raises", "uneven", world=3, starter="hosts"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TABLES)
def test_table(name: str, tmp_path: Path) -> None:
    for outcome in table(TABLES[name], tmp_path, at_once=1 if name == "8 ranks" else 2):
        check(outcome)
