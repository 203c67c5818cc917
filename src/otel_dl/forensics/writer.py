"""Writes a status page: stores into memory that the kernel keeps when the process is killed."""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import time
from collections.abc import Sequence
from typing import Any, Final, cast
from zlib import adler32

from otel_dl.forensics import layout
from otel_dl.forensics.memory import Memory
from otel_dl.forensics.processes import process_started
from otel_dl.forensics.samples import ranges
from otel_dl.recording.identity import Identity
from otel_dl.recording.records import clock
from otel_dl.recording.status import Status

_phase = layout.PHASE_STRUCT.pack_into
_number = layout.NUMBER_STRUCT.pack_into
_taken = layout.BATCH_STRUCT.pack_into
_done = layout.DONE_STRUCT.pack_into
_collective = layout.COLLECTIVE_STRUCT.pack_into
_done_before = layout.DONE_STRUCT.unpack_from
_ALL: Final = 100_000
_STACK: Final = tuple(layout.PHASES + layout.PHASE_SIZE * depth for depth in range(layout.DEPTH))


def create(path: str, identity: Identity, *, worker: int = -1, parent: int = 0, nonce: str = "", tail: int = 0) -> None:
    """Makes the file of a page, mode 0600, its room and that of `tail` bytes behind it taken; raises OSError, and
    leaves no file, where it can't."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # A store to a mapping that finds no room on the disk is SIGBUS: here it is an error.
        os.posix_fallocate(descriptor, 0, layout.SIZE + tail)
        texts = (nonce.encode()[:32], identity.run.encode()[:96], os.uname().nodename.encode()[:64])
        header = layout.HEADER_STRUCT.pack(layout.MAGIC, 0, 0, 0, 0, parent, identity.rank, worker, *texts)
        os.pwrite(descriptor, header + layout.NUMBER_STRUCT.pack(-1), 0)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


class StatusPage(Status):
    """The calling process's page, which `create` made at `path`. Raises OSError where it can't be mapped."""

    def __init__(self, path: str, tail: int = 0) -> None:
        self.path = path
        self._mapped = Memory(path, layout.SIZE + tail)
        self.address = self._mapped.address
        self._memory = self._mapped.view
        self._pid = os.getpid()
        now = clock()
        layout.PROCESS_STRUCT.pack_into(
            self._memory, layout.PID, self._pid, process_started(self._pid), now, time.time_ns()
        )
        self.began = now

    def close(self) -> None:
        """Takes the mapping away; the file stays as it is. A writer in C must not write from now on."""
        self.address = 0
        self._mapped.close()
        self._memory = self._mapped.view

    @property
    def page(self) -> bytes:
        """What it says now."""
        return bytes(self._memory[: layout.SIZE])

    @property
    def tail(self) -> memoryview:
        """What lies behind the page in its file."""
        return self._mapped.view[layout.SIZE :]

    # What the recorder says.

    def belongs_to(self, run: str) -> None:
        layout.RUN_STRUCT.pack_into(self._memory, layout.RUN, run.encode()[:96])

    def begin(self, depth: int, kind: int, start: int) -> None:
        if depth < layout.DEPTH:
            _phase(self._memory, _STACK[depth], kind, start, kind ^ start ^ layout.CHECK)

    def end(self, depth: int, end: int) -> None:
        if depth < layout.DEPTH:
            _phase(self._memory, _STACK[depth], 0, end, end ^ layout.CHECK)

    def step(self, number: int) -> None:
        _number(self._memory, layout.STEP, number)

    def batch(self, epoch: int, index: int, start: int) -> None:
        self._batch(epoch, index, start, 0, layout.FORM_NONE, b"")

    def collective(self, state: int, op: int, seq: int, size: int, start: int, group: bytes) -> None:
        # One store for all of it: two threads that say something at a time leave one or the other.
        group = group[: layout.GROUP_SIZE]
        check = state ^ op ^ seq ^ size ^ start ^ adler32(group) ^ layout.CHECK
        _collective(self._memory, layout.COLLECTIVE, state, op, seq, size, start, check, group)

    # What a worker says.

    def fetching(self, round: int, index: int, start: int, samples: Any) -> None:
        """The worker begins to read batch `index`: `samples` is what torch's fetcher is given, a list or one index."""
        count, form, data = _samples(samples)
        self._batch(round, index, start, count, form, data)
        self.begin(0, layout.FETCH, start)

    def fetched(self, round: int, index: int, start: int, end: int) -> None:
        """It has read the batch; it is idle from `end` on."""
        self.end(0, end)
        # The sums are kept in the page itself, for there may be a writer in C beside this one.
        *_, since, fetches, busy, idle, _ = _done_before(self._memory, layout.DONE)
        fetches, busy, idle = fetches + 1, busy + end - start, idle + start - (since or self.began)
        check = round ^ index ^ end ^ fetches ^ busy ^ idle ^ layout.CHECK
        _done(self._memory, layout.DONE, round, index, end, fetches, busy, idle, check)

    def ended(self, error: str = "", terminated: bool = False) -> None:
        """The worker's loop, or the run, has ended: by the exception of this name where there is one, or by SIGTERM."""
        if os.getpid() != self._pid:  # a process that the worker forked
            return
        end = layout.End.TERMINATED if terminated else layout.End.EXCEPTION if error else layout.End.FINISHED
        layout.ERROR_STRUCT.pack_into(self._memory, layout.ERROR, error.encode()[:64])
        _number(self._memory, layout.END, end)

    def _batch(self, round: int, index: int, start: int, count: int, form: int, data: bytes) -> None:
        self._memory[layout.SAMPLES : layout.SAMPLES + len(data)] = data
        check = round ^ index ^ start ^ count ^ form ^ adler32(data) ^ layout.CHECK
        _taken(self._memory, layout.BATCH, round, index, start, count, form, check)


def _samples(samples: Any, most: int = layout.SAMPLES_MOST) -> tuple[int, int, bytes]:
    """(how many, their form, as many of them as there is room for), running nobody's code but `__index__`."""
    wanted = cast("Sequence[Any]", samples if isinstance(samples, (list, tuple)) else (samples,))
    count = len(wanted)
    if not count or wanted[0] is None:  # an iterable dataset is told how many, not which
        return count, layout.FORM_NONE, b""
    room = wanted if count <= most else wanted[:most]
    try:
        return count, layout.FORM_INTEGERS, _integers(len(room)).pack(*room)
    except (struct.error, TypeError):
        if all(type(sample) is str for sample in room):
            text = ",".join(room).encode("utf-8", "replace")[: layout.SAMPLES_SIZE]
            return count, layout.FORM_TEXT, text.ljust(layout.SAMPLES_SIZE, b"\0")
        return count, layout.FORM_NONE, b""


def all_ranges(samples: Any) -> str:
    """What torch's fetcher was given, as ranges; "" where that are no indices."""
    count, form, data = _samples(samples, most=_ALL)
    if form == layout.FORM_INTEGERS:
        return ranges(_integers(len(data) // 8).unpack(data), count)
    return ranges(data.rstrip(b"\0").decode("utf-8", "replace"), count) if form == layout.FORM_TEXT else ""


@functools.lru_cache(layout.SAMPLES_MOST)
def _integers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}q")
