"""What this rank waits in, by its own status page, and by torch's Flight Recorder where the page can't tell."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from otel_dl.forensics import reader
from otel_dl.ranks.statuses import is_in_distributed
from otel_dl.recording.collectives import WAITED_FOR
from otel_dl.recording.flight_recorder import OTHER_FORM, entries
from otel_dl.recording.ranks import Group, Wait
from otel_dl.recording.records import Kind, clock, to_epoch_ns

if TYPE_CHECKING:
    from otel_dl.forensics.reader import Page
    from otel_dl.recording.run import Run

_WAITING: Final = int(Kind.FORWARD | Kind.BACKWARD)
"""Phases in which C++ may wait for what it has issued."""
STILL_NS: Final = 1_000_000_000
"""Only where nothing has begun or ended for so long is the Flight Recorder asked."""


def waiting(run: Run, groups: Mapping[str, Group]) -> Wait | None:
    """The first collective whose end this rank waits for in Python, in whatever thread; None where it waits in none, or
    is not seen to."""
    for collective in list(run.collectives.outstanding.values()):
        if collective.state == WAITED_FOR and not collective.end and collective.communicator.id in groups:
            return collective.wait()
    return None


def stuck(run: Run, groups: Mapping[str, Group], still_ns: int = STILL_NS) -> Wait | None:
    """The oldest collective that is under way where this rank has not moved for so long: what it waits for in C++ (in
    `backward`, on DDP's buckets) that it can't be seen to wait for."""
    page = reader.decode(run.status.page)
    if page is None or clock() - page.last() < still_ns:
        return None
    # One that computes in Python waits for nothing, whatever it has issued before.
    waits = any(phase.kind & _WAITING for phase in page.phases or ()) or is_in_distributed(run.trainer)
    return oldest(run, groups, page) if waits else None


def oldest(run: Run, groups: Mapping[str, Group], page: Page) -> Wait | None:
    """The oldest collective that is not known to be complete."""
    latest = page.collective
    if latest is None or latest.state == "complete" or latest.group not in groups:
        return None
    under_way = _by_flight_recorder(run, groups)
    if not under_way:
        return None  # without a Flight Recorder its end may not have been seen
    first = min(under_way, key=lambda wait: wait.start)
    if (first.group.id, first.seq) == (latest.group, latest.seq):
        return first._replace(size=latest.size)
    return first


def _by_flight_recorder(run: Run, groups: Mapping[str, Group]) -> list[Wait] | None:
    """Collectives under way, the first of each group; None where torch has no Flight Recorder for all backends (2.8).

    gloo's entries say `retired` once the work is over (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, 2.15).
    """
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        return _of_dump(dump(includeCollectives=True), run, groups)
    except (RuntimeError, *OTHER_FORM):
        return None  # another torch's has another form


def _of_dump(dump: bytes | str, run: Run, groups: Mapping[str, Group]) -> list[Wait]:
    first: dict[str, Wait] = {}
    for entry in entries(dump):
        group = entry.group
        if entry.retired or entry.transfer or group not in groups or group in first:
            continue
        start = clock() - (to_epoch_ns(clock()) - entry.created)
        latest = run.collectives.latest.get(group)
        monitored = latest.communicator.monitored if latest is not None else 0
        first[group] = Wait("dist." + entry.op, groups[group], entry.seq + monitored, start)
    return list(first.values())
