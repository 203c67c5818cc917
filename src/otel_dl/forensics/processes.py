"""What the kernel says of a process: proc_pid_stat(5)."""

from __future__ import annotations

from typing import Final

_FLAGS: Final = 9
_STARTED: Final = 22
_EXIT_CODE: Final = 52
_PF_EXITING: Final = 0x4
_CORE: Final = 0x80


def process_started(pid: int) -> int:
    """When it started, in clock ticks since boot; 0 where that can't be read. Tells it from later ones of its pid."""
    fields = _stat(pid)
    return fields[_STARTED] if fields else 0


def status_of_exiting(pid: int) -> int | None:
    """The exit code, negative for a signal, of a process that is on its way out, before anybody can wait for it: the
    kernel sets it before it closes the files of the process, so whoever finds one of those closed finds it here.

    None where it runs, or has gone. None as well for exit code 0, which is what the kernel says to those who may not
    know.
    """
    fields = _stat(pid)
    if not fields or not fields[_FLAGS] & _PF_EXITING or not fields[_EXIT_CODE]:
        return None
    status = fields[_EXIT_CODE]
    return -(status & ~_CORE) if status & 0x7F else status >> 8


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped it."""
    return _state(pid) in (b"T", b"t")


def is_dead(pid: int, started: int) -> bool:
    """Whether the process that `started` then is no more, or only waits to be waited for."""
    return process_started(pid) != started or status_of_exiting(pid) is not None or _state(pid) in (b"Z", b"X")


def _state(pid: int) -> bytes:
    """One letter; empty where it can't be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""


def _stat(pid: int) -> dict[int, int]:
    """The fields after the name of the program, by their number in the manual; empty where they can't be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything.
            after = file.read().rpartition(b")")[2].split()
        return {number: int(after[number - 3]) for number in (_FLAGS, _STARTED, _EXIT_CODE)}
    except (OSError, ValueError, IndexError):
        return {}
