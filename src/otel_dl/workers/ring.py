"""Fetches on their way from a worker to its parent, through the memory behind its status page.

No system call: it would let go of the GIL in the middle of the worker's loop, and the parent would have to read. A
fetch that says more than when it was (an error, spans of the user's) goes through the pipe instead.

    0     HEAD    how many were written
    8     PID     the worker's
    64    SLOTS blocks, the latest fetches: round, index, start, end, its number, check (see `forensics.layout`)
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from functools import partial
from os import getpid
from struct import Struct
from typing import Final

from otel_dl.forensics.layout import CHECK
from otel_dl.recording.records import Fetch

SLOTS: Final = 1_024
_HEAD: Final = 0
_PID: Final = 8
_FIRST: Final = 64
_SLOT: Final = Struct("<qqqqqq")
_SLOT_SIZE: Final = _SLOT.size
_NUMBER: Final = Struct("<q")
SIZE: Final = _FIRST + SLOTS * _SLOT_SIZE

LOST: Final = "fetches of workers"
"""The reason in a count of drops."""

_write_slot = _SLOT.pack_into
_write_number = _NUMBER.pack_into
_read_number = _NUMBER.unpack_from
_batch = Struct("<qq").unpack_from
"""(round, index) at the beginning of a block."""


class RingWriter:
    """The worker's end, in `memory` of SIZE bytes."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._pid = os.getpid()
        _write_number(memory, _PID, self._pid)

    def write(self, round: int, index: int, start: int, end: int) -> bool:
        """Whether it is on its way; not from a process that the worker forked."""
        if getpid() != self._pid:
            return False
        # Kept in the memory itself, for there may be a writer in C beside this one.
        (number,) = _read_number(self._memory, _HEAD)
        check = round ^ index ^ start ^ end ^ number ^ CHECK
        _write_slot(
            self._memory, _FIRST + _SLOT_SIZE * (number % SLOTS), round, index, start, end, number, check
        )  # fmt: skip
        _write_number(self._memory, _HEAD, number + 1)
        return True


class RingReader:
    """The parent's end. What was read waits here as it lay there, for most of it nobody asks; it is sorted by round and
    index, as a worker reads in that order."""

    def __init__(self, nonce: str, worker: int, dropped: Counter[str]) -> None:
        self.nonce = nonce
        self._worker = worker
        self._dropped = dropped
        """Counts as LOST what was overwritten before it was read, or is torn."""
        self._pid = 0
        self._read = 0
        self._waiting = bytearray()

    def __len__(self) -> int:
        return len(self._waiting) // _SLOT_SIZE

    def read(self, memory: memoryview) -> None:
        """Copies those that are new."""
        (until,) = _read_number(memory, _HEAD)
        first = max(self._read, until - SLOTS + 1)
        if first >= until:
            return
        place = first % SLOTS
        last = place + until - first
        slots = memory[_FIRST:SIZE]
        copied = bytes(slots[_SLOT_SIZE * place : _SLOT_SIZE * last]) + slots[: _SLOT_SIZE * max(0, last - SLOTS)]
        # Where the oldest lay may be what the worker has written meanwhile, or is just writing.
        (written,) = _read_number(memory, _HEAD)
        whole = min(max(first, written - SLOTS + 1), until)
        if whole > self._read:
            self._dropped[LOST] += whole - self._read
        self._read = until
        self._waiting += copied[_SLOT_SIZE * (whole - first) :]
        (self._pid,) = _read_number(memory, _PID)

    def fetch(self, batch: tuple[int, int], take: bool = False) -> Fetch | None:
        """That of (round, index), if it waits; `take`: it waits no more."""
        at = self._find(batch)
        found = self._waiting[at : at + _SLOT_SIZE]
        if not found or _batch(found) != batch:
            return None
        if take:
            del self._waiting[at : at + _SLOT_SIZE]
        return self._whole(*_SLOT.unpack(found))

    def ready(self, batch: tuple[int, int], most: int, at: int) -> int:
        """How many of `most` batches from (round, index) on wait, and had been read by then."""
        first, (round, index) = self._find(batch), batch
        count = 0
        for now, place, _, end, _, _ in _SLOT.iter_unpack(self._waiting[first : first + _SLOT_SIZE * most]):
            if now != round or place >= index + most or end > at:
                break
            count += 1
        return count

    def oldest(self) -> tuple[int, int]:
        """(round, index) of the first that waits, if one does."""
        return _batch(self._waiting)

    def let_go(self, count: int, sampled: Callable[[int, int], bool]) -> list[Fetch]:
        """Drops the oldest, so many of those that wait; gives the sampled ones of them."""
        oldest = self._waiting[: _SLOT_SIZE * count]
        fetches = [self._whole(*block) for block in _SLOT.iter_unpack(oldest) if sampled(block[0], block[1])]
        del self._waiting[: len(oldest)]
        return [fetch for fetch in fetches if fetch is not None]

    def _find(self, batch: tuple[int, int]) -> int:
        """Where in `_waiting` the first is of this (round, index) or a later one."""
        return _SLOT_SIZE * bisect_left(
            range(0, len(self._waiting), _SLOT_SIZE), batch, key=partial(_batch, self._waiting)
        )

    def _whole(self, round: int, index: int, start: int, end: int, number: int, check: int) -> Fetch | None:
        if round ^ index ^ start ^ end ^ number ^ CHECK != check:
            self._dropped[LOST] += 1
            return None
        return Fetch(self.nonce, round, index, self._worker, self._pid, start, end, None, [], 0)
