"""The script for a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

GPU = Path(__file__).resolve().parent / "gpu"


def test_without_a_gpu_it_says_so_and_is_neither_a_success_nor_a_miss() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, GPU / "device.py"], capture_output=True, text=True, env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("Nothing was checked: torch ")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))


@pytest.mark.usefixtures("gpu")
def test_the_table_tells_what_was_missed() -> None:
    import table

    found = table.Table()
    found.within("a duration", 10.1, 10, 0.02)
    found.within("another", 10.3, 10, 0.02)
    found.at_most("what it costs", 1.0, 1, "%")
    assert [row.claim for row in found.missed] == ["another"]
    assert str(found).splitlines() == [
        "claim          measured   expected",
        "a duration     10.100 ms  10.000 ms ± 2%  ok",
        "another        10.300 ms  10.000 ms ± 2%  MISSED",
        "what it costs  1.000 %    at most 1 %     ok",
    ]


def event(cat: str, ts: float, dur: float, correlation: int = 0, name: str = "") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "ts": ts, "dur": dur, "name": name, "args": {"correlation": correlation}}


@pytest.mark.usefixtures("gpu")
def test_what_the_profilers_trace_says_a_phase_takes_on_the_device() -> None:
    import device_time

    trace = {
        "traceEvents": [
            # Launched in forward, done at 5,000; the host leaves forward at 1,000.
            event("user_annotation", 0, 1_000, name="phase forward"),
            event("cuda_runtime", 100, 10, 1),
            event("kernel", 200, 4_800, 1),
            # Launched in backward, by another thread: from 5,000 to 9,000; the host is through at 10,000.
            event("user_annotation", 2_000, 8_000, name="phase backward"),
            event("cuda_runtime", 2_500, 10, 2),
            event("kernel", 5_000, 4_000, 2),
            # Nothing is queued, nothing is to be done: the device idles as long as the host.
            event("user_annotation", 20_000, 3_000, name="phase dataloader.next"),
        ]
    }
    assert device_time.profiled(trace) == {
        "forward": [5.0],  # the first mark is passed at 0, the second when the kernel is done
        "backward": [5.0],  # from 5,000 to 10,000
        "dataloader.next": [3.0],
    }


@pytest.mark.usefixtures("gpu")
def test_the_network_trains() -> None:
    from resnet import ResNet

    model = ResNet(width=4, classes=3)
    output = model(torch.randn(2, 3, 64, 64))
    assert output.shape == (2, 3)
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("part", ["device_time", "convolutions", "compilation", "synchronization"])
def test_every_check_fills_the_one_table(part: str) -> None:
    module = importlib.import_module(part)
    assert module.CHECKS
    for check in module.CHECKS:
        (parameter,) = inspect.signature(check).parameters.values()
        assert parameter.annotation == "Table", check
