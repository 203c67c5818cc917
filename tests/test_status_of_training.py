"""The training process's page says, at every moment, the step and the open phases that the script knows of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.inprocess import recording
from support.loops import Picky, Points, seed, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from otel_dl.forensics import reader

STEPS = 140
"""Beyond 100 a step may be an ordinary one, which becomes the next."""


@pytest.mark.parametrize("native", [True, False], ids=["C", "Python"])
def test_at_every_moment_it_says_what_the_script_does(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_DL_DIR", str(tmp_path))
    wrong: list[str] = []
    looked = 0
    number = 0

    def look(*phases: str, step: int | None = -1, place: int | None = None) -> None:
        nonlocal looked
        (page,) = reader.read_all(tmp_path)
        looked += 1
        found = page.step, [phase.name for phase in page.phases] if page.phases is not None else ["torn"]
        if found != (number if step == -1 else step, list(phases)):
            wrong.append(f"step {number}, {phases}: {found}")
        if place is not None and (page.batch is None or page.batch.place != place):
            wrong.append(f"step {number} reads batch {place}: {page.batch}")

    class Looking(Points):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index % 4 == 0 and index:
                look("dataloader.next", place=index // 4)
            return super().__getitem__(index)

    class Model(Picky):
        def forward(self, x: Tensor) -> Tensor:
            look(*(("optimizer.step", "forward") if in_closure else ("forward",)))
            return super().forward(x)

    class Optimizer(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)

        def step(self, closure: object = None) -> object:  # type: ignore[override]
            look("optimizer.step")
            return super().step(closure)  # type: ignore[arg-type]

    seed()
    in_closure = False
    model: nn.Module = Model(6, 3)
    optimizer = Optimizer(sgd(model).param_groups, lr=0.01)
    with recording(native=native):
        for number, (x, y) in enumerate(DataLoader(Looking(4 * STEPS), batch_size=4)):
            look()
            optimizer.zero_grad()

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                loss = F.cross_entropy(model(x), y)
                outer = ("optimizer.step", "backward") if in_closure else ("backward",)  # noqa: B023
                loss.register_hook(lambda gradient: look(*outer))
                loss.backward()
                return loss

            if number % 10 == 9:
                in_closure = True
                optimizer.step(closure)
                in_closure = False
            else:
                closure()
                optimizer.step()
            look()
            number += 1  # what the next batch is read for
    assert wrong == []
    assert looked > 5 * STEPS
    assert list(tmp_path.glob("*.status")) == [], "the run has ended"
