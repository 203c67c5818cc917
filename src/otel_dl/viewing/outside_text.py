"""What the time of a run went to, as rows of the summary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from otel_dl.viewing.outside import Divided, RunTime
from otel_dl.viewing.words import duration, plural

_LABEL: Final = "Run time"
_OWN_SHOWN: Final = 3


def rows(time: RunTime | None, several_ranks: bool) -> Iterator[tuple[str, str]]:
    """(label, text)"""
    if time is None:
        return
    of = f"rank {time.rank}, " if several_ranks else ""
    until = "" if time.is_whole else " until its last span"
    whole = f"{of}{duration(time.whole_ns)}{until}"
    if time.divided is None:
        yield _LABEL, f"{whole}; how much of it lies in steps is not known: {time.missing}"
    else:
        yield _LABEL, f"{whole}: {', '.join(_parts(time.divided))}"


def _parts(time: Divided) -> Iterator[str]:
    yield f"{duration(time.steps_ns)} in {time.steps:,} step{plural(time.steps)}"
    if time.evaluations:
        count = time.evaluations
        yield f"{duration(time.evaluations_ns)} evaluation ({count:,} stretch{plural(count, 'es')})"
    yield f"{duration(time.startup_ns)} start-up"
    if time.workers_ns:
        yield f"{duration(time.workers_ns)} start of workers"
    more: list[str] = []
    own = [f"{duration(ns)} {name}" for name, ns in list(time.own.items())[:_OWN_SHOWN]]
    if own:
        more.append(f"of that {', '.join(own)}")
    if time.longest is not None and time.longest.ns:
        more.append(f"the longest stretch: {duration(time.longest.ns)} after step {time.longest.after}")
    yield f"{duration(time.outside_ns)} outside of any" + (f" ({'; '.join(more)})" if more else "")
