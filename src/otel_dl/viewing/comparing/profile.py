"""What `compare` needs of a profile, whoever wrote it. Times are nanoseconds: since the epoch where it is anchored."""

from __future__ import annotations

import dataclasses
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from typing import Final, NamedTuple

from otel_dl.semconv import PHASES, SpanName
from otel_dl.viewing.intervals import Interval, Many, Moments, union

_LONG_NS: Final = 200_000
"""Python functions that take less are not kept: they name what took long."""
_LOOKED_AT: Final = 10_000
"""Functions that began before a gap and are asked whether they took it, at most."""

_TORCHS: Final = (
    ("enumerate(DataLoader)#", SpanName.NEXT),
    ("Optimizer.step#", SpanName.OPTIMIZER_STEP),
    ("Optimizer.zero_grad#", SpanName.ZERO_GRAD),
)
"""How torch's own ranges begin, and the phase that each is (torch/utils/data/dataloader.py, torch/optim/optimizer.py,
2.4-2.15)."""
_COMPILING: Final = " (dynamo_timed)"
"""How ranges of compilation end: those of torch/_dynamo/utils.py::dynamo_timed, 2.4-2.15."""
_WAITING: Final = "Synchronize"
"""How calls of CUDA end in which the host waits, before any `_v2`."""


class ProfileError(Exception):
    """The profile can't be used, in words for a person."""


class Range(NamedTuple):
    start: int
    end: int


class Ranges:
    """The ranges of one phase."""

    def __init__(self) -> None:
        self._found: list[Range] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, start: int, end: int) -> None:
        self._found.append(Range(start, end))

    def settle(self) -> None:
        self._found.sort()
        self._starts = array("q", (found.start for found in self._found))
        self._longest = max((found.end - found.start for found in self._found), default=0)

    def starts(self) -> array[int]:
        return self._starts

    def overlapping(self, start: int, end: int) -> list[Range]:
        first, last = bisect_left(self._starts, start - self._longest), bisect_left(self._starts, end)
        return [found for found in self._found[first:last] if found.end > start]

    def shift(self, offset: int) -> None:
        self._found = [Range(found.start + offset, found.end + offset) for found in self._found]
        self.settle()


