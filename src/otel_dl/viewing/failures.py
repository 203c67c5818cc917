"""What failed, each thing once: an exception leaves the fetch, the wait for it, the phase and the step, and ends a
worker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from otel_dl.semconv import SpanName
from otel_dl.viewing.reading import Span, number_of, text_of

MOST: Final = 20_000
"""Failed spans that are told apart in a run; further ones are only counted."""


class _Failed(NamedTuple):
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    rank: int
    error_type: str
    pid: int
    """Of the worker whose business it is; 0: of none."""
    batch: str
    links: Collection[str]
    message: str


class Collector:
    """Takes the failed spans of one run in any order, but for `train.step`."""

    def __init__(self) -> None:
        self._failed: list[_Failed] = []
        self._more: Counter[tuple[str, str]] = Counter()

    def add(self, span: Span) -> None:
        if len(self._failed) >= MOST:
            self._more[span.name, text_of(span, "error.type")] += 1
            return
        self._failed.append(
            _Failed(
                span.name, span.trace_id, span.span_id, span.parent_id, number_of(span, "dl.rank"),
                text_of(span, "error.type"), number_of(span, "dl.worker.pid"), _batch(span),
                [link for _, link in span.links], span.message,
            )
        )  # fmt: skip

    def result(
        self, steps: Mapping[tuple[str, int], tuple[str, str]], died: Collection[str]
    ) -> tuple[Mapping[str, str], Counter[tuple[str, str]]]:
        """`steps`: (trace, rank) of each failed step → its span, its error; `died`: what is told of workers.

        Of those steps where in them it failed, by their spans; and by name and error how many other spans failed.
        """
        of_step: defaultdict[str, list[_Failed]] = defaultdict(list)
        rest: list[_Failed] = []
        for failed in self._failed:
            step, error = steps.get((failed.trace_id, failed.rank), ("", ""))
            if step and error == failed.error_type and failed.name != SpanName.WORKER:
                of_step[step].append(failed)
            elif not (failed.name == SpanName.WORKER and failed.message in died):
                rest.append(failed)
        waits = [each for found in of_step.values() for each in found] + [e for e in rest if e.name == SpanName.NEXT]
        fetched = {(link, wait.error_type): wait for wait in waits for link in wait.links}
        samples: dict[str, str] = {}
        workers: set[tuple[int, int, str]] = {(each.rank, each.pid, each.error_type) for each in waits if each.pid}
        others: Counter[tuple[str, str]] = Counter(self._more)
        for failed in sorted(rest, key=lambda each: each.name == SpanName.WORKER):
            wait = fetched.get((failed.span_id, failed.error_type)) if failed.name == SpanName.FETCH else None
            if wait is not None:
                samples[wait.span_id] = failed.batch
            elif failed.name != SpanName.WORKER or (failed.rank, failed.pid, failed.error_type) not in workers:
                others[failed.name, failed.error_type] += 1
                workers |= {(failed.rank, failed.pid, failed.error_type)} if failed.pid else set()
        return {step: _where(step, found, samples) for step, found in of_step.items()}, others


def _where(step: str, found: Iterable[_Failed], samples: Mapping[str, str]) -> str:
    """ "dataloader.next of batch 9 by worker 1, samples 36-39"."""
    first = sorted(found, key=lambda each: (each.name != SpanName.NEXT, each.parent_id != step))[0]
    batch = samples.get(first.span_id, first.batch) if first.name == SpanName.NEXT else ""
    return f"{first.name} of {batch}" if batch else first.name


def _batch(span: Span) -> str:
    said = span.attributes
    if "dl.batch.index" not in said:
        return ""
    worker = f" by worker {said['dl.worker.id']}" if "dl.worker.id" in said else ""
    samples = f", samples {said['dl.sample.indices']}" if "dl.sample.indices" in said else ""
    return f"batch {said['dl.batch.index']}{worker}{samples}"
