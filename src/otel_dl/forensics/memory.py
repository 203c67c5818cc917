"""Files as memory, which the kernel keeps when a process is killed.

A mapping holds no descriptor: a script that closes what it did not open takes nothing away, and nobody's is closed.
(The standard library's `mmap` holds one until Python 3.13.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Final

_FAILED: Final = ctypes.c_void_p(-1).value
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Memory:
    """The first `size` bytes of the file at `path`, shared with whoever else maps it; raises OSError."""

    def __init__(self, path: str, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_size < size:  # a store behind its end is SIGBUS
                raise OSError(f"{path} is shorter than {size} bytes")
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
            if address == _FAILED:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), path)
        finally:
            os.close(descriptor)
        self.path = path
        self.size = size
        self.address: int = address
        """0 once it is closed."""
        mapped = (ctypes.c_char * size).from_address(address)
        # With the last view of it, for a thread may be in the middle of a store when it is closed.
        weakref.finalize(mapped, _libc.munmap, address, size).atexit = False
        self.view = memoryview(mapped).cast("B")

    @property
    def whole(self) -> bool:
        """Whether the file is as long as the mapping, or is gone: a look behind the end of one that somebody has cut is
        SIGBUS."""
        try:
            return os.stat(self.path).st_size >= self.size
        except OSError:
            return True

    def close(self) -> None:
        """Takes the mapping away, once nobody holds a view of it. What is written to `view` from now on is lost."""
        if self.address:
            self.address = 0
            self.view = memoryview(bytearray(self.size))
