"""The messages of a worker to its parent: frames in a pipe, of builtins only (both ends run the same Python).

A frame is a header, `length of the body, kind, messages dropped since the last frame`, and the body. A fetch is a
fixed struct; its exception, a span of the user's and a resource go through `marshal`, which runs nobody's code when it
is read.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from otel_dl.recording.failure import Failure

FETCH: Final = 1
SPAN: Final = 2
RESOURCE: Final = 3
WARNING: Final = 4
"""Text that the parent logs, once for all workers."""

HEADER: Final = struct.Struct("<IBI")
_FETCH: Final = struct.Struct("<IIIIqqI?")


class FetchMessage(NamedTuple):
    """The reading of the batch with this index. `start` and `end` are readings of `clock`; `dropped` counts spans of
    the user's that found no room; `read` is false where the worker's iterable dataset had ended."""

    worker: int
    pid: int
    round: int
    batch: int
    start: int
    end: int
    dropped: int
    read: bool
    error: Failure | None
    samples: str
    """Where it failed or took long, as ranges."""


class Frame(NamedTuple):
    kind: int
    dropped: int
    body: bytes


def frame(kind: int, dropped: int, body: bytes) -> bytes:
    return HEADER.pack(len(body), kind, dropped) + body


def frames(buffer: bytearray) -> Iterator[Frame]:
    """Takes the whole frames out of `buffer`; a part of one stays."""
    position = 0
    try:
        while len(buffer) - position >= HEADER.size:
            length, kind, dropped = HEADER.unpack_from(buffer, position)
            end = position + HEADER.size + length
            if end > len(buffer):
                break
            body = bytes(buffer[position + HEADER.size : end])
            position = end
            yield Frame(kind, dropped, body)
    finally:
        del buffer[:position]


def encode_fetch(
    worker: int,
    pid: int,
    round: int,
    batch: int,
    start: int,
    end: int,
    dropped: int,
    read: bool,
    error: Failure | None,
    samples: str = "",
) -> bytes:
    """See `FetchMessage`."""
    packed = _FETCH.pack(worker, pid, round, batch, start, end, dropped, read)
    said = (tuple(error) if error is not None else None, samples)
    return packed + marshal.dumps(said) if error is not None or samples else packed


def decode_fetch(body: bytes) -> FetchMessage:
    known: tuple[Any, ...] = _FETCH.unpack_from(body)
    error, samples = marshal.loads(body[_FETCH.size :]) if len(body) > _FETCH.size else (None, "")
    return FetchMessage._make((*known, Failure._make(error) if error is not None else None, samples))


def encode_resource(number: int, resource: Resource) -> bytes:
    return marshal.dumps((number, _attributes(resource.attributes), resource.schema_url))


def decode_resource(body: bytes) -> tuple[int, Resource]:
    number, attributes, schema_url = marshal.loads(body)
    return number, Resource(attributes, schema_url)


def encode_span(batch: tuple[int, int] | None, resource: int, span: ReadableSpan) -> bytes:
    """`batch` is (round, index) of the fetch that `span` was made in, None outside; `resource` a number sent before."""
    scope = span.instrumentation_scope
    return marshal.dumps(
        (
            batch,
            resource,
            span.name,
            _context(span.context),
            _context(span.parent),
            _attributes(span.attributes),
            [(event.name, _attributes(event.attributes), event.timestamp) for event in span.events],
            [(_context(link.context), _attributes(link.attributes)) for link in span.links],
            span.kind.value,
            (span.status.status_code.value, span.status.description),
            span.start_time,
            span.end_time,
            (scope.name, scope.version, scope.schema_url, _attributes(scope.attributes)) if scope else None,
        )
    )


def span_resource(body: bytes) -> tuple[tuple[int, int] | None, int, tuple[Any, ...]]:
    """(batch, number of the resource, the rest for `decode_span`)."""
    batch, resource, *rest = marshal.loads(body)
    return batch, resource, tuple(rest)


def decode_span(rest: tuple[Any, ...], resource: Resource, kept: bool) -> ReadableSpan:
    """The span again. `kept`: it is exported with its fetch, whatever its own flag said when it began."""
    name, context, parent, attributes, events, links, kind, status, start, end, scope = rest
    return ReadableSpan(
        name,
        _span_context(context, kept),
        _span_context(parent, kept) if parent is not None else None,
        resource,
        attributes,
        [Event(*event) for event in events],
        [Link(_span_context(to), link) for to, link in links],
        SpanKind(kind),
        status=Status(StatusCode(status[0]), status[1]),
        start_time=start,
        end_time=end,
        instrumentation_scope=InstrumentationScope(*scope) if scope is not None else None,
    )


def _context(context: SpanContext | None) -> tuple[Any, ...] | None:
    if context is None:
        return None
    # An integer of 128 bits is marshalled as well; a flag is an int subclass, which is not.
    return (
        context.trace_id,
        context.span_id,
        context.is_remote,
        int(context.trace_flags),
        [tuple(entry) for entry in context.trace_state.items()],
    )


def _span_context(context: tuple[Any, ...], sampled: bool = False) -> SpanContext:
    trace_id, span_id, is_remote, flags, state = context
    flags = flags | TraceFlags.SAMPLED if sampled else flags
    return SpanContext(trace_id, span_id, is_remote, TraceFlags(flags), TraceState(state))


def _attributes(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    return {str(name): _plain(value) for name, value in attributes.items()} if attributes else {}


_EXACT: Final = frozenset({bool, int, float, str, bytes, type(None)})


def _plain(value: Any) -> Any:
    """`value` as builtins: SDKs let subclasses pass (an IntEnum, numpy's float64)."""
    if type(value) in _EXACT:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return _attributes(value)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Sequence):
        return tuple(_plain(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    return str(value)
