"""What waits for the device, as lines of the summary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from otel_dl.viewing.waiting import Waited, Waiting
from otel_dl.viewing.words import duration, of_ranks, percent, plural

_LABEL: Final = "Device wait"
_SHOWN: Final = 5


def rows(waiting: Waiting, ranks: int = 1) -> Iterator[tuple[str, str]]:
    for waited in waiting.lines[:_SHOWN]:
        yield _LABEL, _line(waited, waiting, ranks)
    rest = waiting.lines[_SHOWN:]
    if rest:
        each = duration(sum(waited.total_ns for waited in rest) / waiting.steps)
        yield _LABEL, f"{len(rest)} more line{plural(len(rest))}: {each} a step"
    if waiting.short_count:
        count, each = waiting.short_count, duration(waiting.short_ns / waiting.steps)
        yield _LABEL, f"{count:,} short one{plural(count)} without a span: {each} a step"
    if waiting.left_out:
        yield _LABEL, f"{waiting.left_out:,} more were left out: there are too many lines"


def _line(waited: Waited, waiting: Waiting, ranks: int) -> str:
    line, steps = waited.line, waiting.steps
    where = f"{os.path.basename(line.file)}:{line.number}" if line.file else "in torch"
    text = (
        f"{where} ({line.operation}): {duration(waited.total_ns / steps)} a step,"
        f" {percent(waited.total_ns / waiting.duration_ns if waiting.duration_ns else 0.0)} of its time;"
        f" {waited.count:,} time{plural(waited.count)} in {steps:,} kept step{plural(steps)}{of_ranks(ranks)}"
    )
    if waited.queued_ns is None or waited.split < waited.count:
        return text
    share = percent(waited.queued_ns / waited.total_ns if waited.total_ns else 0.0)
    return f"{text}; {share} of that for work queued before"
