"""Interleaved comparison in one process: these machines are noisy, so differences of neighbours count."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Spread(NamedTuple):
    """Median with quartiles, in ns."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:9,.0f}  [{self.low:,.0f} … {self.high:,.0f}]"


def spread(values: list[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(low, median, high)


class Sample(NamedTuple):
    wall: float
    cpu: float


def timed(body: Callable[[], None], count: int) -> Sample:
    """ns of wall time and of process CPU time (all threads) a call of `body`, which is called `count` times."""
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    for _ in range(count):
        body()
    return Sample((time.perf_counter_ns() - wall) / count, (time.process_time_ns() - cpu) / count)


def interleaved(cases: dict[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Every case once a round, in turn, and the order turned around every other round."""
    samples: dict[str, list[Sample]] = {name: [] for name in cases}
    for turn in range(rounds):
        names = list(cases) if turn % 2 == 0 else list(reversed(cases))
        for name in names:
            samples[name].append(cases[name]())
    return samples


def added(samples: dict[str, list[Sample]], base: str) -> None:
    """Prints each case's median, and what it adds to `base`, pair by pair."""
    print(f"{'':34} {'wall ns':>30}  {'added, wall':>30}  {'added, CPU':>30}")
    for name, values in samples.items():
        wall = spread([sample.wall for sample in values])
        walls = spread([one.wall - other.wall for one, other in zip(values, samples[base], strict=True)])
        cpus = spread([one.cpu - other.cpu for one, other in zip(values, samples[base], strict=True)])
        rest = "" if name == base else f"  {walls!s:>30}  {cpus!s:>30}"
        print(f"{name:34} {wall!s:>30}{rest}")


def machine() -> str:
    import torch

    with open("/proc/cpuinfo") as cpuinfo:
        model = next((line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    return f"{os.cpu_count()} cores ({model}), Python {platform.python_version()}, torch {torch.__version__}"
