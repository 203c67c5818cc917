"""Which process, steps and spans of a trace a profile belongs to, and how its clock stands to theirs."""

from __future__ import annotations

import dataclasses
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Final

from otel_dl.viewing.comparing.profile import Profile, ProfileError, Ranges
from otel_dl.viewing.comparing.steps import Process, Step

_CLOCKS_DIFFER_NS: Final = 2_000_000_000
"""So far apart may the clock of a profile be that says where it stands: beyond, it is of another run."""
_NEAR_NS: Final = 1_000_000
"""So near a range's start has to be to a span's, where the clocks are put together by them."""
_SAMPLE: Final = 64
_ENOUGH: Final = 0.8
"""Share of the sampled ranges that have to have a span."""


@dataclasses.dataclass
class Pairing:
    """A profile whose clock is the trace's, and the steps that it shows."""

    profile: Profile
    process: Process
    steps: list[Step]
    """Those of which every phase lies in the profile."""
    touched: list[Step]
    """Those that the profile begins or ends in, before or after their phases."""
    others: list[Step]
    offset: int | None
    """Nanoseconds that the profile's clock was put forward by, where its own anchor did not do."""
    apart: float
    """By how much spans begin before their ranges (median, ns)."""
    spans: int
    """Phases of the paired steps."""
    by_name: int
    """… that have a range of their own name."""
    by_torch: int
    """… that have one of torch's."""


def pair(profile: Profile, processes: Sequence[Process]) -> Pairing:
    """Raises ProfileError where the profile is not of one of these processes, or of another time."""
    candidates = [process for process in processes if process.pid == profile.pid or not profile.pid]
    if not candidates:
        pids = ", ".join(f"{process.pid} (rank {process.rank})" for process in processes[:8])
        raise ProfileError(f"is of process {profile.pid}; the trace has steps of {pids}: it is of another run or rank")
    offset: int | None = None
    for process in candidates:
        if profile.anchored and not _overlap(process.time, profile):
            continue
        offset = _offset(profile, process)
        if offset is not None:
            break
    else:
        raise ProfileError(_elsewhere(profile, candidates))
    profile.shift(offset)
    steps, touched, others = _shown(process.steps, profile)
    if not steps:
        raise ProfileError("has no whole step of the trace in it: none of the steps that it shows was kept")
    spans = by_name = by_torch = 0
    apart: list[int] = []
    for step in steps:
        for piece in step.phases():
            spans += 1
            for source in (profile.own, profile.torchs):
                ranges = source[piece.name].overlapping(piece.start, piece.end) if piece.name in source else []
                if ranges:
                    by_name += source is profile.own
                    by_torch += source is profile.torchs
                    apart.append(ranges[0].start - piece.start)
                    break
    settled = profile.anchored and not offset
    return Pairing(
        profile, process, steps, touched, others, None if settled else offset,
        statistics.median(apart) if apart else 0.0, spans, by_name, by_torch,
    )  # fmt: skip


def _overlap(time: tuple[int, int], profile: Profile) -> bool:
    return time[0] - _CLOCKS_DIFFER_NS < profile.last and profile.first < time[1] + _CLOCKS_DIFFER_NS


def _offset(profile: Profile, process: Process) -> int | None:
    """By how much the profile's clock has to be put forward; None where its ranges are not this process's spans.

    Of the phase of which there are fewest ranges, the first few dozen: the offset under which most of them begin near a
    span is that of the clocks; it is then their median.
    """
    ranges, name = _reference(profile)
    if ranges is None:
        return 0 if profile.anchored else None
    spans = sorted(piece.start for step in process.steps for piece in step.phases() if piece.name == name)
    starts = list(ranges.starts())[:_SAMPLE]
    if not spans:
        return None
    if profile.anchored and _near(starts, spans, 0) >= _ENOUGH * len(_within(starts, spans, 0)) > 0:
        return 0
    best, found = 0, 0
    for span in spans:
        candidate = span - starts[0]
        if profile.anchored and abs(candidate) > _CLOCKS_DIFFER_NS:
            continue
        near = _near(starts, spans, candidate)
        if near > found:
            best, found = candidate, near
    if found < max(2, _ENOUGH * len(starts)):
        # Steps that were not kept have ranges, and no spans. With the file's own anchor that is no matter.
        return 0 if profile.anchored and _near(starts, spans, 0) else None
    differences = [_nearest(spans, start + best) - start for start in starts]
    return round(statistics.median(differences))


def _reference(profile: Profile) -> tuple[Ranges | None, str]:
    for source in (profile.own, profile.torchs):
        if source:
            name = min(source, key=lambda name: len(source[name]))
            return source[name], name
    return None, ""


def _within(starts: Sequence[int], spans: Sequence[int], offset: int) -> list[int]:
    return [start for start in starts if spans[0] - _NEAR_NS <= start + offset <= spans[-1] + _NEAR_NS]


def _nearest(spans: Sequence[int], start: int) -> int:
    i = bisect_left(spans, start)
    return min(spans[max(0, i - 1) : i + 1], key=lambda span: abs(span - start))


def _near(starts: Sequence[int], spans: Sequence[int], offset: int) -> int:
    return sum(abs(_nearest(spans, start + offset) - start - offset) <= _NEAR_NS for start in starts)


def _shown(steps: Sequence[Step], profile: Profile) -> tuple[list[Step], list[Step], list[Step]]:
    shown: list[Step] = []
    touched: list[Step] = []
    others: list[Step] = []
    for step in steps:
        phases = list(step.phases())
        middles = [(piece.start + piece.end) // 2 for piece in phases]
        if phases and profile.first <= middles[0] and middles[-1] <= profile.last:
            shown.append(step)
        elif step.start <= profile.last and profile.first <= step.end:
            touched.append(step)
        elif step.even:
            others.append(step)
    # The profiler started in the step before, ahead of all that it recorded.
    touched += [step for step in others if shown and step.number == shown[0].number - 1]
    numbers = {step.number for step in touched}
    return shown, touched, [step for step in others if step.number not in numbers]


def _elsewhere(profile: Profile, candidates: Sequence[Process]) -> str:
    times = "; ".join(f"process {each.pid} {_when(each.time[0])} to {_when(each.time[1])}" for each in candidates[:4])
    mine = f"{_when(profile.first)} to {_when(profile.last)}, " if profile.anchored else ""
    return (
        f"is not of this run: it shows {mine}process {profile.pid}; the trace {times}, and no spans that begin with it"
    )


def _when(instant: int) -> str:
    return datetime.fromtimestamp(instant / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
