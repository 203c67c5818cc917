"""Who a process is within its job."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from otel_dl.recording.identity import Identity

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_outside_a_launcher_it_is_the_only_rank_of_a_run_that_no_other_shares() -> None:
    one, other = Identity.read(), Identity.read()
    assert one[1:] == (0, 0, 0, 1, False)
    assert one.run != other.run
    assert len(one.run) == 32


def test_a_launcher_gives_rank_attempt_and_label() -> None:
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    identity = Identity.read({**environ, "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert identity[1:] == (2, 5, 1, 8, False)
    assert identity.run.startswith("job-")


def test_torchrun_without_a_run_id_has_no_label() -> None:
    assert "-" not in Identity.read({"TORCHELASTIC_RUN_ID": "none"}).run


def test_a_wrong_number_counts_as_none() -> None:
    assert Identity.read({"RANK": "first", "WORLD_SIZE": ""})[1:] == (0, 0, 0, 1, False)


def test_the_rank_is_the_one_that_is_known_when_training_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Identity.read()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    now = before.by_now()
    assert (now.run, now.rank, now.world_size) == (before.run, 3, 4)


def test_a_process_group_says_it_before_variables_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    before = Identity.read()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        now = before.by_now()
    finally:
        dist.destroy_process_group()
    assert (now.run, now.rank, now.world_size) == (before.run, 0, 1)
