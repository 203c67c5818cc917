"""What a worker is given: inherited by fork, pickled with it by spawn and forkserver.

The carrier is pickled as part of the process's target, so it arrives whatever the worker's environment is.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from otel_dl.log import logger
from otel_dl.recording.identity import Identity
from otel_dl.semconv import SpanName

if TYPE_CHECKING:
    from otel_dl.recording.keep import Head
    from otel_dl.recording.run import Run

TRACEPARENT: Final = "TRACEPARENT"
_NAMES: Final = frozenset({TRACEPARENT, "TRACESTATE", "BAGGAGE"})


def entries(environ: Mapping[str, str]) -> dict[str, str]:
    """The four kinds of entries that are a worker's business: OTEL_*, TRACEPARENT, TRACESTATE, BAGGAGE."""
    return {name: value for name, value in environ.items() if name.startswith("OTEL_") or name in _NAMES}


def replace(environ: MutableMapping[str, str], wanted: Mapping[str, str]) -> None:
    """Makes the four kinds in `environ` those of `wanted`."""
    for name in entries(environ).keys() - wanted.keys():
        del environ[name]
    environ.update(wanted)


def put_back(environ: MutableMapping[str, str], former: Mapping[str, str]) -> list[str]:
    """Sets the entries of `former` that are missing; one that has another value now is the user's. Their names."""
    missing = [name for name in former if name not in environ]
    for name in missing:
        environ[name] = former[name]
    return missing


class Carrier(NamedTuple):
    """One for all workers of an iterator."""

    nonce: str
    """With round and index it names a batch's own trace."""
    environment: dict[str, str]
    """The four kinds of entries in the parent, TRACEPARENT naming the run's span."""
    restore_env: bool
    span_limit: int
    """Spans of the user's in one fetch at most."""
    trace_id: int
    span_id: int
    sampled: bool
    """The run's span, a worker's context outside any fetch."""
    identity: Identity
    head: Head | bytes | None
    own_sdk: bool
    """Whether the user's spans leave through an SDK that otel-dl set up."""
    foreign_sdk: bool
    """Whether they leave through one that somebody else did."""
    resource: dict[str, Any]
    """Attributes of the resource in otel-dl's own SDK."""
    native: bool = True
    """Whether ordinary fetches may be recorded in C."""
    pages: Sequence[str] = ()
    """The path of each worker's status page, "" where there is none."""

    @classmethod
    def make(cls, run: Run, nonce: str, pages: Sequence[str] = ()) -> Carrier:
        trace_id, span_id = run.run_ids()
        head = run.keep.head
        if run.remote is not None:
            sampled = run.remote.trace_flags.sampled and not head.off
        else:
            sampled = head.other(trace_id, SpanName.STARTUP)
        environment = entries(os.environ)
        environment[TRACEPARENT] = f"00-{trace_id:032x}-{span_id:016x}-{int(sampled):02x}"
        provider = _sdk_provider()
        own = provider is not None and not run.foreign_provider
        resource = provider.resource if provider is not None and own else None
        return cls(
            nonce=nonce,
            environment=environment,
            restore_env=run.settings.restore_env,
            span_limit=run.settings.held_spans,
            trace_id=trace_id,
            span_id=span_id,
            sampled=sampled,
            identity=run.identity,
            head=head,
            own_sdk=own,
            foreign_sdk=provider is not None and not own,
            resource=dict(resource.attributes) if resource is not None else {},
            native=run.settings.native,
            pages=pages,
        )

    def packed(self) -> Carrier:
        """Fit for pickling: a sampler of the user's that cannot be pickled samples no batch in the worker."""
        try:
            return self._replace(head=pickle.dumps(self.head))
        except Exception as error:
            return self._without_sampler(error)

    def unpacked(self) -> Carrier:
        if not isinstance(self.head, bytes):
            return self
        try:
            return self._replace(head=pickle.loads(self.head))
        except Exception as error:
            return self._without_sampler(error)

    def _without_sampler(self, error: Exception) -> Carrier:
        logger.warning(
            "otel-dl: the sampler cannot go along to DataLoader workers (%s: %s): their batches are not sampled there.",
            type(error).__name__,
            error,
        )
        return self._replace(head=None)


def _sdk_provider() -> TracerProvider | None:
    """The global provider where it is the SDK's, else None."""
    provider = trace.get_tracer_provider()
    return provider if isinstance(provider, TracerProvider) else None
