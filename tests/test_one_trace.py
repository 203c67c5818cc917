"""Steps of all ranks share a trace, in real jobs over gloo; and a step that one rank keeps, all keep."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.children import environment, free_port, printed
from support.loader_jobs import SCRIPTS, spans
from support.validate import digest, validate

from otel_dl.viewing.reading import Span

SCRIPT = str(SCRIPTS / "one_trace.py")
RARELY = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": str(1 / 30_000)}


class Job(NamedTuple):
    spans: list[Span]
    said: list[str]
    """What each rank wrote to stderr."""
    seconds: float
    """How long training took."""

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    @property
    def steps(self) -> dict[int, dict[int, Span]]:
        """By number, each rank's."""
        found: dict[int, dict[int, Span]] = defaultdict(dict)
        for span in self.named("train.step"):
            found[span.attributes["dl.step"]][span.attributes["dl.rank"]] = span
        return found

    def runs(self) -> set[Any]:
        return {span.resource["dl.run.id"] for span in self.spans}


def job(directory: Path, world: int, *arguments: str, timeout: float = 120, **settings: str) -> Job:
    """A job of so many ranks, each a process of its own as torchrun starts them."""
    env = environment(
        {
            "OTEL_TRACES_EXPORTER": "otel_dl_file",
            "OTEL_DL_DIR": str(directory),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
            **settings,
        }
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, *arguments],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=timeout) for rank in ranks]
    said = [error for _, error in outputs]
    assert [rank.returncode for rank in ranks] == [0] * world, said
    assert "a fault of ours" not in "".join(said), said
    return Job(spans(directory), said, max(json.loads(printed(out))["seconds"] for out, _ in outputs))


def reasons(step: dict[int, Span]) -> dict[int, str]:
    return {rank: span.attributes["dl.keep.reason"] for rank, span in sorted(step.items())}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_share_a_trace_a_step(tmp_path: Path, world: int) -> None:
    found = job(tmp_path, world, "20")
    assert validate(found.spans) == []
    assert len(found.runs()) == 1
    for number, step in found.steps.items():
        assert len(step) == world, f"step {number}"
        assert len({span.trace_id for span in step.values()}) == 1
        assert {rank: bool(span.parent_id) for rank, span in step.items()} == {rank: rank > 0 for rank in range(world)}
    starts = found.named("train.startup")
    assert len(starts) == world
    assert len({span.trace_id for span in starts}) == 1
    assert {span.attributes["dl.clock.offset_ns"] for span in found.named("train.step")} == {0}


def test_a_collective_long_before_the_first_step_does_not_keep_ranks_apart(tmp_path: Path) -> None:
    found = job(tmp_path, 2, "3", "prepare=3.5")
    assert validate(found.spans) == []
    assert len(found.runs()) == 1
    assert len(found.named("dist.barrier")) == 4


def test_a_world_that_is_too_large_for_one_trace_has_one_a_rank(tmp_path: Path) -> None:
    found = job(tmp_path, 2, "5", OTEL_DL_TRACE_RANKS="1")
    assert validate(found.spans) == []
    assert len(found.runs()) == 1
    for number, step in found.steps.items():
        (run,) = found.runs()
        assert [step[rank].trace_id for rank in (0, 1)] == [digest(run, "step", number, rank) for rank in (0, 1)]
        assert (step[0].trace_id, step[0].span_id) in step[1].links


@pytest.mark.long
def test_a_step_that_fails_on_one_rank_is_kept_by_all(tmp_path: Path) -> None:
    found = job(tmp_path, 2, "1500", "pause=0.004", "fail=500:1", **RARELY)
    assert validate(found.spans) == []
    assert reasons(found.steps[500]) == {0: "peer", 1: "error"}
    names = [{s.name for s in found.spans if s.trace_id == step.trace_id} for step in found.steps[500].values()]
    assert {"forward", "backward", "optimizer.step", "dataloader.next"} <= names[0]


@pytest.mark.long
def test_a_slow_step_of_one_rank_is_kept_by_all(tmp_path: Path) -> None:
    found = job(tmp_path, 2, "1500", "pause=0.004", "slow=500:1:0.5", **RARELY)
    assert validate(found.spans) == []
    assert set(reasons(found.steps[500]).values()) == {"slow"}, "the other one waits for it"


