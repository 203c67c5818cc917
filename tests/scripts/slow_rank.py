"""One rank of a DDP job over gloo in which each step another rank is slow: `slow_rank.py STEPS SECONDS FOLDER`.

Every rank draws from the same numbers which rank sleeps so long in a step, and where. What really happened it writes
into FOLDER, for on a shared machine others may come late as well: (step, rank, where, and of each gradient when it was
there, by the clock that all processes of a host share).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import otel_dl

otel_dl.instrument()
steps, seconds, folder = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OUTSIDE = "outside any phase"
BEFORE = 2
"""Steps in which nobody is slow: DDP makes its buckets, and in the second one it agrees on them."""
drawn = random.Random(0)
slow = [(-1, "")] * BEFORE + [
    (drawn.randrange(world), drawn.choice(["dataloader.next", "forward", "backward", OUTSIDE, "optimizer.step"]))
    for _ in range(steps)
]
number = 0


def maybe_sleep(where: str, step: int) -> None:
    if step < len(slow) and slow[step] == (rank, where):
        time.sleep(seconds)


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return len(slow)

    def __getitem__(self, index: int) -> torch.Tensor:
        maybe_sleep("dataloader.next", number)
        return torch.ones(64)


class Slow(torch.autograd.Function):
    """Sleeps in `forward` and in `backward`."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        maybe_sleep("forward", number)
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        maybe_sleep("backward", number)
        return gradient


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(self.layers(x)).sum()


class Optimizer(torch.optim.SGD):
    """What it loses comes after all collectives of a step: the rank is late in the next one."""

    def step(self, closure: object = None) -> None:
        maybe_sleep("optimizer.step", number + 1)
        super().step()


torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(Model(), bucket_cap_mb=0.03)
optimizer = Optimizer(model.parameters(), lr=0.01)
there: list[int] = []
for parameter in model.parameters():
    parameter.register_hook(lambda _: there.append(time.time_ns()))

with (folder / f"{rank}.jsonl").open("w") as truth:
    for x in DataLoader(Numbers()):
        there.clear()
        loss = model(x)
        maybe_sleep(OUTSIDE, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps([number, *slow[number], there]), file=truth)
        number += 1
dist.destroy_process_group()
