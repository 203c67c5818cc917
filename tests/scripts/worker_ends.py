"""A job one of whose workers ends badly: `worker_ends.py METHOD WAY WHEN`. Prints the truth and what was seen of it.

WAY: finished, exception, SIGKILL, SIGSEGV, SIGBUS, exit (`os._exit(3)`), stuck (the loader has a timeout). WHEN: first
(batch), middle, between (epochs, of an iterable dataset whose workers live on). The dataset writes down, before it
happens, who does it to which sample, in a file of its own.
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
FIRST, MIDDLE = 1, 9
TIMEOUT = 3


def say(path: str, **truth: object) -> None:
    Path(path).write_text(json.dumps({"pid": os.getpid(), "worker": get_worker_info().id, **truth}))


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
            memory[0]
    if way == "SIGSEGV":
        ctypes.string_at(0)
    if way == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)


class Map(Dataset):
    def __init__(self, way: str, guilty: int, path: str) -> None:
        self.way, self.guilty, self.path = way, guilty, path

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.guilty and self.way != "finished":
            say(self.path, sample=index)
            end(self.way)
        return torch.tensor(float(index))


class Stream(IterableDataset):
    """Ends when its second epoch begins, in one worker."""

    def __init__(self, way: str, path: str) -> None:
        self.way, self.path, self.epochs = way, path, 0

    def __iter__(self):
        self.epochs += 1
        if self.epochs == 2 and get_worker_info().id == 1 and self.way != "finished":
            say(self.path, sample=None)
            end(self.way)
        return iter([float(index) for index in range(ITEMS // WORKERS)])


def train(loader: DataLoader) -> int:
    model = torch.nn.Linear(BATCH, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = 0
    for batch in loader:
        model(batch.float()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        batches += 1
    return batches


def main() -> None:
    import otel_dl

    otel_dl.instrument()
    method, way, when, path = sys.argv[1:]
    keywords: dict = {"batch_size": BATCH, "num_workers": WORKERS, "multiprocessing_context": method}
    if way == "stuck":
        keywords["timeout"] = TIMEOUT
    if when == "between":
        loader = DataLoader(Stream(way, path), persistent_workers=True, **keywords)
    else:
        loader = DataLoader(Map(way, {"first": FIRST, "middle": MIDDLE}[when], path), **keywords)
    seen: dict = {"type": None, "text": "", "notes": []}
    batches = 0
    for _ in range(2):
        try:
            batches += train(loader)
        except Exception as error:
            seen = {"type": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
            break
    loader._iterator = None
    gc.collect()  # the traceback of an exception that torch raises again is a reference cycle
    print(json.dumps({"batches": batches, **seen}))


if __name__ == "__main__":
    main()
