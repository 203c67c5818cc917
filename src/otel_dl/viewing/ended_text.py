"""How the processes of a job ended that runs no more, in words: by status pages, and by traces where none is left.

A process that ends by itself or by SIGTERM takes its page away, after its last span was written; one that is killed
leaves its page, and no word of how.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from otel_dl.forensics.reader import Page
from otel_dl.forensics.report import HOW_IS_NOT_KNOWN, lines, when
from otel_dl.viewing.incident_text import failure
from otel_dl.viewing.incidents import TERMINATED
from otel_dl.viewing.seen import Process
from otel_dl.viewing.summary import Summary

_DEAD: Final = re.compile(r"is dead \((.*?)\); it was ")


def ends(summary: Summary, pages: Sequence[Page]) -> list[str]:
    """A line a process, by rank; `pages`: those of the run."""
    return [line for _, line in sorted(_ends(summary, pages), key=lambda each: each[0])]


def _ends(summary: Summary, pages: Sequence[Page]) -> Iterator[tuple[int, str]]:
    told = {
        culprit.page.path: culprit.missing.words
        for incident in summary.incidents.found
        for culprit in incident.culprits
        if culprit.page is not None
    }
    for page, line in zip(pages, lines(pages), strict=True):
        words = told.get(page.path, "")
        yield page.rank, f"{line}{_seen_by_others(words)}"
    with_page = {(page.host, page.pid) for page in pages}
    for process in summary.processes:
        if (process.host, process.pid) not in with_page:
            who = f"pid {process.pid}" if process.pid else "a process"
            yield process.rank, f"{who} (rank {process.rank}) {_ended(process)}; last span {when(process.last_ns)}"


def _seen_by_others(words: str) -> str:
    """What other ranks saw of a process besides what its page tells."""
    dead = _DEAD.match(words)
    if dead is None:
        return f"; by what other ranks saw, it {words}" if words else ""
    # What it did stands in the page, which is where the others had it from.
    return "" if dead[1] == HOW_IS_NOT_KNOWN else f"; by what other ranks saw, {dead[1]}"


def _ended(process: Process) -> str:
    step = process.last_step
    if process.startup_error:
        return f"ended by {process.startup_error} before a first step"
    if step is None:
        return "ended, no step and no failure of it is in these traces"
    if step.error_type == TERMINATED:
        return f"was ended by SIGTERM in step {step.number}"
    if step.error_type:
        return f"ended, its last step had failed: {failure(step)}"
    return f"ended after step {step.number}, without a failure in these traces"
