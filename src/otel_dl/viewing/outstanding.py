"""Which ranks, and which steps, are late by more than noise: somebody is always the last.

A rank stands out that arrived last in more steps than chance gives it, by `SPREADS` standard deviations (where one of
n ranks was last in s steps, chance gives each s/n of them), and for which the others waited at least `SHARE` of the
steps' time; none does where under half of the steps that ran could be compared, and no even sample of them. A step
stands out in which the others waited over `FACTOR` times as long as in the median one, and at least `SHARE` of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from otel_dl.viewing.arrivals import Arrival, Arrivals, Late

SPREADS: Final = 2.5
SHARE: Final = 0.02
FACTOR: Final = 5
EVEN: Final = 30
"""Steps of an even sample that tell of all, however many ran."""
BASIS: Final = 0.5
"""Share of the steps that ran, warm-up apart, of which all ranks have to be there: of fewer no rank is named."""


def is_thin(arrivals: Arrivals) -> bool:
    """Whether too few steps could be compared to say anything of a rank, and they are no even sample either."""
    return arrivals.compared < BASIS * (arrivals.ran - arrivals.warmup) and arrivals.even_sample < EVEN


def ranks(arrivals: Arrivals) -> Sequence[Late]:
    """Most time first."""
    if is_thin(arrivals):
        return []
    named, chance = len(arrivals.steps), 1 / max(1, len(arrivals.own))
    most = named * chance + SPREADS * math.sqrt(named * chance * (1 - chance))
    return [late for late in arrivals.ranks if late.steps > most and late.share >= SHARE]


def steps(arrivals: Arrivals) -> Sequence[Arrival]:
    """Those that stand out, and those of ranks that do; most time first."""
    who = {late.rank for late in ranks(arrivals)}
    all_ns = [0.0] * arrivals.even + [arrival.late_ns for arrival in arrivals.steps]
    least = FACTOR * statistics.median_low(all_ns) if all_ns else 0.0
    found = [
        arrival
        for arrival in arrivals.steps
        if arrival.rank in who or (arrival.late_ns > least and arrival.share >= SHARE)
    ]
    return sorted(found, key=lambda arrival: -arrival.late_ns)
