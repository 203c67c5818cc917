"""Sample indices, and ranks, as text."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Final

MOST: Final = 256
"""Characters at most."""


def ranges(samples: Collection[int] | str, count: int = 0, most: int = MOST) -> str:
    """`samples` as ranges ("3,5-9"), of `most` characters at most; "…" stands for those left out of `count` in all.

    Names, which are joined by commas already, stay as they are.
    """
    if isinstance(samples, str):
        parts = samples.split(",")
        left_out = len(parts) < count
    else:
        parts = _ranges(samples)
        left_out = len(samples) < count
    whole = ",".join(parts)
    if len(whole) <= most and not left_out:
        return whole
    ends = itertools.accumulate(len(part) + 1 for part in parts)  # of each part, with the comma behind it
    fitting = sum(1 for _ in itertools.takewhile(lambda end: end <= most - 1, ends))
    return ",".join([*parts[:fitting], "…"])


def _ranges(samples: Collection[int]) -> list[str]:
    parts: list[str] = []
    first = last = None
    for sample in sorted(set(samples)):
        if last is not None and sample == last + 1:
            last = sample
            continue
        if first is not None:
            parts.append(_range(first, last))
        first = last = sample
    if first is not None:
        parts.append(_range(first, last))
    return parts


def _range(first: int, last: int | None) -> str:
    return str(first) if first == last else f"{first}-{last}"