class Kernels:
    """Work of the device: when it ran, and when the host launched it."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")
        self._correlations = array("q")
        self._launched: dict[int, int] = {}
        self._launches = array("q")
        self.busy = Many()
        self.unlaunched = 0
        """Kernels of which no launch was found: which phase they are of is not known."""

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int, correlation: int) -> None:
        self._starts.append(start)
        self._ends.append(end)
        self._correlations.append(correlation)

    def launch(self, correlation: int, start: int) -> None:
        self._launched[correlation] = start

    def settle(self) -> None:
        """Once all are known: puts them in the order of their launches."""
        found = [(self._launched.get(c, -1), i) for i, c in enumerate(self._correlations)]
        self._launched = {}
        self.unlaunched = sum(launch < 0 for launch, _ in found)
        found.sort()
        for column in ("_starts", "_ends"):
            values = getattr(self, column)
            setattr(self, column, array("q", (values[i] for _, i in found)))
        self._launches = array("q", (launch for launch, _ in found))
        self._correlations = array("q")
        for start, end in sorted(zip(self._starts, self._ends, strict=True)):
            self.busy.add(start, end)

    def launched_between(self, start: int, end: int) -> Moments:
        """When the device ran what the host launched in this time."""
        first, last = bisect_left(self._launches, start), bisect_left(self._launches, end)
        return union((self._starts[i], self._ends[i]) for i in range(first, last))

    def shift(self, offset: int) -> None:
        for column in ("_starts", "_ends", "_launches"):
            setattr(
                self, column, array("q", (value + offset if value >= 0 else value for value in getattr(self, column)))
            )
        self.busy.shift(offset)


class Functions:
    """Python functions that took long, where the profiler recorded the stack."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")
        self._names = array("q")
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, name: str, start: int, end: int) -> None:
        if end - start >= _LONG_NS:
            self._starts.append(start)
            self._ends.append(end)
            self._names.append(self._numbers.setdefault(name, len(self._numbers)))

    def settle(self) -> None:
        order = sorted(range(len(self._starts)), key=self._starts.__getitem__)
        for column in ("_starts", "_ends", "_names"):
            values = getattr(self, column)
            setattr(self, column, array("q", (values[i] for i in order)))

    def named(self, gap: Interval) -> str:
        """The innermost one that ran in most of the gap; "" where none did."""
        start, end = gap
        latest = bisect_right(self._starts, start + (end - start) // 5)
        for i in range(latest - 1, max(-1, latest - _LOOKED_AT), -1):
            if min(self._ends[i], end) - max(self._starts[i], start) > 0.8 * (end - start):
                return list(self._numbers)[self._names[i]]
        return ""

    def shift(self, offset: int) -> None:
        self._starts = array("q", (start + offset for start in self._starts))
        self._ends = array("q", (end + offset for end in self._ends))


@dataclasses.dataclass
class Profile:
    """One process's, filled by a reader and then settled."""

    tool: str
    """Who wrote it, as people call it."""
    pid: int = 0
    """0: the profile does not say."""
    host: str = ""
    anchored: bool = False
    """Whether the file itself says where its clock stands in the time of day."""
    events: int = 0
    shows_operations: bool = True
    """Whether torch's operations on the host are in it; else only calls of the device's driver are."""
    own: dict[str, Ranges] = dataclasses.field(default_factory=dict[str, Ranges])
    """Ranges under otel-dl's names, by phase."""
    torchs: dict[str, Ranges] = dataclasses.field(default_factory=dict[str, Ranges])
    """torch's own ranges, by the phase that each is."""
    operations: Many = dataclasses.field(default_factory=Many)
    compiling: Many = dataclasses.field(default_factory=Many)
    waiting: Many = dataclasses.field(default_factory=Many)
    """Calls in which the host waits for the device."""
    kernels: Kernels = dataclasses.field(default_factory=Kernels)
    functions: Functions = dataclasses.field(default_factory=Functions)
    """Of the thread that has the ranges."""
    first: int = 0
    last: int = 0
    _threads: dict[object, Many] = dataclasses.field(default_factory=dict[object, Many])
    _functions: dict[object, Functions] = dataclasses.field(default_factory=dict[object, Functions])
    _ranges: Counter[object] = dataclasses.field(default_factory=Counter[object])
    """How many ranges each thread has."""

    def add_range(self, name: str, thread: object, start: int, end: int) -> bool:
        """A range of somebody's; whether it is one of otel-dl's phases, and none of torch's operations."""
        if name in PHASES:
            self.own.setdefault(name, Ranges()).add(start, end)
            self._ranges[thread] += 1
            return True
        for beginning, phase in _TORCHS:
            if name.startswith(beginning):
                self.torchs.setdefault(phase, Ranges()).add(start, end)
                self._ranges[thread] += 1
                return True
        if name.endswith(_COMPILING):
            self.compiling.add(start, end)
        return False

    def add_operation(self, thread: object, start: int, end: int) -> None:
        """On the host."""
        moments = self._threads.get(thread)
        if moments is None:
            moments = self._threads[thread] = Many()
        moments.add(start, end)

    def add_function(self, name: str, thread: object, start: int, end: int) -> None:
        """Of Python's."""
        functions = self._functions.get(thread)
        if functions is None:
            functions = self._functions[thread] = Functions()
        functions.add(name, start, end)

    def add_call(self, name: str, thread: object, start: int, end: int, correlation: int) -> None:
        """Of the device's driver or runtime, by the host."""
        self.kernels.launch(correlation, start)
        self.add_operation(thread, start, end)
        if name.partition("_")[0].endswith(_WAITING):
            self.waiting.add(start, end)

    def see(self, start: int, end: int) -> None:
        """The host did something then."""
        self.first = min(self.first, start) if self.first else start
        self.last = max(self.last, end)

    def settle(self) -> None:
        self.operations.settle(self._threads.values())
        self._threads.clear()
        self.compiling.settle()
        self.waiting.settle()
        self.kernels.settle()
        if self._ranges:
            self.functions = self._functions.get(self._ranges.most_common(1)[0][0], self.functions)
        self._functions.clear()
        self.functions.settle()
        for ranges in (*self.own.values(), *self.torchs.values()):
            ranges.settle()

    def shift(self, offset: int) -> None:
        """Puts everything later by so much."""
        if offset:
            self.first += offset
            self.last += offset
            for part in (self.operations, self.compiling, self.waiting, self.kernels, self.functions):
                part.shift(offset)
            for ranges in (*self.own.values(), *self.torchs.values()):
                ranges.shift(offset)
