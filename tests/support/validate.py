"""Whether spans are what the vocabulary and the derivation of ids promise, whoever wrote them.

`validate` takes spans as `otel_dl.viewing.reading` gives them; `from_sdk` and `from_receiver` make such of others. Its
answer is a list of sentences, empty where nothing is wrong. Ids are computed here anew, from what the spans say.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

from otel_dl import semconv
from otel_dl.semconv import ATTRIBUTES, BY_NAME, FIRST_SPANS, RESOURCE, Attribute, KeepReason, SpanName, TraceKind
from otel_dl.viewing.reading import Span

_NAMES = {value for name, value in vars(SpanName).items() if name.isupper()} | semconv.CONVOLUTIONS
_REASONS = {value for name, value in vars(KeepReason).items() if name.isupper()}
_KINDS = {
    SpanName.STARTUP: TraceKind.RUN,
    SpanName.STEP: TraceKind.STEP,
    SpanName.EVAL: TraceKind.EVAL,
    SpanName.FETCH: TraceKind.BATCH,
    SpanName.STALL: TraceKind.STALL,
}
_ORDINALS = range(1, 2_100)
_EVALUATIONS = range(10_000)
OF_TRACE = 10_000
"""Spans of a step's trace at most."""


def from_sdk(span: Any) -> Span:
    """Of a `ReadableSpan`."""
    return Span(
        trace_id=f"{span.context.trace_id:032x}",
        span_id=f"{span.context.span_id:016x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent is not None else "",
        name=span.name,
        start_ns=span.start_time,
        end_ns=span.end_time,
        attributes=dict(span.attributes or {}),
        resource=dict(span.resource.attributes),
        scope=span.instrumentation_scope.name,
        failed=not span.status.is_unset,
        links=tuple((f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links),
    )


def from_receiver(span: Any) -> Span:
    """Of a `support.receiver.Span`."""
    return Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        name=span.name,
        start_ns=span.start,
        end_ns=span.end,
        attributes=span.attributes,
        resource=span.resource,
        scope=span.scope,
        failed=span.status == 2,
        links=tuple((link.trace_id, link.span_id) for link in span.links),
    )


def validate(spans: Iterable[Span], *, whole: bool = True, loader_in_a_thread: bool = False) -> list[str]:
    """What is wrong. `whole`: no span of these runs is missing. `loader_in_a_thread`: batches may be older than the
    step that took them."""
    spans = list(spans)
    problems: list[str] = []
    for span in spans:
        if span.scope == semconv.SCOPE:
            problems += _named(span, _words(span))
        if span.scope in (semconv.SCOPE, semconv.USER_SCOPE):
            problems += _named(span, _resource(span))
    problems += _ids(spans)
    problems += _parents(spans, loader_in_a_thread)
    problems += _batches(spans, whole)
    problems += _ranks(spans, whole)
    if whole:
        problems += _steps(spans)
    return problems


def _named(span: Span, problems: Iterable[str]) -> Iterator[str]:
    for problem in problems:
        yield f"{span.name} {span.trace_id[:8]}/{span.span_id[:8]}: {problem}"


def _in_worker(span: Span) -> bool:
    return span.name == SpanName.WORKER or (span.name == SpanName.FETCH and not span.parent_id)


def is_first(span: Span) -> bool:
    return span.name in FIRST_SPANS or (span.name == SpanName.FETCH and not span.parent_id)


# Names, attributes, resource.


def _words(span: Span) -> Iterator[str]:
    if span.name not in _NAMES:
        yield "the name is not in the vocabulary"
    if span.end_ns < span.start_ns:
        yield "it ends before it begins"
    for name, value in span.attributes.items():
        known = BY_NAME.get(name)
        if known is None:
            yield f"{name} is not in the vocabulary"
        elif not _belongs(known, span):
            yield f"{name} does not belong here"
        elif not _has_type(value, known.kind):
            yield f"{name} is {value!r}, not of type {getattr(known.kind, '__name__', known.kind)}"
    for known in ATTRIBUTES:
        if known.built and _belongs(known, span) and known.name not in span.attributes:
            yield f"{known.name} is missing"
    if ("error.type" in span.attributes) != span.failed and span.name != SpanName.STALL:  # it may get over it
        yield "error.type and the status disagree"
    if is_first(span):
        yield from _first(span)


