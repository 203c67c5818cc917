"""A job with three kinds of loader under one start method: `loaders.py METHOD`. Prints the truth, one JSON line a step.

What is true travels in the batch: the worker writes down who it is, when it read what, and which trace it was in.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import time

import psutil
import torch
from opentelemetry import trace
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

tracer = trace.get_tracer("user")
ITEMS, BATCH, WORKERS = 12, 2, 2


def read(index: int) -> dict:
    worker = get_worker_info()
    context = trace.get_current_span().get_span_context()
    with tracer.start_as_current_span("decode", attributes={"index": index, "pid": os.getpid()}):
        at = time.time_ns()
    return {
        "index": index,
        "worker": worker.id if worker else None,
        "pid": os.getpid(),
        "at": at,
        "trace": format(context.trace_id, "032x"),
        "span": format(context.span_id, "016x"),
        "threads": [thread.name for thread in threading.enumerate()],
    }


class Map(Dataset):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict:
        return read(index)


class Iterable(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        return (read(index) for index in range(first, ITEMS, stride))


def init(worker: int) -> None:
    with tracer.start_as_current_span("init", attributes={"pid": os.getpid()}):
        pass


def collate(items: list) -> list:
    return items


def main() -> None:
    import otel_dl

    otel_dl.instrument()
    method = sys.argv[1]
    workers = {"num_workers": WORKERS, "multiprocessing_context": method, "worker_init_fn": init}
    if method == "none":
        workers = {}
    loaders = [
        ("map", DataLoader(Map(), batch_size=BATCH, collate_fn=collate, **workers), 2),
        ("iterable", DataLoader(Iterable(), batch_size=BATCH, collate_fn=collate, **workers), 1),
    ]
    if workers:
        persistent = DataLoader(Map(), batch_size=BATCH, collate_fn=collate, persistent_workers=True, **workers)
        loaders.append(("persistent", persistent, 3))
    if method == "fork" and "in_order" in inspect.signature(DataLoader).parameters:  # from torch 2.6 on
        unordered = DataLoader(Map(), batch_size=BATCH, collate_fn=collate, in_order=False, **workers)
        loaders.append(("unordered", unordered, 1))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = 0
    for number, (kind, loader, epochs) in enumerate(loaders):
        for epoch in range(epochs):
            for batch in loader:
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                print(json.dumps({"step": step, "loader": number, "kind": kind, "epoch": epoch, "batch": batch}))
                step += 1
    helpers = {}
    for process in psutil.Process().children(recursive=True):
        for name in ("resource_tracker", "forkserver"):
            # Workers of the fork server were forked from it, and have its command line.
            if any(name in part for part in process.cmdline()) and process.ppid() == os.getpid():
                helpers[name] = process.num_threads()
    print(json.dumps({"helpers": helpers}))


if __name__ == "__main__":
    main()
