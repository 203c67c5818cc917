"""ns that a collective costs more, with hooks that do nothing and recorded with its end; µs that a step of DDP costs
more on two gloo ranks, recording on and off in turn.

The first part runs on a group of one rank, where a collective is nothing but its overhead.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from _measure import Sample, added, interleaved, machine, spread, timed

from otel_dl.patches import collectives
from otel_dl.patches._patching import Patches
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.records import clock
from otel_dl.recording.run import Run
from otel_dl.settings import Settings

ROUNDS = 41
CALLS = 300
STEPS = 40
TURNS = 24


def with_patches(body: Callable[[], Any]) -> Callable[[], Sample]:
    run = Run(Settings(), NeverHead())
    patches = Patches("collectives")

    def once() -> None:
        step = run.current
        if step is None:
            run.current = step = run.open(clock(), batch=True, former=frozenset())
        step.__dict__.pop("collectives", None)
        body()

    def measure() -> Sample:
        collectives.install(run, patches)
        try:
            return timed(once, CALLS)
        finally:
            run.finish()
            if run.current is not None:
                run.cancel(run.current)
            patches.restore()
            run._begin(run.keep.head)

    return measure


def with_hooks(body: Callable[[], Any]) -> Callable[[], Sample]:
    """The floor: hooks that do nothing."""
    group: Any = c10d._get_default_group()

    def nothing(args: Any) -> None:
        pass

    def measure() -> Sample:
        group.register_pre_hook(1, nothing)
        group.register_post_hook(1, nothing)
        try:
            return timed(body, CALLS)
        finally:
            group.unregister_pre_hook(1)
            group.unregister_post_hook(1)

    return measure


def of_one_call() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    values = torch.ones(4)

    def sync() -> None:
        dist.all_reduce(values)

    def asynchronous() -> None:
        dist.all_reduce(values, async_op=True).wait()

    for name, body in (("sync", sync), ("async, waited for", asynchronous)):
        cases = {f"all_reduce, {name}": lambda body=body: timed(body, CALLS)}
        if hasattr(c10d.ProcessGroup, "register_pre_hook"):
            cases["hooks that do nothing"] = with_hooks(body)
        cases["recorded, with its end"] = with_patches(body)
        added(interleaved(cases, ROUNDS), next(iter(cases)))
    dist.destroy_process_group()


def rank_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    batch = torch.randn(8, 256)

    def step() -> None:
        optimizer.zero_grad()
        parallel(batch).sum().backward()
        optimizer.step()

    run = Run(Settings(), NeverHead())
    patches = Patches("collectives")

    def stretch(on: bool) -> list[float]:
        if on:
            collectives.install(run, patches)
        dist.barrier()
        values: list[float] = []
        for _ in range(STEPS):
            if on:
                run.current = run.open(clock(), batch=True, former=frozenset())
            start = time.perf_counter_ns()
            step()
            values.append(time.perf_counter_ns() - start)
            if on and run.current is not None:
                run.close(run.current, clock())
        if on:
            patches.restore()
        return values

    stretch(False)
    off, on = [], []
    for _ in range(TURNS):
        off.append(statistics.median(stretch(False)))
        on.append(statistics.median(stretch(True)))
    if rank == 0:
        print(f"a step of DDP, 2 gloo ranks, µs: off {spread([v / 1e3 for v in off])}; on"
              f" {spread([v / 1e3 for v in on])}; added, pair by pair"
              f" {spread([(b - a) / 1e3 for a, b in zip(off, on, strict=True)])}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(machine())
    of_one_call()
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [multiprocessing.get_context("spawn").Process(target=rank_of_two, args=(r, folder)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
