"""The thread that talks to the job's store: once a second, one write at most, and what is to be read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Final, Protocol, TypeVar

from otel_dl import threads
from otel_dl.log import logger
from otel_dl.ranks.store import JobStore, StoreGone

TICK_S: Final = 1.0
_RETRY_S: Final = 0.2
_RETRY_MOST_S: Final = 5.0
_STOPPED_S: Final = 2.0
"""A look that comes so much too late: the process was stopped, or had no processor. What it waits in may have come
meanwhile, and nobody has seen it yet."""
_CATCH_UP_S: Final = 0.5
_T = TypeVar("_T")


class Participant(Protocol):
    """Takes part in the exchange; both methods are called in its thread, once a tick, and may raise StoreGone."""

    def connected(self, store: JobStore) -> None:
        """A connection stands; called once for each."""
        ...

    def write(self, store: JobStore) -> bool:
        """May do one write; whether it did. Those before it in the list had nothing to write."""
        ...

    def read(self, store: JobStore) -> None: ...


class Exchange:
    """`begin` when `init_process_group` does, `stop` at the end of the run. Other methods from any thread."""

    def __init__(self, participants: Sequence[Participant], look: Callable[[], float] = lambda: TICK_S) -> None:
        """The `participants` in the order in which they may write; `look` is called after each tick, with or without a
        store, and says in how many seconds it wants to be called again."""
        self._participants = participants
        self._look = look
        self._wake = threading.Event()
        self._asked: deque[Callable[[JobStore | None], None]] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        """The thread's own: one that is still busy when it is stopped must not go on beside the next one."""
        self._address: tuple[str, int] | None = None
        self._prefix = ""
        self.store: JobStore | None = None
        """The connection, where there is one."""
        self._retry = _RETRY_S
        self.trouble = ""
        """Why there is no connection."""
        self._said = False
        self._phase = 0.0

    def begin(self, address: tuple[str, int] | None, prefix: str, phase_s: float = 0.0) -> None:
        """There is, or soon will be, a store at `address`, where keys begin with `prefix`; None: there is none. The
        second tick is `phase_s` later than it would be, and so are those after it."""
        self._phase = phase_s
        self._address, self._prefix = address, prefix
        self.store = None
        self._retry = _RETRY_S
        self.trouble = "" if address is not None else "the job's store is no TCP store"
        if not self.running:
            self._stopped = threading.Event()
            try:
                self._thread = threads.start("otel-dl-ranks", self._loop, self._stopped)
            except RuntimeError:
                self.trouble = "this process may have no more threads"
        self._wake.set()

    def ask(self, question: Callable[[JobStore | None], None]) -> None:
        """Calls it in the thread, as soon as that is free."""
        self._asked.append(question)
        self._wake.set()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._stopped.is_set()

    def stop(self, deadline: float) -> bool:
        """Ends the thread once it has done what it was asked; waits for that until `deadline` (monotonic) at most.
        Whether it has ended."""
        self._stopped.set()
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - monotonic()))
        self.store = None
        return thread is None or not thread.is_alive()

    def after_fork(self) -> None:
        """In a forked child: the thread, and the connection, are the parent's."""
        self._thread = None
        self.store = None
        self._asked.clear()
        self._wake = threading.Event()

    def _loop(self, stopped: threading.Event) -> None:
        due = look = monotonic()
        while True:
            wait = min(due, look) - monotonic()
            if self.store is None and self._address is not None:
                wait = min(wait, self._retry)
            self._wake.wait(max(0.0, wait))
            self._wake.clear()
            if not stopped.is_set():
                self._attempt(self._connect)
            while self._asked and stopped is self._stopped:
                question = self._asked.popleft()
                self._attempt(partial(question, self.store))
            if stopped.is_set():
                return
            if monotonic() >= due:
                due = monotonic() + TICK_S
                if self.store is not None:
                    due, self._phase = due + self._phase, 0.0
                self._attempt(self._tick)
            late = monotonic() - look
            if late > _STOPPED_S:
                look = monotonic() + _CATCH_UP_S
            elif late >= 0:
                look = monotonic() + (self._attempt(self._look) or TICK_S)

    def _connect(self) -> None:
        address, prefix = self._address, self._prefix
        if self.store is not None or address is None:
            return
        self._retry = min(self._retry * 1.2, _RETRY_MOST_S)  # after a minute each 5 s
        store = JobStore(address, prefix)
        self._retry = _RETRY_S
        for participant in self._participants:
            participant.connected(store)
        if (address, prefix) == (self._address, self._prefix):  # no other group was begun meanwhile
            self.store, self.trouble = store, ""

    def _tick(self) -> None:
        store = self.store
        if store is None:
            return
        for participant in self._participants:
            if participant.write(store):
                break
        for participant in self._participants:
            participant.read(store)

    def _attempt(self, part: Callable[[], _T]) -> _T | None:
        try:
            return part()
        except StoreGone as error:
            self.store = None
            self.trouble = str(error)
        except Exception:
            if not self._said:
                self._said = True
                logger.warning(
                    "otel-dl: a fault of ours while talking to other ranks. Please report it.", exc_info=True
                )
