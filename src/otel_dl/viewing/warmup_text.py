"""One-time work as text: the rows of a summary."""

from __future__ import annotations

from collections.abc import Iterator

from otel_dl.semconv import SpanName
from otel_dl.viewing.summary import OTHER, PARTS
from otel_dl.viewing.warmup import Benchmark, Warmup, Work
from otel_dl.viewing.words import duration, plural


def rows(warmup: Warmup, total: int) -> Iterator[tuple[str, str]]:
    kinds = ", ".join(
        f"{kind} {duration(work.time_ns)} ({work.spans:,}{_in_evaluation(work)})"
        for kind, work in sorted(warmup.kinds.items(), key=lambda item: -item[1].time_ns)
    )
    parts = ", ".join(
        f"{PARTS.get(name, name) or OTHER} {duration(time_ns)}"
        for name, time_ns in sorted(warmup.parts.items(), key=lambda item: -item[1])
    )
    evaluated = any(work.evaluation for work in warmup.kinds.values())
    yield (
        "Warm-up",
        f"{duration(warmup.time_ns)} of one-time work, in {warmup.steps:,} of at least {total:,}"
        f" step{plural(total)}{' and in evaluation' if evaluated else ''}: {kinds}; in {parts}",
    )
    if warmup.predicted:
        yield "Warm-up", "what cuDNN tuned is predicted from the convolutions' keys, not observed"
    if warmup.benchmark is not None:
        yield "Benchmark", _benchmark(warmup.benchmark)


def _in_evaluation(work: Work) -> str:
    return f", {work.evaluation:,} of them in {SpanName.EVAL}" if work.evaluation else ""


def _benchmark(benchmark: Benchmark) -> str:
    words = (
        f"costs more than it brings, as shapes keep changing: {benchmark.keys:,} keys were tuned in"
        f" {benchmark.steps:,} of at least {benchmark.of:,} steps, which took {duration(benchmark.time_ns)}"
    )
    if benchmark.needed_ns is None or benchmark.steady_ns is None:
        words += "; no step found all its plans"
    else:
        words += (
            f"; it would have to save {duration(benchmark.needed_ns)} in each of the others, which take"
            f" {duration(benchmark.steady_ns)}"
        )
    return f"{words}. torch.backends.cudnn.benchmark = False ends it, and so do shapes that repeat (padding, drop_last)"
