"""A rank that keeps a step asks the others to keep it as well: one log a minute in the job's store, in which each
writes what it wants.

Steps that failed, or that the user asked for, are kept by every rank. Slow ones are proposed, by the rank that was
slow; the first few of a minute's log are kept, by every rank alike, and after them only one that lasted twice as long
as all that were: with 10,000 ranks some rank is always slow, and the one that matters may come last. All read the same
log in the same order, so all take the same, without asking anybody.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from otel_dl.ranks.store import JobStore, StoreGone
from otel_dl.recording.held import GONE, WAITS
from otel_dl.recording.keep import CAP_PER_MINUTE
from otel_dl.semconv import KeepReason

if TYPE_CHECKING:
    from otel_dl.recording.run import Run

LOG_BYTES: Final = 8_192
"""Of a minute's log so much counts: what comes later is counted and dropped. Each rank reads the log once a second
until it is full, and what is in it is not changed by what comes later: all read the same."""
_LOST: Final = "requests to other ranks to keep a step"
"""The key in `Run.dropped`."""
WAITING: Final = 4_096
"""Requests of this rank that wait to be written at most; the oldest go first."""
_CLOCKS_S: Final = 10
"""A log is read so long before and after its minute: ranks write by clocks of their own, once a second."""
_BEHIND: Final = 5
"""Minutes that a process reads at most when it has not for a while."""
_PROPOSED: Final = "s"
_WANTED: Final = "e"
_GONE_AFTER: Final = 2
"""Ticks after which a step that is decided and is nowhere to be found is taken for gone."""


class Slow:
    """The slow steps of a minute that are kept: CAP_PER_MINUTE, then one that lasted twice as long as all of them."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.longest = 0

    def has_room(self, milliseconds: int) -> bool:
        return len(self.numbers) < CAP_PER_MINUTE or milliseconds >= 2 * self.longest

    def take(self, number: int, milliseconds: int) -> bool:
        """Whether step `number`, which lasted so long, is kept."""
        if number not in self.numbers and not self.has_room(milliseconds):
            return False
        self.numbers.add(number)
        self.longest = max(self.longest, milliseconds, 1)
        return True


