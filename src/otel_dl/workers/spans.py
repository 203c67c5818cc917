"""The user's own spans in a worker: one road, the pipe.

Where otel-dl set up the SDK, spans made in a fetch are recorded whatever the sampler says, and go where the fetch goes.
Where somebody else did, their sampler decides, and their provider in the parent exports.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util._once import Once
from opentelemetry.util.types import Attributes

from otel_dl.recording.ids import SecretsIdGenerator
from otel_dl.workers import wire

if TYPE_CHECKING:
    from otel_dl.workers.loop import Worker

OPEN: Final = 4_096
"""Open spans that are told from those inherited at the fork at most."""
RESOURCES: Final = 16
"""Resources (of several providers) that are sent at most."""


class RelayProcessor(SpanProcessor):
    """Hands ended spans to the worker's pipe. A span that was begun before the fork is the parent's, and stays out."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._pid = os.getpid()
        self._begun: set[int] = set()
        self._resources: dict[int, tuple[int, Resource]] = {}
        """By id: (number, the resource itself, which keeps its id from being used again)."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if span.context is not None and len(self._begun) < OPEN:
            self._begun.add(span.context.span_id)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.context
        if context is None or context.span_id not in self._begun or os.getpid() != self._pid:
            return
        self._begun.discard(context.span_id)
        worker = self._worker
        batch = worker.batch if worker.carrier.own_sdk else None
        if batch is None and not context.trace_flags.sampled:
            return
        if batch is not None and not worker.room():
            return
        number = self._resource(span.resource)
        body = wire.encode_span(batch, number, span) if number is not None else None
        if (body is None or not worker.writer.write(wire.SPAN, body)) and batch is not None:
            worker.dropped += 1

    def _resource(self, resource: Resource) -> int | None:
        """The number under which the parent knows `resource`; None where it could not be told."""
        known = self._resources.get(id(resource))
        if known is not None:
            return known[0]
        if len(self._resources) == RESOURCES:
            return None
        worker = self._worker
        named = resource.merge(Resource({"dl.worker.id": worker.number}))
        if worker.carrier.own_sdk:
            named = worker.carrier.identity.resource(resource, worker.number)
        number = len(self._resources)
        if not worker.writer.write(wire.RESOURCE, wire.encode_resource(number, named)):
            return None
        self._resources[id(resource)] = (number, resource)
        return number

    def shutdown(self) -> None:
        return None

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


class FetchSampler(Sampler):
    """The SDK's own sampler, but in a fetch everything is recorded: it is held with the fetch in the parent."""

    def __init__(self, worker: Worker, inner: Sampler) -> None:
        self._worker = worker
        self._inner = inner

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        result = self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        if result.decision is Decision.DROP and self._worker.batch is not None:
            # A sampler that drops gives no attributes back (sdk/trace/sampling.py, 1.45).
            return SamplingResult(Decision.RECORD_ONLY, attributes, result.trace_state)
        return result

    def get_description(self) -> str:
        return self._inner.get_description()


class LazyProvider(trace.TracerProvider):
    """Becomes the SDK's provider at the first question: most workers never ask."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._provider: TracerProvider | None = None

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> trace.Tracer:
        return self._sdk().get_tracer(instrumenting_module_name, instrumenting_library_version, schema_url, attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._sdk(), name)

    def _sdk(self) -> TracerProvider:
        with self._lock:
            if self._provider is None:
                resource = Resource(self._worker.carrier.resource)
                self._provider = TracerProvider(
                    resource=self._worker.carrier.identity.resource(resource, self._worker.number),
                    shutdown_on_exit=False,
                    id_generator=SecretsIdGenerator(),
                )
                self._provider.sampler = FetchSampler(self._worker, self._provider.sampler)
                self._provider.add_span_processor(RelayProcessor(self._worker))
            return self._provider


def route(worker: Worker) -> None:
    """Sends what the worker's provider records through the pipe, where the parent can export it.

    A provider that the user's code sets up later, in the worker's init function, is left alone.
    """
    carrier = worker.carrier
    if not (carrier.own_sdk or carrier.foreign_sdk):
        return
    provider: Any = trace._TRACER_PROVIDER  # pyright: ignore[reportPrivateUsage]
    if isinstance(provider, TracerProvider):
        _reroute(worker, provider)
    elif provider is None and carrier.own_sdk:
        # Not through `set_tracer_provider`, which works once: that once is the user's.
        trace._TRACER_PROVIDER = LazyProvider(worker)  # pyright: ignore[reportPrivateUsage]
    if carrier.own_sdk:
        # Inherited by fork, it was used up by otel-dl, not by the user.
        trace._TRACER_PROVIDER_SET_ONCE = Once()  # pyright: ignore[reportPrivateUsage]


def _reroute(worker: Worker, provider: Any) -> None:
    several: Any = getattr(provider, "_active_span_processor", None)
    processors: tuple[Any, ...] = getattr(several, "_span_processors", ())
    kept = tuple(p for p in processors if not _exports(p))
    if len(kept) == len(processors):
        return
    several._span_processors = (*kept, RelayProcessor(worker))
    if worker.carrier.own_sdk:
        provider.sampler = sampler = FetchSampler(worker, provider.sampler)
        tracers: dict[Any, Any] = getattr(provider, "_tracers", {})
        for tracer in tracers.values():
            with contextlib.suppress(AttributeError):
                tracer.sampler = sampler


def _exports(processor: Any) -> bool:
    """Whether it is one that exports what has ended: the SDK's, or ours."""
    return isinstance(processor, (BatchSpanProcessor, SimpleSpanProcessor)) or type(processor).__module__.startswith(
        "otel_dl."
    )
