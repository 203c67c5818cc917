"""One-time work, as it is watched: from the outermost call of a thread that does such work to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from otel_dl.recording.details import Detail
from otel_dl.recording.failure import Failure
from otel_dl.recording.records import Kind, Record, clock

if TYPE_CHECKING:
    from otel_dl.recording.run import Run


class OneTime(Detail):
    """Work that is done once: the phases and the step that it ran in are warm-up."""

    __slots__ = ()
    warm = True


class _Open(threading.local):
    work: Work | None = None
    """The outermost one that this thread is in."""


_open = _Open()


def current() -> Work | None:
    """The one-time work that this thread is in."""
    return _open.work


class Work:
    """One piece of it. What it does within is part of it: only the outermost is noted, as torch's own callbacks
    (`torch._dynamo.callback`) tell of the outermost only."""

    __slots__ = ("_run", "outermost", "start")

    def __init__(self, run: Run) -> None:
        self._run = run
        self.start = 0
        self.outermost = False

    def begin(self) -> None:
        if _open.work is None and self._run.active:
            self.start = clock()
            self.outermost = True
            _open.work = self

    def end(self, detail: OneTime, error: BaseException | None = None) -> None:
        """It is over, by `error` where that left it."""
        if not self.outermost:
            return
        end = clock()
        self.drop()
        if self._run.active:
            note(self._run, detail, self.start, end, Failure.of(error) if error is not None else None)

    def drop(self) -> None:
        """It came to nothing."""
        if _open.work is self:
            _open.work = None


class Stretch(threading.local):
    """One-time work that begins in one call of torch's and ends in another, or never. One at a time in a thread."""

    subject = 0
    """The `id` of what is worked on; 0: nothing."""
    start = 0

    def __init__(self, run: Run) -> None:
        self._run = run

    def begin(self, subject: object) -> None:
        """Work on `subject` begins. What had begun before has come to nothing."""
        if _open.work is None and self._run.active:
            self.subject = id(subject)
            self.start = clock()

    def has_begun(self, subject: object) -> bool:
        return self.subject == id(subject)

    def end(self, subject: object, detail: Callable[[], OneTime], error: BaseException | None = None) -> None:
        if not self.has_begun(subject):
            return
        end = clock()
        self.subject = 0
        if self._run.active:
            note(self._run, detail(), self.start, end, Failure.of(error) if error is not None else None)

    def drop(self) -> None:
        self.subject = 0


def note(run: Run, detail: OneTime, start: int, end: int, error: Failure | None) -> None:
    """`detail` happened in this thread. What a thread does that does not train is told in the run's trace."""
    if _trains(run):
        run.note(detail, start, end, error)
    else:
        run.tell(Record(detail, start, end, error, None))


def _trains(run: Run) -> bool:
    """Whether this thread bounds steps, or is autograd's and works for it (torch runs the backward on a device in
    threads of its own, one a device)."""
    trainer = run.trainer
    if trainer.ident == threading.get_ident():
        return True
    lane = run.stepper or run.main
    if lane is None or not lane.kinds & Kind.BACKWARD:
        return False
    import torch

    return torch._C._current_graph_task_id() != -1  # pyright: ignore
