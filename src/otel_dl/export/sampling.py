"""The head decision where a sampler of OpenTelemetry's makes it, and the sampler that OTEL_TRACES_SAMPLER names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG
from opentelemetry.sdk.trace.sampling import (
    DEFAULT_ON,
    ParentBased,
    Sampler,
    StaticSampler,
    TraceIdRatioBased,
)
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind

from otel_dl.export.components import component, names
from otel_dl.faults import from_signal_handler
from otel_dl.log import logger
from otel_dl.semconv import SpanName

GROUP: Final = "opentelemetry_traces_sampler"
AHEAD: Final = 32
"""Steps for which a sampler that answers the same each time is asked at once, while its code is warm."""
_RATIOS: Final = ("traceidratio", "parentbased_traceidratio")


class SamplerHead:
    """Asks `sampler` for each step as for a root with the step's trace id; exactly that is done.

    `trace_id_of` gives the trace id of a step. `remote` is the sender of a TRACEPARENT with flag 00, which is then the
    parent that the sampler sees.
    """

    adaptive = False
    off = False

    def __init__(self, sampler: Sampler, trace_id_of: Callable[[int], int], remote: SpanContext | None = None) -> None:
        self.sampler = sampler
        self._trace_id_of = trace_id_of
        self._remote = remote
        self._parent = _parent(remote)
        self._warned = False
        self._repeatable = _is_repeatable(sampler)

    def __getstate__(self) -> dict[str, Any]:
        # It goes along to workers, which have no steps. A Context can be pickled, but not be read again.
        return {**vars(self), "_trace_id_of": None, "_parent": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._parent = _parent(self._remote)

    def step(self, number: int) -> bool:
        return self.other(self._trace_id_of(number), SpanName.STEP)

    def no_earlier(self, number: int) -> int:
        if not self._repeatable:
            return number
        ahead = range(number, number + AHEAD)
        return next((later for later in ahead if self.step(later)), number + AHEAD)

    def other(self, trace_id: int, name: str) -> bool:
        try:
            result = self.sampler.should_sample(self._parent, trace_id, name, SpanKind.INTERNAL, None, ())
            return result.decision.is_sampled()
        except Exception as error:
            if from_signal_handler(error):
                raise
            if not self._warned:
                self._warned = True
                logger.warning(
                    "otel-dl: the sampler %s raised when it was asked about %s; that counts as no. It is asked again"
                    " for each step.",
                    type(self.sampler).__qualname__,
                    name,
                    exc_info=error,
                )
            return False


def _parent(remote: SpanContext | None) -> Context:
    context = Context()
    return context if remote is None else trace.set_span_in_context(NonRecordingSpan(remote), context)


def _is_repeatable(sampler: Sampler) -> bool:
    """Whether it is known to answer the same each time it is asked: those of the SDK do."""
    if type(sampler) is ParentBased:
        parts = [value for value in vars(sampler).values() if isinstance(value, Sampler)]
        return all(_is_repeatable(part) for part in parts)
    return type(sampler) in (StaticSampler, TraceIdRatioBased)


def is_default(sampler: Sampler) -> bool:
    """Whether it is the one that the SDK takes when nobody chose: `parentbased_always_on`."""
    if sampler is DEFAULT_ON:
        return True
    try:
        return sampler.get_description() == DEFAULT_ON.get_description()
    except Exception:
        return False


def from_environment() -> Sampler | None:
    """The sampler that OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG name; None where it is not set, or is wrong."""
    name = os.environ.get(OTEL_TRACES_SAMPLER, "").strip()
    if not name:
        return None
    found = component(GROUP, name) or component(GROUP, name.lower())
    if found is None:
        logger.warning(
            "otel-dl: %s has the value %r; allowed: %s. It counts as not set.",
            OTEL_TRACES_SAMPLER,
            name,
            ", ".join(names(GROUP)),
        )
        return None
    try:
        sampler: Any = found.load()(_argument(name.lower()))
    except Exception as error:
        logger.warning(
            "otel-dl: the sampler that %s names, %r, can't be made: %s: %s. It counts as not set.",
            OTEL_TRACES_SAMPLER,
            name,
            type(error).__name__,
            error,
        )
        return None
    if not isinstance(sampler, Sampler):
        logger.warning("otel-dl: what %s names, %r, is no sampler. It counts as not set.", OTEL_TRACES_SAMPLER, name)
        return None
    return sampler


def _argument(name: str) -> str | float | None:
    text = os.environ.get(OTEL_TRACES_SAMPLER_ARG)
    if name not in _RATIOS:
        return text
    try:
        ratio = float(text or "1")
        if not 0 <= ratio <= 1:
            raise ValueError(text)
    except ValueError:
        logger.warning(
            "otel-dl: %s has the value %r; allowed: a number from 0 to 1. The default 1.0 is used.",
            OTEL_TRACES_SAMPLER_ARG,
            text,
        )
        return 1.0
    return ratio
