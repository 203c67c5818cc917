"""Numbers as words, the same wherever a person reads them."""

from __future__ import annotations

import sys
from collections.abc import Collection

from otel_dl.forensics.samples import ranges


def duration(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return (
                f"{nanoseconds / size:.3g} {unit}" if nanoseconds < 1000 * size else f"{nanoseconds / size:,.0f} {unit}"
            )
    return f"{nanoseconds / 1e3:.3g} µs"


def percent(share: float) -> str:
    return f"{share:.1%}"


def plural(count: int, ending: str = "s") -> str:
    return "" if count == 1 else ending


def ranks(numbers: Collection[int]) -> str:
    """ "rank 3", "ranks 0-2,7"."""
    return f"rank{plural(len(numbers))} {ranges(numbers, most=sys.maxsize)}"
