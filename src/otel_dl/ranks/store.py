"""The job's store, over a connection of our own: torch's TCPStore, spoken to directly.

Never through the client that torch uses: while its main thread blocks in a `get`, a `set` of ours waits for it
(measured: 5.7 s). And not through another one of the kind: it asks for the name of the host first, waits for ever for a
host that is stopped or whose packets are lost, writes warnings where the store is gone, and a process that ends while a
thread is inside of it is aborted (torch 2.15). What is spoken is the same from torch 2.4 to 2.15
(torch/csrc/distributed/c10d/TCPStore.cpp and TCPStoreBackend.hpp): one byte says what is asked; a text has its length
before it; numbers have eight bytes, in the machine's order.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Final

from otel_dl.descriptors import Descriptor

OPERATION_S: Final = 2.0
"""How long an operation waits for the store's answer at most."""

_VALIDATE, _SET, _GET, _ADD, _CHECK, _WAIT, _DELETE, _APPEND, _MULTI_GET, _CANCEL_WAIT = 0, 1, 3, 4, 5, 6, 8, 9, 10, 12
"""`QueryType`."""
_MAGIC: Final = 0x3C85F7CE
_YES: Final = b"\0"
"""`CheckResponseType::READY`, `WaitResponseType::STOP_WAITING`."""
_ROOT: Final = "/"
"""What torch puts before every key."""
_MANY: Final = 2_000
"""Keys that are asked for at once: what is under way then fits the socket's buffers."""
_FEW: Final = 8
"""Of so many each is looked for at once."""

_number = struct.Struct("=q").pack
_read_number: Callable[[bytes], tuple[int]] = struct.Struct("=q").unpack  # pyright: ignore[reportAssignmentType]


class StoreGone(Exception):
    """The store does not answer (any more); the text says what it was."""


class JobStore:
    """A client of the TCP store at `address`; keys get `prefix`. Every method raises StoreGone where it is gone, or
    does not answer in time; from then on it stays so.

    To be used by one thread at a time. torch does not count it as a rank that has joined.
    """

    def __init__(self, address: tuple[str, int], prefix: str) -> None:
        self.address = address
        self.prefix = prefix
        try:
            self._socket = socket.create_connection(address, OPERATION_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise self._gone(error) from None
        self._descriptor = Descriptor(self._socket.fileno())
        self._send(_VALIDATE, struct.pack("=I", _MAGIC))
        self.has("")  # an answer, of whatever kind, tells a store

    def close(self) -> None:
        if hasattr(self, "_descriptor") and self._socket.fileno() >= 0:
            self._socket.detach()
            self._descriptor.close()  # unless somebody has, and the number is of something else by now

    __del__ = close

    def set(self, key: str, value: bytes | str) -> None:
        self._send(_SET, self._text(key), _bytes(value))

    def append(self, key: str, value: bytes | str) -> None:
        """Puts `value` behind what stands there."""
        self._send(_APPEND, self._text(key), _bytes(value))

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        self._send(_DELETE, self._text(key))
        return self._read_number() > 0

    def add(self, key: str, number: int = 1) -> int:
        """Adds to a counter, which begins at 0; what it is now."""
        self._send(_ADD, self._text(key), _number(number))
        return self._read_number()

    def has(self, *keys: str) -> bool:
        """Whether all of them are there."""
        self._send(_CHECK, *self._texts(keys))
        return self._read(1) == _YES

    def get(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def get_from_elsewhere(self, key: str) -> bytes | None:
        """What stands under the whole `key`, without this client's prefix (torch's own, those of another attempt); None
        where it is missing."""
        text = _bytes(_ROOT + key)
        self._send(_CHECK, _number(1), text)
        if self._read(1) != _YES:
            return None
        self._send(_GET, text)
        return self._read(self._read_number())

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each, None where it is missing: three messages for two thousand of them at most."""
        found: list[bytes | None] = []
        for first in range(0, len(keys), _MANY):
            some = keys[first : first + _MANY]
            # torch's server ends the connection for one that is missing.
            there = [True] * len(some) if len(some) > _FEW and self.has(*some) else self._are_there(some)
            wanted = [key for key, is_there in zip(some, there, strict=True) if is_there]
            if wanted:
                self._send(_MULTI_GET, *self._texts(wanted))
            found += [self._read(self._read_number()) if is_there else None for is_there in there]
        return found

    def _are_there(self, keys: Sequence[str]) -> list[bool]:
        """Whether each of these is there: all questions first, then all answers."""
        first, *others = (_number(1) + self._text(key) for key in keys)
        self._send(_CHECK, first, *(bytes((_CHECK,)) + other for other in others))
        return [answer == _YES[0] for answer in self._read(len(keys))]

    def take(self, key: str, seconds: float) -> bytes | None:
        """The value of a key that is there, or comes within this time; else None."""
        if not self.wait(key, seconds):
            return None
        self._send(_GET, self._text(key))
        return self._read(self._read_number())

    def wait(self, key: str, seconds: float) -> bool:
        """Whether the key was there, or came, within this time."""
        self._send(_WAIT, *self._texts([key]))
        try:
            self._socket.settimeout(max(seconds, 0.001))
            return self._socket.recv(1) == _YES or self._fail("closed")
        except TimeoutError:
            pass
        except OSError as error:
            raise self._gone(error) from None
        self._send(_CANCEL_WAIT)
        came = self._read(1) == _YES
        if came:
            self._read(1)  # the answer to the second thing
        return came

    def _text(self, key: str) -> bytes:
        return _bytes(_ROOT + self.prefix + key)

    def _texts(self, keys: Iterable[str]) -> list[bytes]:
        texts = [self._text(key) for key in keys]
        return [_number(len(texts)), *texts]

    def _send(self, query: int, *parts: bytes) -> None:
        try:
            if not self._descriptor.ours:
                self._fail("its descriptor was closed")
            self._socket.settimeout(OPERATION_S)
            self._socket.sendall(bytes((query,)) + b"".join(parts))
        except OSError as error:
            raise self._gone(error) from None

    def _read(self, size: int) -> bytes:
        data = bytearray()
        until = monotonic() + OPERATION_S
        try:
            while len(data) < size:
                self._socket.settimeout(max(0.001, until - monotonic()))
                part = self._socket.recv(min(size - len(data), 2**20))
                if not part:
                    self._fail("closed")
                data += part
        except OSError as error:
            raise self._gone(error) from None
        return bytes(data)

    def _read_number(self) -> int:
        return _read_number(self._read(8))[0]

    def _fail(self, why: str) -> bool:
        raise self._gone(OSError(why))

    def _gone(self, error: OSError) -> StoreGone:
        """An answer that comes late would be taken for another one's."""
        self.close()
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return StoreGone(f"{self.address[0]}:{self.address[1]}: {why}")


def _bytes(text: bytes | str) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return _number(len(data)) + data
