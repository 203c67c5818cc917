"""Where otel-dl set up the SDK: the user's own spans in a step are recorded, held with it, and share its fate.

So a step that is kept late, for an error or because it was slow, has them as well, and one that is dropped leaves none
behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING
from weakref import WeakSet

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, Span, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from otel_dl.recording.context import DerivedSpan

if TYPE_CHECKING:
    from otel_dl.export.sink import Sink
    from otel_dl.recording.run import Run

CurrentRun = Callable[[], "Run | None"]
"""Answers with the run that is going on, None between runs."""


class UserSpanSampler(Sampler):
    """Records what the head decision left out of an open step; everything else is as `configured` says."""

    def __init__(self, configured: Sampler, current_run: CurrentRun) -> None:
        self.configured = configured
        self._current_run = current_run

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
        parent = trace.get_current_span(parent_context)
        if self._in_unsampled_step(parent):
            return SamplingResult(Decision.RECORD_ONLY, attributes, parent.get_span_context().trace_state)
        return self.configured.should_sample(parent_context, trace_id, name, kind, attributes, links)

    def _in_unsampled_step(self, parent: Span) -> bool:
        context = parent.get_span_context()
        if context.trace_flags.sampled:
            return False
        if isinstance(parent, DerivedSpan):
            return parent.open
        run = self._current_run()
        return run is not None and parent.is_recording() and context.trace_id in run.undecided

    def get_description(self) -> str:
        return self.configured.get_description()


class UserSpanProcessor(SpanProcessor):
    """Takes the user's finished spans to their step while it is undecided, and to the sink otherwise.

    `held` spans of one step at most; more are counted in `run.dropped`. A later run exchanges all but `current_run`.
    """

    def __init__(self, sink: Sink, current_run: CurrentRun, held: int, exit_delay: float) -> None:
        self.sink = sink
        self.held = held
        self._current_run = current_run
        self.exit_delay = exit_delay
        self._open: WeakSet[SdkSpan] = WeakSet()
        self._parents: frozenset[int] = frozenset()
        """Ids of the spans that were open in the parent process when this one was forked off."""

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        self._open.add(span)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.context
        if context is None or context.span_id in self._parents:
            # A child that unwinds out of the parent's open `with` ends the parent's span; the parent does as well.
            return
        run = self._current_run()
        if run is not None:
            step = run.undecided.get(context.trace_id)
            if step is not None:
                if len(step.user_spans) < self.held:
                    step.user_spans.append(span)
                else:
                    run.dropped["user spans"] += 1
                return
        if context.trace_flags.sampled or (run is not None and context.trace_id in run.recent):
            self.sink.offer((span,))

    def after_fork(self) -> None:
        """In a forked child: what is open or waits now is the parent's."""
        self.sink.after_fork()
        self._parents = frozenset(span.get_span_context().span_id for span in self._open)
        self._open = WeakSet()

    def shutdown(self) -> None:
        # The provider's, by the user: the run may go on, so this is no end of the sink.
        self.force_flush()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self.sink.flush(monotonic() + min(timeout_millis / 1000, self.exit_delay))
