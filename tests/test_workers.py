"""Inside workers and ranks: their environment, the user's own spans, and what a child process inherits of us."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest
from support.loader_jobs import run, run_both, spans

METHODS = ("fork", "spawn", "forkserver")
FEWER = ("fork", "spawn", pytest.param("forkserver", marks=pytest.mark.long))
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def four_kinds(environment: dict[str, str]) -> dict[str, str]:
    names = ("TRACEPARENT", "TRACESTATE", "BAGGAGE")
    return {name: value for name, value in environment.items() if name.startswith("OTEL_") or name in names}


@pytest.mark.parametrize("method", METHODS)
def test_what_init_functions_remove_is_put_back_of_the_four_kinds_and_nothing_else(method: str, tmp_path: Path) -> None:
    given = {
        "OTEL_SERVICE_NAME": "a job",
        "TRACEPARENT": TRACEPARENT,
        "TRACESTATE": "vendor=1",
        "BAGGAGE": "user=7",
        "USER_SETTING": "1",
    }
    output = run("worker_environment.py", method, directory=tmp_path, **given)
    answers = {answer["way"]: answer for answer in map(json.loads, output.splitlines())}
    assert answers.keys() == {"untouched", "cleared", "filtered", "changed"}
    for way, answer in answers.items():
        before, left, after = answer["before"], answer["left"], answer["after"]
        there = four_kinds(before)
        assert there["OTEL_LATE"] == "set after the start", "what the parent had when the worker started"
        assert "OTEL_OLD" not in there
        assert {name: there[name] for name in ("OTEL_SERVICE_NAME", "TRACESTATE", "BAGGAGE")} == {
            name: given[name] for name in ("OTEL_SERVICE_NAME", "TRACESTATE", "BAGGAGE")
        }
        # The run's trace is the sender's; the parent of what a worker does outside a fetch is the run's own span.
        assert there["TRACEPARENT"].split("-")[1] == TRACEPARENT.split("-")[1]
        assert after == {**there, **left}, way
        assert four_kinds(answer["program"]) == four_kinds(after), "the processes that a worker starts see it as well"
    assert answers["changed"]["after"]["OTEL_SERVICE_NAME"] == "chosen-in-the-worker"
    assert answers["cleared"]["after"] == four_kinds(answers["cleared"]["before"])
    assert "USER_SETTING" not in answers["filtered"]["after"]


def test_nothing_is_put_back_where_a_setting_says_so(tmp_path: Path) -> None:
    output = run("worker_environment.py", "fork", directory=tmp_path, OTEL_DL_RESTORE_ENV="false")
    for answer in map(json.loads, output.splitlines()):
        assert answer["after"] == answer["left"]


@pytest.mark.parametrize(
    ("method", "way", "who"),
    [
        ("spawn", "unpickling", "the unpickling of the worker, with its dataset __mp_main__.Clearing,"),
        ("forkserver", "unpickling", ""),  # it is given the four kinds anew in any case
        ("fork", "init", "the worker_init_fn __main__.init"),
        ("fork", "getitem", "__main__.Clearing.__getitem__ or the collate_fn __main__.first"),
        ("fork", "collate", "__main__.Clearing.__getitem__ or the collate_fn __main__.clear_and_first"),
        ("fork", "iter", "__main__.ClearingStream.__iter__ or the collate_fn __main__.first"),
    ],
)
def test_whatever_clears_the_environment_it_is_put_back_and_named_once(
    method: str, way: str, who: str, tmp_path: Path
) -> None:
    given = {"OTEL_SERVICE_NAME": "a job", "BAGGAGE": "user=7", "USER_SETTING": "1"}
    output, said = run_both("worker_clears.py", method, way, directory=tmp_path, **given)
    seen = [json.loads(line) for line in output.splitlines()]
    assert len(seen) == 6
    for number, environment in enumerate(seen):
        assert four_kinds(environment).keys() == four_kinds(seen[0]).keys() >= {"TRACEPARENT", "OTEL_SERVICE_NAME"}
        assert environment["BAGGAGE"] == "user=7"
        cleared_before = way in ("unpickling", "init") or number % 3
        assert ("USER_SETTING" in environment) != bool(cleared_before), "nothing else is put back"
    warnings = [line for line in said.splitlines() if "removed" in line]
    assert len(warnings) == bool(who), said
    for warning in warnings:
        assert warning.startswith(f"otel-dl: {who} removed BAGGAGE, ")
        assert "OTEL_DL_RESTORE_ENV=false" in warning


def test_where_a_setting_says_so_what_a_fetch_clears_stays_cleared_and_nothing_is_said(tmp_path: Path) -> None:
    output, said = run_both("worker_clears.py", "fork", "getitem", directory=tmp_path, OTEL_DL_RESTORE_ENV="false")
    assert [bool(json.loads(line)) for line in output.splitlines()] == [True, False, False] * 2
    assert "removed" not in said


@pytest.mark.parametrize("method", METHODS)
def test_spans_of_a_provider_of_the_users_leave_once_through_the_parents(method: str, tmp_path: Path) -> None:
    file = tmp_path / "exported"
    main = run("own_provider.py", method, str(file), directory=tmp_path / "none").strip()
    lines = [line.split() for line in file.read_text().splitlines()]
    own = collections.Counter((name, index, pid) for name, index, pid, *_ in lines if name in ("decode", "init"))
    assert own == {
        **{("decode", str(index), main): 1 for index in range(8)},
        **{("init", str(index), main): 1 for index in range(2)},
    }
    assert {worker for name, _, _, _, worker in lines if name == "decode"} == {"0", "1"}
    fetches = collections.Counter(trace for name, _, _, trace, _ in lines if name == "dataloader.fetch")
    assert collections.Counter(trace for name, _, _, trace, _ in lines if name == "decode") == dict.fromkeys(fetches, 2)
    assert not (tmp_path / "none").exists(), "nothing is exported beside the user's provider"


@pytest.mark.parametrize("method", FEWER)
def test_a_provider_that_the_init_function_sets_up_is_left_alone(method: str, tmp_path: Path) -> None:
    file = tmp_path / "exported"
    main = run("own_provider.py", method, str(file), "in_worker", directory=tmp_path / "traces").strip()
    lines = [line.split() for line in file.read_text().splitlines()]
    assert sorted((name, int(index)) for name, index, *_ in lines) == [
        *(("decode", index) for index in range(8)),
        *(("init", index) for index in range(2)),
    ]
    assert main not in {pid for _, _, pid, *_ in lines}
    ours = spans(tmp_path / "traces")
    assert not {"decode", "init"} & {span.name for span in ours}
    assert sum(span.name == "dataloader.fetch" for span in ours) == 4


def test_terminating_a_forked_worker_ends_that_worker_only(tmp_path: Path) -> None:
    # torch's own handler turns a SIGTERM of the parent's into exit code 0 (torch/csrc/DataLoader.cpp).
    assert run("terminate.py", directory=tmp_path).splitlines() == ["RuntimeError True", "0 True"]


@pytest.mark.parametrize("method", FEWER)
def test_ranks_of_torch_multiprocessing_are_instrumented_as_their_parent_is(method: str, tmp_path: Path) -> None:
    ranks = {int(pid) for pid in run("ranks.py", method, directory=tmp_path).split()}
    stepped = collections.Counter(s.resource["process.pid"] for s in spans(tmp_path) if s.name == "optimizer.step")
    assert stepped == dict.fromkeys(ranks, 2)
    assert len(ranks) == 2


@pytest.mark.parametrize("forks", [50, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_a_fork_inherits_no_step_no_lock_no_thread_and_exports_nothing_of_its_parents(
    forks: int, tmp_path: Path
) -> None:
    output = run("forks.py", str(forks), directory=tmp_path, timeout=800)
    assert output.splitlines() == [f"{forks} came back"]
    found = spans(tmp_path)
    names = collections.Counter(span.name for span in found)
    assert names["train.step"] == names["held"] == names["child"] == forks
    ids = collections.Counter((span.trace_id, span.span_id) for span in found)
    assert set(ids.values()) == {1}, "a span that two processes export is one that a child inherited"
