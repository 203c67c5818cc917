"""When this process started, and how long importing torch took."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from time import CLOCK_BOOTTIME, clock_gettime_ns, time_ns
from types import ModuleType

from otel_dl.semconv import SpanName

_loaded_ns = time_ns()

zero_code = False
"""Whether this module was loaded at the interpreter's start, so that `_loaded_ns` is its end."""


@functools.cache
def process_start_ns() -> int:
    """Epoch ns at which the kernel started this process, in steps of 10 ms (proc(5), field 22 of /proc/self/stat).

    Where /proc cannot be read: when this module was loaded.
    """
    try:
        with open("/proc/self/stat", "rb") as stat:
            ticks = int(stat.read().rpartition(b")")[2].split()[19])
        age_ns = clock_gettime_ns(CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        return time_ns() - age_ns
    except (OSError, ValueError, IndexError, AttributeError):
        return _loaded_ns


def script_name() -> str:
    """ "train" of `python train.py` and of `python -m pkg.train`, "pkg" of `python -m pkg`; "" of `python -c` and of
    what reads from standard input."""
    path = sys.argv[0] if sys.argv else ""
    if path in ("", "-", "-c", "-m"):
        return ""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.basename(folder) if name == "__main__.py" else os.path.splitext(name)[0]


def parts() -> dict[str, tuple[int, int]]:
    """(start, end) in epoch ns of what is known of the start-up, by span name."""
    known: dict[str, tuple[int, int]] = {}
    if zero_code:
        known[SpanName.STARTUP_INTERPRETER] = (process_start_ns(), _loaded_ns)
    if import_torch.times is not None:
        known[SpanName.STARTUP_IMPORT_TORCH] = import_torch.times
    return known


class ImportClock:
    """Notices when the import of a module begins and ends. It finds nothing itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began: int | None = None
        self.times: tuple[int, int] | None = None
        """Epoch ns."""

    def install(self) -> None:
        if self._name not in sys.modules and self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == self._name and self._began is None:
            self._began = time_ns()
        return None

    def uninstall(self) -> None:
        """The module is there, or nobody wants to know any more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            if self._began is not None and self._name in sys.modules:
                self.times = (self._began, time_ns())


import_torch = ImportClock("torch")
