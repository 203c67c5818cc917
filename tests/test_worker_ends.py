"""How a worker ended: what its span, the step and torch's own exception say, against what its dataset wrote down."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.inprocess import recording
from support.loader_jobs import run, spans
from support.validate import validate

from otel_dl.viewing.reading import Span

MANY = int(os.environ.get("OTEL_DL_TEST_WORKERS", 2_000))
"""Workers that are started and ended; 10,000 of them take a quarter of an hour on two cores."""
METHODS = ("fork", "spawn", "forkserver")
WAYS = ("finished", "exception", "SIGKILL", "SIGSEGV", "SIGBUS", "exit", "stuck")
WHENS = ("first", "middle", "between")

ENDS = {
    "finished": ("finished", None, 0),
    "exception": ("exception", None, None),
    "SIGKILL": ("signal", "SIGKILL", None),
    "SIGSEGV": ("signal", "SIGSEGV", None),
    "SIGBUS": ("signal", "SIGBUS", None),
    "exit": ("exit", None, 3),
    "stuck": ("killed_by_parent", None, 0),  # torch's handler of SIGTERM exits with 0 where its parent sends it
}
"""`dl.worker.end`, `dl.worker.signal`, `dl.worker.exit_code`; a code of None: whatever it is."""
WORDS = {
    "exception": "KeyError",
    "SIGKILL": "was killed by SIGKILL",
    "SIGSEGV": "was killed by SIGSEGV",
    "SIGBUS": "was killed by SIGBUS",
    "exit": "ended with exit code 3",
    "stuck": "is alive",
}


class Cell(NamedTuple):
    method: str
    way: str
    when: str


class Outcome(NamedTuple):
    cell: Cell
    guilty: dict[str, Any] | None
    seen: dict[str, Any]
    spans: list[Span]
    left: list[str]
    """What is left in the folder beside traces."""


def job(cell: Cell, directory: Path) -> Outcome:
    truth, traces = directory / "truth", directory / "traces"
    truth.mkdir(parents=True)
    seen = json.loads(run("worker_ends.py", *cell, str(truth), directory=traces, OMP_NUM_THREADS="1"))
    guilty = truth / "guilty"
    return Outcome(
        cell,
        json.loads(guilty.read_text()) if guilty.exists() else None,
        seen,
        spans(traces),
        [path.name for path in traces.iterdir() if path.suffix != ".jsonl"],
    )


def holds(ranges: str, sample: int) -> bool:
    bounds = [part.split("-") for part in ranges.split(",")]
    return any(int(part[0]) <= sample <= int(part[-1]) for part in bounds)


def wrong_about(outcome: Outcome) -> list[str]:
    """What is said of the end that is not so, or not said."""
    way, when, guilty = outcome.cell.way, outcome.cell.when, outcome.guilty
    wrong = validate(outcome.spans)
    workers = [span for span in outcome.spans if span.name == "dataloader.worker"]
    if guilty is None and way != "finished":
        return ["nobody was guilty"]
    if guilty is None:
        expected = 2 if when == "between" else 4
        ends = [span.attributes["dl.worker.end"] for span in workers]
        if ends != ["finished"] * expected:
            wrong.append(f"workers ended as {ends}")
        return wrong
    found = [span for span in workers if span.attributes["dl.worker.pid"] == guilty["pid"]]
    if len(workers) != 2 or len(found) != 1:
        return [*wrong, f"{len(found)} spans of the guilty worker, {len(workers)} of all"]
    said = found[0].attributes
    end, signal, code = ENDS[way]
    if outcome.cell.method == "forkserver" and way in ("stuck", "exception"):
        # Its parent is the fork server: it ends by SIGTERM, where it does not finish in time.
        signal, code = said.get("dl.worker.signal"), None
        if signal not in (None, "SIGTERM"):
            wrong.append(f"it says {signal}")
    if (said["dl.worker.end"], said.get("dl.worker.signal"), said["dl.worker.id"]) != (end, signal, guilty["worker"]):
        wrong.append(f"it says {said}")
    if code is not None and said.get("dl.worker.exit_code") != code:
        wrong.append(f"it says exit code {said.get('dl.worker.exit_code')}")
    if (said.get("error.type") or "") != {"exception": "KeyError"}.get(way, signal or end):
        wrong.append(f"error.type is {said.get('error.type')}")
    others = {span.attributes["dl.worker.end"] for span in workers if span is not found[0]}
    if not others <= {"finished", "killed_by_parent"}:
        wrong.append(f"the other worker ended as {others}")
    words = "; ".join(outcome.seen["notes"]) if sys.version_info >= (3, 11) else ""
    failed = [span.message for span in outcome.spans if span.name == "train.step" and span.failed]
    # An exception that leaves `iter()` belongs to no phase: the user may catch it, and no step fails of it.
    in_step = bool(failed) or when != "between"
    for text in [words, *failed] if in_step else [words]:
        if f"worker {guilty['worker']} (pid {guilty['pid']})" not in text or WORDS[way] not in text:
            wrong.append(f"the words are {text!r}")
        samples = text.partition("samples ")[2].partition(";")[0]
        if guilty["sample"] is not None and not holds(samples, guilty["sample"]):
            wrong.append(f"the guilty sample is not in {text!r}")
    if guilty["sample"] is not None and way != "exception" and not holds(said["dl.sample.indices"], guilty["sample"]):
        wrong.append(f"the samples in hand are {said['dl.sample.indices']}")
    if guilty["sample"] is None and "dl.sample.indices" in said:
        wrong.append("it had no samples in hand")
    if (
        in_step
        and way != "exception"
        and not any(
            span.trace_id == found[0].trace_id for span in outcome.spans if span.name == "train.step" and span.failed
        )
    ):
        wrong.append("it does not stand in the step that failed of it")
    return wrong


QUICK = [
    Cell("fork", "finished", "middle"),
    Cell("fork", "SIGKILL", "middle"),
    Cell("fork", "exit", "first"),
    Cell("spawn", "SIGSEGV", "middle"),
    Cell("fork", "exception", "between"),
]
ALL = [Cell(method, way, when) for method in METHODS for way in WAYS for when in WHENS]
REST = [cell for cell in ALL if cell not in QUICK]


@pytest.mark.parametrize("cells", [QUICK, pytest.param(REST, marks=pytest.mark.long)], ids=["quick", "rest"])
def test_what_is_said_of_a_workers_end_is_so(
    cells: list[Cell], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda cell: job(cell, tmp_path / "-".join(cell)), cells))
    verdicts = {outcome.cell: wrong_about(outcome) for outcome in outcomes}
    with capsys.disabled():
        print(f"\n{'start':<11}{'end':<11}{'when':<9}{'torch raised':<22}{'wrong':>6}")
        for outcome in outcomes:
            method, way, when = outcome.cell
            raised = outcome.seen["type"] or "nothing"
            print(f"{method:<11}{way:<11}{when:<9}{raised:<22}{len(verdicts[outcome.cell]):>6}")
    assert not {cell: wrong for cell, wrong in verdicts.items() if wrong}
    assert not any(outcome.left for outcome in outcomes), "a page of a job that ended in order"


def test_processes_that_are_no_workers_end_as_ever() -> None:
    pytest.importorskip("torch")
    with recording():
        process = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
        process.start()
        process.terminate()
        process.join()
        assert process.exitcode == -signal.SIGTERM
        process.close()
        with pytest.raises(ValueError, match="closed"):
            process.kill()
        assert hasattr(vars(BaseProcess)["kill"], "__wrapped__"), "no fault of ours that took it out"
    assert not hasattr(vars(BaseProcess)["kill"], "__wrapped__")


@pytest.mark.parametrize(
    ("workers", "killed"), [(100, 2), pytest.param(MANY, MANY // 50, marks=pytest.mark.long)], ids=["quick", "many"]
)
@pytest.mark.timeout(3600)
def test_many_workers_leave_nothing_behind(
    workers: int, killed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither file nor descriptor, thread, child, shared memory or mapping; what the process needs stays as it was."""
    (tmp_path / "tmp").mkdir()
    output = run(
        "many_workers.py", str(workers), str(killed), directory=tmp_path / "traces", timeout=3500,
        TMPDIR=str(tmp_path / "tmp"), OTEL_TRACES_SAMPLER="traceidratio", OTEL_TRACES_SAMPLER_ARG="0.01",
    )  # fmt: skip
    early, late = map(json.loads, output.splitlines())
    notes, grown = late.pop("notes"), late.pop("rss") - early.pop("rss")
    with capsys.disabled():
        print(f"\n{workers} workers, {killed} of them killed: {grown / 2**20:+.1f} MiB since a tenth of them; {late}")
    if sys.version_info >= (3, 11):
        assert notes == killed, "each death has its words"
    assert late == early
    assert late["pages"] == 1, "the training process's own"
    assert late["children"] == late["segments"] == 0
    assert grown < 8 * 2**20
    assert [path.suffix for path in (tmp_path / "traces").iterdir()] == [".jsonl"]


