"""A job that trains from every kind of loader under one start method: `loaders.py METHOD [KIND …]`.

Prints the truth, one JSON line a step, and at the end which kinds could not be had. What is true travels in the batch:
whoever reads an item writes down who it is, when it read what, and in which trace. Nothing of otel-dl is asked.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil
import torch
from opentelemetry import trace
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, get_worker_info

import otel_dl

tracer = trace.get_tracer("user")
ITEMS, BATCH, WORKERS = 12, 2, 2


# What is read.


def read(index: int) -> dict:
    worker = get_worker_info()
    context = trace.get_current_span().get_span_context()
    at = time.time_ns()
    with tracer.start_as_current_span("decode", attributes={"index": index, "pid": os.getpid(), "at": at}):
        pass
    return {
        "index": index,
        "worker": worker.id if worker else None,
        "pid": os.getpid(),
        "at": at,
        "trace": format(context.trace_id, "032x"),
        "span": format(context.span_id, "016x"),
        "threads": [thread.name for thread in threading.enumerate()],
    }


def share(count: int) -> range:
    """What of `count` items the present worker reads."""
    worker = get_worker_info()
    return range(worker.id, count, worker.num_workers) if worker else range(count)


class Map(Dataset):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict:
        return read(index)


class Bulk(Map):
    """Is asked for a batch at a time."""

    def __getitem__(self, indices: list[int]) -> list[dict]:
        return [read(index) for index in indices]


class Reading(Map):
    """Reads from a loader of its own."""

    def __init__(self) -> None:
        self.source = DataLoader(range(4), batch_size=2)

    def __getitem__(self, index: int) -> dict:
        assert len(list(self.source)) == 2
        return read(index)


class Iterable(IterableDataset):
    def __iter__(self) -> Iterator[dict]:
        return map(read, share(ITEMS))


class Resumable(IterableDataset):
    """Keeps its place, as torchdata's StatefulDataLoader wants it."""

    def __iter__(self) -> Iterator[dict]:
        return Place(share(ITEMS))


class Place:
    def __init__(self, indices: range) -> None:
        self.indices, self.position = indices, 0

    def __iter__(self) -> Place:
        return self

    def __next__(self) -> dict:
        if self.position == len(self.indices):
            raise StopIteration
        self.position += 1
        return read(self.indices[self.position - 1])

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


def read_from(example: dict) -> dict:
    """The example of somebody else's dataset, read."""
    return read(int(example["index"]))


def init(worker: int) -> None:
    with tracer.start_as_current_span("init", attributes={"pid": os.getpid()}):
        pass


def collate(items: list) -> list:
    return items


class Wrapped(NamedTuple):
    items: list
    name: str


def collate_with(name: str, items: list) -> Wrapped:
    return Wrapped(items, name)


# The job.


class Taken(NamedTuple):
    """A batch that a step is trained with."""

    loader: int
    """The loaders of a run are counted in the order of their first use."""
    epoch: int
    items: list[dict]
    asked: int | None = 0
    """In which step it was asked for, counted from the one that trains with it; None: in any, by another thread."""


class Job:
    def __init__(self, method: str) -> None:
        self.method = method
        self.workers: dict[str, Any] = {}
        if method != "none":
            self.workers = {"num_workers": WORKERS, "multiprocessing_context": method, "worker_init_fn": init}
        if method == "forkserver":
            multiprocessing.set_forkserver_preload(["torch"])
        if method == "spawn":
            # Each imports torch: they are started anew each epoch only where that is the point.
            self.workers["persistent_workers"] = True
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.kind = ""
        self.run = self.number = self.loaders = 0

    def loader(self, dataset: Any, of: Callable[..., Any] = DataLoader, **keywords: Any) -> Any:
        return of(dataset, **{"batch_size": BATCH, "collate_fn": collate, **self.workers, **keywords})

    def use(self) -> int:
        """The number of a loader that is used for the first time now."""
        self.loaders += 1
        return self.loaders - 1

    def step(self, *taken: Taken) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()
        self.trained(*taken)

    def trained(self, *taken: Taken) -> None:
        print(
            json.dumps(
                {
                    "kind": self.kind,
                    "run": self.run,
                    "step": self.number,
                    "taken": [batch._asdict() for batch in taken],
                }
            )
        )
        self.number += 1

    def epochs(self, loader: Any, epochs: int, wrap: Callable[[Any], Any] = iter) -> None:
        number = self.use()
        for epoch in range(epochs):
            for batch in wrap(loader):
                self.step(Taken(number, epoch, batch))


KINDS: dict[str, Callable[[Job], None]] = {}


def kind(function: Callable[[Job], None]) -> Callable[[Job], None]:
    KINDS[function.__name__] = function
    return function


