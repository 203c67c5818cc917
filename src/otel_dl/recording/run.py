"""A run: from `instrument()` to `uninstrument()` or the end of the process; what its threads share.

Steps arrive here when they are closed; those that are kept wait in `closed` for the builder.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext

from otel_dl.recording import context, ids
from otel_dl.recording.collectives import Collectives
from otel_dl.recording.details import Detail
from otel_dl.recording.device import DeviceTime
from otel_dl.recording.failure import Failure
from otel_dl.recording.flight_recorder import FlightRecorder
from otel_dl.recording.held import Held
from otel_dl.recording.identity import Expected, Identity, SharedRun
from otel_dl.recording.keep import Head, Keep, NeverHead
from otel_dl.recording.lane import Lane
from otel_dl.recording.native import FastPath
from otel_dl.recording.observers import Observers
from otel_dl.recording.outside import OF_A_NAME, OF_ALL, Outside, OwnSpans, forget_innermost
from otel_dl.recording.ranks import Ranks
from otel_dl.recording.records import Evaluation, Event, Kind, Record, Step, WorkersStarted, clock
from otel_dl.recording.status import Status
from otel_dl.semconv import KeepReason, SpanName, TraceKind
from otel_dl.settings import Settings

WAITING_STEPS: Final = 2_048
"""Closed steps that wait for the builder at most."""
STEPS_WAITING: Final = "steps waiting"
"""The key in `Run.dropped` of those that found no room."""
PENDING_RECORDS: Final = 64
WAITING_EVENTS: Final = 4_096
"""Events of the run that wait for the builder at most."""
EVENTS: Final = "starts and ends of workers and process groups, stalls, spans outside of steps"
"""The key in `Run.dropped` of those that found no room."""
OWN_SPANS: Final = f"spans outside of steps, over {OF_A_NAME} of a name or {OF_ALL:,} in all"
"""The key in `Run.dropped` of those that the user named."""
RECENT_STEPS: Final = 256
"""Kept steps whose late spans of the user's still find their way out."""


CUT_OFF: Final = "SIGTERM ended the process in the middle of the step"


