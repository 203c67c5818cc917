"""The parent's end: a pipe and a ring for each worker, read by the builder.

Fetches wait here for the step that takes their batch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from opentelemetry.sdk.resources import Resource

from otel_dl.descriptors import Descriptor
from otel_dl.forensics import layout
from otel_dl.forensics.memory import Memory
from otel_dl.log import logger
from otel_dl.recording.keep import batch_sampled
from otel_dl.recording.records import Fetch
from otel_dl.workers import ring, wire
from otel_dl.workers.ring import RingReader

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from otel_dl.recording.run import Run


FETCHES: Final = 4_096
"""Fetches that wait at most: those of steps that are not kept are never taken, and go when newer ones come."""
SPANS: Final = 16_384
"""Spans of the user's that wait with them, or to be taken by `outside`, at most."""
WARNINGS: Final = 16
"""Different warnings of workers at most."""
AHEAD: Final = 64
"""Batches of an iterator that are looked for ahead of one at most."""
PIPE_BYTES: Final = 256 * 1024
READ_BYTES: Final = 65_536
READS: Final = 16
"""Reads of one pipe in one `drain` at most."""

Key = tuple[str, int, int]
_Plain = tuple[tuple[int, int], int, int]
"""((worker, pid), start, end) of a fetch that is nothing else: most are never asked for."""


SPARE: Final = 32
SPARE_WORKER: Final = 8
"""Descriptors that are left to the process, and for each worker that it starts: without them torch would fail."""


def _pipe(spare: int) -> tuple[int, int] | None:
    """A pipe, where so many more descriptors could be had."""
    try:
        ends = os.pipe()
    except OSError:
        return None
    # Numbers are given out lowest first: below these two none is free.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and max(ends) + spare >= limit:
        for end in ends:
            os.close(end)
        return None
    return ends


class _Pipe:
    """What came from one worker. `spans` are those of fetches that are not finished, by (round, index)."""

    __slots__ = ("buffer", "descriptor", "memory", "nonce", "resources", "ring", "spans", "worker")

    def __init__(self, descriptor: Descriptor, nonce: str, worker: int, page: str) -> None:
        self.descriptor = descriptor
        self.nonce = nonce
        self.worker = worker
        self.memory: Memory | None = None
        self.ring: RingReader | None = None
        if page:
            with contextlib.suppress(OSError):
                self.memory = Memory(page, layout.SIZE + ring.SIZE)
                self.ring = RingReader(self.memory.view[layout.SIZE :])
        self.buffer = bytearray()
        self.resources: dict[int, Resource] = {}
        self.spans: dict[tuple[int, int], list[ReadableSpan]] = {}

    def close(self) -> None:
        """Nothing comes from it any more."""
        self.ring = None
        if self.memory is not None:
            self.memory.close()


_left_open: list[Descriptor] = []
"""Read ends of workers that outlived their run."""


def _close_ended() -> None:
    for descriptor in list(_left_open):
        try:
            ended = not descriptor.ours or not os.read(descriptor.number, READ_BYTES)
        except BlockingIOError:
            continue
        except OSError:
            ended = True
        if ended:
            _left_open.remove(descriptor)
            descriptor.close()


def _whole(key: Key, fetch: Fetch | _Plain) -> Fetch:
    if isinstance(fetch, Fetch):
        return fetch
    (worker, pid), start, end = fetch
    return Fetch(*key, worker, pid, start, end, None, [], 0)