def _first(span: Span) -> Iterator[str]:
    said = span.attributes
    if said.get("dl.keep.reason") not in _REASONS:
        yield f"dl.keep.reason is {said.get('dl.keep.reason')!r}"
    if said.get("dl.keep") is not (said.get("dl.keep.reason") != KeepReason.HEAD):
        yield "dl.keep and dl.keep.reason disagree"
    if said.get("dl.trace.kind") != _KINDS.get(span.name):
        yield f"dl.trace.kind is {said.get('dl.trace.kind')!r}"
    for name in ("dl.run.id", "dl.rank", "dl.local_rank", "dl.world_size"):
        if said.get(name) != span.resource.get(name):
            yield f"{name} is not that of the resource"


def _belongs(attribute: Attribute, span: Span) -> bool:
    return span.name in attribute.on or ("first" in attribute.on and is_first(span))


def _has_type(value: Any, kind: Any) -> bool:
    if isinstance(kind, type):
        return type(value) is kind
    items = {"list[str]": str, "list[int]": int}[kind]
    return isinstance(value, (list, tuple)) and all(type(item) is items for item in value)


def _resource(span: Span) -> Iterator[str]:
    resource = span.resource
    for name, kind in RESOURCE.items():
        if type(resource.get(name)) is not kind:
            yield f"{name} of the resource is {resource.get(name)!r}"
    worker = resource.get("dl.worker.id")
    in_worker = _in_worker(span)
    if in_worker and (type(worker) is not int or worker != span.attributes.get("dl.worker.id")):
        yield f"dl.worker.id of the resource is {worker!r}"
    if in_worker and resource.get("process.pid") != span.attributes.get("dl.worker.pid"):
        yield "process.pid of the resource is not the worker's"
    if not in_worker and worker is not None:
        yield "the resource names a worker"
    instance = f"{resource.get('dl.run.id')}/{resource.get('dl.rank')}" + (f"/{worker}" if in_worker else "")
    if resource.get("service.instance.id") != instance:
        yield f"service.instance.id of the resource is {resource.get('service.instance.id')!r}"


# Ids.


def digest(*parts: object) -> str:
    return blake2b("\0".join(str(part) for part in parts).encode(), digest_size=16).hexdigest()


def _ids(spans: list[Span]) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    for span in spans:
        if (span.trace_id, span.span_id) in seen:
            yield from _named(span, ["there is another one with its ids"])
        seen.add((span.trace_id, span.span_id))
        if span.scope == semconv.SCOPE and is_first(span):
            yield from _named(span, _first_ids(span))
    yield from _ordinals(spans)


def _first_ids(span: Span) -> Iterator[str]:
    run, rank = span.resource.get("dl.run.id"), span.resource.get("dl.rank")
    if span.name == SpanName.STEP:
        step = span.attributes.get("dl.step")
        trace_id, span_id = digest(run, "step", step), digest(run, "step", step, rank)[:16]
        if span.trace_id == digest(run, "step", step, rank):
            trace_id = span.trace_id  # a trace a rank: see `_ranks`
    elif span.name == SpanName.STARTUP:
        trace_id = digest(run, "run") if not span.parent_id else span.trace_id
        span_id = digest(run, "run", rank)[:16]
    elif span.name == SpanName.STALL:
        pid = span.resource.get("process.pid")
        found = [ids for n in _ORDINALS if (ids := digest(run, "stall", rank, pid, n)) == span.trace_id]
        trace_id = found[0] if found else "one of a stall"
        span_id = trace_id[:16]
    elif span.name == SpanName.EVAL:
        found = [ids for n in _EVALUATIONS if (ids := digest(run, "eval", rank, n)) == span.trace_id]
        trace_id = found[0] if found else "one of an evaluation"
        span_id = trace_id[:16]
    else:
        return  # of a worker: derived from a nonce that no span says
    if span.trace_id != trace_id:
        yield f"its trace id is not {trace_id}"
    if span.span_id != span_id:
        yield f"its span id is not {span_id}"
    if span.parent_id and span.name in (SpanName.EVAL, SpanName.STALL):
        yield "it has a parent"


