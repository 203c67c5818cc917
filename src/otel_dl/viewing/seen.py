"""What the traces last show of each training process, and of which ranks they show nothing."""

from __future__ import annotations

from typing import Final, NamedTuple

from otel_dl.semconv import COLLECTIVES, FIRST_SPANS, PHASES, SpanName
from otel_dl.viewing.reading import Span, number_of, text_of

MOST: Final = 20_000
"""Failed phases and collectives that are kept of a run."""
_WORKERS: Final = -1


class Step(NamedTuple):
    """One rank's `train.step`, as far as its end is concerned."""

    number: int
    span_id: str
    start_ns: int
    end_ns: int
    error_type: str
    """Empty where it did not fail."""
    message: str
    phase: str = ""
    """Or the collective outside any, that failed in a step that failed; "" where none did."""
    whole: bool = True
    """Whether all its phases were exported."""


class Process(NamedTuple):
    """A training process. Times are of its own clock, in ns since the epoch."""

    rank: int
    pid: int
    host: str
    run: str
    last_step: Step | None
    """The kept step that began last."""
    startup_error: str
    """Of what ended it before a first step had; "" otherwise."""
    last_ns: int
    """End of the last span of it."""


class Ranks(NamedTuple):
    world: int
    """How many the run says it has, at most."""
    unread: tuple[int, ...]
    """Those of which not one span was read."""
    without_step: tuple[int, ...]
    """Those of which something was read, but no step, where there are steps of others."""


class Collector:
    """Takes the spans of one run in any order."""

    def __init__(self) -> None:
        self._processes: dict[tuple[int, str, int], Process] = {}
        self._world = 0
        self._failed_phases: dict[str, str] = {}
        """Id of a span → what failed directly in it."""

    def add(self, span: Span) -> None:
        if span.failed and span.name in PHASES | COLLECTIVES and len(self._failed_phases) < MOST:
            self._failed_phases[span.parent_id] = span.name
        if span.name in FIRST_SPANS:
            self._world = max(self._world, number_of(span, "dl.world_size"))
        rank, pid, host = number_of(span, "dl.rank"), number_of(span, "process.pid"), text_of(span, "host.name")
        if "dl.worker.id" in span.resource:
            pid = _WORKERS  # which show that something was read of their rank
        key = rank, host, pid
        process = self._processes.get(key) or Process(rank, pid, host, text_of(span, "dl.run.id"), None, "", 0)
        process = process._replace(last_ns=max(process.last_ns, span.end_ns))
        if span.name == SpanName.STEP and (process.last_step is None or span.start_ns >= process.last_step.start_ns):
            process = process._replace(last_step=_step(span))
        elif span.name == SpanName.STARTUP and span.failed:
            process = process._replace(startup_error=text_of(span, "error.type"))
        self._processes[key] = process

    def processes(self) -> list[Process]:
        """By rank, then by what was seen last."""
        found = [
            process._replace(last_step=self._with_phase(process.last_step))
            for (_, _, pid), process in self._processes.items()
            if pid != _WORKERS
        ]
        return sorted(found, key=lambda process: (process.rank, process.last_ns))

    def _with_phase(self, step: Step | None) -> Step | None:
        return step._replace(phase=self._failed_phases.get(step.span_id, "")) if step is not None else None

    def ranks(self) -> Ranks:
        # A world size is a number that somebody has set: it must not make a list of a billion.
        world = min(self._world, 1_000_000)
        seen = {process.rank for process in self._processes.values()}
        with_step = {process.rank for process in self._processes.values() if process.last_step is not None}
        return Ranks(
            self._world,
            tuple(rank for rank in range(world) if rank not in seen),
            tuple(sorted(seen - with_step)) if with_step else (),
        )


def _step(span: Span) -> Step:
    return Step(
        number_of(span, "dl.step"), span.span_id, span.start_ns, span.end_ns,
        (text_of(span, "error.type") or "error") if span.failed else "", span.message,
        whole="dl.detail.reduced" not in span.attributes and not number_of(span, "otel_dl.dropped"),
    )  # fmt: skip
