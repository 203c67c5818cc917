"""What a rank says of itself, and what its neighbours read of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.children import environment

from otel_dl.forensics import layout
from otel_dl.forensics.folder import StatusFolder
from otel_dl.forensics.memory import Memory
from otel_dl.ranks.statuses import Statuses
from otel_dl.ranks.verdict import Life
from otel_dl.recording.keep import AdaptiveHead
from otel_dl.recording.run import Run
from otel_dl.settings import Settings

SECOND = 1_000_000_000
OTHER = """
import sys, time
from otel_dl.forensics.folder import StatusFolder
from otel_dl.recording.identity import Identity
from otel_dl.recording.records import Kind
page = StatusFolder(sys.argv[1]).open(Identity("run", 0, 3, 0, 4))
page.step(87)
page.begin(0, Kind.NEXT, time.perf_counter_ns())
page.collective(3, 1, 430, 16, time.perf_counter_ns(), b"0")
print(page.path, flush=True)
sys.stdin.readline()
page.ended("ValueError")
"""


@pytest.fixture
def statuses(tmp_path: Path) -> Statuses:
    run = Run(Settings(), AdaptiveHead())
    run.status = StatusFolder(str(tmp_path)).open(run.identity)
    return Statuses(run, lambda: None, lambda: ["0"])


@pytest.fixture
def neighbour(statuses: Statuses, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Rank 3, another process of this host."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], env=environment({}), text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        statuses._neighbours[3] = process.pid, Memory(path, layout.SIZE)
        yield process
        process.kill()


def test_times_are_on_rank_0s_clock(statuses: Statuses) -> None:
    statuses._run.clock = 3_600 * SECOND, 0  # this host's clock is an hour before rank 0's
    assert abs(statuses.own().at - (time.time_ns() - 3_600 * SECOND)) < 60 * SECOND


def test_a_status_has_no_age_where_no_clock_is_known(statuses: Statuses) -> None:
    assert statuses.own().at == 0
    statuses._run.clock = 0, 0
    told = statuses.own()
    assert told.at > 0

    class Store:
        def get_many(self, keys: list[str]) -> list[bytes]:
            return [told.encode().encode() for _ in keys]

    store: Any = Store()
    assert statuses.read_all(store, [1])[1].at == told.at
    statuses._run.clock = None
    assert statuses.read_all(store, [1])[1].at == 0


def test_a_neighbour_that_runs(statuses: Statuses, neighbour: subprocess.Popen[str]) -> None:
    status = statuses.neighbours()[3]
    assert (status.life, status.step, status.doing) == (Life.RUNS, 87, "dataloader.next")
    assert (status.issued["0"].seq, status.latest, status.end) == (430, "0", "")


def test_a_neighbour_that_is_stopped(statuses: Statuses, neighbour: subprocess.Popen[str]) -> None:
    os.kill(neighbour.pid, signal.SIGSTOP)
    os.waitpid(neighbour.pid, os.WUNTRACED)
    assert statuses.neighbours()[3].life is Life.STOPPED


def test_a_neighbour_that_was_killed_left_no_words(statuses: Statuses, neighbour: subprocess.Popen[str]) -> None:
    os.kill(neighbour.pid, signal.SIGKILL)
    os.waitid(os.P_PID, neighbour.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie still
    assert (statuses.neighbours()[3].life, statuses.neighbours()[3].end) == (Life.DEAD, "")
    neighbour.wait()
    status = statuses.neighbours()[3]
    assert status.life is Life.DEAD
    assert status.words(time.time_ns()) == "is dead (killed by SIGKILL); it was in dataloader.next at step 87"


def test_how_a_neighbour_ended_whose_parent_has_waited_for_it_is_not_known(
    statuses: Statuses, neighbour: subprocess.Popen[str]
) -> None:
    os.kill(neighbour.pid, signal.SIGKILL)
    neighbour.wait()
    assert statuses.neighbours()[3].words(time.time_ns()) == (
        "is dead (how it ended is not known); it was in dataloader.next at step 87"
    )


def test_the_last_words_stay_though_the_page_has_gone(statuses: Statuses, neighbour: subprocess.Popen[str]) -> None:
    os.unlink(statuses._neighbours[3][1].path)
    neighbour.communicate("\n")
    assert (statuses.neighbours()[3].life, statuses.neighbours()[3].end) == (Life.DEAD, "ValueError")