def test_the_step_that_fails_is_the_right_one_also_where_steps_are_only_recorded() -> None:
    """None is exported but those that fail, so each step becomes the next one."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    from otel_dl.recording.keep import NeverHead

    class Deadly(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 130:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.ones(2)

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps = 0
    with recording(NeverHead()) as recorded:
        with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:  # noqa: PT012
            for x in DataLoader(Deadly(), batch_size=1, num_workers=1, prefetch_factor=1):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                steps += 1
        assert "SIGKILL" in str(getattr(raised.value, "__notes__", ["SIGKILL"]))
    (failed,) = [step for step in recorded.named("train.step") if not step.status.is_unset]
    (life,) = recorded.named("dataloader.worker")
    assert failed.attributes["dl.step"] == steps
    assert life.parent.span_id == failed.context.span_id
    assert "SIGKILL" in failed.status.description


def test_an_init_function_that_raises_blames_no_samples() -> None:
    from torch.utils.data import DataLoader

    def init(number: int) -> None:
        raise ValueError("no room for this worker")

    with recording():
        with pytest.raises(ValueError, match="no room") as raised:
            next(iter(DataLoader(list(range(8)), batch_size=2, num_workers=1, worker_init_fn=init)))
        notes = "".join(getattr(raised.value, "__notes__", []))
        assert "ValueError" in notes
        assert "samples" not in notes
