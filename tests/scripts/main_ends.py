"""A job whose training process ends in some way: `main_ends.py METHOD END TRUTH`.

END: return, exception, sys.exit, SIGTERM, SIGKILL, SIGSEGV, os._exit. The last three end it while both workers are held
up in a sample that they have written down in the folder TRUTH, as they have each sample that they began to read.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

BATCH, WORKERS, ITEMS, HELD_UP = 2, 2, 24, 8
HARD = ("SIGKILL", "SIGSEGV", "os._exit")


class Map(Dataset):
    def __init__(self, folder: str, held_up: bool) -> None:
        self.folder, self.held_up = folder, held_up

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> float:
        with open(Path(self.folder, f"read-{os.getpid()}"), "a") as file:
            file.write(f"{index}\n")
        if self.held_up and index >= HELD_UP:
            Path(self.folder, f"held-{os.getpid()}").write_text(str(index))
            threading.Event().wait()
        return float(index)


def end(way: str) -> None:
    if way == "exception":
        raise ValueError("the user fails")
    if way == "sys.exit":
        sys.exit(3)
    if way == "os._exit":
        os._exit(4)
    if way == "SIGSEGV":
        ctypes.string_at(0)
    if way in ("SIGKILL", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, way))


def main() -> None:
    import otel_dl

    otel_dl.instrument()
    method, way, folder = sys.argv[1:]
    data = Map(folder, way in HARD)
    loader = DataLoader(data, batch_size=BATCH, num_workers=WORKERS, multiprocessing_context=method, collate_fn=list)
    model = torch.nn.Linear(BATCH, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = model(torch.tensor(batch)).sum()
        if number == HELD_UP // BATCH - 1 and way != "return":
            while way in HARD and len(list(Path(folder).glob("held-*"))) < WORKERS:
                time.sleep(0.01)
            loss.register_hook(lambda gradient: end(way))
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
