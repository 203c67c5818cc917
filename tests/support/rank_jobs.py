"""Jobs of several ranks in which one of them misbehaves: what each rank said of it, and what it exported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from support.children import environment, free_port

from otel_dl.viewing.reading import Reading, Span, read_spans

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "rank_ends.py"


class Case(NamedTuple):
    scenario: str
    at: str = "plain"
    culprit: int = -1
    """-1: the last rank."""
    world: int = 2
    starter: str = "processes"
    limit: float = 6.0
    reasons: frozenset[str] = frozenset()
    """Why the culprit may be said to be missing; empty: nothing fails, and nobody may be blamed by an error."""

    def __str__(self) -> str:
        who = "rank 0" if self.culprit == 0 else "the last"
        return f"{self.scenario:15} {self.at:6} {who:8} of {self.world} {self.starter}"

    @property
    def who(self) -> int:
        return self.culprit if self.culprit >= 0 else self.world - 1


class Told(NamedTuple):
    """By one rank that survived the culprit."""

    rank: int
    by: str
    """`note`: of its exception; `report`: its last `train.stall`; `step`: that which SIGTERM cut off; `nothing`."""
    words: str
    error_type: str
    missing: dict[int, str] | None
    """Rank → reason; None: it says that it does not know."""
    after: float
    """Seconds after torch's own exception, or the limit, or the event."""
    ended_early: bool
    """Whether its launcher may have ended it by SIGTERM before it came to the collective, or before it was heard."""


class Outcome(NamedTuple):
    case: Case
    told: list[Told]
    done: list[int]
    """Ranks that trained to the end."""
    claims: list[dict[int, str]]
    """Every `dl.missing_ranks` in spans that failed by a time-out or a lost peer."""
    spans: list[Span]
    output: str
    codes: dict[int, int]
    """Exit status of each rank, where each is a process that the test has started."""


def run(case: Case, directory: Path, timeout: float = 150) -> Outcome:
    diary, traces = directory / "diary", directory / "traces"
    diary.mkdir(parents=True)
    env = environment(
        {
            "OTEL_TRACES_EXPORTER": "otel_dl_file",
            "OTEL_DL_DIR": str(traces),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(case.world),
        }
    )
    store = _store(env) if case.scenario == "store goes" else None
    arguments = [str(SCRIPT), case.scenario, case.at, str(case.who), str(case.limit), str(diary)]
    log = (directory / "log").open("w+")
    if case.starter == "hosts":
        env["OWN_HOSTS"] = "1"  # each rank takes itself for the only one of its host
    if case.starter in ("processes", "hosts"):
        commands = [([sys.executable, *arguments], {**env, "RANK": str(rank)}) for rank in range(case.world)]
    elif case.starter == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(case.world)]
        commands = [([*launcher, "--master-port", env["MASTER_PORT"], *arguments], env)]
    else:
        commands = [([sys.executable, *arguments, str(case.world)], env)]
    jobs = [subprocess.Popen(command, env=env, stdout=log, stderr=log) for command, env in commands]
    _wait(case, jobs, diary, timeout)
    if store is not None:
        store.kill()
        store.communicate()
    log.seek(0)
    output = log.read()
    log.close()
    notes = {rank: _notes(diary / f"{rank}.jsonl") for rank in range(case.world)}
    reading = Reading(traces)
    spans = list(read_spans(reading)) if traces.exists() else []
    survivors = [rank for rank in range(case.world) if rank != case.who]
    return Outcome(
        case,
        [_told(case, rank, notes, spans) for rank in survivors if "done" not in notes[rank]],
        [rank for rank in notes if "done" in notes[rank]],
        [names for span in spans if "error.type" in span.attributes and (names := _missing(span)) is not None],
        spans,
        output,
        {rank: job.returncode for rank, job in enumerate(jobs)} if case.starter in ("processes", "hosts") else {},
    )


def _store(env: dict[str, str]) -> subprocess.Popen[str]:
    """The job's store in a process of its own, as torchrun's agent has it."""
    script = f"""if True:
        import sys, torch.distributed as dist
        store = dist.TCPStore("127.0.0.1", {env["MASTER_PORT"]}, None, is_master=True, wait_for_workers=False)
        print("ready", flush=True)
        sys.stdin.read()
        """
    store = subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert store.stdout is not None
    assert store.stdout.readline() == "ready\n"
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "STORE_PID": str(store.pid)}
    return store


def _wait(case: Case, jobs: list[subprocess.Popen[bytes]], diary: Path, timeout: float) -> None:
    """Until all have ended; a culprit that is stopped is killed once the others have."""
    until = time.monotonic() + timeout
    while any(job.poll() is None for job in jobs):
        others = [_notes(diary / f"{rank}.jsonl") for rank in range(case.world) if rank != case.who]
        mine = _notes(diary / f"{case.who}.jsonl")
        over = all("error" in each or "done" in each for each in others)
        if "pid" in mine and (over or time.monotonic() > until) and case.scenario.startswith("stopped"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(mine["pid"]["pid"], signal.SIGKILL)
        if time.monotonic() > until + 5:
            for job in jobs:
                job.kill()
        time.sleep(0.05)


def _notes(path: Path) -> dict[str, Any]:
    """The last of each kind."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    notes: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # it is being written
            entry = json.loads(line)
            notes[entry["what"]] = entry
    return notes


def _told(case: Case, rank: int, notes: dict[int, dict[str, Any]], spans: Iterable[Span]) -> Told:
    mine = [span for span in spans if span.resource.get("dl.rank") == rank and "error.type" in span.attributes]
    named = [span for span in mine if "rank_id" in span.attributes]
    stalls = [span for span in named if span.name == "train.stall"]
    failed = [span for span in named if span.name != "train.stall"]
    early = case.starter in ("torchrun", "spawn") and case.scenario in ("killed", "crashes", "raises")
    error = notes[rank].get("error")
    event = notes[case.who].get("event", {}).get("at")
    if error is not None:
        words = next((note for note in error["notes"] if note.startswith("otel-dl: ")), "")
        span = (failed or stalls or [None])[-1]
        torchs = notes[rank].get("torch", {}).get("at")
        since = torchs or error["at"]
        return Told(
            rank, "note" if words else "nothing", words, str(span.attributes["error.type"]) if span else "",
            _missing(span) if span else None, error["at"] - since, early,
        )  # fmt: skip
    if stalls:
        last = stalls[-1]
        after = last.end_ns / 1e9 - event if event is not None else 0.0
        return Told(rank, "report", last.message, str(last.attributes["error.type"]), _missing(last), after, early)
    if failed:
        last = failed[-1]
        after = last.end_ns / 1e9 - event if event is not None else 0.0
        return Told(rank, "step", last.message, str(last.attributes["error.type"]), _missing(last), after, early)
    return Told(rank, "nothing", "", "", None, 0.0, early)


def _missing(span: Span) -> dict[int, str] | None:
    ranks = span.attributes.get("dl.missing_ranks")
    return None if ranks is None else dict(zip(ranks, span.attributes["dl.missing.reason"], strict=True))
