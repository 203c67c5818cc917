"""ns that the status page costs: an event (a phase begins, or ends) in C and in Python, and a worker's whole fetch.

Hot loops: what is added with cold caches is in `steps.py` and `dataloader.py`, which run with the page.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _measure import Sample, added, interleaved, machine, timed

from otel_dl.forensics import writer
from otel_dl.forensics.writer import StatusPage
from otel_dl.recording import native
from otel_dl.recording.context import get_current, variable
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.native import FastPath, LaneState, StepState
from otel_dl.recording.records import Kind, clock
from otel_dl.recording.run import Run
from otel_dl.recording.status import Status
from otel_dl.settings import Settings
from otel_dl.workers import ring
from otel_dl.workers.carrier import Carrier
from otel_dl.workers.loop import DataQueue, IndexQueue, Worker
from otel_dl.workers.writer import Writer

ROUNDS = 41
COUNT = 2_000
KIND = int(Kind.FORWARD)


def page(folder: str, name: str, tail: int = 0) -> StatusPage:
    path = os.path.join(folder, name)
    writer.create(path, Run(Settings(), NeverHead()).identity, tail=tail)
    return StatusPage(path, tail)


def in_python(status: Status) -> Callable[[], Sample]:
    def phase() -> None:
        status.begin(0, KIND, clock())
        status.end(0, clock())

    return lambda: timed(phase, COUNT)


def in_c(status: StatusPage | None) -> Callable[[], Sample]:
    """An ordinary phase around a call of `len`."""
    fast, lane, step = FastPath(variable, COUNT), LaneState(), StepState()
    step.records, step.context, step.settled = [], get_current(), True
    lane.kinds, lane.step = 0, step
    fast.follow(lane)  # type: ignore[arg-type]
    if status is not None:
        fast.map_page(status.address)
    phase: Any = native.hooks.Phase(fast, KIND, len, len, None, None, None)

    def sample() -> Sample:
        step.records.clear()
        return timed(lambda: phase(()), COUNT)

    return sample


class Queue:
    """A queue of torch's, without the queue."""

    message: Any = None

    def get(self) -> Any:
        return self.message

    def put(self, message: Any) -> None:
        pass


def fetch(status: StatusPage | None, samples: int, recorded: bool = True) -> Callable[[], Sample]:
    queue: Any = Queue()
    carrier = Carrier.make(Run(Settings(), NeverHead()), "0" * 32)
    worker = Worker(carrier, 0, Writer(None), status)
    indices, data = (IndexQueue(queue, worker), DataQueue(queue, worker)) if recorded else (queue, queue)
    queue.message = (0, list(range(samples)))
    answer = (0, "a batch")

    def whole() -> None:
        indices.get()
        data.put(answer)

    return lambda: timed(whole, COUNT)


if __name__ == "__main__":
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        phases: dict[str, Callable[[], Sample]] = {
            "a phase in Python: two readings": in_python(Status()),
            "a phase in Python, with the page": in_python(page(folder, "python")),
        }
        if native.hooks is not None:
            phases["a phase in C"] = in_c(None)
            phases["a phase in C, with the page"] = in_c(page(folder, "c"))
        added(interleaved(phases, ROUNDS), next(iter(phases)))
        fetches: dict[str, Callable[[], Sample]] = {"a fetch": fetch(None, 32, recorded=False)}
        for samples in (1, 32, 128):
            fetches[f"of {samples} samples"] = fetch(page(folder, f"worker-{samples}", ring.SIZE), samples)
        added(interleaved(fetches, ROUNDS), "a fetch")
        assert Path(folder).exists()
