"""A job whose dataset misbehaves: `bad_datasets.py METHOD WAY`. Prints each batch, and how it ended."""

from __future__ import annotations

import io
import os
import re
import resource
import sys
import tempfile
import threading
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, Dataset

ITEMS = 6


def clear_environment() -> None:
    os.environ.clear()


def fork() -> None:
    """The child leaves in a way of its own each time: at once, by an exception that is caught, through a thread."""
    child = os.fork()
    if child == 0:
        with tempfile.TemporaryFile() as file:
            file.write(b"a child of the worker")
        threading.Thread(target=os._exit, args=(0,)).start()
        threading.Event().wait()
    os.waitpid(child, 0)


def replace_stdout() -> None:
    sys.stdout.flush()
    sys.stdout = sys.stderr = io.StringIO()


def lose_stdout() -> None:
    sys.stdout = sys.stderr = None


opened: list[int] = []


def close_descriptors() -> None:
    """And opens files, which get the numbers."""
    os.closerange(3, 1024)
    folder = os.environ["FILES"]
    opened.extend(os.open(os.path.join(folder, str(number)), os.O_WRONLY | os.O_CREAT) for number in range(40))


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


WAYS: dict[str, Callable[[], None]] = {
    way.__name__: way
    for way in (clear_environment, fork, replace_stdout, lose_stdout, close_descriptors, few_descriptors)
}


class Numbers(Dataset):
    def __init__(self, way: str) -> None:
        self.way = way
        self.lock = threading.Lock() if way == "no_pickle" else None

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> int:
        if self.way in WAYS:
            WAYS[self.way]()
        return index


def leave_descriptors(free: int) -> None:
    """A limit that leaves this process so many."""
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def main() -> None:
    import otel_dl

    otel_dl.instrument()
    method, way = sys.argv[1:]
    if way.isdigit():
        leave_descriptors(int(way))
    init = (lambda worker: None) if way == "lambda" else None
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        # Without a descriptor to send it by, no batch ever comes.
        options = {"timeout": 3} if way == "few_descriptors" else {}
        loader = DataLoader(Numbers(way), num_workers=2, multiprocessing_context=method, worker_init_fn=init, **options)
        for batch in loader:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            print(batch.tolist(), flush=True)
    except Exception as error:
        said = re.sub(r"pid\(s\) [\d, ]+", "pid(s) … ", str(error))
        print(type(error).__name__, said.splitlines()[-1] if said else "", flush=True)


if __name__ == "__main__":
    main()