def needs(*modules: str) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        function.missing = [name for name in modules if importlib.util.find_spec(name) is None]
        return function

    return mark


@kind
def map_style(job: Job) -> None:
    """Its workers are started anew each epoch."""
    job.epochs(job.loader(Map(), persistent_workers=False), 2)


@kind
def iterable_style(job: Job) -> None:
    job.epochs(job.loader(Iterable()), 2)


@kind
def persistent(job: Job) -> None:
    job.epochs(job.loader(Map(), persistent_workers=job.method != "none"), 3)


@kind
def unordered(job: Job) -> None:
    if "in_order" in inspect.signature(DataLoader).parameters:  # from torch 2.6 on
        job.epochs(job.loader(Map(), in_order=False, persistent_workers=job.method != "none"), 2)


@kind
def batch_sampler(job: Job) -> None:
    sampler = [[11, 0, 4], [2], [7, 8]]
    job.epochs(DataLoader(Map(), batch_sampler=sampler, collate_fn=collate, **job.workers), 1)


@kind
def batches_of_the_datasets_own(job: Job) -> None:
    sampler = BatchSampler(SequentialSampler(range(ITEMS)), BATCH, drop_last=False)
    job.epochs(job.loader(Bulk(), batch_size=None, sampler=sampler), 1)


@kind
def collate_of_its_own(job: Job) -> None:
    loader, number = job.loader(Map(), collate_fn=functools.partial(collate_with, "named")), job.use()
    for batch in loader:
        assert batch.name == "named"
        job.step(Taken(number, 0, batch.items))


@kind
def pin_memory(job: Job) -> None:
    """Without an accelerator torch warns and pins nothing."""
    warnings.filterwarnings("ignore", "'pin_memory' argument")
    job.epochs(job.loader(Map(), pin_memory=True), 1)


@kind
def timeout(job: Job) -> None:
    job.epochs(job.loader(Map(), timeout=60 if job.workers else 0), 1)


@kind
def several_at_once(job: Job) -> None:
    """The second one is shorter: the first one's batch without a partner belongs to no step."""
    first, second = job.loader(Map()), job.loader(Map(), batch_size=4)
    numbers = job.use(), job.use()
    for one, other in zip(first, second, strict=False):
        job.step(Taken(numbers[0], 0, one), Taken(numbers[1], 0, other))
    for other, one in zip(second, first, strict=False):
        job.step(Taken(numbers[1], 1, other), Taken(numbers[0], 1, one))


@kind
def one_within_another(job: Job) -> None:
    outer, inner = job.loader(Map(), batch_size=6), job.loader(Map(), batch_size=4)
    numbers = job.use(), job.use()
    for epoch, whole in enumerate(outer):
        first = [Taken(numbers[0], 0, whole)]
        for batch in inner:
            job.step(*first, Taken(numbers[1], epoch, batch))
            first = []


@kind
def read_within_the_dataset(job: Job) -> None:
    dataset = Reading()
    number = job.use()
    if job.method == "none":
        job.use()
    for batch in job.loader(dataset):
        job.step(Taken(number, 0, batch))


@kind
def left_in_mid_epoch(job: Job) -> None:
    loader, number = job.loader(Map()), job.use()
    for epoch in range(2):
        for place, batch in enumerate(loader):
            job.step(Taken(number, epoch, batch))
            if place == 2:
                break


@kind
def left_before_the_step(job: Job) -> None:
    """The batch in hand is left behind, and belongs to no step; that shows when the loader begins again."""
    loader, number = job.loader(Map()), job.use()
    for epoch in range(3):
        for place, batch in enumerate(loader):
            if epoch < 2 and place == 2:
                break
            job.step(Taken(number, epoch, batch))


@kind
def by_hand(job: Job) -> None:
    batches, number = iter(job.loader(Map())), job.use()
    job.step(Taken(number, 0, next(batches)))
    job.step(Taken(number, 0, next(batches)), Taken(number, 0, batches.__next__()))
    for batch in batches:
        job.step(Taken(number, 0, batch))
    assert next(batches, None) is None


@kind
def itertools_around(job: Job) -> None:
    loader, number = job.loader(Map()), job.use()
    for batch in itertools.islice(loader, 4):
        job.step(Taken(number, 0, batch))
    first, second = job.loader(Map(), batch_size=6), job.loader(Iterable(), batch_size=6)
    numbers = [job.use()] * 2 + [job.use()] * 2
    for place, batch in enumerate(itertools.chain(first, second)):
        job.step(Taken(numbers[place], 0, batch))


@kind
@needs("tqdm")
def tqdm(job: Job) -> None:
    from tqdm import tqdm

    job.epochs(job.loader(Map()), 1, wrap=functools.partial(tqdm, disable=False, file=sys.stderr))


