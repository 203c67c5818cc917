"""The report says what the time of a run went to."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import SpanContext
from support import children
from test_report_ranks import EPOCH, MS, Job, Rank, lines

from otel_dl.forensics import layout
from otel_dl.forensics.reader import SUFFIX, Page, read_all
from otel_dl.forensics.writer import create
from otel_dl.recording.identity import Identity
from otel_dl.viewing.outside import Divided, Longest, RunTime
from otel_dl.viewing.reading import Reading, read_spans
from otel_dl.viewing.summary import Summary, summarize

S = 1_000 * MS


class Made:
    """One rank: 1 s of start-up, four epochs of ten steps of 100 ms, after each 200 ms of evaluation and 300 ms of a
    checkpoint; workers start anew before the second and each later one, for 50 ms; 400 ms until the end."""

    def __init__(self) -> None:
        self.job = Job(world=1)
        self.rank: Rank = self.job.ranks[0]

    def write(
        self, directory: Path, kept: Callable[[int], bool], ends: bool = True, own: str = "checkpoint"
    ) -> Summary:
        rank = self.rank
        startup = rank.first("train.startup", 7, EPOCH, EPOCH + S + 100 * MS)
        rank.now = EPOCH + S
        for epoch in range(4):
            if epoch:
                self.lasts("dataloader.start_workers", 50, startup)
            for number in range(10 * epoch, 10 * epoch + 10):
                begun, rank.now = rank.now, rank.now + 100 * MS
                if kept(number):
                    said: dict[str, Any] = {"dl.step": number, "dl.keep.reason": "head" if number else "warmup"}
                    rank.first("train.step", 100 + number, begun, rank.now, **said)
            self.lasts("train.eval", 200, None)
            self.lasts(own, 300, startup, scope="otel_dl.user" if own else "")
        begun, rank.now = rank.now, rank.now + 400 * MS
        if ends:
            said = {
                "dl.run.steps": 40, "dl.run.steps_ms": 4_000.0, "dl.run.evals": 4, "dl.run.evals_ms": 800.0,
                "dl.run.start_workers_ms": 150.0, "dl.run.longest_outside_ms": 700.0,
                "dl.run.longest_outside_after": 39,
            }  # fmt: skip
            rank.span("train.shutdown", 7, begun, rank.now, parent=startup, **said)
        self.job.write(directory)
        pages = [] if ends else [open_page(directory, step=40)]
        (summary,) = summarize(read_spans(Reading(directory)), pages)
        return summary

    def lasts(self, name: str, ms: int, parent: SpanContext | None, scope: str = "otel_dl") -> None:
        begun, self.rank.now = self.rank.now, self.rank.now + ms * MS
        if name:
            self.rank.span(name, 7 if parent else self.rank.now, begun, self.rank.now, parent=parent, scope=scope)


def open_page(directory: Path, step: int) -> Page:
    """Of a process that was killed in this step."""
    path = directory / f"1{SUFFIX}"
    create(str(path), Identity.read()._replace(run="job-1", rank=0))
    with path.open("r+b") as file:
        file.seek(layout.STEP)
        file.write(step.to_bytes(8, "little"))
    (page,) = read_all(directory)
    return page


def every_fourth(number: int) -> bool:
    return number % 4 == 0


def every(_: int) -> bool:
    return True


class TestMadeByHand:
    @pytest.mark.parametrize("kept", [every, every_fourth])
    def test_of_all_steps_whichever_were_kept(self, tmp_path: Path, kept: Callable[[int], bool]) -> None:
        summary = Made().write(tmp_path, kept)
        assert summary.run_time == RunTime(
            0, 7_550 * MS, True,
            Divided(
                40, 4_000 * MS, 4, 800 * MS, 150 * MS, S, 1_600 * MS, {"checkpoint": 1_200 * MS}, Longest(700 * MS, 39)
            ),
            "",
        )  # fmt: skip
        assert list(lines(summary, "Run time")) == [
            "7.55 s: 4 s in 40 steps, 800 ms evaluation (4 stretches), 1 s start-up, 150 ms start of workers, 1.6 s"
            " outside of any (of that 1.2 s checkpoint; the longest stretch: 700 ms after step 39)"
        ]

    def test_of_a_run_without_its_end_where_every_step_was_kept(self, tmp_path: Path) -> None:
        summary = Made().write(tmp_path, every, ends=False)
        assert list(lines(summary, "Run time")) == [
            "7.15 s until its last span: 4 s in 40 steps, 800 ms evaluation (4 stretches), 1 s start-up, 150 ms start"
            " of workers, 1.2 s outside of any (of that 1.2 s checkpoint; the longest stretch: 300 ms after step 9)"
        ]

    def test_where_neither_is_there_it_is_not_known(self, tmp_path: Path) -> None:
        summary = Made().write(tmp_path, every_fourth, ends=False)
        assert list(lines(summary, "Run time")) == [
            "7.15 s until its last span; how much of it lies in steps is not known: the end of the run is not in these"
            " traces (the process was killed, or runs still), and not all of its steps are, or it is not known that"
            " they are"
        ]

    def test_without_the_first_step_it_is_not_known(self, tmp_path: Path) -> None:
        summary = Made().write(tmp_path, lambda number: number > 0)
        assert list(lines(summary, "Run time")) == [
            "7.55 s; how much of it lies in steps is not known: the first step is not in these traces"
        ]

    def test_what_no_span_names_is_outside_all_the_same(self, tmp_path: Path) -> None:
        summary = Made().write(tmp_path, every, own="")
        (told,) = lines(summary, "Run time")
        assert told.endswith("1.6 s outside of any (the longest stretch: 700 ms after step 39)")

    def test_a_span_around_steps_is_not_outside_of_them(self, tmp_path: Path) -> None:
        made = Made()
        (startup,) = [made.rank.first("train.startup", 7, EPOCH, EPOCH + S + 100 * MS)]
        made.rank.spans.clear()
        made.rank.span("the training", 7, EPOCH + S, EPOCH + 7 * S, parent=startup, scope="otel_dl.user")
        (told,) = lines(made.write(tmp_path, every_fourth), "Run time")
        assert "the training" not in told

    def test_of_several_ranks_it_says_of_which(self, tmp_path: Path) -> None:
        job = Job(world=2)
        for rank in job.ranks:
            rank.first("train.startup", 7, EPOCH, EPOCH + 15 * MS)
        for number in range(3):
            job.step(number)
        for rank in job.ranks:
            rank.span("train.shutdown", 7, rank.now, rank.now, **{"dl.run.steps": 3 + rank.rank})
        (told,) = lines(job.summary(tmp_path), "Run time")
        assert told.startswith("rank 0, ")
        assert " in 3 steps, " in told


SCRIPT = """
import os, signal, time, torch, otel_dl
otel_dl.instrument()
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = DataLoader(TensorDataset(torch.randn(40, 2)), batch_size=2)
number = 0
for epoch in range(3):
    for x, in data:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        number += 1
        if number == 50 and os.environ["KILL"] == "True":
            otel_dl.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 2))
    model.train()
    with otel_dl.span("checkpoint"):
        time.sleep(0.02)
