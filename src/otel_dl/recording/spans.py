"""Spans out of records: what a kept step, a stretch of evaluation, a batch or the start of the run looks like."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from time import time_ns
from typing import TYPE_CHECKING, Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext

from otel_dl.recording import ids
from otel_dl.recording.collectives import Collective
from otel_dl.recording.collectives import attributes as collective_attributes
from otel_dl.recording.details import Detail, Settled, settle
from otel_dl.recording.failure import Failure
from otel_dl.recording.ranks import Stall
from otel_dl.recording.records import (
    NAMES,
    Batch,
    Evaluation,
    Event,
    Fetch,
    GroupChange,
    Kind,
    OwnSpan,
    Record,
    RunEnded,
    Step,
    WorkerLife,
    to_epoch_ns,
)
from otel_dl.recording.reduced import reduce
from otel_dl.recording.span import SCOPE, USER_SCOPE, Attributes, context_of, make_span, narrow
from otel_dl.semconv import KeepReason, SpanName, TraceKind

if TYPE_CHECKING:
    from otel_dl.recording.identity import Identity
    from otel_dl.recording.run import Run

_FORMER_STEPS: Final = 64

OF_TRACE: Final = 10_000
"""Spans of ours in the trace of a step at most."""
_LEAST_RECORDS: Final = 16

Take = Callable[[tuple[str, int, int]], "Fetch | None"]
Ready = Callable[[tuple[str, int, int], int], int]


class SpanBuilder:
    """Builds spans for one run, in one process. Times of records are readings of `clock`; spans have epoch ns."""

    def __init__(
        self,
        run: Run,
        resource: Resource,
        take: Take,
        pid: int,
        ready: Ready = lambda key, at: 0,
        limits: SpanLimits | None = None,
    ) -> None:
        self._run = run
        self._base = resource
        self._resources: dict[tuple[Identity, int | None, int], Resource] = {}
        self._take = take
        self._ready = ready
        self._pid = pid
        self._be(run.identity)
        self.of_run_so_far = 0
        """Spans of the run's trace so far, below its first one."""
        self._own: dict[int, SpanContext] = {}
        """Spans of the user's in it, by their number: those that were built, and those that lie around such."""
        self._limits = narrow(limits)
        self._kept: list[tuple[int, SpanContext]] = []
        """The latest kept steps, by number."""

    def _be(self, identity: Identity) -> None:
        """What is built next is of the time when the process was this."""
        self._identity = identity
        self._resource = self._resource_of(None, self._pid)

    def _resource_of(self, worker: int | None, pid: int) -> Resource:
        key = self._identity, worker, pid
        resource = self._resources.get(key)
        if resource is None:
            if len(self._resources) > 256:
                self._resources.clear()
            resource = self._resources[key] = self._identity.resource(self._base, worker, pid)
        return resource

    # Traces.

    def step(self, step: Step, lives: Sequence[WorkerLife] = ()) -> list[ReadableSpan]:
        """The spans of a kept step: `train.step` first, then its phases by start, then its batches' traces, then the
        `lives` of workers that ended in it."""
        run = self._run
        identity = step.identity or run.identity
        self._be(identity)
        context = context_of(*run.step_ids(step.number, identity))
        parent: SpanContext | None = None
        settled = settle(Record._make(record) for record in step.records)
        records, collectives, reduced = reduce(settled.records, _by_start(step), self._room(identity))
        settled = settled._replace(records=records)
        # The context of the run's trace; the former kept step; a span of the user's around the step.
        links = [Link(context_of(*run.run_ids()))]
        former = self._former(step.number, context)
        if former is not None:
            links.append(Link(former))
        if step.link is not None:
            links.append(Link(step.link))
        if identity.shared and identity.rank:
            zeros = context_of(*run.step_ids(step.number, identity, rank=0))
            if run.one_trace(identity):
                parent = zeros
            else:
                links.append(Link(zeros))
        first = step.number == 0
        attributes = self._first(TraceKind.STEP, step.reason, step.dropped) | settled.sums.get(0, {})
        attributes |= run.device.of_step(step.start, step.end)
        attributes["dl.step"] = step.number
        attributes["is_warmup"] = first or step.warm
        epoch = next((record.batch[1] for record in records if record.batch is not None), None)
        if epoch is not None:
            attributes["dl.epoch"] = epoch
        if step.joined:
            attributes["dl.joined"] = True
        if step.global_step is not None:
            attributes["dl.global_step"] = step.global_step
        if run.foreign_provider and step.span is not None and not step.head:
            attributes["dl.user_spans"] = "not_recorded"
        if reduced:
            attributes["dl.detail.reduced"] = reduced
        spans = [
            self._span(SpanName.STEP, context, parent, step.start, step.end, attributes, step.error, links,
                       words=step.words)
        ]  # fmt: skip
        ordinal = self._phases(
            context, settled, first, step.reason, spans, step.words, collectives, max(step.end, step.start)
        )
        for life in lives:
            ordinal += 1
            spans.append(self._life(life, context, ordinal))
        return spans

    def evaluation(self, evaluation: Evaluation) -> list[ReadableSpan]:
        """`train.eval`, from its first record's start to its last one's end, with what ran in it."""
        self._be(evaluation.identity)
        context = context_of(*self._run.evaluation_ids(evaluation))
        records = [Record._make(record) for record in evaluation.records]
        if not records:
            return []
        collectives = evaluation.collectives
        for one in collectives:  # the latest of which may have ended since, or be known since
            evaluation.lasts(one.start, one.end)
        start, end = evaluation.start, evaluation.end
        settled = settle(records)
        attributes = self._first(TraceKind.EVAL, evaluation.reason, evaluation.dropped) | settled.sums.get(0, {})
        links = [Link(context_of(*self._run.run_ids()))]
        spans = [self._span(SpanName.EVAL, context, None, start, end, attributes, evaluation.error, links)]
        self._phases(context, settled, False, evaluation.reason, spans, "", collectives, end)
        return spans

    def fetch(self, fetch: Fetch, reason: str, batch: Batch | None, returned: SpanContext | None) -> list[ReadableSpan]:
        """The trace of a batch that a worker read, linked to the `dataloader.next` that returned it, if it is known,
        with the user's own spans that were made meanwhile."""
        context = context_of(*ids.batch_ids(fetch.nonce, fetch.round, fetch.place))
        attributes = self._first(TraceKind.BATCH, reason, fetch.dropped)
        if batch is not None:
            attributes |= batch.attributes()
        else:
            attributes |= {"dl.batch.index": fetch.place, "dl.worker.id": fetch.worker, "dl.worker.pid": fetch.pid}
        if fetch.samples:
            attributes["dl.sample.indices"] = fetch.samples
        links = [Link(returned)] if returned is not None else []
        span = self._span(
            SpanName.FETCH, context, None, fetch.start, fetch.end, attributes, fetch.error, links,
            self._resource_of(fetch.worker, fetch.pid),
        )  # fmt: skip
        return [span, *fetch.spans]

    def startup(self, start: int, parts: dict[str, tuple[int, int]], error: Failure | None) -> list[ReadableSpan]:
        """`train.startup`: from `start` (epoch ns) to the end of the first step, or until now, with its `parts`."""
        run = self._run
        self._be(run.announce())
        context = context_of(*run.run_ids())
        links = [Link(context_of(*run.former))] if run.former is not None else ()
        parent = run.remote
        if self._identity.shared and self._identity.rank:
            parent = context_of(*run.run_ids(rank=0))
        end = time_ns() if run.first_step_end is None else to_epoch_ns(run.first_step_end)
        attributes = self._first(TraceKind.RUN, KeepReason.REQUESTED, 0)
        spans = [self._epoch_span(SpanName.STARTUP, context, parent, start, end, attributes, error, links)]
        for name, times in parts.items():
            self.of_run_so_far += 1
            child = context_of(context.trace_id, self._ordinal(context.trace_id, self.of_run_so_far))
            spans.append(self._epoch_span(name, child, context, *times, {}, None, ()))
        return spans

    def of_run(self, event: Event | Collective) -> ReadableSpan:
        """In the run's trace: `dataloader.start_workers`, a `dataloader.worker` that ended in no kept step, what makes
        and ends process groups, a collective outside any step, one-time work in none, a span of the user's in none,
        or `train.shutdown`."""
        if isinstance(event, Stall):
            return self._stall(event)
        self._be(self._run.announce())
        run = context_of(*self._run.run_ids())
        if isinstance(event, OwnSpan):
            parent = self._own_context(event.around, run) if event.around else run
            name = event.name.encode("utf-8", "replace").decode()
            context = self._own_context(event.number, run)
            return self._span(
                name, context, parent, event.start, event.end, {}, event.error, (), scope=USER_SCOPE
            )  # fmt: skip
        self.of_run_so_far += 1
        if isinstance(event, Collective):
            return self._collective(event, run, self.of_run_so_far, [], event.issued)
        if isinstance(event, WorkerLife):
            return self._life(event, run, self.of_run_so_far)
        if isinstance(event, Record):
            context = context_of(run.trace_id, self._ordinal(run.trace_id, self.of_run_so_far))
            return self._detail(event, context, run, [])
        if isinstance(event, GroupChange):
            context = context_of(run.trace_id, self._ordinal(run.trace_id, self.of_run_so_far))
            return self._span(
                event.name, context, run, event.start, event.end, event.attributes(), event.error, (),
                words=event.words,
            )  # fmt: skip
        context = context_of(run.trace_id, self._ordinal(run.trace_id, self.of_run_so_far))
        name = SpanName.SHUTDOWN if isinstance(event, RunEnded) else SpanName.START_WORKERS
        return self._span(name, context, run, event.start, event.end, event.attributes(), None, ())

    def _own_context(self, number: int, run: SpanContext) -> SpanContext:
        """Of the user's span with this number: one that lies in another is built before that."""
        context = self._own.get(number)
        if context is None:
            self.of_run_so_far += 1
            context = context_of(run.trace_id, self._ordinal(run.trace_id, self.of_run_so_far))
            self._own[number] = context
        return context

    def _stall(self, stall: Stall) -> ReadableSpan:
        """A trace of its own."""
        self._be(self._run.identity)
        identity = self._run.identity
        parts = (identity.run, TraceKind.STALL, identity.rank, self._pid, stall.ordinal)
        context = context_of(ids.trace_id(*parts), ids.span_id(*parts))
        attributes = self._first(TraceKind.STALL, KeepReason.REQUESTED, 0) | stall.attributes()
        error = Failure(stall.explained.error_type, "")
        links = [Link(context_of(*self._run.run_ids()))]
        return self._span(
            SpanName.STALL, context, None, stall.start, stall.end, attributes, error, links,
            words=stall.explained.words,
        )  # fmt: skip

    def _life(self, life: WorkerLife, parent: SpanContext, ordinal: int) -> ReadableSpan:
        return self._span(
            SpanName.WORKER, context_of(parent.trace_id, self._ordinal(parent.trace_id, ordinal)), parent,
            life.start, life.end, life.attributes(), life.error, [Link(context_of(*self._run.run_ids()))],
            self._resource_of(life.worker, life.pid), words=life.words,
        )  # fmt: skip

    # Their parts.

    def _phases(
        self, root: SpanContext, settled: Settled, warm: bool, reason: str, spans: list[ReadableSpan],
        words: str = "", collectives: Sequence[Collective] = (), end: int = 0,
    ) -> int:  # fmt: skip
        """Appends them to `spans`; the number of the last one in this trace, which ends at `end`. `warm`: all of it is
        warm-up."""
        around: list[tuple[Record, SpanContext]] = []
        ordinal = 0
        issued = sorted(collectives, key=_issued_at, reverse=True)
        for record in settled.records:
            while issued and issued[-1].start < record.start:
                ordinal += 1
                spans.append(self._collective(issued.pop(), root, ordinal, around, end))
            ordinal += 1
            context = context_of(root.trace_id, self._ordinal(root.trace_id, ordinal))
            if isinstance(record.kind, Detail):
                spans.append(self._detail(record, context, root, around))
                continue
            while around and record.end > around[-1][0].end:
                around.pop()
            parent = around[-1][1] if around else root
            if record.kind == Kind.NEXT_ELSEWHERE:
                parent = root  # at the same time as a phase of this thread, not within it
            else:
                around.append((record, context))
            attributes: Attributes = {}
            links: Sequence[Link] = ()
            fetched: Fetch | None = None
            if type(record.kind) is str:
                # An exporter would refuse the whole batch for a lone surrogate.
                name, scope = record.kind.encode("utf-8", "replace").decode(), USER_SCOPE
            else:
                name, scope = NAMES[int(record.kind)], SCOPE
                attributes |= settled.sums.get(id(record), {}) | self._run.device.between(record.start, record.end)
                attributes["is_warmup"] = warm or id(record) in settled.warm
            batch = Batch._make(record.batch) if record.batch is not None else None
            if batch is not None:
                attributes |= batch.attributes()
                if batch.worker is not None:
                    key = (batch.nonce, batch.round, batch.place)
                    fetched = self._take(key)
                    if fetched is not None:
                        ahead = self._ready(key, record.start)
                        attributes["dl.queue.depth"] = ahead + (fetched.end <= record.start)
                        attributes["dl.fetch.duration_ms"] = (fetched.end - fetched.start) / 1e6
                        attributes["dl.fetch.ready_ms"] = max(0, record.start - fetched.end) / 1e6
                        links = [Link(context_of(*ids.batch_ids(batch.nonce, batch.round, batch.place)))]
            span = self._span(
                name, context, parent, record.start, record.end, attributes, record.error, links, scope=scope,
                words=words if record.kind == Kind.NEXT else "",
            )  # fmt: skip
            spans.append(span)
            if batch is None:
                continue
            if fetched is not None:
                spans.extend(self.fetch(fetched, reason, batch, context))
            elif batch.worker is None:
                ordinal += 1
                child = context_of(root.trace_id, self._ordinal(root.trace_id, ordinal))
                spans.append(
                    self._span(
                        SpanName.FETCH, child, context, record.start, record.end, batch.attributes(),
                        record.error, (),
                    )
                )  # fmt: skip
        while issued:
            ordinal += 1
            spans.append(self._collective(issued.pop(), root, ordinal, around, end))
        return ordinal

    def _detail(
        self, record: Record, context: SpanContext, root: SpanContext, around: list[tuple[Record, SpanContext]]
    ) -> ReadableSpan:
        """Under the innermost phase that it lies in. Nothing lies in it."""
        detail = record.kind
        assert isinstance(detail, Detail)
        parent = next((phase for each, phase in reversed(around) if each.end >= record.end), root)
        attributes = detail.attributes()
        if detail.warm is not None:
            attributes["is_warmup"] = detail.warm
        return self._span(detail.name, context, parent, record.start, record.end, attributes, record.error, ())

    def _collective(
        self, collective: Collective, root: SpanContext, ordinal: int, around: list[tuple[Record, SpanContext]],
        last: int,
    ) -> ReadableSpan:  # fmt: skip
        """Under the phase in which it was issued: an asynchronous one may outlive it. Where its end was not seen, it
        is the phase's, or `last`."""
        while around and collective.start > around[-1][0].end:
            around.pop()
        parent = around[-1][1] if around else root
        end = collective.end or max(collective.start, around[-1][0].end if around else last)
        context = context_of(root.trace_id, self._ordinal(root.trace_id, ordinal))
        return self._span(
            collective.name, context, parent, collective.start, end, collective_attributes(collective),
            collective.failure, (),
        )  # fmt: skip

    def _first(self, kind: str, reason: str, dropped: int) -> Attributes:
        identity = self._identity
        attributes: Attributes = {}
        if identity.world_size > 1 and self._run.clock is not None:
            attributes["dl.clock.offset_ns"], attributes["dl.clock.error_ns"] = self._run.clock
        return attributes | {
            "dl.run.id": identity.run,
            "dl.run.attempt": identity.attempt,
            "dl.rank": identity.rank,
            "dl.local_rank": identity.local_rank,
            "dl.world_size": identity.world_size,
            "dl.trace.kind": kind,
            "dl.keep": reason != KeepReason.HEAD,
            "dl.keep.reason": reason,
            "otel_dl.dropped": dropped,
        }

    def _ordinal(self, trace_id: int, ordinal: int) -> int:
        return ids.span_id(f"{trace_id:032x}", self._identity.rank, self._pid, ordinal)

    def _room(self, identity: Identity) -> int:
        """Records of a step of which spans are built at most: one trace holds those of all ranks that share it."""
        ranks = identity.world_size if self._run.one_trace(identity) else 1
        return max(_LEAST_RECORDS, OF_TRACE // ranks - 2)

    def _former(self, number: int, context: SpanContext) -> SpanContext | None:
        """The kept step before this one. (Steps that a peer asked for come later than those after them.)"""
        place = bisect_left(self._kept, (number,))
        former = self._kept[place - 1][1] if place else None
        self._kept.insert(place, (number, context))
        if len(self._kept) > _FORMER_STEPS:
            del self._kept[0]
        return former

    def _span(
        self, name: str, context: SpanContext, parent: SpanContext | None, start: int, end: int,
        attributes: Attributes, error: Failure | None, links: Sequence[Link],
        resource: Resource | None = None, scope: InstrumentationScope = SCOPE, words: str = "",
    ) -> ReadableSpan:  # fmt: skip
        return make_span(
            name, context, parent, to_epoch_ns(start), to_epoch_ns(end), attributes, error, links,
            resource or self._resource, scope, words, self._limits,
        )  # fmt: skip

    def _epoch_span(
        self, name: str, context: SpanContext, parent: SpanContext | None, start: int, end: int,
        attributes: Attributes, error: Failure | None, links: Sequence[Link],
    ) -> ReadableSpan:  # fmt: skip
        return make_span(
            name, context, parent, start, end, attributes, error, links, self._resource, SCOPE, "", self._limits
        )


def _by_start(step: Step) -> Sequence[Collective]:
    return sorted([*step.collectives, *step.unseen], key=_issued_at) if step.unseen else step.collectives


def _issued_at(collective: Collective) -> int:
    return collective.start
