"""What was compiled, autotuned and captured: how often, how long, and why again. Durations are nanoseconds."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from otel_dl.semconv import SpanName
from otel_dl.viewing.reading import Span, number_of, text_of
from otel_dl.viewing.warmup import Work

MOST: Final = 1_000
"""Functions that are told apart in a run; further ones are one."""
REASONS: Final = 32
"""Reasons that are told apart of a function; further ones are only counted among its recompilations."""

_RESUMED: Final = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+$")
"""What torch calls the rest of a function after a graph break."""
_WHICH: Final = re.compile(r"^\d+/\d+: ")
"""Of which earlier compilation the condition was that does not hold."""


@dataclasses.dataclass
class Function:
    """A function that torch.compile compiled, with what follows its graph breaks and with its backward."""

    name: str
    file: str
    count: int = 0
    total_ns: int = 0
    recompilations: int = 0
    """Of its forward: the backward of one comes with it."""
    graph_breaks: int = 0
    failed: int = 0
    reasons: Counter[str] = dataclasses.field(default_factory=Counter[str])


class Compilations(NamedTuple):
    compiled: Work
    recompilations: int
    graph_breaks: int
    cache: Mapping[str, int]
    """`hit`, `miss`, `bypass` → how many."""
    functions: Sequence[Function]
    """Those that took longest first."""
    autotuned: Work
    captured: Work


class Collector:
    """Takes the spans of one run in any order."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], Function] = {}
        self._cache: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()

    def add(self, span: Span) -> None:
        if span.name not in (SpanName.COMPILE, SpanName.AUTOTUNE, SpanName.CAPTURE):
            return
        self._counts[span.name] += 1
        self._totals[span.name] += span.duration_ns
        if span.name != SpanName.COMPILE:
            return
        function = self._function(span)
        function.count += 1
        function.total_ns += span.duration_ns
        function.failed += span.failed
        function.graph_breaks += number_of(span, "dl.compile.graph_breaks")
        cache = text_of(span, "dl.compile.cache")
        if cache:
            self._cache[cache] += 1
        # Of a backward no breaks are told: that tells it apart.
        if span.attributes.get("dl.compile.recompiled") and "dl.compile.graph_breaks" in span.attributes:
            function.recompilations += 1
            reason = _WHICH.sub("", text_of(span, "dl.compile.reason"))
            if reason and (reason in function.reasons or len(function.reasons) < REASONS):
                function.reasons[reason] += 1

    def _function(self, span: Span) -> Function:
        name, file = text_of(span, "code.function.name"), text_of(span, "code.file.path")
        prefix, _, last = name.rpartition(".")
        resumed = _RESUMED.match(last)
        if resumed:
            name = f"{prefix}.{resumed[1]}" if prefix else resumed[1]
        key = name, file
        if key not in self._functions and len(self._functions) >= MOST:
            key = "others", ""
        return self._functions.setdefault(key, Function(*key))

    def result(self) -> Compilations:
        functions = sorted(self._functions.values(), key=lambda function: -function.total_ns)
        return Compilations(
            compiled=self._work(SpanName.COMPILE),
            recompilations=sum(function.recompilations for function in functions),
            graph_breaks=sum(function.graph_breaks for function in functions),
            cache=self._cache,
            functions=functions,
            autotuned=self._work(SpanName.AUTOTUNE),
            captured=self._work(SpanName.CAPTURE),
        )

    def _work(self, name: str) -> Work:
        return Work(self._counts[name], self._totals[name])
