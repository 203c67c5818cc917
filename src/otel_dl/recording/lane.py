"""What one thread records: its open phases, and the step that it bounds.

A step begins at the `dataloader.next` that takes its first batch and ends at the first later `next`, outside any
phase, after an optimizer stepped or a phase raised. Without a loader it begins at the first zero_grad or training
forward once every optimizer of the former step has stepped. Only the thread that steps the optimizers bounds steps.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from otel_dl.recording import context
from otel_dl.recording.context import SUPPRESSED, get_current
from otel_dl.recording.details import Detail
from otel_dl.recording.device import is_out_of_memory
from otel_dl.recording.failure import Failure
from otel_dl.recording.native import LaneState
from otel_dl.recording.records import Evaluation, Kind, Step, clock

if TYPE_CHECKING:
    from otel_dl.recording.outside import Own
    from otel_dl.recording.run import Run

# Plain integers: an IntFlag's own operators cost a microsecond each.
NEXT: Final = int(Kind.NEXT)
FORWARD: Final = int(Kind.FORWARD)
BACKWARD: Final = int(Kind.BACKWARD)
OPTIMIZER: Final = int(Kind.OPTIMIZER)
ZERO_GRAD: Final = int(Kind.ZERO_GRAD)
SCHEDULER: Final = int(Kind.SCHEDULER)

EVAL_FORWARD: Final = int(Kind.EVAL_FORWARD)
NEUTRAL_FORWARD: Final = int(Kind.NEUTRAL_FORWARD)
NEXT_ELSEWHERE: Final = int(Kind.NEXT_ELSEWHERE)

_TRAINING: Final = frozenset({FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD})

_PHASES: Final = NEXT | FORWARD | BACKWARD | OPTIMIZER | ZERO_GRAD | SCHEDULER
"""One bit for each phase that may be open: so many are the depth of the next one."""

_TOGETHER: Final = 16
"""Loaders that are read side by side for one step, at most."""

_NO_OPTIMIZERS: Final[frozenset[int]] = frozenset()


def is_failure(error: BaseException) -> bool:
    """Whether what left a phase failed: neither does `sys.exit(0)`, nor checkpointing, which stops its recomputation
    early by raising (torch/utils/checkpoint.py)."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return type(error).__name__ != "_StopRecomputationError"


def _is_of_another_epoch(record: tuple[Any, ...], loader: int, epoch: int) -> bool:
    """Whether `record` is a batch of this loader, and not of this epoch of it."""
    batch = record[4]
    return batch is not None and batch[0] == loader and batch[1] != epoch


def has_warm(records: list[tuple[Any, ...]]) -> bool:
    return any(isinstance(record[0], Detail) and record[0].warm for record in records)


class Segment(Enum):
    """What followed a batch, until the next one: nothing yet (it joins the next), evaluation alone, or training."""

    NOTHING = 0
    EVAL = 1
    TRAIN = 2


OpenSpan = tuple[str, int, "int | None", "Own | None"]
"""One that the user names: name, start, the step that it lies in or None; None as well for one in no step for which
there is no room. (A NamedTuple costs 100 ns more.)"""


