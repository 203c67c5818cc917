"""What the hot path writes: one tuple an event, kept in the step that it belongs to.

A thread owns the step it bounds until the step is closed; from then on the builder owns it and nobody writes to it.
The one exception are batches that another thread reads for it: those are appended (atomic under the GIL) while it is
open.
"""

from __future__ import annotations

import time
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_dl.recording.native import StepState
from otel_dl.recording.ranks import Stall
from otel_dl.semconv import SpanName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

    from otel_dl.recording.collectives import Collective
    from otel_dl.recording.details import Detail
    from otel_dl.recording.failure import Failure
    from otel_dl.recording.identity import Identity
    from otel_dl.recording.run import StepSpan

clock: Final = time.perf_counter_ns
"""Nanoseconds, monotonic, comparable between the processes of one host."""

_anchor: Final = (time.time_ns(), time.perf_counter_ns())


def to_epoch_ns(instant: int) -> int:
    """Nanoseconds since the epoch of a reading of `clock`, by this process's one anchor."""
    return _anchor[0] + instant - _anchor[1]


class Kind(IntFlag):
    """A phase, as a bit: a thread's open phases are one integer."""

    NEXT = 1
    FORWARD = 4
    BACKWARD = 8
    OPTIMIZER = 16
    ZERO_GRAD = 32
    SCHEDULER = 64
    EVAL_FORWARD = 128 | FORWARD
    """A forward in eval mode or without gradients."""
    NEUTRAL_FORWARD = 256 | FORWARD
    """A forward that says nothing of either: a loss module without parameters."""
    NEXT_ELSEWHERE = 512 | NEXT
    """A batch that another thread read."""


NAMES: Final[dict[int, str]] = {
    Kind.NEXT: SpanName.NEXT,
    Kind.NEXT_ELSEWHERE: SpanName.NEXT,
    Kind.FORWARD: SpanName.FORWARD,
    Kind.EVAL_FORWARD: SpanName.FORWARD,
    Kind.NEUTRAL_FORWARD: SpanName.FORWARD,
    Kind.BACKWARD: SpanName.BACKWARD,
    Kind.OPTIMIZER: SpanName.OPTIMIZER_STEP,
    Kind.ZERO_GRAD: SpanName.ZERO_GRAD,
    Kind.SCHEDULER: SpanName.LR_SCHEDULER_STEP,
}


class Batch(NamedTuple):
    """Where the batch came from that a `dataloader.next` returned.

    `place` is the loader's own batch number in this epoch. `epoch` counts the epochs of `loader`, `round` those of the
    iterator that read it: its nonce and round name the batch's own trace. `worker` is None where the main process read
    it, within the `next()`.
    """

    loader: int
    epoch: int
    place: int
    nonce: str
    round: int = 0
    worker: int | None = None
    pid: int = 0
    start_method: str = ""

    def attributes(self) -> dict[str, Any]:
        """Of each span that is about it."""
        attributes: dict[str, Any] = {"dl.loader.id": self.loader, "dl.batch.index": self.place}
        if self.worker is not None:
            attributes["dl.worker.id"] = self.worker
            attributes["dl.worker.pid"] = self.pid
            attributes["dl.worker.start_method"] = self.start_method
        return attributes


class Record(NamedTuple):
    """One event. On the hot path a plain tuple with these fields in this order (a NamedTuple costs 100 ns more).

    `kind` is a `Kind`, the name of a span that the user asked for, or what happened within a phase. `start` and `end`
    are readings of `clock`: the phases of a thread are nested, so which record is whose parent follows from them.
    `error` is the exception that left it.
    """

    kind: int | str | Detail
    start: int
    end: int
    error: Failure | None
    batch: Batch | None


class Fetch(NamedTuple):
    """The reading of one batch in a worker, as the worker reported it; `spans` are the user's own, made meanwhile."""

    nonce: str
    round: int
    place: int
    worker: int
    pid: int
    start: int
    end: int
    error: Failure | None
    spans: list[ReadableSpan]
    dropped: int
    samples: str = ""
    """Which they were, as ranges, where the reading failed or took long."""


class WorkerLife(NamedTuple):
    """One worker's life, from the start of its loop to its end (readings of `clock`), with how it ended."""

    worker: int
    pid: int
    start_method: str
    loader: int
    start: int
    end: int
    how: str
    signal: str
    exit_code: int | None
    samples: str
    """Those in hand when it died, as ranges; empty where it had none, or they are not known."""
    words: str
    error: Failure | None
    step: int | None
    """The step that it ended in, where its end is the step's business too."""
    fetches: int | None
    busy: int
    idle: int
    """Nanoseconds, until its last fetch that was finished; of no meaning where `fetches` is None: not known."""

    def attributes(self) -> dict[str, Any]:
        """Its span's own."""
        attributes: dict[str, Any] = {
            "dl.loader.id": self.loader,
            "dl.worker.id": self.worker,
            "dl.worker.pid": self.pid,
            "dl.worker.start_method": self.start_method,
            "dl.worker.end": self.how,
        }
        if self.signal:
            attributes["dl.worker.signal"] = self.signal
        if self.exit_code is not None:
            attributes["dl.worker.exit_code"] = self.exit_code
        if self.samples:
            attributes["dl.sample.indices"] = self.samples
        if self.fetches is not None:
            attributes["dl.worker.fetches"] = self.fetches
            attributes["dl.worker.busy_ms"] = self.busy / 1e6
            attributes["dl.worker.idle_ms"] = self.idle / 1e6
        return attributes


