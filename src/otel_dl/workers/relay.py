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
from functools import partial
from typing import TYPE_CHECKING, Final

from opentelemetry.sdk.resources import Resource

from otel_dl.descriptors import Descriptor
from otel_dl.forensics import layout
from otel_dl.forensics.memory import Memory
from otel_dl.log import logger
from otel_dl.recording.keep import batch_sampled
from otel_dl.recording.records import Fetch
from otel_dl.workers import ring, wire
from otel_dl.workers.ring import LOST, RingReader

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from otel_dl.recording.run import Run


FETCHES: Final = 4_096
"""Fetches that wait at most, of an iterator, of those that have ended, and of those that came through the pipes: what
steps that are not kept would take goes when newer ones come."""
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

    def __init__(self, descriptor: Descriptor, nonce: str, worker: int, page: str, dropped: Counter[str]) -> None:
        self.descriptor = descriptor
        self.nonce = nonce
        self.worker = worker
        self.memory: Memory | None = None
        self.ring: RingReader | None = None
        if page:
            with contextlib.suppress(OSError):
                self.memory = Memory(page, layout.SIZE + ring.SIZE)
                self.ring = RingReader(nonce, worker, dropped)
        self.buffer = bytearray()
        self.resources: dict[int, Resource] = {}
        self.spans: dict[tuple[int, int], list[ReadableSpan]] = {}

    def close(self) -> None:
        """Nothing comes from it any more."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()


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
        self._fetches: dict[Key, Fetch] = {}
        """Those that came through a pipe; the others wait with the readers of the rings."""
        self._rings: dict[str, list[RingReader]] = {}
        """By the nonce of the iterator, also of workers that have ended."""
        self._ended: list[RingReader] = []
        """Of these, as they ended."""
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
            pipe = _Pipe(Descriptor(read), nonce, number, pages[number] if pages else "", self.dropped)
            if pipe.ring is not None:
                self._rings.setdefault(nonce, []).append(pipe.ring)
            self._pipes.append(pipe)
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
            pipes = list(self._pipes)
            for pipe in pipes:
                self._read(pipe)
                self._read_ring(pipe)
            for nonce in {pipe.nonce for pipe in pipes}:
                self._let_go(self._rings.get(nonce, ()), FETCHES)
            if len(self._pipes) < len(pipes):
                self._forget_ended()

    def take(self, key: Key) -> Fetch | None:
        """The fetch of the batch (nonce, round, index): what its worker wrote before it handed the batch over."""
        if not key[0]:
            return None
        with self._lock:
            fetch = self._waiting(key, take=True)
            if fetch is not None:
                self._spans -= len(fetch.spans)
            else:
                self.dropped["fetches not found"] += 1
            return fetch

    def peek(self, key: Key) -> Fetch | None:
        """The same for those who need it before its step is built; it stays."""
        with self._lock:
            return self._waiting(key)

    def ready(self, key: Key, at: int) -> int:
        """How many batches of this iterator, from (nonce, round, index) on, wait here and had been read by then, a
        reading of `clock`."""
        nonce, round, place = key
        with self._lock:
            later = range(place, place + AHEAD) if self._fetches else ()
            found = (self._fetches.get((nonce, round, index)) for index in later)
            told = sum(fetch.end <= at for fetch in found if fetch is not None)
            return told + sum(reader.ready((round, place), AHEAD, at) for reader in self._rings.get(nonce, ()))

    def _waiting(self, key: Key, take: bool = False) -> Fetch | None:
        """It is looked for once more after reading what has arrived."""
        found = self._look(key, take)
        if found is None:
            self.drain()
            found = self._look(key, take)
        return found

    def _look(self, key: Key, take: bool) -> Fetch | None:
        found = self._fetches.pop(key, None) if take else self._fetches.get(key)
        readers = self._rings.get(key[0], ())
        return found or next(filter(None, (reader.fetch(key[1:], take) for reader in readers)), None)

    def expired(self) -> list[Fetch]:
        """Sampled fetches that no step took."""
        with self._lock:
            if self._final:
                while self._fetches:
                    self._evict()
                for readers in list(self._rings.values()):
                    self._let_go(readers, 0)
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
        if pipe.ring is None or pipe.memory is None:
            return
        if not pipe.memory.whole:
            self.dropped["status pages of workers, cut by others"] += 1
            pipe.close()
            return
        pipe.ring.read(pipe.memory.view[layout.SIZE :])

    def _let_go(self, readers: Sequence[RingReader], most: int) -> None:
        """Of the fetches that wait with `readers`, all of one iterator, the oldest go, and `most` stay."""
        head = self._run.keep.head
        excess = sum(map(len, readers)) - most
        share = -(-excess // max(1, len(readers)))
        while excess > 0:
            reader = min(filter(len, readers), key=RingReader.oldest)
            count = min(share, excess, len(reader))
            for fetch in reader.let_go(count, partial(batch_sampled, head, reader.nonce)):
                self._expire(fetch)
            excess -= count

    def _forget_ended(self) -> None:
        """Of the workers that have ended the latest stay, with FETCHES that wait."""
        room = FETCHES
        for reader in reversed(self._ended.copy()):
            room -= len(reader)
            if room < 0 or not reader:
                self._let_go([reader], 0)
                self._ended.remove(reader)
                self._rings[reader.nonce].remove(reader)
                if not self._rings[reader.nonce]:
                    del self._rings[reader.nonce]

    def _expire(self, fetch: Fetch) -> None:
        """It is sampled, and no step took it."""
        if len(self._expired) < FETCHES:
            self._expired.append(fetch)
        else:
            self.dropped[LOST] += 1

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
        self._spans -= len(fetch.spans)
        if sampled:
            self._expire(fetch)
        elif fetch.spans and full:
            self.dropped["spans of workers"] += len(fetch.spans)

    def _close(self, pipe: _Pipe) -> None:
        """The worker has ended: spans of a fetch that it did not finish belong to none."""
        if pipe not in self._pipes:
            return
        self._pipes.remove(pipe)
        pipe.descriptor.close()
        self._read_ring(pipe)
        pipe.close()
        if pipe.ring is not None:
            self._ended.append(pipe.ring)
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
