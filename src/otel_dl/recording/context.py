"""The OpenTelemetry context during a step: a span that stands for the step while it is open, and for nothing after.

Nothing has to be taken back at the right moment: a context that outlives its step, because a user's `with` put it
back, or a thread kept a copy, answers with what was there before the step.
"""

from __future__ import annotations

from typing import Final

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import (
    _SUPPRESS_INSTRUMENTATION_KEY,  # pyright: ignore[reportPrivateUsage]
    Context,
)
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags

_PLAIN_SUPPRESS_KEY: Final = "suppress_instrumentation"


class DerivedSpan(NonRecordingSpan):
    """A span of otel-dl's in the context: its ids are derived when somebody asks for them, and only while it is open.

    `outer` is the context that it covers.
    """

    def __init__(self, trace_id: int, span_id: int, sampled: bool, outer: Context) -> None:
        flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
        super().__init__(SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags))
        self.outer = outer
        self.open = True

    def get_span_context(self) -> SpanContext:
        if self.open:
            return super().get_span_context()
        return trace.get_current_span(self.outer).get_span_context()


def users_span() -> SpanContext | None:
    """The context of the recording span of the user's that is current, None where there is none."""
    span = trace.get_current_span()
    return span.get_span_context() if span.is_recording() else None


def attach(span: DerivedSpan) -> None:
    context_api.attach(trace.set_span_in_context(span, span.outer))


def detach(span: DerivedSpan) -> None:
    """Closes `span`, and takes it out of the context where it is still the current one."""
    span.open = False
    if trace.get_current_span() is span:
        context_api.attach(span.outer)


def outer_context() -> Context:
    """The current context without spans of ours that a user's `with` left behind."""
    context = context_api.get_current()
    span: Span = trace.get_current_span(context)
    while isinstance(span, DerivedSpan) and not span.open:
        context = span.outer
        span = trace.get_current_span(context)
    return context


def suppressed() -> bool:
    """Whether `suppress_instrumentation()` holds here (as `is_instrumentation_enabled()`, at a third of its cost)."""
    context = context_api.get_current()
    return bool(context.get(_SUPPRESS_INSTRUMENTATION_KEY) or context.get(_PLAIN_SUPPRESS_KEY))
