"""Descriptors of ours in a process that is not: a script may close what it does not know (`os.closerange`), and the
number is somebody else's file or socket from then on."""

from __future__ import annotations

import contextlib
import os


class Descriptor:
    """An open descriptor, recognised by device and inode of what it stands for."""

    __slots__ = ("_identity", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._identity = _identity(number)

    @property
    def ours(self) -> bool:
        """Whether it still stands for the same; to be asked before each use."""
        return _identity(self.number) == self._identity

    def close(self) -> None:
        if self.ours:
            with contextlib.suppress(OSError):
                os.close(self.number)


def _identity(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino
