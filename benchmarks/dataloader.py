"""ns that a batch costs more: without workers, with one worker, and what a worker itself does for a fetch.

Each batch is made a step of its own, as an optimizer would make it; so the beginning and end of one are in what is
added, and so is reading what the worker reports.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from _measure import Sample, added, interleaved, machine, spread, timed
from torch.utils.data import DataLoader, Dataset

from otel_dl.patches import dataloader
from otel_dl.patches._patching import Patches
from otel_dl.recording.keep import AdaptiveHead, NeverHead
from otel_dl.recording.run import Run
from otel_dl.settings import Settings
from otel_dl.workers.carrier import Carrier
from otel_dl.workers.loop import Worker
from otel_dl.workers.relay import Relay
from otel_dl.workers.writer import Writer

ROUNDS = 41
BATCHES = 1_000

item = 0
"""No tensor: passing one on costs hundreds of microseconds, and its noise would hide what is measured."""


class Items(Dataset[int]):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> int:
        return item


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

    def __call__(self) -> Sample:
        patches = Patches("dataloader")
        if self._patched:
            dataloader.install(self._run, patches, self._relay)
        try:
            batches = iter(self._loader)
            lane = self._run.local.lane
            self._run.stepper = lane

            def step() -> None:
                next(batches)
                if lane.step is not None:
                    lane.step.stepped = True

            step()

            def epoch() -> None:
                for count in range(1, BATCHES):
                    step()
                    if count % 100 == 0:
                        self._relay.drain()  # in a run the builder does

            sample = timed(epoch, 1)
            for _ in batches:
                pass
            return Sample(sample.wall / (BATCHES - 1), sample.cpu / (BATCHES - 1))
        finally:
            self._run.finish()
            patches.restore()


def fetches() -> list[float]:
    """What a worker does for each fetch beside torch's own loop."""
    run = Run(Settings(), AdaptiveHead())
    relay = Relay(run)
    (descriptor,) = relay.open("0" * 32, 1)
    assert descriptor is not None
    worker = Worker(Carrier.make(run, "0" * 32), 0, Writer(os.dup(descriptor)))
    costs: list[float] = []
    for _ in range(ROUNDS):
        messages = iter([(index, item) for index in range(500)])

        def fetch(messages: object = messages) -> None:
            message = next(messages)  # type: ignore[call-overload]
            worker.received(message)
            worker.answers(message)

        costs.append(timed(fetch, 500).wall)
        relay.drain()
    relay.close()
    return costs


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(machine())
    for workers in (0, 1):
        cases: dict[str, Callable[[], Sample]] = {
            f"{workers} workers": Case(workers, patched=False),
            f"{workers} workers, recorded": Case(workers, patched=True),
        }
        added(interleaved(cases, ROUNDS), f"{workers} workers")
    print(f"{'a fetch in the worker':34} {spread(fetches())!s:>30}")
