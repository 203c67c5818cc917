"""What otel-dl asks of the job's store: a write a second and rank, and nothing on the thread that trains."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
from support.children import environment, free_port
from support.loader_jobs import SCRIPTS

from otel_dl.ranks import store

WRITES = {store._SET, store._ADD, store._APPEND}


@pytest.mark.long
def test_a_rank_writes_once_a_second_and_never_where_it_trains() -> None:
    env = environment(
        {"OTEL_TRACES_EXPORTER": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "store_writes.py")],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        told = json.loads(rank.communicate(timeout=120)[0])
        assert rank.returncode == 0
        assert {thread for _, thread, _ in told["operations"]} == {"otel-dl-ranks"}
        # What joins, and what ends, says so at once.
        steady = [
            at for at, _, query in told["operations"] if query in WRITES and told["began"] + 1 < at < told["ended"]
        ]
        assert len(steady) >= 4
        assert min(later - former for former, later in itertools.pairwise(steady)) > 0.9
