"""Starting the job, waiting for it, passing signals on, and ending as it ended.

Signals are blocked and taken one by one with `sigtimedwait` instead of being handled: there is no moment at which one
can get lost or end `otel-dl` before the job. The job stays in the same process group, so that the terminal and the
shell treat both as one: Ctrl-C, Ctrl-Z and what is sent to the group reach it without us. Only what was sent to
`otel-dl` alone is passed on; which one that is, a witness tells.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

BOOTSTRAP = Path(__file__).parent / "bootstrap"
"""Its `sitecustomize.py` switches otel-dl on in each Python process that finds it first on the path."""

_FORWARDED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
# Python ignores these two, which a job would inherit; from a shell it would have the default.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

_NOT_EXECUTABLE = 126
_NOT_FOUND = 127

_ONE_BY_ONE_S = 0.1
"""Within which a sender that goes through the processes of a group one by one has come to all of them."""

_Item = TypeVar("_Item")


class Interrupted(Exception):
    """A signal came when the job had ended."""


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

    A command that cannot be started is said on stderr, in a shell's words and with a shell's status (126, 127). The
    signals that are passed on stay blocked afterwards: what comes then is not to replace the job's end by our own.
    """
    watched = _FORWARDED | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    with _Witness() as witness:
        try:
            pid = os.posix_spawnp(
                arguments[0], list(arguments), environment, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON
            )
        except OSError as error:
            return _not_started(arguments[0], error)
        status = _wait(pid, watched, witness, every_second)
    while signal.sigtimedwait(watched, 0):  # it came for the job
        pass
    return Ended(status)


def _wait(
    pid: int, watched: frozenset[signal.Signals], witness: _Witness, every_second: Callable[[], None] | None
) -> int:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        received = signal.sigtimedwait(watched, 1.0)
        if received is None:
            if every_second is not None:
                every_second()
        elif received.si_signo in _FORWARDED and not witness.received(received.si_signo):
            os.kill(pid, received.si_signo)


class _Witness:
    """A process of our group that only receives signals, as a context manager. One that it received as well was sent to
    the whole group, and the job has it: the kernel tells neither of them whom else it signalled."""

    def __init__(self) -> None:
        """In a process where the forwarded signals are blocked."""
        questions, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:  # the user may have no more processes: then the job hears of a signal twice
            self._pid = -1
        if self._pid == 0:
            try:
                os.close(self._ask)
                while question := os.read(questions, 1):
                    received = signal.sigtimedwait({question[0]}, _ONE_BY_ONE_S)
                    os.write(answer, bytes((received is not None,)))
            finally:
                os._exit(0)
        os.close(questions)
        os.close(answer)

    def __enter__(self) -> _Witness:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._ask)
        os.close(self._answers)
        if self._pid > 0:
            os.waitpid(self._pid, 0)

    def received(self, number: int) -> bool:
        """Whether it has received this signal since it was asked last."""
        try:
            os.write(self._ask, bytes((number,)))
            return os.read(self._answers, 1) == b"\1"
        except BrokenPipeError:
            return False


def until_interrupted(items: Iterable[_Item]) -> Iterator[_Item]:
    """`items`, of something that is done after the job; raises Interrupted once a signal has come."""
    for item in items:
        if signal.sigpending() & _FORWARDED:
            raise Interrupted
        yield item


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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # a shell's status, should the signal be one that does not kill