def _ordinals(spans: list[Span]) -> Iterator[str]:
    """Below the first span: H(trace, rank, pid, ordinal in the trace)."""
    known: dict[tuple[Any, ...], set[str]] = {}
    parents = {
        (span.resource.get("dl.run.id"), span.resource.get("dl.rank")): span.resource.get("process.pid")
        for span in spans
        if span.scope == semconv.SCOPE and not _in_worker(span)
    }
    for span in spans:
        if span.scope not in (semconv.SCOPE, semconv.USER_SCOPE) or (span.scope == semconv.SCOPE and is_first(span)):
            continue
        rank, pid = span.resource.get("dl.rank"), span.resource.get("process.pid")
        # A worker's life is told by its parent.
        pid = parents.get((span.resource.get("dl.run.id"), rank)) if span.name == SpanName.WORKER else pid
        place = span.trace_id, rank, pid
        if place not in known:
            known[place] = {digest(*place, ordinal)[:16] for ordinal in _ORDINALS}
        if span.span_id not in known[place]:
            yield from _named(span, ["its span id is not derived from its trace, rank, pid and an ordinal"])


# Relations.


def _parents(spans: list[Span], loader_in_a_thread: bool) -> Iterator[str]:
    by_ids = {(span.trace_id, span.span_id): span for span in spans}
    for span in spans:
        if span.scope not in (semconv.SCOPE, semconv.USER_SCOPE) or is_first(span):
            continue
        parent = by_ids.get((span.trace_id, span.parent_id))
        if parent is None:
            yield from _named(span, ["its parent is not there"])
            continue
        if span.name == SpanName.WORKER or parent.name == SpanName.STARTUP:
            continue  # a worker's life began before the step that it ended in; the run's trace has no end of its own
        if span.name in semconv.COLLECTIVES and (parent.name == SpanName.STARTUP or span.start_ns <= parent.end_ns):
            continue  # outside any step; or issued in a phase that did not wait for it
        older = loader_in_a_thread and span.name == SpanName.NEXT
        if span.end_ns > parent.end_ns or (span.start_ns < parent.start_ns and not older):
            yield from _named(span, [f"it is not within its parent {parent.name}"])


def _ranks(spans: list[Span], whole: bool) -> Iterator[str]:
    """Rank 0's first span is the root of a trace that ranks share, and the others' are its children. Where ranks have a
    trace each, they link to rank 0's."""
    by_ids = {(span.trace_id, span.span_id): span for span in spans}
    ranks: dict[Any, set[Any]] = defaultdict(set)
    of_trace: Counter[str] = Counter()
    for span in spans:
        ranks[span.resource.get("dl.run.id")].add(span.resource.get("dl.rank"))
        of_trace[span.trace_id] += span.scope == semconv.SCOPE
    for span in spans:
        if span.scope != semconv.SCOPE or span.name not in (SpanName.STEP, SpanName.STARTUP):
            continue
        run, rank, step = span.resource.get("dl.run.id"), span.resource.get("dl.rank"), span.attributes.get("dl.step")
        shared = len(ranks[run]) > 1
        if span.name == SpanName.STEP and of_trace[span.trace_id] > OF_TRACE:
            yield from _named(span, [f"its trace has {of_trace[span.trace_id]} spans"])
        root = digest(run, "step", step, 0) if span.name == SpanName.STEP else digest(run, "run", 0)
        if not rank:
            if span.name == SpanName.STEP and span.parent_id:
                yield from _named(span, ["it has a parent, and is rank 0's"])
        elif span.name == SpanName.STEP and span.trace_id == digest(run, "step", step, rank):
            if span.parent_id or (root, root[:16]) not in span.links:
                yield from _named(span, ["it has a trace of its own, and no link to rank 0's"])
        elif span.parent_id not in ("", root[:16]) and (shared or span.name == SpanName.STEP):
            yield from _named(span, ["its parent is not rank 0's"])
        elif shared and not span.parent_id:
            yield from _named(span, ["it shares a run with other ranks, and has no parent"])
        elif shared and whole and (span.trace_id, span.parent_id) not in by_ids:
            yield from _named(span, ["rank 0's is not there"])


