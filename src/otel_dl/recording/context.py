"""The OpenTelemetry context during a step: a span that stands for the step while it is open, and for nothing after.

Nothing has to be taken back at the right moment: a context that outlives its step, because a user's `with` put it
back, or a thread kept a copy, answers with what was there before the step. Ids are settled by the first question: while
nobody has asked, one span may stand for one ordinary step after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import (
    _RUNTIME_CONTEXT,  # pyright: ignore[reportPrivateUsage]
    _SUPPRESS_INSTRUMENTATION_KEY,  # pyright: ignore[reportPrivateUsage]
    Context,
)
from opentelemetry.trace import INVALID_SPAN, NonRecordingSpan, Span, SpanContext, TraceFlags
from opentelemetry.trace.propagation import _SPAN_KEY  # pyright: ignore[reportPrivateUsage]

SUPPRESSED: Final = _SUPPRESS_INSTRUMENTATION_KEY
"""Set in the context under `suppress_instrumentation()`, and in the threads of the SDK that export."""


# The variable itself where the default runtime context holds one (opentelemetry/context/contextvars_context.py, 1.40 to
# 1.45): a step asks for the context a dozen times, and each layer of functions above it costs a quarter microsecond.
variable: ContextVar[Context] | None = getattr(_RUNTIME_CONTEXT, "_current_context", None)
if not isinstance(variable, ContextVar):
    variable = None
get_current: Callable[[], Context] = context_api.get_current if variable is None else variable.get
set_current: Callable[[Context], object] = context_api.attach if variable is None else variable.set


class DerivedSpan(NonRecordingSpan):
    """A span of otel-dl's in the context: its ids are derived when somebody asks for them, and only while it is open.

    `outer` is the context that it covers. `sampled` becomes the flag of what it hands out.
    """

    open = True
    asked: SpanContext | None = None

    def __init__(self, sampled: bool, outer: Context) -> None:
        # Not super().__init__: its SpanContext is made when somebody asks, which most steps are never asked.
        self.sampled = sampled
        self.outer = outer

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_span_context()!r})"

    def ids(self) -> tuple[int, int]:
        """(trace id, span id)."""
        raise NotImplementedError

    def get_span_context(self) -> SpanContext:
        if not self.open:
            return trace.get_current_span(self.outer).get_span_context()
        if self.asked is None:
            trace_id, span_id = self.ids()
            flags = TraceFlags(TraceFlags.SAMPLED if self.sampled else TraceFlags.DEFAULT)
            self.asked = SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)
        return self.asked


def attach(span: DerivedSpan) -> None:
    set_current(Context({**span.outer, _SPAN_KEY: span}))


def detach(span: DerivedSpan) -> None:
    """Closes `span`, and takes it out of the context where it is still the current one."""
    span.open = False
    if get_current().get(_SPAN_KEY) is span:
        uncover()


def uncover() -> None:
    """Takes the spans of ours that are closed out of the context."""
    set_current(_uncovered(get_current())[0])


def current() -> tuple[Context, Span]:
    """The current context and its span, without spans of ours that a user's `with` left behind."""
    context, span = _uncovered(get_current())
    return context, span if isinstance(span, Span) else INVALID_SPAN


def _uncovered(context: Context) -> tuple[Context, object]:
    """`context` with the span that closed ones of ours cover, and that span. What else the user put there stays."""
    outer, span = context, context.get(_SPAN_KEY)
    while isinstance(span, DerivedSpan) and not span.open:
        outer = span.outer
        span = outer.get(_SPAN_KEY)
    if outer is context:
        return context, span
    values = {key: value for key, value in context.items() if key != _SPAN_KEY}
    if span is not None:
        values[_SPAN_KEY] = span
    return Context(values), span


def suppressed() -> bool:
    """Whether `suppress_instrumentation()` holds here."""
    return bool(get_current().get(SUPPRESSED))
