"""Where the user's own code is: the file and the line, whatever of torch, of otel-dl and of packages lies between."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

from otel_dl.faults import is_users


class Place:
    """The line of the user's that a frame was called from: empty where none is."""

    __slots__ = ("file", "function", "line")

    def __init__(self, frame: FrameType | None) -> None:
        while frame is not None and not is_users(frame.f_code):
            frame = frame.f_back
        self.file = frame.f_code.co_filename if frame is not None else ""
        self.line = (frame.f_lineno or 0) if frame is not None else 0
        self.function = frame.f_code.co_qualname if frame is not None and sys.version_info >= (3, 11) else (
            frame.f_code.co_name if frame is not None else "")  # fmt: skip

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""


def code_attributes(file: str, line: int, function: str) -> dict[str, Any]:
    """A span's that is about this line; none where no file is known."""
    if not file:
        return {}
    return {"code.file.path": file, "code.line.number": line, "code.function.name": function}


def place_of(thread: threading.Thread | None) -> Place:
    """The line that `thread` is at."""
    return Place(sys._current_frames().get(thread.ident or 0) if thread is not None else None)  # pyright: ignore[reportPrivateUsage]


def here() -> Place:
    """The line that the caller was called from."""
    return Place(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
