"""Fetches on their way from a worker to its parent, through the memory behind its status page.

No system call: it would let go of the GIL in the middle of the worker's loop, and the parent would have to read. A
fetch that says more than when it was (an error, spans of the user's) goes through the pipe instead.

    0     HEAD    how many were written
    8     PID     the worker's
    64    SLOTS blocks, the latest fetches: round, index, start, end, its number, check (see `forensics.layout`)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from os import getpid
from struct import Struct
from typing import Final

from otel_dl.forensics.layout import CHECK

SLOTS: Final = 1_024
_HEAD: Final = 0
_PID: Final = 8
_FIRST: Final = 64
_SLOT: Final = Struct("<qqqqqq")
_SLOT_SIZE: Final = _SLOT.size
_NUMBER: Final = Struct("<q")
SIZE: Final = _FIRST + SLOTS * _SLOT_SIZE

_write_slot = _SLOT.pack_into
_write_number = _NUMBER.pack_into
_read_number = _NUMBER.unpack_from


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
    """The parent's end."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._read = 0
        self.lost = 0
        """Fetches that were overwritten before they were read, or are torn."""

    @property
    def pid(self) -> int:
        return _read_number(self._memory, _PID)[0]

    def read(self) -> Iterator[tuple[int, int, int, int]]:
        """(round, index, start, end) of those that are new."""
        (until,) = _read_number(self._memory, _HEAD)
        number = max(self._read, until - SLOTS)
        self.lost += number - self._read
        self._read = max(number, until)
        while number < until:
            place = number % SLOTS
            count = min(until - number, SLOTS - place)
            blocks = self._memory[_FIRST + _SLOT_SIZE * place : _FIRST + _SLOT_SIZE * (place + count)]
            for round, index, start, end, written, check in _SLOT.iter_unpack(blocks):
                if written == number and round ^ index ^ start ^ end ^ written ^ CHECK == check:
                    yield round, index, start, end
                else:
                    self.lost += 1
                number += 1
