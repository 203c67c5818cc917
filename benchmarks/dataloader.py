"""ns that a batch costs more: without workers, with one worker, and in that worker.

Each batch is made a step of its own, as an optimizer would make it; so the beginning and end of one are in what is
added, and so is reading what the worker reports. A worker tells its CPU time in what it reads.
"""

from __future__ import annotations

import atexit
import time

import torch
from _measure import Sample, added, interleaved, machine, spread, timed
from torch.utils.data import DataLoader, Dataset

from otel_dl.forensics.folder import StatusFolder
from otel_dl.patches import dataloader
from otel_dl.patches._patching import Patches
from otel_dl.patches.workers import Watch
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.run import Run
from otel_dl.settings import Settings
from otel_dl.workers import ring
from otel_dl.workers.relay import Relay

ROUNDS = 41
BATCHES = 1_000


class Items(Dataset[int]):
    """No tensors: passing one on costs hundreds of microseconds, and its noise would hide what is measured."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> int:
        return time.process_time_ns()


def same(items: list[int]) -> int:
    return items[0]


class Case:
    """An epoch of a loader that lives through all rounds, with or without the patches."""

    def __init__(self, workers: int, patched: bool) -> None:
        kept = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
        self._loader = DataLoader(Items(), batch_size=1, num_workers=workers, collate_fn=same, **kept)
        self._patched = patched
        self._run = Run(Settings(), NeverHead())
        self._relay = Relay(self._run)
        self._folder = StatusFolder("", ring.SIZE)
        self._watch = Watch(self._run, self._relay, self._folder)
        if patched:
            self._folder.open(self._run.identity)
            atexit.register(self._folder.close)
        self.worker: list[float] = []
        """ns of CPU time a batch where the batches are read, one value a round."""

    def __call__(self) -> Sample:
        patches = Patches("dataloader")
        if self._patched:
            dataloader.install(self._run, patches, self._relay, self._watch)
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
    print(machine())
    for workers in (0, 1):
        bare, recorded = Case(workers, patched=False), Case(workers, patched=True)
        added(
            interleaved({f"{workers} workers": bare, f"{workers} workers, recorded": recorded}, ROUNDS),
            f"{workers} workers",
        )
    pairs = zip(recorded.worker, bare.worker, strict=True)
    print(f"{'added to a fetch in the worker, CPU':64}{spread([one - other for one, other in pairs])!s:>30}")