def _batches(spans: list[Span], whole: bool) -> Iterator[str]:
    """A `dataloader.next` and its fetch in a worker link to each other, and say the same of the batch."""
    by_ids = {(span.trace_id, span.span_id): span for span in spans}
    for span in spans:
        if span.scope != semconv.SCOPE or span.name not in (SpanName.NEXT, SpanName.FETCH):
            continue
        if span.name == SpanName.FETCH and span.parent_id:
            continue
        other_name = SpanName.FETCH if span.name == SpanName.NEXT else SpanName.NEXT
        if whole and span.name == SpanName.NEXT and "dl.fetch.duration_ms" in span.attributes and not span.links:
            yield from _named(span, ["it has no link to its fetch"])
        for link in span.links:
            other = by_ids.get(link)
            if other is None:
                if whole:
                    yield from _named(span, ["what it links to is not there"])
            elif other.name != other_name:
                yield from _named(span, [f"it links to a {other.name}"])
            elif (span.trace_id, span.span_id) not in other.links:
                yield from _named(span, [f"the {other.name} that it links to does not link back"])
            else:
                yield from _named(span, _same_batch(span, other))


def _same_batch(span: Span, other: Span) -> Iterator[str]:
    for name in ("dl.loader.id", "dl.batch.index", "dl.worker.id", "dl.worker.pid", "dl.worker.start_method"):
        if span.attributes.get(name) != other.attributes.get(name):
            yield f"{name} is not that of the {other.name} that it links to"
    if span.name == SpanName.NEXT:
        milliseconds = span.attributes.get("dl.fetch.duration_ms", -1)
        if abs(milliseconds - other.duration_ns / 1e6) > 1e-3:
            yield "dl.fetch.duration_ms is not how long its fetch took"


def _kept_late(step: Span) -> bool:
    return step.attributes.get("dl.keep.reason") in (KeepReason.PEER, KeepReason.SLOW)


def _steps(spans: list[Span]) -> Iterator[str]:
    """Each `train.step` links to the run's trace, and to the former kept step."""
    steps: dict[tuple[Any, Any], list[Span]] = defaultdict(list)
    runs = {(s.resource.get("dl.run.id"), s.resource.get("dl.rank")): s for s in spans if s.name == SpanName.STARTUP}
    for span in spans:
        if span.name == SpanName.STEP:
            run = span.resource.get("dl.run.id"), span.resource.get("dl.rank")
            startup = runs.get(run)
            run_trace = startup.trace_id if startup is not None else digest(run[0], "run")
            if (run_trace, digest(run[0], "run", run[1])[:16]) not in span.links:
                yield from _named(span, ["it has no link to its run"])
            steps[run].append(span)
    for kept in steps.values():
        kept.sort(key=lambda span: span.start_ns)
        for place, (former, span) in enumerate(itertools.pairwise(kept)):
            # One that was kept for a peer was not kept yet when the next one was built.
            own = next((i for i in range(place, 0, -1) if not _kept_late(kept[i])), 0)
            if not any((other.trace_id, other.span_id) in span.links for other in kept[own : place + 1]):
                yield from _named(span, ["it has no link to the former kept step"])
            numbers = former.attributes.get("dl.step"), span.attributes.get("dl.step")
            if all(type(number) is int for number in numbers) and numbers != tuple(sorted(set(numbers))):
                yield from _named(span, ["its number is not higher than that of the step before"])
