"""Two ranks of `torch.multiprocessing.start_processes`, two steps each: `ranks.py METHOD`. Prints each rank's pid."""

from __future__ import annotations

import os
import sys

import torch
import torch.multiprocessing as multiprocessing


def rank(number: int, steps: int) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(os.getpid(), flush=True)


def main() -> None:
    import otel_dl

    otel_dl.instrument()
    multiprocessing.start_processes(rank, args=(2,), nprocs=2, start_method=sys.argv[1])


if __name__ == "__main__":
    main()
