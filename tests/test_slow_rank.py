"""Jobs of real ranks under torchrun, read back from the files of all: in each step another rank is slow, and the report
names it; each gradient bucket is there once on each rank."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from support.children import environment, free_port
from support.loader_jobs import SCRIPTS, spans
from support.validate import validate
from test_collectives import HOOKED

from otel_dl.viewing.arrivals import Arrival
from otel_dl.viewing.reading import Span
from otel_dl.viewing.summary import summarize

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not HOOKED, reason="what DDP's C++ issues is seen from torch 2.15 on"),
]


BEFORE = 2
"""Steps of the script's before those in which a rank is slow."""


class Truth(NamedTuple):
    """Of one step, by the script's own clock."""

    drawn: int
    """The rank that was to be slow."""
    where: str
    last: int
    """The rank that came last; another one where the machine has held it up for longer."""


def job(directory: Path, world: int, steps: int, seconds: float) -> tuple[list[Span], dict[int, Truth]]:
    """All its spans, and by step who was slow."""
    traces = directory / "traces"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    script = [str(SCRIPTS / "slow_rank.py"), str(steps), str(seconds), str(directory)]
    done = subprocess.run(
        [*launcher, "--master-port", str(free_port()), *script],
        env=environment({"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(traces)}),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "a fault of ours" not in done.stderr, done.stderr
    ranks = [
        [json.loads(line) for line in (directory / f"{rank}.jsonl").read_text().splitlines()] for rank in range(world)
    ]
    found = spans(traces)
    assert validate(found) == []
    return found, {step: truth([rank[step] for rank in ranks]) for step in range(BEFORE, BEFORE + steps)}


def truth(said: Sequence[tuple[int, int, str, list[int]]]) -> Truth:
    """Out of what each rank wrote of one step: which was latest at any of its gradients, against most of the others."""
    late: list[tuple[float, int]] = []
    for there in zip(*(times for _, _, _, times in said), strict=True):
        rank = max(range(len(there)), key=there.__getitem__)
        late.append((there[rank] - statistics.median(there[:rank] + there[rank + 1 :]), rank))
    _, drawn, where, _ = said[0]
    return Truth(drawn, where, max(late)[1])


def check_buckets(found: Sequence[Span], world: int, steps: int) -> None:
    """Each bucket of each step on each rank once, under the number that it has on the others, within `backward`."""
    names = {span.span_id: span.name for span in found}
    step_of = {(s.trace_id, s.attributes["dl.rank"]): s.attributes["dl.step"] for s in found if s.name == "train.step"}
    ranks: dict[tuple[int, int], list[int]] = defaultdict(list)
    numbers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for span in found:
        if "dl.bucket.index" in span.attributes:
            assert (span.name, names[span.parent_id]) == ("dist.all_reduce", "backward")
            rank = span.resource["dl.rank"]
            bucket = step_of[span.trace_id, rank], span.attributes["dl.bucket.index"]
            ranks[bucket].append(rank)
            numbers[bucket].add(span.attributes["dl.collective.seq"])
    for bucket, there in ranks.items():
        assert sorted(there) == list(range(world)), bucket
        assert len(numbers[bucket]) == 1, bucket
    assert len({min(each) for each in numbers.values()}) == len(numbers)
    for step in range(steps):
        indices = sorted(index for number, index in ranks if number == step)
        assert indices == list(range(len(indices)))
        assert len(indices) > 1 or step == 0, "DDP makes its buckets after the first step"


def named(found: Sequence[Span]) -> dict[int, Arrival]:
    """By step."""
    (summary,) = summarize(found)
    assert summary.arrivals.lacking == summary.arrivals.unclear == []
    return {arrival.step: arrival for arrival in summary.arrivals.steps}


def test_of_a_hundred_steps_with_another_slow_rank_each_all_name_it(tmp_path: Path) -> None:
    found, truths = job(tmp_path, 4, 100, 0.05)
    check_buckets(found, 4, BEFORE + 100)
    arrivals = named(found)
    assert {step: arrivals[step].rank for step in truths} == {step: each.last for step, each in truths.items()}
    as_drawn = {step: each for step, each in truths.items() if each.drawn == each.last}
    assert len(as_drawn) > 50, "the machine was slower than the ranks that were to be"
    right = [step for step, each in as_drawn.items() if arrivals[step].longer == each.where]
    assert len(right) > 0.8 * len(as_drawn), "where it was slow"


def test_each_bucket_of_eight_ranks_is_in_the_files_once(tmp_path: Path) -> None:
    found, _ = job(tmp_path, 8, 2, 0)
    check_buckets(found, 8, BEFORE + 2)
