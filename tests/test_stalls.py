"""A collective that lasts is told while it does, and only one that is waited for, by real gloo processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.children import environment, free_port
from support.loader_jobs import SCRIPTS, spans

from otel_dl.viewing.reading import Span

pytestmark = pytest.mark.long


def start(case: str, world: int, directory: Path, stall_after: float) -> list[subprocess.Popen[str]]:
    env = environment(
        {
            "OTEL_TRACES_EXPORTER": "otel_dl_file",
            "OTEL_DL_DIR": str(directory),
            "OTEL_DL_STALL_AFTER": str(stall_after),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
        }
    )
    command = [sys.executable, str(SCRIPTS / "stalls.py"), case]
    return [
        subprocess.Popen(command, env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]


def stalls(case: str, world: int, directory: Path) -> dict[int, list[Span]]:
    """By rank, its `train.stall`s."""
    ranks = start(case, world, directory, stall_after=1)
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, said
    found: dict[int, list[Span]] = {rank: [] for rank in range(world)}
    for span in sorted(spans(directory), key=lambda span: span.end_ns):
        if span.name == "train.stall":
            assert "error.type" not in span.attributes, "the limit is far away"
            found[span.attributes["rank_id"]].append(span)
    return found


def missing(found: dict[int, list[Span]]) -> dict[int, list[list[int]]]:
    return {rank: [span.attributes["dl.missing_ranks"] for span in told] for rank, told in found.items() if told}


def test_each_report_names_those_that_had_not_come_by_then(tmp_path: Path) -> None:
    assert missing(stalls("staggered", 3, tmp_path)) == {0: [[1, 2]], 1: [[2]]}


def test_a_monitored_barrier_leaves_the_numbers_of_all_ranks_alike(tmp_path: Path) -> None:
    assert missing(stalls("monitored", 3, tmp_path)) == {0: [[1]], 2: [[1]]}


def test_one_that_computes_waits_for_nothing(tmp_path: Path) -> None:
    assert missing(stalls("computes", 2, tmp_path)) == {}


def test_a_thread_that_is_busy_beside_hides_nothing(tmp_path: Path) -> None:
    found = stalls("beside a thread", 2, tmp_path)
    assert missing(found) == {0: [[1]]}
    assert found[0][0].attributes["dl.group.id"] == "0"


def test_one_that_was_stopped_itself_accuses_nobody(tmp_path: Path) -> None:
    found = stalls("stopped", 2, tmp_path)
    assert missing(found) == {0: [[1]]}
    assert "is stopped" in found[0][0].attributes["dl.missing.words"][0]


def test_who_waits_for_a_rank_that_has_died_says_so_long_before_it_would_of_one_that_is_late(tmp_path: Path) -> None:
    waiting, dead = start("bereft", 2, tmp_path, stall_after=1_000)  # half the limit is 30 s
    try:
        assert dead.wait(60) == -signal.SIGKILL
        until = time.monotonic() + 25
        while not (told := [span for span in spans(tmp_path) if span.name == "train.stall"]):
            assert time.monotonic() < until, "nothing was said"
            time.sleep(0.1)
    finally:
        waiting.kill()
        waiting.communicate()
        dead.communicate()
    (report,) = told
    assert report.attributes["error.type"] == "GLOO_PEER_LOST"
    assert report.attributes["dl.missing_ranks"] == [1]
    assert report.attributes["dl.missing.reason"] == ["dead"]
    assert report.attributes["dl.stall.in"] == "dist.new_group"
