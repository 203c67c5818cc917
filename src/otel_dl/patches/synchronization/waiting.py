"""A call that makes the host wait for a device: what is done around it, whichever it is."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_dl.patches.synchronization.split import Split
from otel_dl.places import here
from otel_dl.recording.failure import Failure
from otel_dl.recording.records import clock
from otel_dl.recording.waits import SHORT, Wait

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.lane import Lane
    from otel_dl.recording.native import Ended
    from otel_dl.recording.run import Run

Args = tuple[Any, ...]
Keywords = Mapping[str, Any]
Condition = Callable[[Args, Keywords], bool]


class Does(Enum):
    """What a call does with the time that it takes."""

    WAITS = 0
    """Nothing else."""
    COPIES = 1
    """First it waits for the current stream, then it copies from the device, or to it, and waits for that."""
    COMPUTES = 2
    """It queues work of its own and waits for what comes of it: one can't be told from the other, the less so as the
    last of that work (`nonzero` writes the indices once it knows how many) may still run when the host goes on."""


def always(args: Args, kwargs: Keywords) -> bool:
    return True


def unknown(args: Args, kwargs: Keywords) -> Any:
    return None


class Call(NamedTuple):
    """A function, or a method, that makes the host wait. All are called with the arguments."""

    operation: str
    does: Does
    device: Callable[[Args, Keywords, Any], Any]
    """Called with the result as well, None where it raised: which device it waited for; None or "": for none."""
    queue: Callable[[Args, Keywords], Any] = unknown
    """Called before: the `torch.device` whose current stream is waited for; None: none is, or it is not known."""
    counts: Condition = always
    """Whether it waits also where it took no time to speak of."""
    waits: Condition = always
    """Called before: whether it can be one that waits at all."""


Begun = tuple[Call, Any, int]
"""A call, what `Split.begin` returned, and when (`clock`). A tuple without names: making one is a call of no function,
which torch.compile would look at."""


class Thread(threading.local):
    inside = False
    """Whether it is in a call that is recorded: those within are part of it."""


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

    def around(self, call: Call, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, recorded."""
        begin, end = self._begin, self._end

        @functools.wraps(original)
        def waits(*args: Any, **kwargs: Any) -> Any:
            begun = begin(call, args, kwargs)
            if begun is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                end(begun, args, kwargs, None, error)
                raise
            end(begun, args, kwargs, result, None)
            return result

        return waits

    def follow(self, call: Call) -> Callable[[Args, Keywords | None], Ended | None]:
        """What `Follow` (`recording/c/follow.c`) calls before a function is called, to record it."""

        def begin(args: Args, kwargs: Keywords | None) -> Ended | None:
            given = kwargs or {}
            begun = self._begin(call, args, given)
            return None if begun is None else functools.partial(self._end, begun, args, given)

        return begin

    def _begin(self, call: Call, args: Args, kwargs: Keywords) -> Begun | None:
        """None where the call is not recorded: then it has not begun."""
        thread, run = self.thread, self.run
        if thread.inside or self._is_compiling():
            return None
        try:
            if not call.waits(args, kwargs):
                return None
            thread.inside = True
            mark = None
            if call.does is Does.COPIES and run.active and (step := run.current) is not None and step.head:
                mark = self._split.begin(call.queue(args, kwargs))
            return call, mark, clock()
        except BaseException as error:
            thread.inside = False
            self.patches.fault(error)
            return None

    def _end(self, begun: Begun, args: Args, kwargs: Keywords, result: Any, error: BaseException | None) -> None:
        try:
            end = clock()
            if error is None:
                self._over(begun, args, kwargs, result, end)
            else:
                self._failed(begun, args, kwargs, end, error)
        except BaseException as fault:
            self.patches.fault(fault)
        finally:
            self.thread.inside = False

    def _over(self, begun: Begun, args: Args, kwargs: Keywords, result: Any, end: int) -> None:
        call, mark, start = begun
        wait: Wait | None = None
        long = end - start >= self._least
        if (long or call.counts(args, kwargs)) and self._is_recorded():
            of = call.device(args, kwargs, result)
            if of is not None and not long:
                self.run.note(SHORT, start, end)
            elif of is not None:
                wait = Wait(call.operation, str(of), here(), end - start)
                if call.does is Does.WAITS:
                    wait.copied = 0
                self.run.note(wait, start, end)
        if mark is not None:
            self._split.end(mark, wait)

    def _failed(self, begun: Begun, args: Args, kwargs: Keywords, end: int, error: BaseException) -> None:
        call, _, start = begun
        of = call.device(args, kwargs, None)
        if of is not None and self._is_recorded():
            self.run.note(Wait(call.operation, str(of), here(), end - start), start, end, Failure.of(error))

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
