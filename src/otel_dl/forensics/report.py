"""What status pages say, a line a process: for people who ask what runs, or what ran when it died."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from otel_dl.forensics import ends
from otel_dl.forensics.layout import End
from otel_dl.forensics.reader import Collective, Page
from otel_dl.semconv import SpanName

HOW_IS_NOT_KNOWN: Final = "how it ended is not known"


def lines(pages: Sequence[Page]) -> list[str]:
    """Such as "pid 123 (rank 0 worker 2) died in dataloader.fetch of batch 17, samples 34-35; last event 12:00:05"."""
    return [f"{_who(page)} {_state(page)} {_doing(page)}{_when(page)}" for page in pages]


def began(pages: Sequence[Page]) -> int:
    """When the first of their processes began, in ns since the epoch; 0: none has."""
    return min((page.epoch for page in pages if page.pid), default=0)


def when(nanoseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(nanoseconds / 1e9))


def _who(page: Page) -> str:
    worker = f" worker {page.worker}" if page.worker is not None else ""
    pid = f"pid {page.pid}" if page.pid else f"a process that pid {page.parent} started"
    return f"{pid} (rank {page.rank}{worker})"


def _state(page: Page) -> str:
    alive = page.alive()
    if alive is None:
        return f"on {page.host}, whether it lives is unknown," if page.pid else "said nothing"
    if alive:
        return "runs,"
    if page.end is End.FINISHED:
        return "finished"
    if page.end is End.TERMINATED:
        return "was ended by SIGTERM"
    return f"ended by {page.error or 'an exception'}" if page.end is End.EXCEPTION else "died"


def _doing(page: Page) -> str:
    if page.worker is not None:
        return ends.doing(page)
    step = f" of step {page.step}" if page.step is not None else ""
    if page.phases is None:
        return f"doing what is unknown{step}: its status page is torn"
    collective = _collective(page.collective)
    if page.phases:
        return f"in {page.phases[-1].name}{step}{collective}"
    return f"outside any phase{step}{collective}" if step else f"outside any step{collective}"


def _collective(collective: Collective | None) -> str:
    if collective is None or collective.state == "complete":
        return ""
    state = "waits for" if collective.state == "waiting" else "has issued"
    return f", {state} {describe(collective.name, collective.group, collective.seq)}"


def describe(name: str, group: str, seq: int) -> str:
    """ "all_reduce 431 of group 3"."""
    operation = name.removeprefix("dist.")
    if name == SpanName.INIT_PROCESS_GROUP or not group:
        return operation
    number = f" {seq}" if seq else ""
    return f"{operation}{number} of {'the default group' if group == '0' else f'group {group}'}"


def _when(page: Page) -> str:
    if not page.pid:
        return ""
    return f"; last event {when(page.last_at)}"
