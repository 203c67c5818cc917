"""ns that a batch costs more: without workers, with one worker, and in that worker.

Each batch is made a step of its own, as an optimizer would make it, and none is kept. So the end of a step, the
beginning of the next and `dataloader.next` itself are in what is added: *waits alone* is these without what is known of
the worker's batch, and the difference is what that costs, reading what the worker reports with it. The worker tells its
CPU time in what it reads.
"""

from __future__ import annotations

import atexit
import os
import time

import torch
from _measure import Sample, added, interleaved, machine, spread, timed
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import dataloader as loaders

from otel_dl.forensics.folder import StatusFolder
from otel_dl.patches import dataloader
from otel_dl.patches._patching import Patches
from otel_dl.patches.workers import Watch
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.run import Run
from otel_dl.settings import Settings
from otel_dl.workers import ring
from otel_dl.workers.entry import Starting
from otel_dl.workers.relay import Relay

ROUNDS = 81
BATCHES = 1_000
CORES = sorted(os.sched_getaffinity(0))


class Items(Dataset[int]):
    """No tensors: passing one on costs hundreds of microseconds, and its noise would hide what is measured."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> int:
        return time.process_time_ns()


def pin(worker: int) -> None:
    """Each process has a core of its own: where the scheduler puts them makes more of a difference than what is
    measured."""
    os.sched_setaffinity(0, {CORES[(1 + worker) % len(CORES)]})


def same(items: list[int]) -> int:
    return items[0]


class Case:
    """An epoch of a loader that lives through all rounds. `patched`: "" (nothing), "waits" or "all"."""

    def __init__(self, workers: int, patched: str) -> None:
        kept = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
        self._loader = DataLoader(
            Items(), batch_size=1, num_workers=workers, collate_fn=same, worker_init_fn=pin, **kept
        )
        self._patched = patched
        self._run = Run(Settings(), NeverHead())
        self._relay = Relay(self._run)
        self._folder = StatusFolder("", ring.SIZE)
        self._watch = Watch(self._run, self._relay, self._folder)
        if patched == "all":
            self._folder.open(self._run.identity)
            atexit.register(self._folder.close)
        self.worker: list[float] = []
        """ns of CPU time a batch where the batches are read, one value a round."""

    def __call__(self) -> Sample:
        patches = Patches("dataloader")
        if self._patched == "all":
            dataloader.install(self._run, patches, self._relay, self._watch)
        elif self._patched == "waits":
            dataloader._install_iterators(patches, loaders, dataloader.Loaders(), Starting())
            dataloader._install_waits(self._run, patches, loaders._BaseDataLoaderIter, self._watch)
        try:
            batches = iter(self._loader)
            lane = self._run.local.lane
            self._run.stepper = lane

            def step() -> int:
                used = next(batches)
                if lane.step is not None:
                    lane.step.stepped = True
                return used

            first = last = step()

            def epoch() -> None:
                nonlocal last
                for count in range(1, BATCHES):
                    last = step()
                    if count % 100 == 0:
                        self._relay.drain()  # in a run the builder does

            sample = timed(epoch, 1)
            for _ in batches:
                pass
            self.worker.append((last - first) / (BATCHES - 1))
            return Sample(sample.wall / (BATCHES - 1), sample.cpu / (BATCHES - 1))
        finally:
            self._run.finish()
            patches.restore()


if __name__ == "__main__":
    torch.set_num_threads(1)
    pin(-1)
    print(machine())
    cases = {
        "0 workers": Case(0, ""),
        "0 workers, recorded": Case(0, "all"),
        "1 worker": Case(1, ""),
        "1 worker, waits alone": Case(1, "waits"),
        "1 worker, recorded": Case(1, "all"),
    }
    samples = interleaved({**cases}, ROUNDS)
    for base in ("0 workers", "1 worker"):
        added({name: values for name, values in samples.items() if name.startswith(base)}, base)
    bare, waits, recorded = list(cases)[2:]
    main = [one.cpu - other.cpu for one, other in zip(samples[recorded], samples[waits], strict=True)]
    worker = [one - other for one, other in zip(cases[recorded].worker, cases[bare].worker, strict=True)]
    print(f"{'a batch of a worker beside its wait, in the main process, CPU':64}  {spread(main)!s:>30}")
    print(f"{'and in the worker, CPU':64}  {spread(worker)!s:>30}")
