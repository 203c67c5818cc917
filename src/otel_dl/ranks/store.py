"""The job's store, over a connection of our own.

Never through torch's own client: while its main thread blocks in a `get`, a `set` of ours on the same client waits for
it (measured: 5.7 s). Such a connection must not wait for workers, or the host of the store counts it as a rank that
has joined (torch 2.15).
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

OPERATION_S: Final = 1.0
"""How long an operation waits for the store's answer at most."""
_CONNECT_S: Final = 1.0


class StoreGone(Exception):
    """The store does not answer (any more); the text says what it was."""


class JobStore:
    """A client of the TCP store at `address`; keys get `prefix`. Every method raises StoreGone where it is gone.

    To be used by one thread at a time. `get` of a missing key would block in torch; here it answers None.
    """

    def __init__(self, address: tuple[str, int], prefix: str) -> None:
        self.address = address
        self.prefix = prefix
        self.knock()
        store: Any = sys.modules["torch.distributed"].TCPStore
        self._client: Any = self._call(
            store, *address, None, is_master=False, timeout=timedelta(seconds=OPERATION_S), wait_for_workers=False
        )

    def knock(self) -> None:
        """Whether anybody listens there: where nobody does, torch would retry, and write warnings of its own."""
        try:
            socket.create_connection(self.address, _CONNECT_S).close()
        except OSError as error:
            raise StoreGone(f"{self.address[0]}:{self.address[1]}: {error.strerror or error}") from None

    def set(self, key: str, value: bytes | str) -> None:
        self._call(self._client.set, self.prefix + key, value)

    def append(self, key: str, value: bytes | str) -> None:
        """Puts `value` behind what stands there."""
        self._call(self._client.append, self.prefix + key, value)

    def add(self, key: str, number: int = 1) -> int:
        """Adds to a counter, which begins at 0; what it is now."""
        return self._call(self._client.add, self.prefix + key, number)

    def has(self, *keys: str) -> bool:
        """Whether all of them are there."""
        return self._call(self._client.check, [self.prefix + key for key in keys])

    def get(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def get_of_torch(self, key: str) -> bytes | None:
        """What torch wrote under `key`, which has no prefix of ours; None where it is missing."""
        return self._call(self._client.get, key) if self._call(self._client.check, [key]) else None

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each, None where it is missing: few messages, where all or none are there."""
        if not keys:
            return []
        if self.has(*keys):
            return self._call(self._client.multi_get, [self.prefix + key for key in keys])
        if len(keys) == 1:
            return [None]
        half = len(keys) // 2
        return self.get_many(keys[:half]) + self.get_many(keys[half:])

    def wait(self, key: str, seconds: float) -> bool:
        """Whether the key was there, or came, within this time."""
        try:
            self._client.wait([self.prefix + key], timedelta(seconds=seconds))
        except Exception as error:
            if self.has(key):
                return True
            if "timeout" in str(error).lower() or "timed out" in str(error).lower():
                return False
            raise StoreGone(_first_line(error)) from None
        return True

    def _call(self, function: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except Exception as error:  # DistNetworkError, DistStoreError, RuntimeError, by version
            raise StoreGone(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