def test_without_a_tcp_store_there_is_a_trace_a_rank_and_one_warning(tmp_path: Path) -> None:
    found = job(tmp_path / "traces", 2, "5", f"store={tmp_path / 'store'}")
    assert validate(found.spans) == []
    assert len(found.runs()) == 2
    assert all(not span.parent_id for span in found.named("train.step"))
    assert ["no TCPStore" in said for said in found.said] == [True, True]
    assert sum(said.count("no TCPStore") for said in found.said) == 2


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize(
    ("every", "batches"),
    [
        pytest.param(1, 3, id="plain"),
        pytest.param(2, 6, id="accumulates", marks=pytest.mark.long),
        pytest.param(2, 5, id="in the middle", marks=pytest.mark.long),
    ],
)
def test_a_rank_without_data_takes_part_in_the_others_steps(
    tmp_path: Path, short: int, every: int, batches: int
) -> None:
    found = job(tmp_path, 2, "6", f"uneven={short}:{batches}:{every}")
    assert validate(found.spans) == []
    assert sorted(found.steps) == list(range(6))
    own = batches // every
    for number, step in found.steps.items():
        assert {rank: bool(span.parent_id) for rank, span in step.items()} == {0: False, 1: True}
        joined = [rank for rank, span in sorted(step.items()) if span.attributes.get("dl.joined")]
        assert joined == ([short] if number >= own else []), f"step {number}"
        inside: dict[Any, set[Any]] = defaultdict(set)
        for span in found.spans:
            if span.trace_id == step[0].trace_id and "dl.collective.seq" in span.attributes:
                inside[span.attributes["dl.collective.seq"]].add(span.resource["dl.rank"])
        assert inside
        assert all(ranks == {0, 1} for ranks in inside.values()), f"step {number}: {dict(inside)}"


def test_a_second_init_changes_nothing(tmp_path: Path) -> None:
    found = job(tmp_path, 2, "5", "init=2")
    assert validate(found.spans) == []
    assert len(found.runs()) == 1
    assert sorted(found.steps) == list(range(10))
    assert all(len(step) == 2 for step in found.steps.values())


def test_steps_before_init_keep_the_ids_that_they_had(tmp_path: Path) -> None:
    found = job(tmp_path, 2, "5", "before=3")
    assert validate(found.spans, whole=False) == []
    (shared,) = {span.resource["dl.run.id"] for step in range(3, 8) for span in found.steps[step].values()}
    assert [found.steps[step][0].resource["dl.run.id"] for step in range(3)] == [shared] * 3
    assert shared not in [found.steps[step][1].resource["dl.run.id"] for step in range(3)]


@pytest.mark.long
def test_a_run_id_that_comes_late_holds_from_the_next_step(tmp_path: Path) -> None:
    """Rank 0 switches otel-dl on after some steps."""
    found = job(tmp_path, 2, "800", "late=0:200", "pause=0.01", OTEL_TRACES_SAMPLER="always_on")
    assert validate(found.spans, whole=False) == []
    of_rank_0 = {span.resource["dl.run.id"] for span in found.spans if span.resource["dl.rank"] == 0}
    numbers = sorted(number for number, step in found.steps.items() if 1 in step)
    runs = [found.steps[number][1].resource["dl.run.id"] for number in numbers]
    assert len(of_rank_0) == 1
    assert runs[0] not in of_rank_0
    assert runs[-1] in of_rank_0
    assert len(set(runs)) == 2
    assert runs == sorted(runs, key=runs.index), "once it has come it stays"
    assert found.said[1].count("has not come within 1 s of the first step") == 1


@pytest.mark.long
def test_a_restart_is_linked_to_the_run_before(tmp_path: Path) -> None:
    env = environment({"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(tmp_path)})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*launcher, f"--master-port={free_port()}", SCRIPT, "400", "pause=0.005", "die=300:1"],
        env=env, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    starts = [span for span in spans(tmp_path) if span.name == "train.startup"]
    by_attempt: dict[int, list[Span]] = defaultdict(list)
    for span in starts:
        by_attempt[span.attributes["dl.run.attempt"]].append(span)
    assert sorted(by_attempt) == [0, 1]
    assert len({span.resource["dl.run.id"] for span in starts}) == 2, "each attempt is a run of its own"
    (former,) = [span for span in by_attempt[0] if span.attributes["dl.rank"] == 0]
    for span in by_attempt[1]:
        assert span.links == ((former.trace_id, former.span_id),)


@pytest.mark.long
def test_of_ten_thousand_steps_what_counts_is_kept_and_by_all(tmp_path: Path) -> None:
    steps, slow = 10_000, 6_000
    found = job(
        tmp_path, 2, str(steps), "pause=0.004", f"slow={slow}:1:1.0", f"absent={steps - 1}:1:6", timeout=400, **RARELY
    )
    assert validate(found.spans) == []
    assert set(reasons(found.steps[slow]).values()) == {"slow"}
    last = found.steps[steps - 1]
    assert reasons(last) == {0: "error", 1: "error"}
    assert last[0].attributes["error.type"] == "GLOO_TIMEOUT"
    (timed_out,) = [
        span for span in found.named("dist.all_reduce") if span.attributes.get("error.type") == "GLOO_TIMEOUT"
    ]
    assert timed_out.trace_id == last[0].trace_id
    assert (timed_out.attributes["rank_id"], timed_out.attributes["dl.missing_ranks"]) == (0, [1])
    for step in (found.steps[slow], last):
        for span in step.values():
            inside = {
                each.name for each in found.spans if each.trace_id == span.trace_id and each.resource == span.resource
            }
            assert {"dataloader.next", "forward", "backward", "dist.all_reduce"} <= inside
    last_seconds = steps - int(2 * steps / found.seconds) - 1
    alone = {number for number, step in found.steps.items() if len(step) < 2 and number < last_seconds}
    assert alone == set()
    assert len(found.steps) - 2 <= steps * 0.005
