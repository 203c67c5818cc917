"""A job one of whose workers ends in some way: `worker_ends.py METHOD WAY WHEN TRUTH`.

WAY: finished, exception, SIGKILL, SIGSEGV, SIGBUS, exit (`os._exit(3)`), stuck (the loader has a timeout). WHEN: first
(batch), middle, between (epochs, of an iterable dataset whose workers live on). The dataset itself writes the truth:
into the folder TRUTH each worker one line a sample that it begins to read, `guilty` who ends on which sample. Prints
what the user saw.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

BATCH, WORKERS, ITEMS = 2, 2, 16
GUILTY = {"first": 1, "middle": 9, "between": None}
TIMEOUT = {"fork": 3, "spawn": 15, "forkserver": 15}
"""Seconds, in which the first batch has to come."""


def say(folder: str, sample: int | None) -> None:
    truth = {"pid": os.getpid(), "worker": get_worker_info().id, "sample": sample}
    Path(folder, "guilty").write_text(json.dumps(truth))


def end(way: str) -> None:
    if way == "exception":
        raise KeyError("guilty")
    if way == "exit":
        os._exit(3)
    if way == "stuck":
        threading.Event().wait()
    if way == "SIGBUS":
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            file.truncate(0)
            print(memory[0])
    if way == "SIGSEGV":
        ctypes.string_at(0)
    if way == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)


class Map(Dataset):
    def __init__(self, way: str, guilty: int | None, folder: str) -> None:
        self.way, self.guilty, self.folder = way, guilty, folder

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> float:
        with open(Path(self.folder, f"read-{os.getpid()}"), "a") as file:
            file.write(f"{index}\n")
        if index == self.guilty and self.way != "finished":
            say(self.folder, index)
            end(self.way)
        return float(index)


class Stream(IterableDataset):
    """One worker ends when its second epoch begins."""

    def __init__(self, way: str, folder: str) -> None:
        self.way, self.folder, self.epochs = way, folder, 0

    def __iter__(self):
        self.epochs += 1
        if self.epochs == 2 and get_worker_info().id == 1 and self.way != "finished":
            say(self.folder, None)
            end(self.way)
        return iter([float(index) for index in range(ITEMS // WORKERS)])


def train(loader: DataLoader) -> None:
    model = torch.nn.Linear(BATCH, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in loader:
        model(torch.tensor(batch)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    import otel_dl

    otel_dl.instrument()
    method, way, when, folder = sys.argv[1:]
    # No tensors: what a dead worker holds of those can't be taken over, which is an EOFError or the like.
    keywords: dict = {"batch_size": BATCH, "num_workers": WORKERS, "collate_fn": list}
    keywords["multiprocessing_context"] = method
    if way == "stuck":
        keywords["timeout"] = TIMEOUT[method]
    if when == "between":
        loader = DataLoader(Stream(way, folder), persistent_workers=True, **keywords)
    else:
        loader = DataLoader(Map(way, GUILTY[when], folder), **keywords)
    seen: dict = {"type": None, "text": "", "notes": []}
    for _ in range(2):
        try:
            train(loader)
        except Exception as error:
            seen = {"type": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
            break
    loader._iterator = None
    gc.collect()  # the traceback of an exception that torch raises again is a reference cycle
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
