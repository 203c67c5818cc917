"""A call that makes the host wait for a device: what is done around it, whichever it is."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from otel_dl.patches.synchronization.split import Split
from otel_dl.places import here
from otel_dl.recording.failure import Failure
from otel_dl.recording.records import clock
from otel_dl.recording.waits import SHORT, Wait

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.lane import Lane
    from otel_dl.recording.run import Run

Args = tuple[Any, ...]
Keywords = dict[str, Any]


class Does(Enum):
    """What a call does with the time that it takes."""

    WAITS = 0
    """Nothing else."""
    COPIES = 1
    """First it waits for the current stream, then it copies from the device and waits for that."""
    COMPUTES = 2
    """It queues work of its own and waits for what comes of it: one can't be told from the other."""


class Thread(threading.local):
    inside = False
    """Whether it is in a call that is recorded: those within are part of it."""


def always(args: Args, kwargs: Keywords) -> bool:
    return True


class Waiting:
    """What the patches of this target share."""

    def __init__(self, run: Run, patches: Patches) -> None:
        from torch._guards import TracingContext
        from torch.compiler import is_dynamo_compiling

        self.run = run
        self.patches = patches
        self.thread: Final = Thread()
        self._least = int(run.settings.sync_min_ms * 1e6)
        self._split = Split()
        self._is_compiling = is_dynamo_compiling
        self._tracing: Callable[[], object] = TracingContext.try_get

    def around(
        self,
        operation: str,
        original: Callable[..., Any],
        device: Callable[[Args, Keywords, Any], Any],
        does: Does,
        counts: Callable[[Args, Keywords], bool] = always,
    ) -> Callable[..., Any]:
        """`original`, recorded under the name `operation`.

        `device`, called with arguments and result (None where it raised), says which one it waited for; None or "":
        for none. `counts`: whether it waits also where it took no time to speak of.
        """
        run, patches, thread, split = self.run, self.patches, self.thread, self._split
        is_compiling = self._is_compiling
        copies = does is Does.COPIES

        @functools.wraps(original)
        def waits(*args: Any, **kwargs: Any) -> Any:
            if thread.inside or is_compiling():
                return original(*args, **kwargs)
            mark = None
            thread.inside = True
            try:
                if copies and run.active and (step := run.current) is not None and step.head:
                    mark = split.begin(args[0])
                start = clock()
            except BaseException as error:
                thread.inside = False
                patches.fault(error)
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                thread.inside = False
                try:
                    self._failed(operation, device(args, kwargs, None), start, error)
                except BaseException as fault:
                    patches.fault(fault)
                raise
            try:
                end = clock()
                self._over(operation, device, args, kwargs, result, start, end, does, counts, mark)
            except BaseException as error:
                patches.fault(error)
            finally:
                thread.inside = False
            return result

        return waits

    def _over(
        self, operation: str, device: Callable[[Args, Keywords, Any], Any], args: Args, kwargs: Keywords, result: Any,
        start: int, end: int, does: Does, counts: Callable[[Args, Keywords], bool], mark: Any,
    ) -> None:  # fmt: skip
        wait: Wait | None = None
        long = end - start >= self._least
        if (long or counts(args, kwargs)) and self._is_recorded():
            of = device(args, kwargs, result)
            if of is not None and not long:
                self.run.note(SHORT, start, end)
            elif of is not None:
                wait = Wait(operation, str(of), here(), end - start)
                if does is Does.WAITS:
                    wait.copied = 0
                self.run.note(wait, start, end)
        if mark is not None:
            self._split.end(mark, wait)

    def _failed(self, operation: str, of: Any, start: int, error: BaseException) -> None:
        if of is not None and self._is_recorded():
            end = clock()
            self.run.note(Wait(operation, str(of), here(), end - start), start, end, Failure.of(error))

    def seen(self, operation: str) -> None:
        """The host is about to wait in C++, within no call that is recorded: it is not known until when."""
        if not self.thread.inside and self._is_recorded():
            now = clock()
            self.run.note(Wait(operation, "", here(), 0), now, now)

    def _is_recorded(self) -> bool:
        """Whether this thread trains, or is autograd's, which works for one that does; and no compiler traces."""
        run = self.run
        if not run.active or self._tracing() is not None:
            return False
        lane: Lane = run.local.lane
        return lane.bounds or isinstance(lane.thread, threading._DummyThread)  # pyright: ignore[reportPrivateUsage]
