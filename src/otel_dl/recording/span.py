"""One span: a `ReadableSpan` of the SDK's that was never a live one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from otel_dl import semconv
from otel_dl.recording.failure import Failure
from otel_dl.version import __version__

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)

SCOPE: Final = InstrumentationScope(semconv.SCOPE, __version__, semconv.SCHEMA_URL)
USER_SCOPE: Final = InstrumentationScope(semconv.USER_SCOPE, __version__)

_MOST_LINKS: Final = 4
"""Of one span: run, former kept step, a span of the user's, rank 0's step."""

_UNSET: Final = Status(StatusCode.UNSET)
"""One for all: what waits for the exporter is work for the garbage collector."""

_bounded_list: Callable[[int | None, Sequence[Link]], Sequence[Link]] = BoundedList.from_seq  # pyright: ignore

Attributes = dict[str, Any]


def context_of(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)


def narrow(limits: SpanLimits | None) -> SpanLimits | None:
    """`limits` where a span of ours may exceed them; the default ones it never does."""
    if limits is None:
        return None
    attributes: int | None = limits.max_span_attributes
    links: int | None = limits.max_links
    exceeded = (
        limits.max_span_attribute_length is not None
        or (attributes is not None and attributes < len(semconv.ATTRIBUTES))
        or (links is not None and links < _MOST_LINKS)
    )
    return limits if exceeded else None


def make_span(
    name: str, context: SpanContext, parent: SpanContext | None, start: int, end: int, attributes: Attributes,
    error: Failure | None, links: Sequence[Link], resource: Resource, scope: InstrumentationScope, words: str,
    limits: SpanLimits | None,
) -> ReadableSpan:  # fmt: skip
    """`start` and `end`: epoch ns. `words`: what otel-dl knows of the error. `limits`: see `narrow`."""
    if error is not None and error.type:
        attributes["error.type"] = error.type
        if error.attributes:
            attributes |= error.attributes
    bounded = attributes
    if limits is not None:
        # As the SDK's own spans are bounded, and what is dropped counted.
        bounded = BoundedAttributes(
            limits.max_span_attributes, attributes, max_value_len=limits.max_span_attribute_length
        )
        links = _bounded_list(limits.max_links, links)
    return ReadableSpan(
        name,
        context,
        parent,
        resource,
        bounded,
        (),
        links,
        SpanKind.INTERNAL,
        status=_UNSET if error is None else Status(StatusCode.ERROR, _said(words, error)),
        start_time=start,
        end_time=end,
        instrumentation_scope=scope,
    )


def _said(words: str, error: Failure) -> str | None:
    """A failed span's description: what otel-dl knows, then the exception's message."""
    return "; ".join(filter(None, (words, error.message))) or None