"""


@pytest.mark.parametrize("kept", ["all", "few"])
@pytest.mark.parametrize("killed", [False, True])
def test_of_a_real_run(tmp_path: Path, kept: str, killed: bool) -> None:
    env = {"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(tmp_path)}
    if kept == "few":
        env |= {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    ran = children.run(SCRIPT, {**env, "KILL": str(killed)})
    assert ran.code == (-signal.SIGKILL if killed else 0), str(ran)
    (summary,) = summarize(read_spans(Reading(tmp_path)), read_all(tmp_path))
    time = summary.run_time
    assert time is not None
    assert time.is_whole is not killed
    assert (time.divided is None) == (killed and kept == "few")
    if time.divided is None:
        return
    divided = time.divided
    assert (divided.steps, divided.evaluations) == ((49, 2) if killed else (60, 3))  # it was killed in its 50th step
    parts = divided.steps_ns + divided.evaluations_ns + divided.startup_ns + divided.workers_ns + divided.outside_ns
    assert parts == pytest.approx(time.whole_ns, rel=1e-6)
    assert (40 if killed else 60) * MS <= divided.own["checkpoint"] <= divided.outside_ns
    assert divided.longest is not None
    assert divided.longest.after in (19, 39, 48 if killed else 59)


def test_of_a_span_in_which_the_run_is_ended_by_sigterm(tmp_path: Path) -> None:
    script = SCRIPT.replace(
        "time.sleep(0.02)", "time.sleep(0.02); number == 60 and os.kill(os.getpid(), signal.SIGTERM)"
    )
    ran = children.run(script, {"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(tmp_path), "KILL": "False"})
    assert ran.code == -signal.SIGTERM, str(ran)
    (summary,) = summarize(read_spans(Reading(tmp_path)), read_all(tmp_path))
    assert summary.run_time is not None
    assert summary.run_time.divided is not None
    assert summary.run_time.divided.own["checkpoint"] >= 60 * MS