class Run:
    """State of one run in one process. Numbers are taken under the GIL by the one thread that bounds steps."""

    def __init__(self, settings: Settings, head: Head, remote: SpanContext | None = None) -> None:
        self.settings = settings
        self.remote = remote
        """The sender of TRACEPARENT, whose trace the run's own spans join."""
        self.foreign_provider = False
        """Whether spans of the user's go to a provider that is not ours: it takes an unsampled parent at its word."""
        self.active = True
        self.on_start: Callable[[], None] | None = None
        self.ranks = Ranks()
        """The other ranks of the job, once there are some."""

        class Local(threading.local):
            def __init__(self, run: Run) -> None:
                self.lane = Lane(run)

        self._local_type = Local
        self.fast = FastPath(context.variable, settings.step_records)
        self.observers = Observers(self.fast)
        self._begin(head)

    def _begin(self, head: Head) -> None:
        self.identity = Identity.read()
        self._expected: Expected | None = None
        """Rank 0's run, where it is on its way."""
        self._shared_run: SharedRun | None = None
        self._announced: tuple[Identity, int] | None = None
        """Who the process was, and the run's trace, when its first span was built: that stays."""
        self.clock: tuple[int, int] | None = None
        """How far this host's clock is before rank 0's, and how far off that may be (ns), once it is known."""
        self.keep = Keep(head)
        self.slow = self.keep.slow
        self.fast.durations = self.slow.new
        self.fast.attention = 0
        self.held: Held | None = None
        """Steps that other ranks may ask for, where they share the run."""
        self.fast.hold = None
        self.stepper = None
        self.current: Step | None = None
        """The step that is open, of the thread that bounds them."""
        self.collectives = Collectives(self)
        self.flight_recorder: FlightRecorder | None = None
        """Where only that shows what C++ issues. (Not in a forked child: torch's may be locked for ever there.)"""
        self.number = 0
        """Of the step that is opened next."""
        self._decided_for = -1
        self._head_says = False
        """The head decision for step `_decided_for`."""
        self.evaluations = 0
        self.outside = Outside()
        self.own_spans = OwnSpans()
        """Those that the user names outside of steps."""
        self.first_step_end: int | None = None
        """Reading of `clock` at which the first step ended."""
        self.started = False
        self.member: tuple[int, int] | None = None
        """Rank and world size, where the run began with `init_process_group`."""
        self.status = Status()
        """Where the thread that bounds steps says what it does now; `on_start` puts the page there."""
        self.fast.map_page(0)
        self.device = DeviceTime(self)
        """The device's own time, once a device is in use (`patches/device.py`)."""
        self.pending: deque[tuple[Any, ...]] = deque(maxlen=PENDING_RECORDS)
        """Batches that other threads read while no step was open; the next one takes them."""
        self._handed_out: Step | None = None
        """The last step, where it was cancelled and somebody has its ids."""
        self.undecided: dict[int, Step] = {}
        """Steps whose ids somebody asked for, by trace id, until they are decided."""
        self.recent: dict[int, None] = {}
        """Trace ids of the latest kept steps whose ids somebody asked for."""
        self.closed: deque[Step | Evaluation] = deque()
        self.events: deque[Event] = deque()
        """Starts and ends of workers and process groups, for the builder."""
        self.dropped: Counter[str] = Counter()
        """Records and steps that were dropped, by reason."""
        self.main: Lane | None = None
        """The main thread's, once there is one."""
        self.local: Any = self._local_type(self)
        """`local.lane`: the calling thread's recorder."""

    def __reduce__(self) -> tuple[Callable[[], Run], tuple[()]]:
        # A class of the user's may be pickled by value (cloudpickle), with a method of it that is patched.
        return _inert, ()

    @property
    def stepper(self) -> Lane | None:
        """The thread whose optimizers bound steps; until one has stepped the main thread bounds them."""
        return self.fast.lane

    @stepper.setter
    def stepper(self, lane: Lane | None) -> None:
        self.fast.follow(lane)

    @property
    def trainer(self) -> threading.Thread:
        """The thread that bounds steps; the main one until it is known."""
        lane = self.stepper or self.main
        return lane.thread if lane is not None else threading.main_thread()

    def restart(self) -> None:
        """A run of its own in a forked child: nothing of the parent's is open, held or counted."""
        self.observers.forked()
        self.device.forked()
        self._begin(self.keep.head)

    def start(self, member: tuple[int, int] | None = None) -> None:
        """The first step, loader with workers or `init_process_group` begins: from now on there is something to export.

        `member` is the rank and the world size that the latter was given. `on_start` connects with the SDK: it sets
        `keep.head`, `foreign_provider`, `remote` and `identity`.
        """
        if not self.started and self.active:
            self.member = member
            if self.on_start is not None:
                self.on_start()
            # Only now: where it was interrupted, the next step tries again.
            self.started = True
        if self._expected is not None and self.current is None:
            self._learn(self._expected)

    # Who the process is, where there are other ranks.

    def expect(self, expected: Expected) -> None:
        """`init_process_group` has returned. The next step takes rank 0's run, which it waits for once."""
        self._expected = expected
        self.fast.attention = 0

    def look_up(self) -> None:
        """What was expected has come: the step that is open is not to become the next one by itself."""
        self.fast.attention = 0

    def _learn(self, expected: Expected) -> None:
        """Between two steps."""
        shared = None if self._handed_out is not None else expected.look()  # ids handed out stay
        if shared is None:
            return
        self._expected = None
        identity = self.identity.by_now()
        if identity.world_size == 1:
            return
        self._shared_run = shared
        self.identity = identity._replace(run=shared.run, shared=True)
        self.status.belongs_to(shared.run)
        self._decided_for = -1
        if self.settings.held_records and not self.keep.head.off:
            self.held = Held(self, self.settings.held_records)

    @property
    def is_expecting(self) -> bool:
        """Whether rank 0's run is on its way."""
        return self._expected is not None

    @property
    def is_settled(self) -> bool:
        """Whether the process is likely to stay who it is."""
        return self.identity.shared or (self._expected is None and self.identity.world_size == 1)

    @property
    def former(self) -> tuple[int, int] | None:
        """(trace id, span id) of the first span of the run that this one is a restart of."""
        return self._shared_run.former if self._shared_run is not None else None

    def announce(self) -> Identity:
        """A span of the run's trace is built: its ids stay. Who this process is in them."""
        if self._announced is None:
            self._announced = self.identity, self.run_ids()[0]
        return self._announced[0]

    # Opening and closing, called by the thread that bounds steps.

    def open(self, start: int, batch: bool, former: frozenset[int]) -> Step:
        """A step that begins at `start` (ns of `clock`); its number is used up when it is closed."""
        if self.current is not None:
            self.cancel(self.current)
        if not self.started or self._expected is not None:
            self.start()
        number = self.number
        if self._decided_for != number:  # a step that came to nothing has left its number, and its answer
            self._decided_for, self._head_says = number, self.keep.head.step(number)
        self.current = step = Step(number, start, batch, former, self._head_says)
        step.identity = self.identity
        self.status.step(number)
        if self.pending:
            step.records.extend(self.pending)
            self.pending.clear()
        outer, span = context.current()
        if span.is_recording():
            step.link = span.get_span_context()
        elif step.head or not self.leaves_context:
            step.span = span = StepSpan(self, step, outer)
            context.attach(span)
        if self._handed_out is not None:
            self._take_over(step)
        step.context = context.get_current()
        step.plain = not (step.head or step.link is not None or number == 0)
        if self.device.awaited:
            self.device.look_for_it()
        self.observers.step_begins(start)
        return step

    @property
    def leaves_context(self) -> bool:
        """Whether the context of a step that the head does not keep is left alone: an unsampled parent would take the
        user's own spans away from a provider of theirs that samples everything."""
        return self.foreign_provider and self.keep.head.adaptive

    def records_only(self, number: int) -> bool:
        """Whether step `number` is, as far as the head decides, only recorded; says how long the next ones are."""
        if self._expected is not None and self._expected.due:
            return False
        if self.current is not None:
            self.outside.step_begins(self.current.start)
        slow = self.slow
        if len(slow.new) >= slow.TOGETHER:
            slow.sort_in()
        # Never `head.step`: a sampler that counts or limits must be asked once for each step, which `open` does.
        yes = self.keep.head.no_earlier(number)
        self.fast.limit = slow.limit
        self.fast.attention = min(yes, number + slow.TOGETHER - len(slow.new))
        return yes > number

    def cancel(self, step: Step) -> None:
        """Nothing came of `step`: its number goes to the next one."""
        self.outside.step_begins_later(step.number, step.start)
        self.current = None
        self.observers.step_ends(clock())
        for collective in step.collectives:
            self.collectives.leave(collective)
        self.status.step(-1)
        self.number = step.number
        if step.span is not None and step.span.asked is not None:
            self._handed_out = step
        self._leave(step)

    def _take_over(self, step: Step) -> None:
        """`step` has the ids of a cancelled one: spans of the user's that bear them are its own."""
        former, self._handed_out = self._handed_out, None
        if former is not None:
            step.user_spans = former.user_spans
            self.undecided.pop(self.step_ids(former.number, former.identity)[0], None)
            if step.span is not None:
                step.span.get_span_context()

    def _leave(self, step: Step) -> None:
        span = step.span
        if span is not None:
            context.detach(span)
            span.step = None  # no reference cycle: steps must not be work for the garbage collector

    def close(self, step: Step, end: int) -> None:
        """Ends `step` and hands it to the builder where it is kept."""
        step.end = end
        self.current = None
        self.observers.step_ends(end)
        self.status.step(-1)
        self.number = step.number + 1
        self.fast.attention = 0
        self.outside.step_begins(step.start)
        self.outside.step_ends(step.number, end)
        if self.first_step_end is None:
            self.first_step_end = end
        self._leave(step)
        step.context = None  # while it waits to be built, it holds what spans are built of and no more
        reason = self.keep.decide(step)
        if self.held is not None:
            reason = self.held.closed(step, reason)
        span = step.span
        if span is not None and span.asked is not None:
            self._decided(span.asked.trace_id, reason)
        if reason:
            step.reason = reason
            self._hand_over(step)

    def keep_late(self, step: Step) -> None:
        """`step`, which was held, is kept after all, for its `reason`. Called by any thread."""
        self._hand_over(step)

    def _decided(self, trace_id: int, reason: str) -> None:
        self.undecided.pop(trace_id, None)
        if reason:
            self.recent[trace_id] = None
            if len(self.recent) > RECENT_STEPS:
                del self.recent[next(iter(self.recent))]

    def _hand_over(self, trace: Step | Evaluation) -> None:
        if len(self.closed) < WAITING_STEPS:
            self.closed.append(trace)
        else:
            self.dropped[STEPS_WAITING] += 1

    def tell(self, event: Event) -> None:
        """Something happened that belongs to no step, or to one that is decided later."""
        if isinstance(event, WorkersStarted) and (self.current is None or self.current.ended):
            self.outside.workers_started(event)
        if len(self.events) < WAITING_EVENTS:
            self.events.append(event)
        else:
            self.dropped[EVENTS] += 1

    @property
    def decided(self) -> int:
        """Steps before this one are decided. (`number` is behind while ordinary steps become one another.)"""
        step = self.current
        return self.number if step is None else step.number

    def note(self, detail: Detail, start: int, end: int, error: Failure | None = None) -> None:
        """`detail` happened between these readings of `clock`, in the thread that trains or one that works for it (the
        autograd engine's). Outside any step it is evaluation's, or the run's where it is one-time work, or nobody's."""
        lane = self.stepper or self.main
        taken = lane is not None and lane.note((detail, start, end, error, None), bool(detail.warm))
        if detail.warm and not taken:
            self.tell(Record(detail, start, end, error, None))

    def tell_step(self, words: str) -> int | None:
        """The number of the step that is open, which `words` are about should it fail now; None where none is."""
        step = self.current
        if step is None:
            return None
        step.words = words
        step.plain = False
        return step.number

    def evaluation(self) -> Evaluation:
        evaluation = Evaluation(self.evaluations, self.identity)
        self.evaluations += 1
        return evaluation

    def close_evaluation(self, evaluation: Evaluation) -> None:
        self.outside.evaluated(evaluation, self.current.start if self.current is not None else None)
        if self.keep.head.off:
            return
        if evaluation.error is not None:
            evaluation.reason = KeepReason.ERROR
        elif self.keep.head.other(self.evaluation_ids(evaluation)[0], SpanName.EVAL):
            evaluation.reason = KeepReason.HEAD
        else:
            return
        self._hand_over(evaluation)

    def recover(self) -> None:
        """Our code was left half done in this thread: no phase counts as open, and what kind of step this is, anew."""
        lane: Lane = self.local.lane
        kinds, lane.kinds = lane.kinds, 0
        forget_innermost()
        if lane.bounds:
            now = clock()
            self.status.end(0, now)
            with contextlib.suppress(Exception):  # The fault may lie in there.
                self.observers.phases_end(kinds, now)
        if lane.step is not None:
            lane.step.settled = lane.step.batch = lane.step.plain = False
        with contextlib.suppress(Exception):  # Or in there.
            _, span = context.current()
            if isinstance(span, StepSpan) and span.step is not lane.step:
                context.detach(span)

    def finish(self, error: BaseException | None = None, terminated: bool = False) -> None:
        """Closes what is open: the run ends, by `error` or by SIGTERM where one of them ends the process."""
        # The end of the process may run in a thread of its own.
        lane: Lane = self.stepper or self.main or self.local.lane
        self.device.stop()  # its queue may be full: then recording one more event would wait
        if lane.thread is not threading.current_thread():
            self.observers.leave()
        lost = self.ranks.lost() if terminated else None
        cut_off: Failure | None = None
        if lost is not None:
            cut_off = Failure(lost.error_type, f"{CUT_OFF}: {lost.words}", lost.attributes)
        elif terminated and (lane.kinds & ~Kind.NEXT or self.collectives.waits):
            cut_off = Failure("SIGTERM", CUT_OFF)
        lane.finish(error, cut_off)
        for own in self.own_spans.cut_off(clock(), Failure("SIGTERM", CUT_OFF) if terminated else None):
            self.tell(own)
        ended = self.outside.ended(clock(), self.slow, self.own_spans.left_out)
        if ended is not None:
            self.tell(ended)
        if self.own_spans.left_out:
            self.dropped[OWN_SPANS] += self.own_spans.left_out
        self.device.look()
        former, self._handed_out = self._handed_out, None
        if former is not None:
            self._decided(self.step_ids(former.number, former.identity)[0], KeepReason.HEAD if former.head else "")
            if former.head and former.user_spans:
                self._hand_over(former)

    # Ids. `identity` is the one at the time: what was handed out stays when the process learns of rank 0's run.

    def step_ids(self, number: int, identity: Identity | None = None, rank: int | None = None) -> tuple[int, int]:
        """(trace id, span id) of step `number` on this rank, or another."""
        identity = identity or self.identity
        parts = (identity.run, TraceKind.STEP, number, identity.rank if rank is None else rank)
        apart = identity.shared and not self.one_trace(identity)
        return ids.trace_id(*(parts if apart else parts[:3])), ids.span_id(*parts)

    def one_trace(self, identity: Identity) -> bool:
        """Whether the ranks share a trace a step: they know the same run, and are not too many."""
        return identity.shared and identity.world_size <= self.settings.trace_ranks

    def sampled_id(self, number: int) -> int:
        """The trace id of which a sampler is asked for step `number`, on every rank the same."""
        return ids.trace_id(self.identity.run, TraceKind.STEP, number)

    def evaluation_ids(self, evaluation: Evaluation) -> tuple[int, int]:
        """(trace id, span id) of a stretch of evaluation on this rank."""
        parts = (evaluation.identity.run, TraceKind.EVAL, evaluation.identity.rank, evaluation.ordinal)
        return ids.trace_id(*parts), ids.span_id(*parts)

    def run_ids(self, rank: int | None = None) -> tuple[int, int]:
        """(trace id, span id) of the first span of this rank, or another, in the run's trace."""
        if self._announced is not None:
            identity, trace_id = self._announced
        else:
            identity = self.identity
            if self._shared_run is not None:
                trace_id = self._shared_run.trace_id
            else:
                trace_id = self.remote.trace_id if self.remote else ids.trace_id(identity.run, TraceKind.RUN)
        return trace_id, ids.span_id(identity.run, TraceKind.RUN, identity.rank if rank is None else rank)


class StepSpan(context.DerivedSpan):
    """Stands for a step in the context."""

    def __init__(self, run: Run, step: Step, outer: Context) -> None:
        super().__init__(step.head, outer)
        self._run = run
        self.step: Step | None = step

    def ids(self) -> tuple[int, int]:
        step = self.step
        assert step is not None, "asked while it is open"
        trace_id, span_id = self._run.step_ids(step.number, step.identity)
        self._run.undecided[trace_id] = step
        step.plain = False
        return trace_id, span_id


def _inert() -> Run:
    """A run that records nothing."""
    run = Run(Settings(), NeverHead())
    run.active = False
    return run