@kind
def prefetching(job: Job) -> None:
    loader, number = job.loader(Map()), job.use()
    for epoch in range(2):
        batches = iter(loader)
        waiting, asked = next(batches, None), 0
        while waiting is not None:
            batch, waiting = waiting, next(batches, None)
            job.step(Taken(number, epoch, batch, asked))
            asked = -1


@kind
def in_a_thread(job: Job) -> None:
    loader, number = job.loader(Map()), job.use()
    batches: queue.Queue[Any] = queue.Queue(1)

    def produce() -> None:
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    thread = threading.Thread(target=produce)
    thread.start()
    while (batch := batches.get()) is not None:
        job.step(Taken(number, 0, batch, None))
    thread.join()


@kind
@needs("torchdata")
def stateful(job: Job) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    job.epochs(job.loader(Map(), StatefulDataLoader), 2)
    job.epochs(job.loader(Iterable(), StatefulDataLoader, persistent_workers=job.method != "none"), 2)


@kind
@needs("torchdata")
def stateful_resumed(job: Job) -> None:
    """In the middle of an epoch; from a dataset that keeps its place, from a sampler's, and by reading up to there."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    for dataset in (Map(), Resumable(), Iterable()):
        loader, number = job.loader(dataset, StatefulDataLoader), job.use()
        for batch in itertools.islice(loader, 2):
            job.step(Taken(number, 0, batch))
        state = loader.state_dict()
        loader, number = job.loader(dataset, StatefulDataLoader), job.use()
        loader.load_state_dict(state)
        steps = job.number
        for batch in loader:
            job.step(Taken(number, 0, batch))
        assert job.number - steps == 4


@kind
@needs("accelerate")
def accelerate(job: Job) -> None:
    """Its loaders take the next batch before they give the one in hand."""
    from accelerate import Accelerator

    # Nothing is moved or put together anew: a batch here is what was read.
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(job.loader(Map()), device_placement=False)
    number = job.use()
    for epoch in range(2):
        for place, batch in enumerate(loader):
            job.step(Taken(number, epoch, batch, -1 if place else 0))


@kind
@needs("lightning")
def lightning(job: Job) -> None:
    import logging

    from lightning.pytorch import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    number = job.use()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: list[dict], place: int) -> torch.Tensor:
            return self.layer(torch.ones(1, 1)).sum()

        def on_train_batch_end(self, outputs: Any, batch: list[dict], place: int) -> None:
            job.trained(Taken(number, self.current_epoch, batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = Trainer(max_epochs=2, accelerator="cpu", barebones=True)
    trainer.fit(Module(), job.loader(Map()))


@kind
@needs("datasets")
def hugging_face(job: Job) -> None:
    from datasets import Dataset as Table

    table = Table.from_dict({"index": list(range(ITEMS))}).to_iterable_dataset(num_shards=WORKERS)
    job.epochs(job.loader(table.map(read_from)), 1)


@kind
@needs("webdataset")
def webdataset(job: Job) -> None:
    import webdataset

    source = webdataset.DataPipeline(Iterable())
    options = {**job.workers, "batch_size": BATCH, "collate_fn": collate}
    number = job.use()
    for batch in webdataset.WebLoader(source, **options):
        job.step(Taken(number, 0, batch))


@kind
def generator(job: Job) -> None:
    """No DataLoader: the main process reads, whatever the start method."""

    def batches() -> Iterator[list[dict]]:
        for first in range(0, ITEMS, BATCH):
            yield [read(first), read(first + 1)]

    for _ in range(2):
        job.epochs(otel_dl.loader(batches()), 1)


@kind
def outlives_a_run(job: Job) -> None:
    """The last kind: what comes behind it is of another run."""
    loader, number = job.loader(Map(), persistent_workers=False), job.use()
    for batch in itertools.islice(loader, 3):
        job.step(Taken(number, 0, batch))
    otel_dl.uninstrument()
    otel_dl.instrument()
    job.run, job.number, job.loaders = job.run + 1, 0, 0
    number = job.use()
    for batch in loader:
        job.step(Taken(number, 0, batch))


def main() -> None:
    otel_dl.instrument()
    method, *wanted = sys.argv[1:]
    job = Job(method)
    missing = {}
    for name in wanted or KINDS:
        if lacks := getattr(KINDS[name], "missing", []):
            missing[name] = lacks
            continue
        job.kind = name
        KINDS[name](job)
    helpers = {}
    for process in psutil.Process().children(recursive=True):
        for name in ("resource_tracker", "forkserver"):
            # Workers of the fork server were forked from it, and have its command line.
            if any(name in part for part in process.cmdline()) and process.ppid() == os.getpid():
                helpers[name] = process.num_threads()
    print(json.dumps({"helpers": helpers, "missing": missing}))


if __name__ == "__main__":
    main()
