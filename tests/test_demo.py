"""The example under `otel-dl run`: what a person finds in the folder afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from otel_dl.viewing.reading import Reading, Span, read_spans

ROOT = Path(__file__).resolve().parent.parent
PHASES = {"dataloader.next", "forward", "backward", "optimizer.step"}
STEPS = 24  # 1,500 images in batches of 64


def digits(directory: Path, *arguments: str, launcher: Sequence[str] = ()) -> list[Span]:
    command = [sys.executable, *launcher, str(ROOT / "examples" / "digits.py"), "--epochs", "1", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "otel_dl.cli", "run", "--out", str(directory), "--", *command],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "accuracy" in done.stdout
    assert "otel-dl" not in done.stdout
    assert str(directory) in done.stderr
    return list(read_spans(Reading(directory)))


def named(spans: Sequence[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> list[Span]:
    return digits(tmp_path_factory.mktemp("traces"))


def test_each_step_is_one_trace_with_its_phases_under_it(spans: list[Span]) -> None:
    steps = named(spans, "train.step")
    assert sorted(step.attributes["dl.step"] for step in steps) == list(range(STEPS))
    assert len({step.trace_id for step in steps}) == STEPS
    for step in steps:
        children = {span.name for span in spans if span.parent_id == step.span_id and span.trace_id == step.trace_id}
        assert children >= PHASES


def test_a_batch_that_a_worker_read_is_a_trace_of_its_own_linked_both_ways(spans: list[Span]) -> None:
    steps = {step.trace_id: step for step in named(spans, "train.step")}
    fetches = {(fetch.trace_id, fetch.span_id): fetch for fetch in named(spans, "dataloader.fetch")}
    main = steps[next(iter(steps))].resource["process.pid"]
    waits = [span for span in named(spans, "dataloader.next") if span.trace_id in steps]
    assert len(waits) == STEPS
    for wait in waits:
        (link,) = wait.links
        fetch = fetches[link]
        assert fetch.parent_id == ""
        assert fetch.trace_id not in steps
        assert (wait.trace_id, wait.span_id) in fetch.links
        assert fetch.resource["process.pid"] == wait.attributes["dl.worker.pid"] != main
        assert fetch.end_ns <= wait.end_ns


def test_without_workers_the_reading_is_a_child_of_the_wait(tmp_path: Path) -> None:
    spans = digits(tmp_path / "traces", "--workers", "0")
    waits = {(wait.trace_id, wait.span_id): wait for wait in named(spans, "dataloader.next")}
    fetches = named(spans, "dataloader.fetch")
    assert Counter((fetch.trace_id, fetch.parent_id) for fetch in fetches) == Counter(waits.keys())
    for fetch in fetches:
        wait = waits[fetch.trace_id, fetch.parent_id]
        assert wait.start_ns <= fetch.start_ns <= fetch.end_ns <= wait.end_ns


@pytest.mark.long
def test_ranks_under_a_launcher_each_leave_their_steps(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    spans = digits(tmp_path / "traces", launcher=launcher)
    assert len(list((tmp_path / "traces").glob("*.jsonl"))) == 2
    steps = Counter(step.attributes["dl.rank"] for step in named(spans, "train.step"))
    assert steps == {0: STEPS // 2, 1: STEPS // 2}
    assert {step.attributes["dl.world_size"] for step in named(spans, "train.step")} == {2}


@pytest.mark.long
def test_make_demo_works_from_a_clean_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    environment = {**os.environ, "OTEL_DL_TORCH_FROM": sys.executable}
    done = subprocess.run(["make", "demo"], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Steps          72 kept" in done.stderr
    (directory,) = (clone / "otel-dl-traces").iterdir()
    assert str(directory) in done.stderr
    assert len(named(list(read_spans(Reading(directory))), "train.step")) == 72
    shutil.rmtree(clone)
