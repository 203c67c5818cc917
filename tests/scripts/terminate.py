"""Terminates one of two forked workers: it ends by SIGTERM, and nobody else does."""

from __future__ import annotations

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Items(Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.tensor(index)


def main() -> None:
    import otel_dl

    otel_dl.instrument()
    iterator = iter(DataLoader(Items(), num_workers=2, multiprocessing_context="fork"))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        next(iterator)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    first, second = iterator._workers
    try:
        first.terminate()
        first.join(10)
        for _ in range(10):
            next(iterator)
    except RuntimeError as error:
        print(type(error).__name__, "exited unexpectedly" in str(error) or "killed by signal" in str(error))
    print(first.exitcode, second.is_alive())


if __name__ == "__main__":
    main()
