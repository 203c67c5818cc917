"""Sample indices as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST: Final = 256
"""Characters at most."""


def ranges(samples: Sequence[int] | str, count: int = 0, most: int = MOST) -> str:
    """`samples` as ranges ("3,5-9"), of `most` characters at most; "…" stands for those left out of `count` in all.

    Names, which are joined by commas already, stay as they are.
    """
    if isinstance(samples, str):
        parts, whole = samples.split(","), samples
        left_out = len(parts) < count
    else:
        parts = list(_ranges(samples))
        whole, left_out = ",".join(parts), len(samples) < count
    if len(whole) <= most and not left_out:
        return whole
    while parts and len(whole) > most - 2:
        parts.pop()
        whole = ",".join(parts)
    return f"{whole},…" if whole else "…"


def _ranges(samples: Sequence[int]) -> list[str]:
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