class WorkersStarted(NamedTuple):
    """The workers of an iterator were started, between these readings of `clock`."""

    loader: int
    start_method: str
    workers: int
    start: int
    end: int
    free_shm: int | None
    """Bytes in /dev/shm before they were."""

    def attributes(self) -> dict[str, Any]:
        """Its span's own."""
        attributes: dict[str, Any] = {
            "dl.loader.id": self.loader,
            "dl.worker.count": self.workers,
            "dl.worker.start_method": self.start_method,
        }
        if self.free_shm is not None:
            attributes["dl.shm.free_bytes"] = self.free_shm
        return attributes


class GroupChange(NamedTuple):
    """A process group was made or ended, or that failed, between these readings of `clock`."""

    name: str
    """The span's: `dist.init_process_group`, …"""
    start: int
    end: int
    group: str
    """Its name in torch; "" where it has none, or this rank is not in it."""
    size: int
    """Ranks in it; 0: not known."""
    ranks: str
    """Which, as ranges; "" where the span does not say it."""
    limit_s: float | None
    """The time limit in force, in seconds."""
    source: str
    """Who set it: `user`, `otel_dl`, `torch`."""
    error: Failure | None
    words: str
    """What is known of the failure."""

    def attributes(self) -> dict[str, Any]:
        """Its span's own."""
        attributes: dict[str, Any] = {}
        if self.group:
            attributes["dl.group.id"] = self.group
        if self.size:
            attributes["dl.group.size"] = self.size
        if self.ranks:
            attributes["dl.group.ranks"] = self.ranks
        if self.limit_s is not None:
            attributes["dl.timeout_s"] = self.limit_s
            attributes["dl.timeout.source"] = self.source
        return attributes


class OwnSpan(NamedTuple):
    """A span that the user named outside of any step, between these readings of `clock`."""

    name: str
    start: int
    end: int
    error: Failure | None
    number: int
    """From 1 on, in the order in which they began."""
    around: int
    """The number of the one that it lies in; 0: none."""


class RunEnded(NamedTuple):
    """The run ended, and its last step before, at these readings of `clock`: what its time went to in all.

    Of what lies outside of steps, only what came after the first step counts: what was before is the start-up.
    """

    start: int
    end: int
    steps: int
    steps_ns: int
    evaluations: int
    evaluations_ns: int
    workers_ns: int
    longest_ns: int
    longest_after: int
    left_out: int

    def attributes(self) -> dict[str, Any]:
        """Its span's own."""
        attributes: dict[str, Any] = {
            "dl.run.steps": self.steps,
            "dl.run.steps_ms": self.steps_ns / 1e6,
            "dl.run.evals": self.evaluations,
            "dl.run.evals_ms": self.evaluations_ns / 1e6,
            "dl.run.start_workers_ms": self.workers_ns / 1e6,
            "dl.run.longest_outside_ms": self.longest_ns / 1e6,
            "otel_dl.dropped": self.left_out,
        }
        if self.longest_after >= 0:
            attributes["dl.run.longest_outside_after"] = self.longest_after
        return attributes


Event = WorkersStarted | WorkerLife | GroupChange | Stall | Record | OwnSpan | RunEnded
"""A record is one of one-time work outside any step, or in a thread that bounds none."""


class Step(StepState):
    """A step while it is open, and what is left of it afterwards.

    Most attributes keep their class's value in most steps, which is what makes a step cheap to begin.
    """

    end = 0
    ended = 0
    """When its epoch was over before an optimizer had stepped: only one that does so next belongs to it."""
    error: Failure | None = None
    words = ""
    """What is known of the worker whose end made it fail."""
    optimizers: frozenset[int] = frozenset()
    """The optimizers (by id) that stepped; only those are complete of which the former step did not have all."""
    boundary: tuple[int, int] | None = None
    """(records, time) of the first event after the latest optimizer step: where a next step would begin."""
    global_step: int | None = None
    unseen: Sequence[Collective] = ()
    """Those that only the Flight Recorder knows, once the builder has read it."""
    explicit = False
    joined = False
    """Whether this rank has run out of data, and takes part in the others' step."""
    requested = False
    warm = False
    """Whether one-time work ran in it."""
    reason = ""
    identity: Identity | None = None
    """Of this process when it was opened; None in a thread that bounds none."""
    span: StepSpan | None = None
    link: SpanContext | None = None
    """The user's span that was current when it began."""

    def __init__(self, number: int, start: int, batch: bool, former: frozenset[int], head: bool) -> None:
        self.number = number
        self.start = start
        self.batch = batch
        """Whether it began with a batch; without, optimizers bound it."""
        self.former = former
        """The optimizers (by id) that stepped in the step before."""
        self.head = head
        self.records: list[tuple[Any, ...]] = []
        self.collectives: list[Collective] = []
        self.user_spans: list[ReadableSpan] = []

    def last(self, default: int) -> int:
        """When its last event ended."""
        last = max((record[2] for record in self.records), default=0)
        return max((last, *(each.end or each.issued or each.start for each in self.collectives))) or default

    @property
    def done(self) -> bool:
        """Whether the next batch begins a step of its own."""
        return self.stepped or self.error is not None


class Evaluation:
    """A stretch of forward passes outside training, with the batches they took."""

    __slots__ = ("collectives", "dropped", "end", "error", "identity", "ordinal", "reason", "records", "start")

    def __init__(self, ordinal: int, identity: Identity) -> None:
        self.ordinal = ordinal
        self.identity = identity
        self.start = self.end = 0
        """Of what ran in it, also of what found no room."""
        self.records: list[tuple[Any, ...]] = []
        self.collectives: list[Collective] = []
        self.dropped = 0
        self.error: Failure | None = None
        self.reason = ""

    def lasts(self, start: int, end: int) -> None:
        """Something between these readings of `clock` is its own."""
        self.start = min(self.start or start, start)
        self.end = max(self.end, end)
