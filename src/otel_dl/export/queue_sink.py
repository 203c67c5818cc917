"""A bounded queue and one daemon thread between training and whatever takes the spans.

`offer` costs microseconds and never waits for a receiver. The thread is started by `open` or the first span, so a
process without steps has neither the thread nor an exporter. Nothing here depends on the receiver: it may be away,
hang, or swallow everything; memory stays bounded, `flush` and `close` keep their deadlines, what is lost is counted.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final

from opentelemetry.context import (
    _SUPPRESS_INSTRUMENTATION_KEY,  # pyright: ignore[reportPrivateUsage]
    attach,
    set_value,
)
from opentelemetry.sdk.trace import ReadableSpan

from otel_dl import threads
from otel_dl.log import logger

BATCH: Final = 512
"""Spans of one export at most, unless OTEL_BSP_MAX_EXPORT_BATCH_SIZE says otherwise."""
ENOUGH: Final = 64
"""So many do not wait for others. Each is four or five objects: with 700 new ones (the default of `gc.set_threshold`)
the garbage collector begins, and now and then goes through all that the process has (0.2 s with torch)."""
LOADING_S: Final = 2.0
"""How long an exporter may take to be imported and made before nobody waits for it any longer."""
DELAY: Final = 1.0
"""Seconds that a first span waits for others, unless OTEL_BSP_SCHEDULE_DELAY says otherwise."""

_BACKOFF: Final = (1.0, 30.0)
_HURRIED_BACKOFF: Final = (0.1, 1.0)
"""Seconds between attempts, first and longest; the second pair while somebody waits in `flush`."""
_HURRIED_ATTEMPTS: Final = 4
"""Failures in a row after which `flush` gives up before its deadline: the receiver is away."""
_REFUSALS: Final = 3
"""Times that a batch may be refused while the receiver takes others; then it is dropped."""
_GRACE: Final = 0.2
"""Seconds at the end of `close` in which an export that does not come back is cut off."""


class _Batch:
    """Spans on their way. `first` counts the spans offered before its first one."""

    __slots__ = ("exported_then", "first", "refusals", "spans")

    def __init__(self, first: int, spans: list[ReadableSpan]) -> None:
        self.first = first
        self.spans = spans
        self.exported_then: int | None = None
        """How many spans had been exported when it last failed."""
        self.refusals = 0


class QueueSink(ABC):
    """The queue, the thread, the retries and the deadlines; a subclass says where a batch goes.

    When the queue is full the oldest spans go. A batch that failed is tried again after 1 s, 2 s, … 30 s, sooner while
    somebody waits in `flush`.
    """

    def __init__(self, capacity: int, batch: int = BATCH, delay: float = DELAY) -> None:
        self._capacity = capacity
        self._batch = min(batch, capacity)
        self._enough = min(self._batch, ENOUGH)
        self._delay = delay
        self._begin()

    def _begin(self) -> None:
        # Reentrant, because a signal handler may end a span of the user's while this thread is in `offer`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._opened = threading.Event()
        self._fresh: deque[ReadableSpan] = deque()
        self._failed: deque[_Batch] = deque()
        self._sending: _Batch | None = None
        self._offered = 0
        self._taken = 0
        self._flushed = 0
        self._wanted = 0
        self._hurry_until = 0.0
        self._failures = 0
        self._futile = False
        self._full = False
        self._ended = ""
        """Why no more spans are taken; empty while they are."""
        self._thread: threading.Thread | None = None
        self.exported = 0
        self.dropped: Counter[str] = Counter()

    def after_fork(self) -> None:
        self._begin()

    # Where spans go.

    @abstractmethod
    def _open(self) -> None:
        """Called in the thread before the first delivery. What it raises ends the sink."""

    @abstractmethod
    def _deliver(self, spans: Sequence[ReadableSpan]) -> bool:
        """Called in the thread: whether `spans` were taken."""

    @abstractmethod
    def _settle(self) -> bool:
        """Called in the thread when everything was delivered and somebody waits for it."""

    @abstractmethod
    def _shut(self) -> None:
        """Ends what `_open` began; called once, from the closing thread where a delivery does not come back."""

    @abstractmethod
    def _target(self) -> str:
        """Where spans go, for a person."""

    @abstractmethod
    def _failed_with(self, message: str) -> None:
        """Told what a delivery raised."""

    def _room(self) -> int:
        """How many spans may be delivered now."""
        return self._batch

    # Called by everybody.

    @property
    def waiting(self) -> int:
        with self._lock:
            sending = len(self._sending.spans) if self._sending is not None else 0
            return len(self._fresh) + sum(len(batch.spans) for batch in self._failed) + sending

    def open(self) -> None:
        with self._lock:
            if self._thread is None and not self._ended:
                self._start()
            started = self._thread is not None
        if started:
            self._opened.wait(LOADING_S)

    def offer(self, spans: Sequence[ReadableSpan]) -> None:
        if not spans:
            return
        with self._lock:
            if self._ended:
                self.dropped[self._ended] += len(spans)
                return
            before = len(self._fresh)
            self._fresh.extend(spans)
            self._offered += len(spans)
            first_drop = self._trim() and not self._full
            self._full = self._full or first_drop
            after = len(self._fresh)
            if self._thread is None:
                self._start()
        if before == 0 or before < self._enough <= after:
            self._bell.put(None)
        if first_drop:
            logger.warning(
                "otel-dl: %d spans wait for %s and no more are held: from now on the oldest are dropped and counted."
                " OTEL_DL_QUEUE_SPANS is the number held.",
                self._capacity,
                self._target(),
            )

    def flush(self, deadline: float) -> bool:
        with self._changed:
            mark = self._offered
            lost = self.dropped.total()
            if self._flushed < mark and not self._ended:
                if self._thread is None:
                    self._start()
                    if self._thread is None:
                        return False
                self._wanted = max(self._wanted, mark)
                self._hurry_until = max(self._hurry_until, deadline)
                self._failures = 0
                self._futile = False
                self._bell.put(None)
                while self._flushed < mark and not (self._futile or self._ended):
                    left = deadline - monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
            return self._flushed >= mark and self.dropped.total() == lost

    def close(self, deadline: float) -> bool:
        if self._ended:
            return not self.dropped
        done = self.flush(deadline - _GRACE)
        with self._changed:
            self._ended = "exit"
            thread = self._thread
            self._bell.put(None)
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_GRACE / 2)
            if thread.is_alive():
                # It may be inside an export that does not come back; the exporter's own shutdown may hang as well.
                with contextlib.suppress(RuntimeError):
                    threads.start("otel-dl-shutdown", self._shut_quietly).join(_GRACE / 2)
                thread.join(_GRACE / 2)
        lost = self._drop_all("exit")
        if lost:
            logger.warning(
                "otel-dl: %d spans did not reach %s in time and are lost. OTEL_DL_EXIT_DELAY is the time in seconds"
                " that the end of the process, or of the run, waits for them.",
                lost,
                self._target(),
            )
        return done

    # Called under the lock.

    def _start(self) -> None:
        # RuntimeError: the interpreter is ending (3.12.0 starts no thread then), or the process may have no more. The
        # next span tries again.
        with contextlib.suppress(RuntimeError):
            self._thread = threads.start("otel-dl-export", self._run)

    def _trim(self) -> bool:
        excess = self.waiting - self._capacity
        left = excess
        while left > 0 and self._failed:
            oldest = self._failed[0]
            count = min(left, len(oldest.spans))
            del oldest.spans[:count]
            oldest.first += count
            left -= count
            if not oldest.spans:
                self._failed.popleft()
        while left > 0 and self._fresh:
            self._fresh.popleft()
            self._taken += 1
            left -= 1
        if excess > left:
            self.dropped["queue_full"] += excess - left
        return excess > left

    def _take(self, room: int) -> _Batch | None:
        # After a success a failed batch has its turn, after a failure a fresh one: a batch that is refused for good
        # does not hold up the others.
        if self._failed and (self._failures == 0 or not self._fresh):
            batch = self._failed.popleft()
        elif self._fresh:
            spans = [self._fresh.popleft() for _ in range(min(room, self._batch, len(self._fresh)))]
            batch = _Batch(self._taken, spans)
            self._taken += len(spans)
        else:
            return None
        self._sending = batch
        return batch

    def _settled(self) -> int:
        """How many of the spans offered, counted from the first, have come to an end."""
        return min([self._taken, *(batch.first for batch in self._failed)])

    def _drop_all(self, reason: str, for_good: bool = False) -> int:
        with self._changed:
            if for_good:
                self._ended = reason
            lost = self.waiting
            self._fresh.clear()
            self._failed.clear()
            self._sending = None
            self._taken = self._flushed = self._offered
            if lost:
                self.dropped[reason] += lost
            self._changed.notify_all()
            return lost

    # The thread.

    def _run(self) -> None:
        # The export's own requests are nobody's spans, as the SDK's processors have it.
        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        try:
            self._open()
        except BaseException as error:
            logger.warning(
                "otel-dl: spans can't be exported to %s: %s: %s. Training goes on without traces.",
                self._target(),
                type(error).__name__,
                error,
            )
            self._drop_all("export_failed", for_good=True)
            return
        finally:
            self._opened.set()
        while not self._ended:
            if not (self._fresh or self._failed):
                self._finish_flush()
                self._wait(None, lambda: bool(self._fresh))
                self._wait(self._delay, lambda: len(self._fresh) >= self._enough or self._hurried())
                continue
            room = self._room()
            if room <= 0:
                self._wait(0.01 if self._hurried() else 0.1, lambda: False)
                continue
            with self._lock:
                batch = self._take(room)
            if batch is not None:
                self._attempt(batch)
        self._shut_quietly()

    def _attempt(self, batch: _Batch) -> None:
        try:
            taken = self._deliver(batch.spans)
        except BaseException as error:  # SystemExit as well: it would end this thread in silence
            self._failed_with(f"{type(error).__name__}: {error}")
            taken = False
        with self._changed:
            if self._sending is not batch:  # dropped meanwhile, by `close`
                return
            self._sending = None
            if taken:
                self.exported += len(batch.spans)
                self._failures = 0
            else:
                self._failures += 1
                self._keep(batch)
            finished = self._wanted > self._flushed and self._settled() >= self._wanted
        if finished:
            self._finish_flush()
        if not taken:
            self._pause()
        elif not self._failed:
            self._wait(self._delay, lambda: len(self._fresh) >= self._enough or self._hurried() or not self._fresh)

    def _keep(self, batch: _Batch) -> None:
        if batch.exported_then is not None and self.exported > batch.exported_then:
            batch.refusals += 1
        batch.exported_then = self.exported
        if batch.refusals >= _REFUSALS:
            self.dropped["export_failed"] += len(batch.spans)
        else:
            self._failed.append(batch)
            self._trim()

    def _pause(self) -> None:
        """Waits before the next attempt; a `flush` that begins meanwhile cuts it short."""
        failures = self._failures
        if self._hurried():
            if failures >= _HURRIED_ATTEMPTS:
                self._give_up()
                self._failures = failures = 1
            else:
                first, longest = _HURRIED_BACKOFF
                self._wait(min(longest, first * 2 ** (failures - 1)), lambda: False)
                return
        first, longest = _BACKOFF
        self._wait(min(longest, first * 2 ** min(failures - 1, 10)), self._hurried)

    def _finish_flush(self) -> None:
        """What somebody waits for was delivered: says so to them."""
        with self._lock:
            # Spans may have come since the thread found nothing to do.
            wanted = min(self._wanted, self._settled())
            if wanted <= self._flushed:
                return
        try:
            settled = self._settle()
        except Exception as error:
            self._failed_with(f"{type(error).__name__}: {error}")
            settled = False
        if not settled:
            self._give_up()
            return
        with self._changed:
            self._flushed = max(self._flushed, wanted)
            self._changed.notify_all()

    def _give_up(self) -> None:
        """Lets those who wait in `flush` go: it would be in vain."""
        with self._changed:
            self._futile = True
            self._wanted = self._flushed
            self._changed.notify_all()

    def _hurried(self) -> bool:
        return self._wanted > self._flushed and monotonic() < self._hurry_until

    def _wait(self, seconds: float | None, ready: Callable[[], bool]) -> None:
        """Until `ready()`, `seconds` have passed, or the sink is closed; woken by the bell."""
        end = None if seconds is None else monotonic() + seconds
        while not (self._ended or ready()):
            left = None if end is None else end - monotonic()
            if left is not None and left <= 0:
                return
            try:
                self._bell.get(timeout=left)
            except Empty:
                return
            if seconds is None and self._hurried():
                return

    def _shut_quietly(self) -> None:
        try:
            self._shut()
        except Exception as error:
            logger.debug("otel-dl: shutting down %s failed", self._target(), exc_info=error)
