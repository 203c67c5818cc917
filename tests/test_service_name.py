"""What `service.name` is of a job that says nothing of it: its script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.children import environment

from otel_dl.viewing.reading import Reading, read_spans

SETS_UP = """
from otel_dl.export.provider import connect
from otel_dl.settings import Settings
print(connect(Settings.read(), lambda: None, set_up=True).resource.attributes["service.name"])
"""
TRAINS = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.utils.data.DataLoader(torch.ones(4, 2)):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "net"
    package.mkdir()
    for name in ("__init__.py", "__main__.py", "train.py"):
        (package / name).write_text(SETS_UP if name != "__init__.py" else "")
    (tmp_path / "digits.v2.py").write_text(SETS_UP)
    (tmp_path / "run_training").write_text(SETS_UP)
    return tmp_path


def name_of(folder: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment(variables), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["digits.v2.py"], "digits.v2"),
        (["./run_training"], "run_training"),
        (["-m", "net.train"], "train"),
        (["-m", "net"], "net"),
        (["net"], "net"),
        (["-c", SETS_UP], "unknown_service"),
    ],
)
def test_it_is_the_script(folder: Path, arguments: list[str], name: str) -> None:
    assert name_of(folder, *arguments).partition(":")[0] == name


@pytest.mark.parametrize(
    "variables",
    [{"OTEL_SERVICE_NAME": "chosen"}, {"OTEL_RESOURCE_ATTRIBUTES": "team=vision,service.name=chosen"}],
)
def test_what_the_user_has_chosen_stands(folder: Path, variables: dict[str, str]) -> None:
    assert name_of(folder, "digits.v2.py", **variables) == "chosen"


@pytest.mark.parametrize(("variables", "name"), [({}, "train"), ({"OTEL_SERVICE_NAME": "chosen"}, "chosen")])
def test_it_is_so_under_otel_dl_run(tmp_path: Path, variables: dict[str, str], name: str) -> None:
    script, traces = tmp_path / "train.py", tmp_path / "traces"
    script.write_text(TRAINS)
    job = [sys.executable, "-m", "otel_dl.cli", "run", "--out", str(traces), "--", sys.executable, str(script)]
    subprocess.run(job, env=environment(variables), capture_output=True, check=True)
    assert {span.resource["service.name"] for span in read_spans(Reading(traces))} == {name}
