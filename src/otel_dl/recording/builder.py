"""The background thread that turns what is kept into spans and hands them to the sink.

It polls: an event that the training thread sets costs that thread a wake-up of another one each step. It works in
short turns and rests in proportion, because what it computes, the training thread waits for (the GIL).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Final, Protocol

from otel_dl import threads
from otel_dl.faults import from_signal_handler
from otel_dl.log import logger
from otel_dl.recording.collectives import OUTSIDE
from otel_dl.recording.ranks import Stall
from otel_dl.recording.records import (
    Evaluation,
    GroupChange,
    OwnSpan,
    Record,
    RunEnded,
    Step,
    WorkerLife,
    WorkersStarted,
    clock,
)
from otel_dl.recording.run import EVENTS, STEPS_WAITING, WAITING_STEPS
from otel_dl.recording.spans import SpanBuilder
from otel_dl.semconv import KeepReason

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanLimits

    from otel_dl.recording.records import Event, Fetch
    from otel_dl.recording.run import Run


POLL_S: Final = 0.2
TURN_S: Final = 0.002
"""Work done at a stretch; then a rest of REST times as long. It shrinks once half of the room for waiting steps is
taken; there is none where all is, or the end of the process waits."""
REST: Final = 19


FOR_RANK_0_NS: Final = 10_000_000_000
"""How long after the first step the run's first spans wait for rank 0's run id, where it is late."""
DEVICE_NS: Final = 10_000_000_000
"""How long a kept step waits for what its device took: until the device has got so far. Then it is built without."""
OUTSIDE_NS: Final = 2_000_000_000
"""How long a collective outside any step waits: an evaluation may take it, and it may end."""
OF_RUN: Final = 2_000
"""Spans in the run's own trace at most."""
OF_COLLECTIVES: Final = 1_000
"""Of these, collectives outside any step take the first so many at most: a script that has no steps has thousands."""
OF_GROUPS: Final = 1_000
"""So many more where they make or end process groups."""


class Spans(Protocol):
    """The sink, as the builder sees it."""

    def offer(self, spans: Sequence[ReadableSpan]) -> None: ...


class Batches(Protocol):
    """The workers' reports, as the builder sees them."""

    def drain(self, final: bool = False) -> None: ...
    def take(self, key: tuple[str, int, int]) -> Fetch | None: ...
    def ready(self, key: tuple[str, int, int], at: int) -> int: ...
    def expired(self) -> list[Fetch]: ...
    def outside(self) -> list[ReadableSpan]: ...


