"""The folder that a run's traces go into."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from otel_dl.settings import FILES_FOLDER


def default() -> Path:
    """A folder of its own for each run, named by the time in the local zone."""
    return Path(FILES_FOLDER) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def prepare(directory: Path) -> str:
    """Makes the folder and tries to write in it. Returns what stands in the way, "" when nothing does."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return error.strerror or str(error)
    return ""