class Lane(LaneState):
    """One thread's recorder. What begins a phase returns its start, or 0 where it is not recorded, and has no end."""

    __slots__ = ("_capacity", "_evaluation", "_explicit", "_main", "former", "run", "thread")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.step: Step | None = None
        self.kinds = 0
        self.former = _NO_OPTIMIZERS
        self._capacity = run.settings.step_records
        self._evaluation: Evaluation | None = None
        self._explicit = False
        """Whether `otel_dl.step()` was used in this thread: from then on it alone bounds steps."""
        self.thread = threading.current_thread()
        self._main = self.thread is threading.main_thread()
        if self._main:
            run.main = self

    # Phases.

    def begin(self, kind: int) -> int:
        """A phase that trains (forward in training mode, backward, zero_grad) or a scheduler's step begins."""
        kinds = self.kinds
        if kinds:
            if kinds & kind:
                return 0
        else:
            step = self.step
            if (step is None or not step.settled or get_current().get(SUPPRESSED)) and not self._outermost(kind):
                return 0
        return self._opened(kind)

    def begin_untrained(self, kind: int) -> int:
        """A root forward begins that does not train: an EVAL_FORWARD or a NEUTRAL_FORWARD."""
        if self.kinds & FORWARD or not (self.kinds or self._without_training(kind)):
            return 0
        return self._opened(kind)

    def begin_optimizer(self, optimizer: int) -> int:
        """The outermost `step()` of the optimizer with this id begins."""
        step = self.step
        if step is not None and step.settled:
            return self.begin(OPTIMIZER)
        if self.kinds & OPTIMIZER or not (self.kinds or self._outermost(OPTIMIZER)):
            return 0
        self.stepping(optimizer)
        return self._opened(OPTIMIZER)

    def _opened(self, kind: int, start: int = 0) -> int:
        """A phase is open from now on, or from `start`; returns its start."""
        start = start or clock()
        kinds = self.kinds
        self.kinds = kinds | kind
        run = self.run
        fast = run.fast
        if fast.lane is self or (fast.lane is None and self._main):  # `bounds`, without a call
            run.status.begin((kinds & _PHASES).bit_count(), kind, start)
            if fast.on_phase is not None:
                fast.on_phase(kind, True, start)
        return start

    def _over(self, kind: int, end: int) -> None:
        """The innermost open phase, which is of this kind, is open no more."""
        self.kinds = kinds = self.kinds & ~kind
        run = self.run
        fast = run.fast
        if fast.lane is self or (fast.lane is None and self._main):
            run.status.end((kinds & _PHASES).bit_count(), end)
            if fast.on_phase is not None:
                fast.on_phase(kind, False, end)

    def end(self, kind: int, start: int, batch: tuple[Any, ...] | None = None) -> None:
        """The innermost open phase, which is of this kind and began at `start`, ends."""
        end = clock()
        self._over(kind, end)
        step = self.step
        if step is None:
            self._end_outside((kind, start, end, None, batch))
            return
        records = step.records
        if len(records) < self._capacity:
            records.append((kind, start, end, None, batch))
        else:
            step.dropped += 1

    def fail(self, kind: int, start: int, error: BaseException, batch: tuple[Any, ...] | None = None) -> None:
        """It ends by an exception, which marks the step where it leaves the outermost phase."""
        end = clock()
        self._over(kind, end)
        failure = self._failure(error, kind) if is_failure(error) else None
        step = self.step
        if failure is not None and not self.kinds and step is not None and step.error is None:
            step.error = failure
            step.plain = False
        self._add((kind, start, end, failure, batch))

    def _failure(self, error: BaseException, kind: int = 0) -> Failure:
        """With what is known beyond: of the other ranks, of a full device. It left a phase of this kind."""
        failure = Failure.of(error, self.run.ranks.of_this_error(error))
        if is_out_of_memory(error):
            return failure.after(self.run.device.out_of_memory(error, kind, outermost=not self.kinds))
        return failure

    def _add(self, record: tuple[Any, ...]) -> None:
        step = self.step
        if step is None:
            self._end_outside(record)
        elif len(step.records) < self._capacity:
            step.records.append(record)
        else:
            step.dropped += 1

    def note(self, record: tuple[Any, ...], warm: bool) -> bool:
        """Something happened within a phase, or between two: see `details`. Any thread may say so.

        Returns whether a step or an evaluation has taken it.
        """
        step = self.step
        if step is None or step.ended:
            evaluates = self._evaluation is not None and self.bounds
            if evaluates:
                self._evaluated([record])
            return evaluates
        if len(step.records) < self._capacity:
            step.records.append(record)
        else:
            step.dropped += 1
        if warm:
            step.warm = True
            step.plain = False
        return True

    def end_optimizer(self, start: int, optimizer: int) -> None:
        """The step of the optimizer with this id, which began at `start`, ends."""
        self.end(OPTIMIZER, start)
        step = self.step
        if step is not None:
            if step.settled:
                step.stepped = True
            else:
                self.stepped(optimizer)

    # Where optimizers bound steps.

    def stepping(self, optimizer: int) -> None:
        """An optimizer (or the GradScaler on its behalf) is about to step."""
        if self.run.stepper is not self:
            if self._another_trains():
                return
            self._become_stepper()
        step = self.step
        if step is None:
            return
        step.ended = 0
        if step.batch or step.explicit:
            return
        if optimizer in step.optimizers:
            # It steps again: another step has begun, at the first event after the latest optimizer.
            index, start = step.boundary or (len(step.records), clock())
            self._split(step, index, start)

    def stepped(self, optimizer: int) -> None:
        step = self.step
        if step is not None and self.run.stepper is self:
            step.stepped = True
            step.optimizers = step.optimizers | {optimizer}
            step.boundary = None

    def _another_trains(self) -> bool:
        """Whether the optimizers step in another thread that is alive."""
        run = self.run
        stepper = run.stepper
        if stepper is None or stepper is self:
            return False
        if stepper.thread.is_alive():
            return True
        stepper.finish()
        run.stepper = None
        return False

    def _become_stepper(self) -> None:
        run = self.run
        run.stepper = self
        step = self.step
        if step is not None and not self._main:
            # Until now the main thread would have bounded steps. What it has open was none of training.
            fresh = run.open(step.start, step.batch, self.former)
            fresh.records[:0] = step.records
            fresh.dropped, fresh.error = step.dropped, step.error
            fresh.segment, fresh.boundary = step.segment, step.boundary
            fresh.warm = step.warm
            fresh.collectives = step.collectives
            self.step = fresh

    def _split(self, step: Step, index: int, start: int) -> None:
        """What `step` recorded from `index` on is of another step, which began at `start`."""
        tail = step.records[index:]
        del step.records[index:]
        end = start
        if tail and tail[0][0] == EVAL_FORWARD:
            # Only now it is told from a forward between two optimizers of one step.
            trained = next((i for i, record in enumerate(tail) if record[0] in _TRAINING), len(tail))
            self._evaluated(tail[:trained])
            del tail[:trained]
            start, end = min((record[1] for record in tail), default=clock()), step.last(step.start)
        self.former = step.optimizers
        warm = step.warm and has_warm(tail)
        step.warm = step.warm and has_warm(step.records)
        later = [collective for collective in step.collectives if collective.start >= start]
        if later:
            step.collectives = [collective for collective in step.collectives if collective.start < start]
        self.run.close(step, end)
        self._close_evaluation()
        self.step = fresh = self.run.open(start, batch=False, former=self.former)
        fresh.records.extend(tail)
        if later:
            fresh.collectives = later
        if warm:
            fresh.warm, fresh.plain = True, False
        fresh.boundary = (0, start)

    @property
    def bounds(self) -> bool:
        """Whether this thread bounds steps."""
        stepper = self.run.fast.lane  # as `run.stepper`, which would be a call more
        return stepper is self or (stepper is None and self._main)

    def _outermost(self, kind: int) -> bool:
        """A phase of training begins outside any other: whether it is recorded, and the step it belongs to."""
        run = self.run
        if not run.active or get_current().get(SUPPRESSED):
            return False
        step = self.step
        if step is not None and step.ended and kind != OPTIMIZER:
            if kind == SCHEDULER:
                return False
            self._close_step(step, step.ended)
            step = None
        if step is None:
            if kind == SCHEDULER:
                return False
            if self._another_trains() or self._explicit:
                # What runs here can't be told to belong to a step of that thread.
                return False
            self.step = step = self._open(clock(), batch=False)
        elif not step.batch and not step.explicit and kind != SCHEDULER:
            if step.error is not None or (step.stepped and self.former and step.optimizers >= self.former):
                if kind in (ZERO_GRAD, FORWARD, BACKWARD) or step.error is not None:
                    self._split(step, len(step.records), clock())
                    return True
            elif step.boundary is None:
                step.boundary = (len(step.records), clock())
        if self._evaluation is not None and not step.batch and kind != SCHEDULER:
            self._close_evaluation()
        return True

    def _without_training(self, kind: int) -> bool:
        """A forward in eval mode, without gradients, or one that says nothing, begins outside any phase."""
        run = self.run
        if not run.active or context.suppressed() or not self.bounds:
            return False
        step = self.step
        if step is not None and step.ended:
            self._close_step(step, step.ended)
            step = None
        if step is None:
            return kind == EVAL_FORWARD and not self._explicit
        if kind == EVAL_FORWARD and not step.batch and not step.explicit and step.done:
            if step.error is not None or (self.former and step.optimizers >= self.former):
                self._close_step(step, step.last(step.start))
            elif step.boundary is None:
                step.boundary = (len(step.records), clock())
        return True

    # Batches.

    def begin_next(self, loader: int, epoch: int) -> int:
        """`next()` of a loader is called, in this epoch of it."""
        if self.kinds & NEXT:
            return 0
        run = self.run
        if not self.kinds:
            start = clock()
            step = self.step
            if (
                step is not None
                and step.stepped
                and step.settled
                and step.plain
                and get_current() is step.context
                and self._evaluation is None
                and start - step.start <= run.slow.limit
                and not run.pending
                and run.active
                and (step.number + 1 < run.fast.attention or run.records_only(step.number + 1))
            ):
                # The ordinary case, and the hot one, which `c/next.c` takes itself where it can: nobody keeps the step
                # and nobody knows its ids, so it becomes the next one. Closing it and opening another costs three
                # times as much.
                run.slow.new.append(start - step.start)
                if run.held is None:
                    step.records.clear()
                    step.collectives.clear()
                else:
                    run.held.recycled(step, start)
                step.number += 1
                run.status.step(step.number)
                step.start = start
                step.stepped = False
                if step.dropped or step.seen:
                    step.dropped = step.segment = step.seen = 0
                run.observers.step_becomes_next(start)
            elif not run.active or get_current().get(SUPPRESSED):
                return 0
            else:
                self._boundary(start, loader, epoch)
        else:
            start = clock()
        return self._opened(NEXT, start)

    def _boundary(self, start: int, loader: int, epoch: int) -> None:
        """Ends the step where it is done, moves evaluation out, and begins one where none is open."""
        step = self.step
        if self.run.stepper is not self and self._another_trains():
            if step is not None:
                # Read before that thread's first optimizer step told who trains.
                self.run.fast.attention = 0
                self.run.pending.extend((NEXT_ELSEWHERE, *r[1:]) for r in step.records if r[0] == NEXT)
                self.step = None
            return
        if step is not None and step.explicit:
            return
        if step is not None and step.ended:
            self._close_step(step, step.ended)
            step = None
        if step is not None:
            followed = self._settle_segment(step)
            if self._explicit and followed == Segment.TRAIN:
                self._cancel(step)
                step = None
            elif step.stepped or step.error is not None:
                self._close_step(step, start)
                step = None
            elif followed == Segment.NOTHING:
                self._forget_left_behind(step, loader, epoch)
            if step is not None and not step.records:
                self._begin_later(step, start)
        if step is None:
            self.step = step = self._open(start, batch=True)
        step.batch = True
        step.settled = self.run.stepper is self and not self._explicit

    def _settle_segment(self, step: Step) -> Segment:
        """What followed the batch in hand. Evaluation is moved out; what trains is the step's for good."""
        followed = Segment.NOTHING
        for record in step.records[step.seen :]:
            if record[0] in _TRAINING:
                followed = Segment.TRAIN
                break
            if record[0] == EVAL_FORWARD:
                followed = Segment.EVAL
        step.seen = len(step.records)
        if followed == Segment.EVAL and step.batch and step.error is None:
            self._evaluated(step.records[step.segment :])
            del step.records[step.segment :]
            step.seen = step.segment
            step.warm = step.warm and has_warm(step.records)
        elif followed == Segment.TRAIN or step.dropped:
            step.segment = len(step.records)
            self._close_evaluation()
        return followed

    def _forget_left_behind(self, step: Step, loader: int, epoch: int) -> None:
        """Batches that nothing followed and that are of an earlier epoch of this loader were not prefetched for it."""
        if step.segment == len(step.records):
            return
        waiting = step.records[step.segment :]
        # Of one epoch all have the same answer, and few take batches of several loaders at a time.
        if any(_is_of_another_epoch(record, loader, epoch) for record in waiting[-_TOGETHER:]):
            kept = [r for r in waiting if r[4] is not None and not _is_of_another_epoch(r, loader, epoch)]
            step.records[step.segment :] = kept
            step.seen = len(step.records)
            if kept and not step.segment:
                self._begin_later(step, kept[0][1])

    def _begin_later(self, step: Step, start: int) -> None:
        """What `step` had recorded so far was not its own."""
        if step is self.run.current:
            self.run.outside.step_begins_later(step.number, step.start)
        step.start = start

    def _elsewhere(self, record: tuple[Any, ...]) -> None:
        """A batch that this thread read for the one that trains."""
        run = self.run
        record = (NEXT_ELSEWHERE, *record[1:])
        stepper = run.stepper
        step = stepper.step if stepper is not None else None
        if step is None or step.ended:
            run.fast.attention = 0
            run.pending.append(record)
        elif len(step.records) < self._capacity:
            step.records.append(record)
        else:
            step.dropped += 1

    def stop_next(self, start: int) -> None:
        """`next()`, called at `start`, raised StopIteration: it ends a step, begins none and uses up no number."""
        self._over(NEXT, clock())
        step = self.step
        if step is None or self.kinds or step.explicit:
            return
        self._forget_untrained_epoch(step)
        if not step.records:
            self._cancel(step)
        elif step.segment == len(step.records) and self._evaluation is None:
            # Neither does a batch of another loader wait for its step, nor was it evaluation's loader, in the middle
            # of a step that accumulates. An optimizer may still step for what an epoch left over.
            step.ended, step.settled = start, False

    def _forget_untrained_epoch(self, step: Step) -> None:
        """Where a loader has ended and nothing followed any of its batches, they were not read for a step."""
        batches = [record[4] for record in step.records[step.segment :] if record[4] is not None]
        if len(batches) > 1 and batches[0][2] == 0 and len({batch[:2] for batch in batches}) == 1:
            del step.records[step.segment :]
            step.seen = step.segment

    # Evaluation.

    def _evaluated(self, records: list[tuple[Any, ...]]) -> None:
        """These records of a step were evaluation's."""
        evaluation = self._evaluation
        if evaluation is None:
            self._evaluation = evaluation = self.run.evaluation()
            self.run.fast.attention = 0
        for record in records:
            evaluation.lasts(record[1], record[2])
        room = self._capacity - len(evaluation.records)
        evaluation.records.extend(records[:room])
        evaluation.dropped += max(0, len(records) - room)
        self._take_collectives(evaluation, min((record[1] for record in records), default=clock()))

    def _take_collectives(self, evaluation: Evaluation, start: int) -> None:
        """Those issued since `start` were evaluation's."""
        step = self.step
        if step is None:
            taken = self.run.collectives.take_since(start) if self.bounds else []
        else:
            taken = [collective for collective in step.collectives if collective.start >= start]
            if taken:
                step.collectives = [collective for collective in step.collectives if collective.start < start]
        for collective in taken:
            evaluation.lasts(collective.start, collective.end)
        room = self._capacity - len(evaluation.collectives)
        evaluation.collectives.extend(taken[:room])
        evaluation.dropped += max(0, len(taken) - room)

    def _close_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            self.run.close_evaluation(evaluation)

    def _end_outside(self, record: tuple[Any, ...]) -> None:
        """A phase that ends while this thread has no step open: evaluation's, another thread's, or nobody's."""
        if not self.bounds:
            if record[0] == NEXT and record[3] is None:
                self._elsewhere(record)
            return
        if record[0] != EVAL_FORWARD:
            return
        self._evaluated([record])
        evaluation = self._evaluation
        if record[3] is not None and evaluation is not None and evaluation.error is None:
            evaluation.error = record[3]

    # Steps.

    def _open(self, start: int, batch: bool) -> Step:
        if self.bounds:
            return self.run.open(start, batch, self.former)
        return Step(0, start, batch, self.former, head=False)

    def _cancel(self, step: Step) -> None:
        self.step = None
        if self.bounds:
            self.run.cancel(step)

    def _close_step(self, step: Step, end: int) -> None:
        self.former = step.optimizers
        self.step = None
        if self.bounds:
            self.run.close(step, end)

    def finish(self, error: BaseException | None = None, cut_off: Failure | None = None) -> None:
        """The run ends: what is open is closed where its last event ended, with the exception that ends the process, or
        with what has `cut_off` the step."""
        step = self.step
        if step is not None and self.bounds:
            self._settle_segment(step)
            if step.error is None:
                step.error = cut_off
            if error is not None and step.error is None and is_failure(error):
                step.error = self._failure(error)
            self._drop_beginning(step)
            trained = step.done or step.segment > 0
            if step.explicit or (trained and not self._explicit):
                self._close_step(step, step.ended or step.last(clock()))
            else:
                self._cancel(step)
        self._close_evaluation()

    def _drop_beginning(self, step: Step) -> None:
        """Takes from the run's last step what would have begun another one, where no batch tells: evaluation, and the
        zero_grad at the end of a loop."""
        if step.batch or step.explicit or step.error is not None or self.kinds:
            return
        index = step.boundary[0] if step.boundary is not None else 0
        tail = step.records[index:]
        kinds = {record[0] for record in tail}
        if kinds == {ZERO_GRAD}:
            del step.records[index:]
            step.segment = min(step.segment, index)
        elif EVAL_FORWARD in kinds and not kinds & _TRAINING:
            del step.records[index:]
            self._evaluated(tail)
            step.warm = step.warm and has_warm(step.records)

    def enter_step(self, global_step: int | None) -> Step | None:
        """`otel_dl.step()` begins: it takes over a step that has only batches so far."""
        if not self.run.active or context.suppressed():
            return None
        start = clock()
        step = self.step
        if step is not None:
            followed = self._settle_segment(step)
            if followed == Segment.TRAIN or step.done or step.explicit or step.ended:
                self._close_step(step, step.ended or start)
                step = None
            elif not step.records:
                self._begin_later(step, start)
        self._explicit = True
        if self.run.stepper is not self and not self._another_trains():
            self._become_stepper()
            step = self.step
        if step is None:
            self.step = step = self._open(start, batch=True)
        step.explicit = True
        step.settled = False
        step.global_step = global_step
        self._close_evaluation()
        return step

    def exit_step(self, step: Step, error: BaseException | None) -> None:
        if self.step is not step:
            return
        if error is not None and step.error is None and is_failure(error):
            step.error = self._failure(error)
        self._close_step(step, clock())

    # Steps of other ranks, in which this one takes part when it has run out of data.

    def begin_joined(self, goes_on: bool) -> None:
        """The others, if any has data left, begin another step, or theirs `goes_on`."""
        step = self.step
        if not self.bounds or not self.run.active or context.suppressed():
            return
        if step is not None and step.explicit and (goes_on or not step.joined):
            return
        self.end_joined()
        step = self.step
        if step is not None:
            trained = self._settle_segment(step) == Segment.TRAIN or step.segment > 0
            if step.done:
                self._close_step(step, step.ended or step.last(clock()))
                step = None
            elif not trained:
                self._cancel(step)
                step = None
        self._close_evaluation()
        if step is None:
            self.step = step = self._open(clock(), batch=True)
        # Else its data ended in the middle of a step.
        step.joined = step.explicit = True
        step.settled, step.ended = False, 0

    def end_joined(self, error: BaseException | None = None) -> None:
        step = self.step
        if step is not None and step.joined:
            self.exit_step(step, error)

    def none_joined(self) -> None:
        """No other has data left: what `begin_joined` began with this question is no step."""
        step = self.step
        if step is not None and step.joined and not step.records and len(step.collectives) <= 1:
            self._cancel(step)
        else:
            self.end_joined()

    def begin_span(self, name: str) -> OpenSpan | None:
        """A span that the user names begins: of the step that is open, else of the run."""
        run = self.run
        if not run.active or context.suppressed():
            return None
        step = self.step
        if step is not None and not step.ended:
            return name, clock(), step.number, None
        start = clock()
        return name, start, None, run.own_spans.begin(name, start)

    def end_span(self, span: OpenSpan, error: BaseException | None) -> None:
        """It ends. One that saw its step end belongs to none, and is counted."""
        end, failure = clock(), Failure.of(error) if error is not None else None
        name, start, step, own = span
        if step is None:
            ended = self.run.own_spans.end(own, end, failure) if own is not None else None
            if ended is not None:
                self.run.tell(ended)
        elif self.step is not None and self.step.number == step:
            self._add((name, start, end, failure, None))
        else:
            self.run.dropped["spans over several steps"] += 1