class Relay:
    """`open` and `started` are called by the thread that starts workers, the rest by the one that builds spans."""

    def __init__(self, run: Run) -> None:
        _close_ended()
        self._run = run
        self._starting = threading.local()
        self._writes: dict[int, Descriptor] = {}
        self._pipes: list[_Pipe] = []
        self._begin()

    def _begin(self) -> None:
        self.dropped: Counter[str] = Counter()
        """What was lost on the way, by reason."""
        self._lock = threading.RLock()
        self._fetches: dict[Key, Fetch | _Plain] = {}
        self._expired: list[Fetch] = []
        self._outside: list[ReadableSpan] = []
        self._spans = 0
        self._final = False
        self._warned: set[str] = set()

    # Starting workers.

    def open(self, nonce: str, workers: int, pages: Sequence[str] = ()) -> list[int | None]:
        """One pipe for each worker of the iterator with this nonce: their write ends, None where there is none. `pages`
        are the paths of their status pages, "" for none.

        The calling thread starts the workers next, and then calls `started` with what it got.
        """
        writes: list[int | None] = []
        for number in range(workers):
            ends = _pipe(SPARE + SPARE_WORKER * workers)
            if ends is None:
                self.dropped["workers without a pipe"] += 1
                writes.append(None)
                continue
            read, write = ends
            os.set_blocking(read, False)
            with contextlib.suppress(OSError, AttributeError):  # the user's share of pipe memory is used up
                fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # pyright: ignore[reportAttributeAccessIssue]
            self._pipes.append(_Pipe(Descriptor(read), nonce, number, pages[number] if pages else ""))
            self._writes[write] = Descriptor(write)
            writes.append(write)
        self._starting.ends = writes
        return writes

    def started(self, writes: Sequence[int | None]) -> None:
        """The workers have their write ends: ours are closed, so that their end is the end of the pipe."""
        self._starting.ends = []
        for write in writes:
            if write is not None and write in self._writes:
                self._writes.pop(write).close()

    # Reading.

    def drain(self, final: bool = False) -> None:
        """Reads what has arrived, and waits for nothing. After `final` everything sampled counts as expired."""
        with self._lock:
            self._final = self._final or final
            for pipe in list(self._pipes):
                self._read(pipe)
                self._read_ring(pipe)

    def take(self, key: Key) -> Fetch | None:
        """The fetch of the batch (nonce, round, index): what its worker wrote before it handed the batch over."""
        if not key[0]:
            return None
        with self._lock:
            if key not in self._fetches:
                self.drain()
            fetch = self._fetches.pop(key, None)
            if fetch is None:
                return None
            fetch = _whole(key, fetch)
            self._spans -= len(fetch.spans)
            return fetch

    def peek(self, key: Key) -> Fetch | None:
        """The same for those who need it before its step is built; it stays."""
        with self._lock:
            if key not in self._fetches:
                self.drain()
            fetch = self._fetches.get(key)
            return _whole(key, fetch) if fetch is not None else None

    def ready(self, key: Key, at: int) -> int:
        """How many batches of this iterator, from (nonce, round, index) on, had been read by then (of `clock`)."""
        nonce, round, place = key
        with self._lock:
            if key not in self._fetches:
                self.drain()
            found = (self._fetches.get((nonce, round, later)) for later in range(place, place + AHEAD))
            ends = (fetch.end if isinstance(fetch, Fetch) else fetch[2] for fetch in found if fetch is not None)
            return sum(end <= at for end in ends)

    def expired(self) -> list[Fetch]:
        """Sampled fetches that no step took."""
        with self._lock:
            if self._final:
                while self._fetches:
                    self._evict()
            expired, self._expired = self._expired, []
            return expired

    def outside(self) -> list[ReadableSpan]:
        """Spans of the user's that belong to no fetch, or whose fetch came to nothing."""
        with self._lock:
            outside, self._outside = self._outside, []
            self._spans -= len(outside)
            return outside

    def _read(self, pipe: _Pipe) -> None:
        for _ in range(READS):
            if not pipe.descriptor.ours:
                self.dropped["pipes of workers, closed by others"] += 1
                self._close(pipe)
                return
            try:
                data = os.read(pipe.descriptor.number, READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close(pipe)
                return
            pipe.buffer += data
            for frame in wire.frames(pipe.buffer):
                if frame.dropped:
                    self.dropped["messages of workers"] += frame.dropped
                try:
                    self._receive(pipe, frame)
                except Exception:
                    self.dropped["messages not understood"] += 1
                    logger.debug("otel-dl: a worker's message was not understood", exc_info=True)

    def _read_ring(self, pipe: _Pipe) -> None:
        reader = pipe.ring
        if reader is None or pipe.memory is None:
            return
        if not pipe.memory.whole:
            self.dropped["status pages of workers, cut by others"] += 1
            pipe.close()
            return
        nonce, worker, fetches = pipe.nonce, (pipe.worker, reader.pid), self._fetches
        for round, index, start, end in reader.read():
            fetches[nonce, round, index] = worker, start, end
        while len(fetches) > FETCHES:
            self._evict()
        if reader.lost:
            self.dropped["fetches of workers"] += reader.lost
            reader.lost = 0

    def _receive(self, pipe: _Pipe, frame: wire.Frame) -> None:
        if frame.kind == wire.FETCH:
            self._finished(pipe, wire.decode_fetch(frame.body))
        elif frame.kind == wire.RESOURCE:
            number, resource = wire.decode_resource(frame.body)
            pipe.resources[number] = resource
        elif frame.kind == wire.WARNING:
            message = frame.body.decode()
            if message not in self._warned and len(self._warned) < WARNINGS:
                self._warned.add(message)
                logger.warning("%s", message)
        elif frame.kind == wire.SPAN:
            if self._spans >= SPANS and not self._make_room():
                self.dropped["spans of workers"] += 1
                return
            batch, number, rest = wire.span_resource(frame.body)
            span = wire.decode_span(rest, pipe.resources[number], kept=batch is not None)
            self._spans += 1
            if batch is None:
                self._outside.append(span)
            else:
                pipe.spans.setdefault(batch, []).append(span)

    def _finished(self, pipe: _Pipe, message: wire.FetchMessage) -> None:
        spans = pipe.spans.pop((message.round, message.batch), [])
        if not message.read:
            self._outside += spans
            return
        fetch = Fetch(
            pipe.nonce,
            message.round,
            message.batch,
            message.worker,
            message.pid,
            message.start,
            message.end,
            message.error,
            spans,
            message.dropped,
            message.samples,
        )
        self._fetches[pipe.nonce, message.round, message.batch] = fetch
        if len(self._fetches) > FETCHES:
            self._evict()

    def _make_room(self) -> bool:
        while self._spans >= SPANS and self._fetches:
            self._evict(full=True)
        return self._spans < SPANS

    def _evict(self, full: bool = False) -> None:
        """The oldest goes: where it is sampled to be exported by itself. `full`: as there is no room for spans."""
        key = next(iter(self._fetches))
        # Asked only here: with a step it goes where the step goes.
        sampled = batch_sampled(self._run.keep.head, *key)
        fetch = self._fetches.pop(key)
        if isinstance(fetch, Fetch):
            self._spans -= len(fetch.spans)
            if not sampled and fetch.spans and full:
                self.dropped["spans of workers"] += len(fetch.spans)
        if sampled:
            if len(self._expired) < FETCHES:
                self._expired.append(_whole(key, fetch))
            else:
                self.dropped["fetches of workers"] += 1

    def _close(self, pipe: _Pipe) -> None:
        """The worker has ended: spans of a fetch that it did not finish belong to none."""
        if pipe not in self._pipes:
            return
        self._pipes.remove(pipe)
        pipe.descriptor.close()
        self._read_ring(pipe)
        pipe.close()
        for spans in pipe.spans.values():
            self._outside += spans

    # Ends.

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's. A worker is yet to be told which write end is its own."""
        keep = set(getattr(self._starting, "ends", ()))
        self.only(*keep)
        self._begin()

    def only(self, *keep: int | None) -> None:
        """Closes every pipe, in a worker but for its own write end."""
        pipes, self._pipes = self._pipes, []
        writes, self._writes = self._writes, {}
        for pipe in pipes:
            pipe.close()
            pipe.descriptor.close()
        for write, descriptor in writes.items():
            if write in keep:
                self._writes[write] = descriptor
            else:
                descriptor.close()

    def close(self) -> None:
        """The run is over. Read ends of workers that still run stay open, for a broken pipe may end a worker (SIGPIPE
        with its default action); a full one does not."""
        with self._lock:
            _left_open.extend(pipe.descriptor for pipe in self._pipes)
            for pipe in self._pipes:
                pipe.close()
            self._pipes = []
            self.only()
            _close_ended()
