"""Starts and ends many forked workers: `many_workers.py WORKERS KILLED`. Prints what the process holds, as JSON lines,
after a tenth of them and at the end."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

import otel_dl

TOGETHER = 10


class Items(Dataset):
    def __init__(self, guilty: int | None) -> None:
        self.guilty = guilty

    def __len__(self) -> int:
        return 2 * TOGETHER

    def __getitem__(self, index: int) -> float:
        if index == self.guilty:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(index)


def train(guilty: int | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """The note of the exception, where there was one."""
    loader = DataLoader(Items(guilty), num_workers=TOGETHER, multiprocessing_context="fork", collate_fn=list)
    try:
        for batch in loader:
            model(torch.tensor(batch)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except (RuntimeError, OSError, EOFError) as error:
        return "".join(getattr(error, "__notes__", ()))
    return None


def held() -> dict:
    gc.collect()
    otel_dl.flush(30)  # what workers have reported is read, and the pipes of those that have ended are closed
    process = psutil.Process()
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children()),
        "pages": len(list(Path(os.environ["OTEL_DL_DIR"]).glob("*.status"))),
        "shared": sum("/dev/shm" in line for line in mappings),
        "segments": len(list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))),
        "temporary": len(list(Path(tempfile.gettempdir()).iterdir())),
        "mapped pages": sum(".status" in line for line in mappings),  # the allocator's own come and go
        "rss": process.memory_info().rss,
    }


def main() -> None:
    otel_dl.instrument()
    workers, killed = map(int, sys.argv[1:])
    rounds = workers // TOGETHER
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    notes = 0
    for number in range(rounds):
        guilty = TOGETHER + number % TOGETHER if number * killed // rounds != (number + 1) * killed // rounds else None
        note = train(guilty, model, optimizer)
        notes += note is not None and "was killed by SIGKILL" in note
        if number + 1 == max(1, rounds // 10):
            print(json.dumps(held()), flush=True)
    print(json.dumps({**held(), "notes": notes}))


if __name__ == "__main__":
    main()
