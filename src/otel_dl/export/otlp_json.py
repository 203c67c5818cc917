"""OTLP's JSON encoding of spans, straight from the SDK's `ReadableSpan`.

The format is that of the OTLP specification 1.x, section "JSON Protobuf Encoding": the proto3 JSON mapping, except that
trace and span ids are lower-case hex and enums are integers. Each value is written as `opentelemetry-proto` would have
it, but without the way through protobuf objects, which takes several times as long: this runs beside a training loop.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from otel_dl.log import logger

Json = dict[str, Any]

_CONTEXT_HAS_IS_REMOTE = 0x100
_CONTEXT_IS_REMOTE = 0x200

_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(spans: Sequence[ReadableSpan]) -> bytes:
    """One `ExportTraceServiceRequest` as JSON in UTF-8, without a line break.

    Spans are grouped by resource and scope. A character that UTF-8 cannot hold (a lone surrogate) becomes `?`, an
    attribute whose type OTLP does not have is left out and logged at level DEBUG.
    """
    groups: dict[Resource, dict[InstrumentationScope | None, list[str]]] = {}
    # Hashing a resource serialises it, so spans of one resource object share the look-up.
    known: dict[tuple[int, int], list[str]] = {}
    for span in spans:
        key = (id(span.resource), id(span.instrumentation_scope))
        group = known.get(key)
        if group is None:
            scopes = groups.setdefault(span.resource, {})
            group = known[key] = scopes.setdefault(span.instrumentation_scope, [])
        # Each by itself: a batch as one object is 20,000 containers, enough for the garbage collector to go through
        # all that the process has, and training waits for that.
        group.append(_encoder.encode(_span(span)))
    return _with({}, "resourceSpans", map(_resource_spans, groups, groups.values())).encode("utf-8", errors="replace")


def _with(encoded: Json, name: str, members: Iterable[str]) -> str:
    """`encoded` as text, with an array of what is text already."""
    before = _encoder.encode(encoded)[:-1]
    return f'{before}{"," if encoded else ""}"{name}":[{",".join(members)}]}}'


def _resource_spans(resource: Resource, scopes: Mapping[InstrumentationScope | None, list[str]]) -> str:
    encoded: Json = {"resource": _with_attributes({}, resource.attributes)}
    if resource.schema_url:
        encoded["schemaUrl"] = resource.schema_url
    return _with(encoded, "scopeSpans", map(_scope_spans, scopes, scopes.values()))


def _scope_spans(scope: InstrumentationScope | None, spans: list[str]) -> str:
    if scope is None:
        return _with({"scope": {}}, "spans", spans)
    name: Json = {"name": scope.name}
    if scope.version:
        name["version"] = scope.version
    encoded: Json = {"scope": _with_attributes(name, scope.attributes)}
    if scope.schema_url:
        encoded["schemaUrl"] = scope.schema_url
    return _with(encoded, "spans", spans)


def _span(span: ReadableSpan) -> Json:
    context, parent = span.context, span.parent
    assert context is not None
    encoded: Json = {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}
    if context.trace_state:
        encoded["traceState"] = context.trace_state.to_header()
    if parent is not None:
        encoded["parentSpanId"] = f"{parent.span_id:016x}"
    encoded["flags"] = _flags(parent)
    encoded["name"] = span.name
    encoded["kind"] = span.kind.value + 1  # OTLP numbers kinds from 1: 0 stands for "unspecified"
    if span.start_time:
        encoded["startTimeUnixNano"] = str(span.start_time)
    if span.end_time:
        encoded["endTimeUnixNano"] = str(span.end_time)
    _with_attributes(encoded, span.attributes, span.dropped_attributes)
    if span.events:
        encoded["events"] = [
            _with_attributes(
                {"name": event.name, "timeUnixNano": str(event.timestamp)}, event.attributes, event.dropped_attributes
            )
            for event in span.events
        ]
    if span.dropped_events:
        encoded["droppedEventsCount"] = span.dropped_events
    if span.links:
        encoded["links"] = [
            _with_attributes(_link(link.context), link.attributes, link.dropped_attributes) for link in span.links
        ]
    if span.dropped_links:
        encoded["droppedLinksCount"] = span.dropped_links
    status: Json = {}
    if span.status.description:
        status["message"] = span.status.description
    if span.status.status_code.value:
        status["code"] = span.status.status_code.value
    encoded["status"] = status
    return encoded


def _link(context: SpanContext) -> Json:
    return {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "flags": _flags(context),
    }


def _flags(context: SpanContext | None) -> int:
    """As the SDK's OTLP exporters set them: that it is known whether the context is another process's, and whether."""
    if context is not None and context.is_remote:
        return _CONTEXT_HAS_IS_REMOTE | _CONTEXT_IS_REMOTE
    return _CONTEXT_HAS_IS_REMOTE


def _with_attributes(encoded: Json, attributes: Mapping[str, Any] | None, dropped: int = 0) -> Json:
    if attributes:
        encoded["attributes"] = list(_key_values(attributes))
    if dropped:
        encoded["droppedAttributesCount"] = dropped
    return encoded


def _key_values(attributes: Mapping[str, Any]) -> Iterable[Json]:
    for key, value in attributes.items():
        try:
            yield {"key": key, "value": _value(value)}
        except (TypeError, ValueError) as error:
            logger.debug("otel-dl: the attribute %r is left out: %s", key, error)


def _value(value: Any) -> Json:
    """An OTLP `AnyValue`. Raises TypeError for other types, ValueError for an integer beyond 64 bits."""
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{value} does not fit into 64 bits")
        return {"intValue": str(int(value))}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _non_finite(value)}
    if value is None:
        return {}
    if isinstance(value, bytes):
        return {"bytesValue": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Sequence):
        items = cast("Sequence[Any]", value)
        return {"arrayValue": {"values": [_value(item) for item in items]}}
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return {"kvlistValue": {"values": [{"key": str(k), "value": _value(v)} for k, v in entries.items()]}}
    raise TypeError(f"OTLP has no type for {type(value).__name__}")


def _non_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