class Builder:
    """Owns closed steps. `start` once the run has begun; `drain` from any thread, with a deadline."""

    def __init__(
        self, run: Run, sink: Spans, batches: Batches, resource: Resource, limits: SpanLimits | None = None
    ) -> None:
        self._run = run
        self._sink = sink
        self._batches = batches
        self._spans = SpanBuilder(run, resource, batches.take, os.getpid(), batches.ready, limits)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._urgent = False
        self._stopped = False
        self._startup: Callable[[SpanBuilder], list[ReadableSpan]] | None = None
        self._thread: threading.Thread | None = None
        self._faulty = self._warned = False

    def start(self, startup: Callable[[SpanBuilder], list[ReadableSpan]]) -> None:
        """Starts the thread; `startup` builds the run's first spans, and is called once the first step has ended."""
        self._startup = startup
        self._thread = threads.start("otel-dl-builder", self._loop)

    def _loop(self) -> None:
        while not self._stopped:
            self._wake.wait(POLL_S)
            self._wake.clear()
            worked = True
            while worked and not self._stopped:
                began = perf_counter()
                with self._lock:
                    worked = self._turn(began + TURN_S)
                if worked and not self._urgent:
                    full = len(self._run.closed) / WAITING_STEPS
                    self._wake.wait((perf_counter() - began) * REST * min(1.0, 2.0 - 2.0 * full))

    def _turn(self, until: float) -> bool:
        """Builds what is there, for a stretch of time; whether there was more."""
        try:
            self._warn_of_drops()
            if self._run.held is not None:
                self._run.held.trim(clock())
            self._batches.drain()
            self._begin_run_in_time()
            closed, decided = self._run.closed, self._run.decided
            while closed and self._device_has_passed(closed[0]):
                if not self._has_all_collectives(closed[0], until):
                    if self._reads_flight_recorder():
                        return True
                    break
                self._build_next()
                if perf_counter() > until:
                    return bool(closed)
            # What happened in a step that waits is its own.
            waiting = [step.number + 1 for step in tuple(closed) if isinstance(step, Step)]
            self._leftovers(min([decided, *waiting]))
        except Exception as error:
            self._fault(error)
        return False

    def _warn_of_drops(self) -> None:
        dropped = self._run.dropped[STEPS_WAITING]
        if dropped and not self._warned:
            self._warned = True
            logger.warning(
                "otel-dl: %d kept steps were dropped: more are kept than spans can be built for (%d wait). Keep fewer,"
                " for example by OTEL_TRACES_SAMPLER=traceidratio with OTEL_TRACES_SAMPLER_ARG=0.01. Said once.",
                dropped,
                WAITING_STEPS,
            )

    def _device_has_passed(self, trace: Step | Evaluation) -> bool:
        """Or is not waited for any longer. Who waits holds up those behind, whose device is no further."""
        run = self._run
        if not isinstance(trace, Step) or run.device.is_read(trace.end):
            return True
        return clock() - trace.end > DEVICE_NS or len(run.closed) > WAITING_STEPS // 2

    def _has_all_collectives(self, trace: Step | Evaluation, until: float) -> bool:
        """Whether those of `trace` that only the Flight Recorder knows have been read, too."""
        recorder = self._run.flight_recorder
        at_once = self._urgent or 2 * len(self._run.closed) > WAITING_STEPS
        return recorder is None or recorder.has(trace, until, at_once)

    def _reads_flight_recorder(self) -> bool:
        recorder = self._run.flight_recorder
        return recorder is not None and recorder.busy

    def _build_next(self) -> None:
        trace = self._run.closed.popleft()
        try:
            self._sink.offer(self._build(trace))
        except Exception as error:
            if from_signal_handler(error):  # where the main thread builds
                self._run.closed.appendleft(trace)
                raise
            self._fault(error)

    def _build(self, trace: Step | Evaluation) -> list[ReadableSpan]:
        recorder = self._run.flight_recorder
        if isinstance(trace, Evaluation):
            if recorder is not None:
                trace.collectives += recorder.take(trace)
            return self._spans.evaluation(trace)
        if not trace.reason:  # cancelled, when spans of the user's had its ids already
            return trace.user_spans
        if recorder is not None:
            room = max(0, self._run.settings.step_records - len(trace.collectives))
            found = recorder.take(trace)
            trace.unseen = found[:room]
            trace.dropped += len(found) - len(trace.unseen)
        return [*self._spans.step(trace, self._ended_in(trace)), *trace.user_spans]

    def _ended_in(self, step: Step) -> list[WorkerLife]:
        events = self._run.events
        lives = [life for life in list(events) if isinstance(life, WorkerLife) and life.step == step.number]
        for life in lives:
            events.remove(life)
        return lives

    def _events(self, decided: int) -> None:
        """Events that belong to no kept step; those before `decided` are built if they are kept."""
        events = self._run.events
        for event in list(events):
            if self._is_unsettled() and _can_wait(event):
                continue
            # The step before may just be on its way here.
            if not isinstance(event, WorkerLife) or event.step is None or event.step < decided - 1:
                events.remove(event)
                # Collectives outside steps must not take the room of what makes and ends their groups.
                room = OF_RUN + OF_GROUPS if isinstance(event, GroupChange) else OF_RUN
                # The user's own were counted when they began (`outside.OwnSpans`).
                if isinstance(event, (Stall, OwnSpan, RunEnded)) or self._spans.of_run_so_far < room:
                    self._sink.offer([self._spans.of_run(event)])
                else:
                    self._run.dropped[EVENTS] += 1

    def _is_unsettled(self) -> bool:
        """Whether the run's spans have to wait, for its trace may turn out to be rank 0's."""
        return self._startup is not None and not self._run.is_settled

    def _is_late(self) -> bool:
        """Whether rank 0's run may still come, after the first step."""
        first = self._run.first_step_end
        return self._run.is_expecting and first is not None and clock() - first < FOR_RANK_0_NS

    def _begin_run_in_time(self) -> None:
        if self._startup is not None and self._run.first_step_end is not None and not self._is_late():
            self._begin_run()

    def _begin_run(self) -> None:
        startup, self._startup = self._startup, None
        if startup is not None and not self._run.keep.head.off:
            self._sink.offer(startup(self._spans))

    def _collectives(self, final: bool) -> None:
        """Those outside any step, once it is clear that no evaluation takes them, and that they are complete or have
        been waited for long enough."""
        outside, before = self._run.collectives.outside, clock() - OUTSIDE_NS
        if not final and self._is_unsettled() and len(outside) < OUTSIDE // 2:
            return  # the first one built fixes the ids of the run, and rank 0's are taken over with the first step
        exported = not self._run.keep.head.off
        while outside and (final or outside[0].start < before):
            try:
                collective = outside.popleft()
            except IndexError:  # evaluation took it
                return
            if not exported:
                continue
            if self._spans.of_run_so_far < OF_COLLECTIVES:
                self._sink.offer([self._spans.of_run(collective)])
            else:
                self._run.dropped["collectives outside steps"] += 1

    def _leftovers(self, decided: int, final: bool = False) -> None:
        self._events(decided)
        self._collectives(final)
        for fetch in self._batches.expired():
            self._sink.offer(self._spans.fetch(fetch, KeepReason.HEAD, None, None))
        outside = self._batches.outside()
        if outside:
            self._sink.offer(outside)

    def drain(self, deadline: float, final: bool = False) -> bool:
        """Builds everything that is closed now, until `deadline` (monotonic); whether it got through."""
        self._urgent = True
        self._wake.set()
        if not self._lock.acquire(timeout=max(0.0, deadline - monotonic())):
            self._urgent = False
            return False
        try:
            if final:
                self._stopped = True
            if final and self._run.held is not None:
                self._run.held.trim(clock(), everything=True)
            self._batches.drain(final)
            self._run.device.look()
            if final and self._run.started:
                self._begin_run()
            self._begin_run_in_time()
            closed, decided = self._run.closed, self._run.decided
            while closed:
                if monotonic() > deadline:
                    return False
                self._has_all_collectives(closed[0], 0.0)
                self._build_next()
            if final and self._run.flight_recorder is not None and not self._run.keep.head.off:
                self._run.flight_recorder.finish()
            self._leftovers(decided + 2 if final else decided, final)
            return True
        except Exception as error:
            if from_signal_handler(error):
                raise
            self._fault(error)
            return False
        finally:
            self._urgent = False
            self._lock.release()

    def join(self, deadline: float) -> None:
        """After the last `drain`: returns once the thread has ended, at `deadline` (monotonic) at the latest."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - monotonic()))

    def _fault(self, error: Exception) -> None:
        self._run.dropped["fault"] += 1
        if not self._faulty:
            self._faulty = True
            logger.warning("otel-dl: a fault of ours while building spans; that step is lost. Please report it.",
                           exc_info=error)  # fmt: skip


def _can_wait(event: Event) -> bool:
    """Whether nobody misses it before the first step has ended."""
    if isinstance(event, (GroupChange, Record, OwnSpan)):
        return event.error is None
    return isinstance(event, (WorkersStarted, RunEnded))
