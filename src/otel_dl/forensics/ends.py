"""How a DataLoader worker ended, from its exit status and its status page, and in words.

Nothing is said that neither shows: an exit status of 0 is a normal end only where the page says that the worker's loop
was left, since torch's handler of SIGTERM (torch/csrc/DataLoader.cpp, 2.15) and `os._exit(0)` end with 0 as well.
"""

from __future__ import annotations

import signal
from enum import Enum
from typing import NamedTuple

from otel_dl.forensics import samples
from otel_dl.forensics.layout import End
from otel_dl.forensics.reader import Page
from otel_dl.semconv import SpanName


class How(str, Enum):
    """The values of `dl.worker.end`."""

    FINISHED = "finished"
    """Its loop was told to end, and did."""
    EXCEPTION = "exception"
    """An exception left its loop, or its dataset raised one, which ended the iteration and so the worker."""
    SIGNAL = "signal"
    EXIT = "exit"
    """It called `os._exit` or `sys.exit`, or something did that ends a process without a signal."""
    KILLED_BY_PARENT = "killed_by_parent"
    """The training process called `terminate()` or `kill()`; torch does where a worker does not end within 5 s."""
    UNKNOWN = "unknown"
    """It was still running when the run ended, or what it left does not tell."""


class WorkerEnded(NamedTuple):
    how: How
    signal: str = ""
    exit_code: int | None = None
    error: str = ""
    """The qualified name of the exception, where it was one."""

    @property
    def error_type(self) -> str | None:
        """What `error.type` says; None where nothing failed, or nothing is known."""
        if self.how in (How.FINISHED, How.UNKNOWN):
            return None
        return self.error or self.signal or self.how.value


def ended(status: int | None, page: Page | None, terminated: bool = False, raised: str = "") -> WorkerEnded:
    """`status` is its exit code, negative for a signal, None where it is not known; `terminated`: the parent called
    `terminate()` or `kill()`; `raised`: the exception of its dataset that ended the iteration."""
    if status is None:
        return WorkerEnded(How.UNKNOWN)
    if status < 0:
        name = signal_name(-status)
        if not (terminated and -status in (signal.SIGTERM, signal.SIGKILL)):
            return WorkerEnded(How.SIGNAL, name)
        return WorkerEnded(How.EXCEPTION if raised else How.KILLED_BY_PARENT, name, error=raised)
    said = page.end if page is not None else End.NONE
    if said is End.EXCEPTION and page is not None:
        return WorkerEnded(How.EXCEPTION, exit_code=status, error=page.error)
    if raised and (terminated or (said is End.FINISHED and status == 0)):
        return WorkerEnded(How.EXCEPTION, exit_code=status, error=raised)
    if said is End.FINISHED and status == 0:
        return WorkerEnded(How.FINISHED, exit_code=0)
    if terminated:
        return WorkerEnded(How.KILLED_BY_PARENT, exit_code=status)
    if page is None or not page.pid:
        return WorkerEnded(How.UNKNOWN, exit_code=status)
    return WorkerEnded(How.EXIT, exit_code=status)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def words(number: int, pid: int, end: WorkerEnded, page: Page | None) -> str:
    """Such as "DataLoader worker 2 (pid 123) was killed by SIGKILL in dataloader.fetch of batch 17, samples 34-35"."""
    return f"{named(number, pid)} {_what(end)} {doing(page)}"


def named(number: int, pid: int) -> str:
    return f"DataLoader worker {number} (pid {pid})"


def _what(end: WorkerEnded) -> str:
    code = f" with exit code {end.exit_code}" if end.exit_code is not None else ""
    if end.how is How.SIGNAL:
        return f"was killed by {end.signal}"
    if end.how is How.KILLED_BY_PARENT:
        return f"was killed by the training process{f' ({end.signal})' if end.signal else ''}"
    if end.how is How.EXCEPTION:
        return f"ended by {end.error or 'an exception'}"
    return f"ended{code}"


def doing(page: Page | None) -> str:
    """What a worker's page says that it did last."""
    if page is None:
        return "doing what is unknown: it has no status page that can be read"
    if not page.pid:
        return "before its loop began"
    if page.fetching is None:
        return "doing what is unknown: its status page is torn"
    if page.fetching:
        return f"in {SpanName.FETCH} of {_batch(page)}"
    if page.done is None:
        return "before its first batch"
    # Without its samples: they had been read.
    return f"while idle, after {_batch(page) if page.batch is None else f'batch {page.batch.place}'}"


def _batch(page: Page) -> str:
    if page.batch is None:
        return "an unknown batch: its status page is torn"
    return f"batch {page.batch.place}{said(in_hand(page))}"


def in_hand(page: Page | None) -> str:
    """The samples of the batch that was taken in hand last, as ranges; "" where they are not known."""
    if page is None or page.batch is None:
        return ""
    return samples.ranges(page.batch.samples, page.batch.size) if page.batch.samples else ""


def said(indices: str) -> str:
    return f", samples {indices}" if indices else ""
