"""Which process, steps and spans of a trace a profile belongs to, and how its clock stands to theirs."""

from __future__ import annotations

import dataclasses
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Final

from otel_dl.viewing.comparing.profile import Profile, ProfileError
from otel_dl.viewing.comparing.steps import Process, Step

_CLOCKS_DIFFER_NS: Final = 2_000_000_000
"""So far apart may the clock of a profile be that says where it stands: beyond, it is of another run."""
_NEAR_NS: Final = 1_000_000
"""So near a range's start has to be to its span's."""
_SAMPLE: Final = 64
_ENOUGH: Final = 0.8
"""Share of the sample that has to be near."""
_CLEARER: Final = 3
"""Under the right offset ranges and spans lie so many times closer together than under any other."""
_LEAST_SPREAD_NS: Final = 1_000


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
    here = [process for process in candidates if _same_host(process.host, profile.host)]
    if not here:
        raise ProfileError(f"is of host {profile.host}; the trace has process {profile.pid} of {candidates[0].host}")
    offset: int | None = None
    for process in here:
        if not profile.anchored or _overlap(process.time, profile):
            offset = _offset(profile, process)
            if offset is not None:
                break
    else:
        raise ProfileError(_elsewhere(profile, here))
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


def _same_host(one: str, other: str) -> bool:
    return not one or not other or one.partition(".")[0] == other.partition(".")[0]


def _overlap(time: tuple[int, int], profile: Profile, apart: int = _CLOCKS_DIFFER_NS) -> bool:
    return time[0] - apart < profile.last and profile.first < time[1] + apart


def _offset(profile: Profile, process: Process) -> int | None:
    """By how much the profile's clock has to be put forward; None where that is not known."""
    ranges = next((source for source in (profile.own, profile.torchs) if source), None)
    if ranges is None:
        return 0 if profile.anchored else None
    spans: dict[str, list[int]] = {name: [] for name in ranges}
    for step in process.steps:
        for piece in step.phases():
            if piece.name in spans:
                spans[piece.name].append(piece.start)
    starts = {name: list(found.starts()) for name, found in ranges.items() if spans[name]}
    if profile.anchored:
        first, last = profile.first + _NEAR_NS, profile.last - _NEAR_NS
        shown = [(name, start) for name in starts for start in spans[name] if first < start < last][:_SAMPLE]
        near = sum(abs(_nearest(starts[name], start) - start) <= _NEAR_NS for name, start in shown)
        # Where no step was kept of those in the profile, nothing speaks against its own clock.
        if near >= _ENOUGH * len(shown) and (shown or _overlap(process.time, profile, 0)):
            return 0
        return _found_offset(starts, spans, _CLOCKS_DIFFER_NS)
    return _found_offset(starts, spans, None)


def _found_offset(starts: dict[str, list[int]], spans: dict[str, list[int]], most: int | None) -> int | None:
    """The one under which ranges and spans of the same names lie closest together; None where there is no such one, or
    several: steps that are all of the same length can't be told apart."""
    if not starts:
        return None
    fewest = min(starts, key=lambda name: len(starts[name]))
    sample = [(name, start) for name, found in starts.items() for start in found[: _SAMPLE // len(starts)]]
    found: list[tuple[float, int]] = []
    for span in spans[fewest]:
        candidate = span - starts[fewest][0]
        if most is not None and abs(candidate) > most:
            continue
        apart = [_nearest(spans[name], start + candidate) - start for name, start in sample]
        middle = statistics.median(apart)
        off = [abs(each - middle) for each in apart]
        if sum(each <= _NEAR_NS for each in off) >= _ENOUGH * len(off):
            found.append((max(_LEAST_SPREAD_NS, statistics.median(off)), round(middle)))
    found.sort()
    if not found:
        return None
    spread, offset = found[0]
    others = [each for each, other in found if abs(other - offset) > _NEAR_NS]
    return offset if not others or others[0] > _CLEARER * spread else None


def _nearest(moments: Sequence[int], moment: int) -> int:
    i = bisect_left(moments, moment)
    return min(moments[max(0, i - 1) : i + 1], key=lambda each: abs(each - moment))


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
    trace = "; ".join(f"{_when(each.time[0])} to {_when(each.time[1])}" for each in candidates[:4])
    if profile.anchored:
        mine = f"{_when(profile.first)} to {_when(profile.last)}"
        return f"is not of this run: process {profile.pid}, {mine}; the trace has that process {trace}"
    return (
        f"can't be put beside the trace: it does not say when it was (no baseTimeNanoseconds), and under no clock, or"
        f" under several, do its ranges fit the spans of process {profile.pid}, {trace}"
    )


def _when(instant: int) -> str:
    return datetime.fromtimestamp(instant / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
