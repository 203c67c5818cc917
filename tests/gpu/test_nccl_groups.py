"""What only NCCL on a GPU can show of process groups: one rank, one GPU, a few minutes.

`pytest -m gpu tests/gpu`; skipped without a GPU. Each case is a process of its own, as NCCL reads its variables once.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import children
from support.loader_jobs import spans as spans_in
from support.validate import validate

from otel_dl.ranks.nccl import UID_BYTES

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
BACKENDS = ["nccl", *(["nccl-legacy"] if TORCH >= (2, 15) else [])]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a GPU and NCCL"),
]

SCRIPT = """
import datetime, json, os, sys, torch, torch.distributed as dist
if {instrument}:
    import otel_dl; otel_dl.instrument()
from otel_dl.patches.groups import group_of
from otel_dl.ranks.nccl import nccl_uid
from otel_dl.ranks.store import JobStore
torch.cuda.set_device(0)
address = "127.0.0.1", {port}
dist.init_process_group({backend!r}, "tcp://127.0.0.1:{port}", rank=0, world_size=1{keywords})
device = torch.device("cuda", 0)
if {instrument}:
    otel_dl.step()
tensor = torch.ones(1024, device=device)
dist.all_reduce(tensor)
torch.cuda.synchronize()
other = dist.new_group([0], timeout=datetime.timedelta(seconds=77))
group = group_of()
store = JobStore(address, "a-test/")
uid = nccl_uid(store, group, "run", 0)
in_force = [g._get_backend(device).options._timeout.total_seconds() for g in (dist.group.WORLD, other)]
print(json.dumps(dict(
    uid=uid.uid, hash=uid.hash, in_force=in_force, told=[group.limit_s, group_of(other).limit_s], backend=group.backend,
    sum=tensor.sum().item(),
)), flush=True)
dist.destroy_process_group()
"""


def job(directory: Path, backend: str, instrument: bool = True, keywords: str = "", **variables: str) -> dict[str, Any]:
    script = SCRIPT.format(instrument=instrument, port=children.free_port(), backend=backend, keywords=keywords)
    environment = {
        "OTEL_TRACES_EXPORTER": "otel_dl_file",
        "OTEL_DL_DIR": str(directory),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": str(directory / "nccl.log"),
    }
    directory.mkdir(exist_ok=True)
    result = children.run(script, {**environment, **variables}, timeout=180)
    assert result.code == 0, result
    assert "a fault of ours" not in result.stderr, result
    found = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert found["sum"] == 1024
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("keywords", "variables", "limit", "source"),
    [
        ("", {}, 600.0, "otel_dl"),
        ("", {"OTEL_DL_PG_TIMEOUT": "0"}, 600.0, "torch"),
        ("", {"OTEL_DL_PG_TIMEOUT": "90"}, 90.0, "otel_dl"),
        (", timeout=datetime.timedelta(seconds=45)", {}, 45.0, "user"),
        (", pg_options=dist.ProcessGroupNCCL.Options()", {"OTEL_DL_PG_TIMEOUT": "90"}, 90.0, "otel_dl"),
    ],
)
def test_the_limit_in_force_on_nccl(
    tmp_path: Path, backend: str, keywords: str, variables: dict[str, str], limit: float, source: str
) -> None:
    found = job(tmp_path, backend, keywords=keywords, **variables)
    assert found["in_force"] == found["told"] == [limit, 77.0]
    spans = spans_in(tmp_path)
    assert not validate(spans)
    said = {
        span.name: (span.attributes["dl.timeout_s"], span.attributes["dl.timeout.source"])
        for span in spans
        if "dl.timeout_s" in span.attributes
    }
    assert said == {"dist.init_process_group": (limit, source), "dist.new_group": (77.0, "user")}


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_otel_dl_torch_has_its_own_limit(tmp_path: Path, backend: str) -> None:
    assert job(tmp_path, backend, instrument=False)["in_force"] == [600.0, 77.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_unique_id_is_read_from_the_store_and_its_hash_stands_in_nccls_log(tmp_path: Path, backend: str) -> None:
    found = job(tmp_path, backend)
    assert len(found["uid"]) == 2 * UID_BYTES, found
    log = (tmp_path / "nccl.log").read_text()
    said = set(re.findall(r"commId (0x[0-9a-f]+)", log))
    assert said, log[:2000]
    assert found["hash"] in said


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_all_reduce_on_the_device_is_a_span(tmp_path: Path, backend: str) -> None:
    job(tmp_path, backend)
    spans = [span for span in spans_in(tmp_path) if span.name == "dist.all_reduce"]
    if not spans:
        pytest.skip("this version has no spans of collectives")
    assert {span.attributes["dl.group.id"] for span in spans} == {"0"}
