"""Runs Python scripts as children: what they printed, how they ended, how long the end took."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"

INSTRUMENT = (str(Path(sys.executable).with_name("opentelemetry-instrument")), sys.executable)
"""The command of opentelemetry-distro that instruments a script which it does not change."""

LAST_LINE = "print('END', time.monotonic(), flush=True)"
"""What a script runs last of all, where its end is measured (`time.monotonic` is one clock for all processes)."""


def printed(output: str) -> str:
    """What a script has printed. (gloo of torch 2.10 says on stdout that it is connected.)"""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("[Gloo] "))


@dataclass(frozen=True)
class Result:
    stdout: str
    stderr: str
    code: int
    duration: float
    """Seconds from the start of the child."""
    ending: float
    """Seconds from the signal that was sent, or from the script's `END` line, to the end of the process."""
    ended: float
    """Reading of `time.monotonic` at the end of the process."""

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.duration:.1f} s\n{self.stdout}\n{self.stderr}"


class Child:
    """A running script, started by `command` (Python's own, or one like `opentelemetry-instrument python -c`)."""

    def __init__(
        self,
        script: str,
        env: Mapping[str, str] | None = None,
        command: tuple[str, ...] = (sys.executable,),
        stdin: bool = False,
    ) -> None:
        self._began = time.monotonic()
        self._signalled: float | None = None
        self._read = ""
        self.process = subprocess.Popen(
            [*command, "-c", textwrap.dedent(script)],
            env=environment(env or {}),
            stdin=subprocess.PIPE if stdin else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_line(self, start: str) -> str:
        """The first line of its output that starts so, as soon as it is there."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._read += line
            if line.startswith(start):
                return line.rstrip()
        raise AssertionError(f"the script ended without a line {start!r}\n{self.finish()}")

    def ask(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def send(self, number: int) -> None:
        self._signalled = time.monotonic()
        os.kill(self.process.pid, number)

    def finish(self, timeout: float = 60) -> Result:
        try:
            stdout, stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            stdout, stderr = self.process.communicate()
            raise AssertionError(f"still running after {timeout} s\n{self._read}{stdout}\n{stderr}") from None
        ended = time.monotonic()
        stdout = printed(self._read + stdout)
        marks = [float(line.split()[1]) for line in stdout.splitlines() if line.startswith("END ")]
        since = self._signalled or (marks[-1] if marks else self._began)
        return Result(stdout, stderr, self.process.returncode, ended - self._began, ended - since, ended)


def run(
    script: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    command: tuple[str, ...] = (sys.executable,),
) -> Result:
    return Child(script, env, command).finish(timeout)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's without any setting of OpenTelemetry's, and with the source tree importable."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OTEL_") and name not in ("TRACEPARENT", "TRACESTATE", "BAGGAGE")
    }
    path = os.pathsep.join(filter(None, (str(SOURCE), clean.get("PYTHONPATH"))))
    return {**clean, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **extra}


def free_port() -> int:
    """A port of loopback on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
