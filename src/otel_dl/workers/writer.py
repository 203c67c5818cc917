"""A worker's end of the pipe. A write never blocks; a message goes out whole or not at all, and losses are counted."""

from __future__ import annotations

import os
import threading
from os import getpid
from typing import Final

from otel_dl.descriptors import Descriptor
from otel_dl.workers import wire

LARGEST: Final = 65_536
"""Bytes of a message at most."""
BACKLOG: Final = 65_536
"""Bytes of fetches that wait in the worker for room in the pipe at most. Spans of the user's don't wait."""


class Writer:
    """Writes frames to `descriptor`; with None, and in processes forked by the worker, it only counts."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = Descriptor(descriptor) if descriptor is not None else None
        self._pid = getpid()
        # A signal handler may end a span while this thread writes: it must neither wait nor tear the frame.
        self._lock = threading.RLock()
        self._writing = False
        self._rest = bytearray()
        """What of a frame the pipe had no room for, and the fetches after it."""
        self._dropped = 0
        if descriptor is not None:
            os.set_blocking(descriptor, False)
            os.set_inheritable(descriptor, False)

    def write(self, kind: int, body: bytes) -> bool:
        """Whether the message is on its way."""
        if self._descriptor is None or getpid() != self._pid:
            return False
        with self._lock:
            if self._writing:
                self._dropped += 1
                return False
            self._writing = True
            try:
                return self._write(kind, body)
            except OSError:
                # The parent is gone, or somebody closed what was open.
                self._descriptor = None
                return False
            finally:
                self._writing = False

    def flush(self) -> None:
        """Tries once more what waits."""
        if self._descriptor is None or getpid() != self._pid:
            return
        with self._lock:
            if not self._writing:
                try:
                    self._flush()
                except OSError:
                    self._descriptor = None

    def _write(self, kind: int, body: bytes) -> bool:
        if self._rest:
            self._flush()
        if len(body) > LARGEST or (self._rest and (kind != wire.FETCH or len(self._rest) > BACKLOG)):
            self._dropped += 1
            return False
        message = wire.frame(kind, self._dropped, body)
        written = self._send(message) if not self._rest else 0
        if written != len(message):
            if written == 0 and kind != wire.FETCH:
                self._dropped += 1
                return False
            self._rest += message[written:]
        self._dropped = 0
        return True

    def _flush(self) -> None:
        if self._rest:
            del self._rest[: self._send(self._rest)]

    def _send(self, data: bytes | bytearray) -> int:
        descriptor = self._descriptor
        if descriptor is None or not descriptor.ours:
            raise BrokenPipeError
        try:
            return os.write(descriptor.number, data)
        except BlockingIOError:
            return 0