class KeepRequests:
    """Takes part in the exchange. `kept` is called by the thread that trains, the rest by the exchange's."""

    def __init__(self, run: Run, now: Callable[[], float] = time.time) -> None:
        """`now`: seconds since the epoch, by rank 0's clock as far as it is known."""
        self._run = run
        self._now = now
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child, which is a run of its own."""
        self._own: deque[tuple[str, int, int]] = deque(maxlen=WAITING)
        self._read_bytes: dict[int, int] = {}
        """Of each minute's log, how far it was read; LOG_BYTES: to its end."""
        self._slow: dict[int, Slow] = {}
        """Of each minute's log."""
        self._written: dict[int, tuple[str, int]] = {}
        """Steps that this rank has written into a log and has not read there yet: kind of the request, minute."""
        self._wanted: dict[int, int] = {}
        """Steps to be kept that are not yet: how often they were decided and nowhere to be found."""
        self._seen: dict[int, None] = {}
        """Steps that are kept everywhere."""
        self._prefix = ""
        self._logs: deque[int] = deque(maxlen=WAITING)
        """Minutes that have a log."""
        self._read_until = 0
        """The last minute whose log was looked at."""

    def kept(self, number: int, reason: str, milliseconds: int = 0) -> None:
        """This rank keeps step `number`, or proposes it."""
        kind = _PROPOSED if reason in (KeepReason.SLOW, KeepReason.WARMUP) else _WANTED
        self._own.append((kind, number, milliseconds))

    def connected(self, store: JobStore) -> None:
        if store.prefix != self._prefix:  # other logs
            self._prefix = store.prefix
            self._read_bytes.clear()
            self._slow.clear()
            self._written.clear()
            self._logs.clear()

    def write(self, store: JobStore) -> bool:
        held = self._run.held
        if held is None or not self._own:
            return self._delete_oldest(store)
        self.read(store)  # a step that was slow for all ranks is proposed by one of them, or a few
        minute = self._minute()
        slow = self._slow.get(minute)
        requests: list[tuple[str, int, int]] = []
        while self._own:
            request = kind, number, milliseconds = self._own.popleft()
            if number in self._seen:
                continue
            if self._read_bytes.get(minute, 0) >= LOG_BYTES:
                self._lose(kind, number)
            elif kind == _PROPOSED and slow is not None and not slow.has_room(milliseconds):
                held.refuse(number)
            else:
                requests.append(request)
        if not requests:
            return False
        try:
            store.append(_key(minute), "".join(f"{kind}{number}:{length} " for kind, number, length in requests))
        except StoreGone:
            self._own.extend(requests)
            raise
        self._written.update({number: (kind, minute) for kind, number, _ in requests})
        while len(self._written) > WAITING:
            del self._written[next(iter(self._written))]
        return True

    def _delete_oldest(self, store: JobStore) -> bool:
        """Rank 0 deletes a log that nobody reads any more; whether there was one."""
        if self._run.identity.rank or not self._logs or self._logs[0] >= self._minute() - _BEHIND - 1:
            return False
        store.delete(_key(self._logs.popleft()))
        return True

    def read(self, store: JobStore) -> None:
        if self._run.held is None:
            return
        now = self._now()
        first, last = int(now - _CLOCKS_S) // 60, int(now + _CLOCKS_S) // 60
        if self._read_until:  # this process may have been stopped
            first = max(first - _BEHIND, min(first, self._read_until))
        self._read_until = last
        minutes = [minute for minute in range(first, last + 1) if self._read_bytes.get(minute, 0) < LOG_BYTES]
        for minute, log in zip(minutes, store.get_many([_key(minute) for minute in minutes]), strict=True):
            if log is not None:
                self._take(minute, log)
        for known in [*self._read_bytes, *self._slow]:
            if known < first - 1:
                self._read_bytes.pop(known, None)
                self._slow.pop(known, None)
        self._keep()

    def last(self, store: JobStore) -> None:
        """The run ends: what is pending is written, and what others want is read, once."""
        self.write(store)
        self.read(store)

    def _minute(self) -> int:
        return int(self._now()) // 60

    def _take(self, minute: int, log: bytes) -> None:
        known = self._read_bytes.get(minute, 0)
        if not known and minute not in self._logs:
            self._logs.append(minute)
        full = len(log) >= LOG_BYTES
        if full:
            log = log[: log.rindex(b" ", 0, LOG_BYTES) + 1]
        self._read_bytes[minute] = LOG_BYTES if full else len(log)
        slow = self._slow.setdefault(minute, Slow())
        for word in log[known:].decode("ascii", "replace").split():
            kind = word[0]
            number, milliseconds = map(int, word[1:].split(":"))
            self._written.pop(number, None)
            if kind == _PROPOSED and not slow.take(number, milliseconds):
                if self._run.held is not None:
                    self._run.held.refuse(number)
                continue
            if number not in self._seen:
                self._seen[number] = None
                self._wanted[number] = 0
        if full:
            for number, (kind, of) in list(self._written.items()):
                if of == minute:
                    del self._written[number]
                    self._lose(kind, number)
        while len(self._seen) > 4 * WAITING:
            del self._seen[next(iter(self._seen))]
        while len(self._wanted) > WAITING:
            del self._wanted[next(iter(self._wanted))]

    def _lose(self, kind: str, number: int) -> None:
        """The log was full: nobody learns of this one."""
        self._run.dropped[_LOST] += 1
        if kind == _PROPOSED and self._run.held is not None:
            self._run.held.refuse(number)

    def _keep(self) -> None:
        held = self._run.held
        assert held is not None, "read"
        for number, answer in held.keep(self._wanted).items() if self._wanted else ():
            if answer == WAITS:
                continue
            if answer == GONE:
                self._wanted[number] += 1
                if self._wanted[number] < _GONE_AFTER:
                    continue
                self._run.dropped["steps that other ranks keep, and that were no longer held"] += 1
            del self._wanted[number]


def _key(minute: int) -> str:
    return f"keep/{minute}"
