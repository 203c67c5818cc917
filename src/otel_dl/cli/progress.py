"""A line at the bottom of the terminal about the traces so far.

The job writes to the same terminal whenever it likes, perhaps half a line. So the last row is taken out of what
scrolls, as apt does for its bar, and is drawn in one write that leaves the cursor where it was: no byte of ours ever
stands between two of the job's on the screen.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from otel_dl.semconv import SpanName

_STEP = f'"name":"{SpanName.STEP}"'.encode()
_LARGEST_READ = 8 * 2**20

_SAVE_CURSOR, _RESTORE_CURSOR = "\x1b7", "\x1b8"
_INDEX = "\x1bD"  # a line feed that leaves the column alone
_SCROLL_EVERYTHING = "\x1b[r"
_SMALLEST_ROWS = 4


class Progress:
    """Draws on stderr, which must be a terminal; use it as a context manager, so that the row is given back."""

    def __init__(self, directory: Path, without: Collection[str] = ()) -> None:
        self._directory = directory
        self._without = frozenset(without)
        self._read: dict[str, int] = {}
        self._steps = 0
        self._began = time.monotonic()
        self._size: os.terminal_size | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._size is not None:
            self._write(_SAVE_CURSOR + _row(self._size.lines) + _SCROLL_EVERYTHING + _RESTORE_CURSOR)

    def draw(self) -> None:
        """Looks at what has been written since the last call and draws the line."""
        try:
            size = os.get_terminal_size(sys.stderr.fileno())
        except OSError:
            return  # the terminal has gone
        if size.lines < _SMALLEST_ROWS:
            return
        control = ""
        if size != self._size:
            # Down and up again: if the cursor stands in the last row, what is there scrolls out of it first.
            control = f"{_INDEX}{_SAVE_CURSOR}\x1b[1;{size.lines - 1}r{_RESTORE_CURSOR}\x1b[1A"
            self._size = size
        text = self._text()[: size.columns - 1]
        self._write(control + _SAVE_CURSOR + _row(size.lines) + text + _RESTORE_CURSOR)

    def _text(self) -> str:
        self._read_on()
        seconds = int(time.monotonic() - self._began)
        size = sum(self._read.values()) / 2**20
        return (
            f"otel-dl {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}  {self._steps:,} step spans,"
            f" {size:,.1f} MiB in {len(self._read)} files of {self._directory}"
        )

    def _read_on(self) -> None:
        try:
            for path in self._directory.glob("*.jsonl"):
                if path.name not in self._without:
                    self._read_on_in(path)
        except OSError:
            pass  # a file or the folder went while we looked: the next look is in a second

    def _read_on_in(self, path: Path) -> None:
        begin = self._read.setdefault(path.name, 0)
        with path.open("rb") as file:
            file.seek(begin)
            new = file.read(_LARGEST_READ)
        whole = new.rfind(b"\n") + 1
        self._steps += new.count(_STEP, 0, whole)
        self._read[path.name] = begin + whole

    def _write(self, text: str) -> None:
        sys.stderr.flush()
        os.write(sys.stderr.fileno(), text.encode())


def _row(number: int) -> str:
    """Goes to that row and clears it."""
    return f"\x1b[{number};1H\x1b[2K"
