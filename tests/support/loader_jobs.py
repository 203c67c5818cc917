"""Jobs with DataLoaders: a script of `tests/scripts` in a process of its own, and the spans it left in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from otel_dl.viewing.reading import Reading, Span, read_spans

SCRIPTS = Path(__file__).parent.parent / "scripts"


def run(script: str, *arguments: str, directory: Path, timeout: float = 120, **environment: str) -> str:
    """Runs the script with the file exporter writing into `directory`; its standard output."""
    return run_both(script, *arguments, directory=directory, timeout=timeout, **environment)[0]


def run_both(
    script: str, *arguments: str, directory: Path, timeout: float = 120, **environment: str
) -> tuple[str, str]:
    """The same; its standard output and what it said on stderr."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OTEL_") and name not in ("TRACEPARENT", "TRACESTATE", "BAGGAGE")
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *arguments],
        env={**clean, "OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(directory), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "a fault of ours" not in done.stderr, done.stderr
    return done.stdout, done.stderr


def spans(directory: Path) -> list[Span]:
    """Every span in `directory`; a file that cannot be read whole fails the test."""
    reading = Reading(directory)
    found = list(read_spans(reading))
    assert not reading.passed_over, reading.passed_over
    return found
