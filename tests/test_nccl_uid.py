"""How NCCL calls a communicator, read from a real TCPStore into which the test has put what torch would."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from otel_dl.ranks.nccl import UID_BYTES, derived, hash_of, nccl_uid
from otel_dl.ranks.store import JobStore
from otel_dl.recording.ranks import Group

GROUP = Group("7", (0, 2, 4), "nccl", 600.0)
UID = os.urandom(UID_BYTES)


@pytest.fixture
def host() -> Any:
    """The job's store, as rank 0 hosts it."""
    return dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)


@pytest.fixture
def store(host: Any) -> Iterator[JobStore]:
    return JobStore(("127.0.0.1", host.port), "otel-dl/")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def of_the_group(store: Any, made_by: str = "torch") -> Any:
    """The store that torch gives a group's NCCL backend (distributed_c10d.py, `_new_process_group_helper`)."""
    if made_by == "torchrun":
        store = dist.PrefixStore("/worker/attempt_3", store)  # rendezvous.py, 2.4
    if made_by != "user":
        store = dist.PrefixStore("default_pg", store)
    return dist.PrefixStore("cuda/", dist.PrefixStore(f"{GROUP.id}/", store))


@pytest.mark.parametrize("made_by", ["torch", "user", "torchrun"])
@pytest.mark.parametrize("generation", ["legacy", "nccl2", "nccl2 of many ranks"])
def test_the_id_is_read_where_torch_puts_it(host: Any, store: JobStore, made_by: str, generation: str) -> None:
    place = of_the_group(host, made_by)
    if generation == "legacy":
        place.set("0", UID)
        place.set("1", os.urandom(UID_BYTES))  # of a second communicator
        place.set("0:1", os.urandom(UID_BYTES))  # of point-to-point
    else:
        key = "nccl_storekey_0" if generation == "nccl2" else "nccl_storekey_0_0"
        dist.PrefixStore(GROUP.id, place).set(key, UID)
    assert nccl_uid(store, GROUP, "run", 3) == (UID.hex(), hash_of(UID))


@pytest.mark.parametrize("value", [None, b"", b"1", UID + b"1"], ids=["none", "empty", "short", "long"])
def test_what_is_no_id_gives_the_derived_one(host: Any, store: JobStore, value: bytes | None) -> None:
    if value is not None:
        of_the_group(host).set("0", value)
    assert nccl_uid(store, GROUP, "run", 0) == (derived(GROUP, "run", 0), "")


def test_without_a_store_or_after_its_end_it_is_the_derived_one() -> None:
    host = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    of_the_group(host).set("0", UID)
    store = JobStore(("127.0.0.1", host.port), "otel-dl/")
    del host
    assert nccl_uid(store, GROUP, "run", 0).uid == nccl_uid(None, GROUP, "run", 0).uid == derived(GROUP, "run", 0)


def test_gloo_has_none(host: Any, store: JobStore) -> None:
    of_the_group(host).set("0", UID)
    assert nccl_uid(store, GROUP._replace(backend="gloo"), "run", 0).hash == ""


def test_the_derived_id_tells_jobs_attempts_and_groups_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {
        derived(GROUP, "run", 0),
        derived(GROUP, "other", 0),
        derived(GROUP, "run", 1),
        derived(GROUP._replace(id="8"), "run", 0),
        derived(GROUP._replace(ranks=(0, 2)), "run", 0),
    }
    assert len(ids) == 5
    assert {len(id) for id in ids} == {32}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert derived(GROUP, "mine", 0) == derived(GROUP, "another rank's", 0)


def test_the_hash_is_nccls() -> None:
    """DJB2: by hand for three bytes, of which the last is negative where a C `char` is."""
    assert hash_of(b"") == hex(5381)
    assert hash_of(b"ab") == hex((5381 * 33 + 97) * 33 + 98)
    assert hash_of(b"\xff") in (hex(5381 * 33 - 1), hex(5381 * 33 + 255))


def test_an_id_of_nccl_itself_has_the_size_that_is_expected() -> None:
    spec = importlib.util.find_spec("nvidia.nccl")
    found = [path for folder in spec.submodule_search_locations for path in _libraries(folder)] if spec else []
    if not found:
        pytest.skip("no NCCL in this environment")
    buffer = ctypes.create_string_buffer(b"\xa5" * UID_BYTES + b"end", UID_BYTES + 4)
    assert ctypes.CDLL(found[0]).ncclGetUniqueId(buffer) == 0
    assert buffer.raw[UID_BYTES:] == b"end\0"
    assert buffer.raw[:8] != b"\xa5" * 8
    assert hash_of(buffer.raw[:UID_BYTES]).startswith("0x")


def _libraries(folder: str) -> list[str]:
    return glob.glob(str(Path(folder) / "lib" / "libnccl.so*"))
