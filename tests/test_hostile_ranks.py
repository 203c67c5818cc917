"""Ranks train bit for bit as they do alone, whatever is wrong around otel-dl."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.children import environment, free_port, printed
from support.loader_jobs import SCRIPTS

pytestmark = pytest.mark.long

NOWHERE = "/dev/null/no-folder"
WRONG = {
    "nobody receives": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_DL_EXIT_DELAY": "1"},
    "no folder, and settings that are none": {
        "OTEL_TRACES_EXPORTER": "otel_dl_file",
        "OTEL_DL_DIR": NOWHERE,
        "OTEL_DL_PG_TIMEOUT": "-3",
        "OTEL_DL_TRACE_RANKS": "many",
        "OTEL_DL_EXIT_DELAY": "1",
    },
}


def train(what: str, **settings: str) -> tuple[str, list[str]]:
    """What rank 0 printed, and what each rank wrote to stderr."""
    env = environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", **settings})
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "hostile_ranks.py"), what], env={**env, "RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return printed(said[0][0]), [error for _, error in said]


@pytest.fixture(scope="module")
def bare() -> str:
    return train("bare")[0]


@pytest.mark.parametrize("what", ["traced", "clear"])
@pytest.mark.parametrize("wrong", WRONG)
def test_ranks_train_as_they_do_alone(what: str, wrong: str, bare: str) -> None:
    result, said = train(what, **WRONG[wrong])
    assert result == bare != ""
    for error in said:
        assert "a fault of ours" not in error
        assert "Traceback" not in error
    if "OTEL_DL_DIR" in WRONG[wrong]:
        assert all(error.count("OTEL_DL_PG_TIMEOUT has the value '-3'") == 1 for error in said)
