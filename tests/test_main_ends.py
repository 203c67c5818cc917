"""However the training process or a worker ends: which spans arrive, and what the status pages say of the others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from support.children import environment
from support.loader_jobs import SCRIPTS
from support.validate import validate

from otel_dl.forensics import reader
from otel_dl.viewing.reading import Reading, Span, read_spans

METHODS = ("fork", "spawn", "forkserver")
MAIN = {
    "return": 0,
    "exception": 1,
    "sys.exit": 3,
    "SIGTERM": -signal.SIGTERM,
    "SIGKILL": -signal.SIGKILL,
    "SIGSEGV": -signal.SIGSEGV,
    "os._exit": 4,
}
HARD = ("SIGKILL", "SIGSEGV", "os._exit")
WORKER = ("finished", "exception", "SIGKILL", "SIGSEGV", "SIGBUS", "exit", "stuck")
WORKERS, BATCH = 2, 2
STEP = 3
"""In whose backward the training process ends."""


class Outcome(NamedTuple):
    who: str
    end: str
    method: str
    code: int
    produced: int
    """Batches that workers have read, by what the dataset wrote down."""
    spans: list[Span]
    truth: Path
    traces: Path

    @property
    def exported(self) -> int:
        return sum(span.name == "dataloader.fetch" for span in self.spans)


def job(who: str, end: str, method: str, directory: Path) -> Outcome:
    truth, traces = directory / "truth", directory / "traces"
    truth.mkdir(parents=True)
    arguments = ["main_ends.py", method, end] if who == "main" else ["worker_ends.py", method, end, "middle"]
    job = subprocess.Popen(
        [sys.executable, str(SCRIPTS / arguments[0]), *arguments[1:], str(truth)],
        env=environment(
            {
                "OTEL_TRACES_EXPORTER": "otel_dl_file",
                "OTEL_TRACES_SAMPLER": "always_on",
                "OTEL_DL_DIR": str(traces),
            }
        ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a worker that outlives the job would keep a pipe open
    )
    code = job.wait(120)
    # A batch is read when its second sample was begun, and did not end the worker; one that raised is told as well.
    ended = {int(file.read_text()) for file in truth.glob("held-*")}
    if (truth / "guilty").exists() and end != "exception":
        ended.add(9)
    produced = sum(
        len({index // BATCH for index in indices if index % BATCH == 1} - {index // BATCH for index in ended})
        for indices in ([int(line) for line in file.read_text().split()] for file in truth.glob("read-*"))
    )
    return Outcome(who, end, method, code, produced, list(read_spans(Reading(traces))), truth, traces)


def wrong_about(outcome: Outcome) -> list[str]:
    if outcome.who == "main":
        if outcome.code != MAIN[outcome.end]:
            return [f"exit code {outcome.code}"]
        if outcome.end in HARD:
            return about_the_dead(outcome)
    wrong = validate(outcome.spans, whole=False)
    lost = outcome.produced - outcome.exported
    # Each worker may have been reading one when it ended, or the run did.
    if not 0 <= lost <= WORKERS:
        wrong.append(f"{lost} of {outcome.produced} batches lost")
    if list(outcome.traces.glob(f"*{reader.SUFFIX}")):
        wrong.append("a status page is left")
    return wrong


def about_the_dead(outcome: Outcome) -> list[str]:
    """What the pages say that is not so. Workers that outlived the training process end here."""
    pages = reader.read_all(outcome.traces)
    workers = {page.pid: page for page in pages if page.worker is not None}
    mains = [page for page in pages if page.worker is None]
    wrong: list[str] = []
    try:
        held = {int(file.name.partition("-")[2]): int(file.read_text()) for file in outcome.truth.glob("held-*")}
        if len(mains) != 1 or mains[0].alive() or {page.parent for page in workers.values()} != {mains[0].pid}:
            wrong.append(f"pages of the training process: {mains}")
        elif mains[0].step != STEP or [phase.name for phase in mains[0].phases or ()] != ["backward"]:
            wrong.append(f"it died in the backward of step {STEP}, its page says {mains[0]}")
        if workers.keys() != held.keys():
            wrong.append(f"pages of workers {list(workers)}, there are {list(held)}")
        for pid, sample in held.items():
            batch = workers[pid].batch
            if not workers[pid].fetching or batch is None or sample not in batch.samples:
                wrong.append(f"worker {pid} is held up in {sample}, its page says {workers[pid]}")
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    said = subprocess.run(
        [sys.executable, "-m", "otel_dl.cli", "status", str(outcome.traces)],
        env=environment({}),
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    if not any(f"pid {mains[0].pid} (rank 0) died" in line for line in said):
        wrong.append(f"otel-dl status says nothing of the training process: {said}")
    for pid, sample in held.items():
        batch = sample // BATCH
        words = f"dataloader.fetch of batch {batch}, samples {batch * BATCH}-{batch * BATCH + 1}"
        if not any(f"pid {pid} (rank 0 worker" in line and words in line for line in said):
            wrong.append(f"otel-dl status says nothing of {pid} in {words}: {said}")
    return wrong


Case = tuple[str, str, str]
QUICK: list[Case] = [
    ("main", "return", "fork"),
    ("main", "SIGTERM", "fork"),
    ("main", "SIGKILL", "fork"),
    ("main", "SIGKILL", "spawn"),
]
ALL: list[Case] = [
    *(("main", end, method) for end in MAIN for method in METHODS),
    *(("worker", end, method) for end in WORKER for method in METHODS),
]


@pytest.mark.parametrize(
    "cases",
    [QUICK, pytest.param([case for case in ALL if case not in QUICK], marks=pytest.mark.long)],
    ids=["quick", "rest"],
)
def test_table_of_ends(cases: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda case: job(*case, tmp_path / "-".join(case)), cases))
    verdicts = {outcome[:3]: wrong_about(outcome) for outcome in outcomes}
    with capsys.disabled():
        print(f"\n{'who':<8}{'end':<11}{'start':<11}{'code':>5}{'batches read':>14}{'exported':>10}{'lost':>6}")
        for outcome in outcomes:
            who, end, method, code, produced, *_ = outcome
            lost = produced - outcome.exported
            print(f"{who:<8}{end:<11}{method:<11}{code:>5}{produced:>14}{outcome.exported:>10}{lost:>6}")
    assert not {case: wrong for case, wrong in verdicts.items() if wrong}
