"""The hot path's state, in C where `c/` was compiled, and what its hooks need to know of a run.

The hooks of `_native` record the ordinary event themselves and hand everything else to a Python function; without them
(no C compiler at installation, `OTEL_DL_NATIVE=false`) that function is what stands in the attribute, and the same
comes out of it. `Follow` alone, for functions of torch (convolutions, waits), has nothing in its place.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from otel_dl.recording.collectives import Collective
    from otel_dl.recording.lane import Lane
    from otel_dl.recording.observers import Observer

_native: Any = None
# Importing it into a free-threaded Python would switch the GIL on.
if getattr(sys, "_is_gil_enabled", lambda: True)():
    with contextlib.suppress(ImportError):
        from otel_dl.recording import _native  # type: ignore[no-redef]

hooks: Any = _native  # pyright: ignore[reportUnknownVariableType]
"""The module `_native`, or None."""

Ended = Callable[[Any, BaseException | None], None]
"""What `begin` of a `Follow` returns, to be called with (the result, None) or (None, what was raised)."""


def hook(name: str, wanted: bool) -> Callable[..., Any] | None:
    """`Phase`, `Forward`, `Next`, `Returned`, `Get`, `Put`, `Method` or `Follow` of `c/`, where there is C and it is
    `wanted`."""
    return getattr(hooks, name) if hooks is not None and wanted else None


if TYPE_CHECKING or _native is None:

    class StepState:
        """What the ordinary step changes."""

        number = 0
        start = 0
        dropped = 0
        segment = 0
        """Index of the record with which the batch in hand began."""
        seen = 0
        """Index of the first record of which it is not known yet whether it trains."""
        stepped = False
        settled = False
        """Whether batches bound it, in the thread that steps the optimizers: then its phases are simply recorded."""
        plain = False
        """Whether nothing has happened that makes it more than an ordinary step: see `Lane.begin_next`."""
        records: list[tuple[Any, ...]]
        collectives: list[Collective]
        context: object = None
        """The OpenTelemetry context that was current when it had begun."""

    class LaneState:
        """What a thread has open."""

        __slots__ = ("kinds", "step")
        kinds: int
        """The open phases of this thread, one bit a `Kind`."""
        step: Any

    class SourceState:
        """What each batch asks of its iterator."""

        __slots__ = (
            "alone",
            "batch",
            "epoch",
            "fetched",
            "in_order",
            "last",
            "loader",
            "method",
            "nonce",
            "pids",
            "round",
        )
        alone: bool
        """Whether the main process reads."""
        loader: int
        epoch: int
        fetched: int
        round: int
        """Epochs of this iterator before this one, where its workers live on."""
        in_order: bool
        last: int
        """Index of the batch that the data queue gave last."""
        nonce: str
        """Empty where no worker was given one: such a batch has no trace of its own."""
        pids: tuple[int, ...]
        method: str
        batch: Any
        """The batch in hand, a tuple as `records.Batch`."""

    class WorkerState:
        """What each fetch changes in a worker."""

        fetching = False
        asked = False
        """Whether somebody asked for the ids of `span` in this fetch."""
        round: int = 0
        index: int = 0
        start: int = 0
        """Of the fetch that is open, or was last."""
        free = 0
        """Room that is left for spans of the user's in this fetch, of `span_limit`."""
        span_limit = 0
        dropped = 0
        """Spans of the user's in this fetch that found no room."""
        fetches: int = 0
        mean: int = 0
        """A running mean of how long they took (ns)."""
        samples: Any = None
        """What torch's fetcher was given to read."""
        span: Any = None
        """Stands for the fetch in the context; it may stand for the next one as well."""
        attached: object = None
        """The context in which it is."""
        entries: Any = None
        """The dict of the environment, where somebody looks after it."""
        entries_count = 0

        def map_page(self, variable: ContextVar[Context], address: int, began: int) -> None:
            """What is recorded in C is said in the status page that is mapped at `address`, by a worker that began at
            `began`; `variable` holds the OpenTelemetry context."""

    class FastPath:
        """The thread whose steps are simply recorded, and which of them are ordinary."""

        def __init__(self, variable: ContextVar[Context] | None, capacity: int) -> None:
            self.lane: Lane | None = None
            self.durations: list[int] = []
            """ns that the ordinary steps took since `SlowSteps` looked last: its `new`."""
            self.limit = -1
            """A step that takes up to so many ns is certainly not slow."""
            self.attention = 0
            """The first step to come that `Run.records_only` has to be asked about."""
            self.hold: Callable[[Any], None] | None = None
            """Takes an ordinary step that has ended, as `held.Entry`; None: its records are thrown away."""
            self.held_in = self.held_out = 0
            """Records that `hold` took, and that were let go since; each has one thread that writes it."""
            self.held_most = 0
            self.not_held = 0
            """Steps for which there was no room."""
            self.on_phase: Observer | None = None
            self.on_step: Observer | None = None
            """Are told of each boundary, by C and by Python: see `observers`, which sets them."""

        def follow(self, lane: Lane | None) -> None:
            """The calling thread, whose lane this is, bounds steps from now on; None: nobody does."""
            self.lane = lane

        def map_page(self, address: int) -> None:
            """What is recorded in C is said in the status page that is mapped at `address`; 0: in none."""

else:
    StepState = _native.StepState
    LaneState = _native.LaneState
    SourceState = _native.SourceState
    WorkerState = _native.WorkerState
    FastPath = _native.FastPath
