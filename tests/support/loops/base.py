"""What loops are made of: the diary, and small models, data and updates."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)  # for tensors as small as these others only wait

Form = Callable[["Diary"], Iterator[Any]]

FORMS: dict[str, Form] = {}
LONG: set[str] = set()
"""Those that compile with a C++ compiler."""


def form(function: Form) -> Form:
    FORMS[function.__name__] = function
    return function


@dataclass
class Diary:
    """What a script says of itself, in the notation of `phases`."""

    steps: list[str] = field(default_factory=list)
    evaluations: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    errors: int = 0
    """Steps that an exception left."""
    nexts_elsewhere: int = 0
    """Batches that another thread took; in which step's time is chance."""

    def step(self, phases: str, loss: Tensor | None = None, failed: bool | None = None) -> None:
        self.steps.append(phases)
        self.errors += "!" in phases if failed is None else failed
        if loss is not None:
            self.losses.append(loss.detach().item())


def seed(number: int = 7) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def train(form: Form, after_setup: Callable[[], None] = lambda: None) -> tuple[Diary, list[Tensor]]:
    """Trains in this form: (what it says, the final weights)."""
    seed()
    diary = Diary()
    script = form(diary)
    models: Any = next(script)
    after_setup()
    for _ in script:
        raise AssertionError("a form yields once")
    models = models if isinstance(models, tuple) else (models,)
    return diary, [value.clone() for model in models for value in model.state_dict().values()]


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Reading an item draws from all three generators, so that one draw too many would show."""

    def __init__(self, count: int, bad: int | None = None) -> None:
        self.x = torch.randn(count, 6)
        self.y = torch.randint(0, 3, (count,))
        self.bad = bad

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise ValueError(f"sample {index} is damaged")
        noise = random.gauss(0, 0.01) + np.random.normal(0, 0.01)
        return self.x[index] + noise + 0.01 * torch.randn(6), self.y[index]


def loader(batches: int, bad: int | None = None, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(Points(batches * 4, bad), batch_size=4, shuffle=shuffle)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.05, momentum=0.9)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6), torch.randint(0, 3, (4,))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """zero_grad forward backward optimizer"""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


UPDATE = "zero_grad forward backward optimizer"
