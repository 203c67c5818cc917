"""Starting the job, waiting for it, passing signals on, and ending as it ended.

Signals are blocked and taken one by one with `sigtimedwait` instead of being handled: there is no moment at which one
can get lost or end `otel-dl` before the job, and each tells whether the kernel sent it (a key pressed at the terminal,
which the job in the same group gets as well) or a process (`kill`, a scheduler, which reached `otel-dl` alone).
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

BOOTSTRAP = Path(__file__).parent / "bootstrap"
"""Its `sitecustomize.py` switches otel-dl on in each Python process that finds it first on the path."""

_FORWARDED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
# Python ignores these two, which a job would inherit; from a shell it would have the default.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

_NOT_EXECUTABLE = 126
_NOT_FOUND = 127


class Ended(NamedTuple):
    """How the job ended: `status` as of `os.waitstatus_to_exitcode`, negative for a signal."""

    status: int
    started: bool = True


def environment_for_files(directory: Path) -> dict[str, str]:
    return _environment(OTEL_TRACES_EXPORTER="otel_dl_file", OTEL_DL_DIR=str(directory))


def environment_for_otlp() -> dict[str, str]:
    return _environment(OTEL_TRACES_EXPORTER=os.environ.get("OTEL_TRACES_EXPORTER", "otlp"))


def environment_without_traces() -> dict[str, str]:
    return _environment(OTEL_TRACES_EXPORTER="none")


def _environment(**more: str) -> dict[str, str]:
    # An empty entry of PYTHONPATH would mean the current folder, so there is none where PYTHONPATH was unset.
    path = [str(BOOTSTRAP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}


def run(
    arguments: Sequence[str], environment: Mapping[str, str], every_second: Callable[[], None] | None = None
) -> Ended:
    """Runs the command to its end, with this process's standard streams; meanwhile calls `every_second`.

    A command that cannot be started is said on stderr, in a shell's words and with a shell's status (126, 127).
    """
    watched = _FORWARDED | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        try:
            pid = os.posix_spawnp(
                arguments[0], list(arguments), environment, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON
            )
        except OSError as error:
            return _not_started(arguments[0], error)
        status = _wait(pid, watched, every_second)
        while signal.sigtimedwait(watched, 0):  # what came for the job is not ours to die of
            pass
        return Ended(status)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wait(pid: int, watched: frozenset[signal.Signals], every_second: Callable[[], None] | None) -> int:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        received = signal.sigtimedwait(watched, 1.0)
        if received is None:
            if every_second is not None:
                every_second()
        elif received.si_signo in _FORWARDED and received.si_code <= 0:  # SI_USER, SI_QUEUE, SI_TKILL: from a process
            os.kill(pid, received.si_signo)


def _not_started(name: str, error: OSError) -> Ended:
    if error.errno == errno.ENOENT and os.sep not in name:
        print(f"otel-dl: {name}: command not found", file=sys.stderr)
    else:
        print(f"otel-dl: {name}: {error.strerror}", file=sys.stderr)
    return Ended(_NOT_FOUND if error.errno == errno.ENOENT else _NOT_EXECUTABLE, started=False)


def end_like(ended: Ended) -> NoReturn:
    """Ends this process as the job ended; by the same signal where it was killed by one."""
    if ended.status >= 0:
        sys.exit(ended.status)
    number = -ended.status
    sys.stdout.flush()
    sys.stderr.flush()
    # The core dump that matters is the job's; a second one of the same name would replace it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # a shell's status, should the signal be one that does not kill
