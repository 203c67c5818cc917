"""Numbers as words, and lines with a label: the same wherever a person reads them."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from otel_dl.forensics.samples import ranges

_UNITS: Final = (("µs", 1e3, 1000), ("ms", 1e6, 1000), ("s", 1e9, 100))
"""Each with its length in ns, and how many of it are told in it."""
_LABEL_WIDTH: Final = 15
_LEAST_NS: Final = 1_000
"""What is shorter is no more than reading the clock at both of its ends and writing it down takes."""


def duration(nanoseconds: float) -> str:
    """Of three significant digits at most, and of no more than the clock tells: "3.1 µs", "12.5 ms", "2 min 5 s"."""
    if nanoseconds < 0:
        return f"−{duration(-nanoseconds)}"
    if 0 < nanoseconds < _LEAST_NS:
        return "under 1 µs"
    for unit, size, most in _UNITS:
        value = float(f"{nanoseconds / size:.3g}")
        if value < most:
            return f"{value if unit != 'µs' else round(value, 1):g} {unit}"
    minutes, seconds = divmod(round(nanoseconds / 1e9), 60)
    if minutes < 60:
        return _and("min", minutes, "s", seconds)
    hours, minutes = divmod(round(nanoseconds / 60e9), 60)
    return _and("h", hours, "min", minutes)


def _and(unit: str, count: int, smaller: str, rest: int) -> str:
    return f"{count:,} {unit}" + (f" {rest} {smaller}" if rest else "")


class Scale(NamedTuple):
    """One unit and number of decimals for durations that stand below each other, or are summed up."""

    unit: str
    size: float
    decimals: int

    def duration(self, nanoseconds: float) -> str:
        text = f"{nanoseconds / self.size:,.{self.decimals}f}"
        if float(text.replace(",", "")) == 0:
            text = text.removeprefix("-")
        return f"{text} {self.unit}".replace("-", "−")

    def signed(self, nanoseconds: float) -> str:
        text = self.duration(nanoseconds)
        return text if text.startswith("−") else f"+{text}"


def scale(nanoseconds: float) -> Scale:
    """That in which so long a duration has three significant digits."""
    unit, size = next(((unit, size) for unit, size, _ in _UNITS if nanoseconds < 999.5 * size), _UNITS[-1][:2])
    whole = max(0, math.floor(math.log10(nanoseconds / size))) if nanoseconds > 0 else 0
    return Scale(unit, size, min(max(0, 2 - whole), 1 if unit == "µs" else 2))


def labelled(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Lines of (label, text); a label that repeats is written once."""
    former = ""
    for label, text in rows:
        yield f"{label if label != former else '':<{_LABEL_WIDTH}}{text}"
        former = label


def percent(share: float) -> str:
    return f"{share:.1%}"


def plural(count: int, ending: str = "s") -> str:
    return "" if count == 1 else ending


def of_ranks(count: int) -> str:
    """Behind a number of steps, each of which is counted once for each rank: " of 2 ranks"; "" of one."""
    return f" of {count:,} ranks" if count > 1 else ""


def ranks(numbers: Collection[int]) -> str:
    """ "rank 3", "ranks 0-2,7"."""
    return f"rank{plural(len(numbers))} {ranges(numbers, most=sys.maxsize)}"
