"""ns that each hook adds to a call, beside the floor: two readings of the clock and one append.

The calls are those of a small training loop, each hook alone, torch running in between: what a hook costs with cold
caches is what it costs. Each step is made an ordinary one beforehand, as it is where all hooks are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from _measure import Sample, added, interleaved, machine, timed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from otel_dl.forensics.folder import StatusFolder
from otel_dl.patches import dataloader, training
from otel_dl.patches._patching import Patches
from otel_dl.patches.workers import Watch
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.records import clock
from otel_dl.recording.run import Run
from otel_dl.settings import Settings
from otel_dl.workers.relay import Relay

ROUNDS = 41
STEPS = 300

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10_000)
loader = DataLoader(TensorDataset(torch.randn(STEPS, 8)), batch_size=1)


def step(batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    scheduler.step()


def epoch(before: Callable[[], None]) -> Callable[[], Sample]:
    def run() -> Sample:
        batches: Iterator[list[torch.Tensor]] = iter(loader)
        next(batches)

        def body() -> None:
            before()
            step(next(batches)[0])

        return timed(body, STEPS - 1)

    return run


def ordinary(current: Run, next_too: bool) -> Callable[[], None]:
    """Makes the step that is open one in which phases are simply recorded; `next_too`: and which the next one follows.

    It costs the same in the case that the others are held against.
    """
    lane = current.local.lane

    def prepare() -> None:
        if current.stepper is None:
            current.stepper = lane
        step = lane.step
        if step is None:
            lane.step = step = current.open(clock(), batch=True, former=frozenset())
        step.settled = step.batch = step.plain = step.stepped = True
        if not next_too:
            step.records.clear()

    return prepare


def hooked(targets: list[str], extra: Callable[[], None] = lambda: None) -> Callable[[], Sample]:
    """An epoch with these hooks, and a call of `extra` in each step."""
    current = Run(Settings(), NeverHead())
    prepare = ordinary(current, "dataloader" in targets)

    def before() -> None:
        prepare()
        extra()

    def run() -> Sample:
        installed: list[Patches] = []
        for target in targets:
            patches = Patches(target)
            if target == "dataloader":
                relay = Relay(current)
                dataloader.install(current, patches, relay, Watch(current, relay, StatusFolder()))
            else:
                training.INSTALLERS[target](current, patches)
            installed.append(patches)
        try:
            return epoch(before)()
        finally:
            current.finish()  # its step leaves the OpenTelemetry context to the next case's
            for patches in reversed(installed):
                patches.restore()

    return run


buffer: list[tuple[int, int]] = []


def floor() -> None:
    start = time.perf_counter_ns()
    buffer.append((start, time.perf_counter_ns()))
    if len(buffer) > 64:
        buffer.clear()


if __name__ == "__main__":
    print(machine())
    cases: dict[str, Callable[[], Sample]] = {"nothing": hooked([]), "floor": hooked([], floor)}
    five = ["dataloader", "zero_grad", "forward", "backward", "optimizer"]
    for target in [*five, "lr_scheduler"]:
        cases[target] = hooked([target])
    cases["all five of a step"] = hooked(five)
    added(interleaved(cases, ROUNDS), "nothing")
