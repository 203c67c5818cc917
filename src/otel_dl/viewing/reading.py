"""OTLP JSON lines of a folder, as a stream of light spans.

Reads what `otel_dl.export.file` and the Collector's file exporter write. Nothing that is wrong with a file stops the
reading: it is passed over, counted, and named in the `Reading`.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from otel_dl.forensics.reader import SUFFIX

_STATUS_ERROR = 2
_NUMBERED = re.compile(r"(spans-.+-\d+-[0-9a-f]{8})(?:\.(\d+))?\.jsonl")
"""The names that `otel_dl.export.file` gives: process, number."""


class Span(NamedTuple):
    """One span. Times are nanoseconds since the epoch, ids lower-case hex; `parent_id` is empty for a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]
    scope: str
    failed: bool
    links: tuple[tuple[str, str], ...]
    """Trace id and span id of each linked span."""
    message: str = ""
    """Of a failed one: what its status says beside `error.type`."""

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


def text_of(span: Span, name: str) -> str:
    """The attribute of the span, else of its resource, else ""."""
    value = span.attributes.get(name, span.resource.get(name, ""))
    return value if isinstance(value, str) else str(value)


def number_of(span: Span, name: str) -> int:
    """The attribute of the span, else of its resource, else 0."""
    value = span.attributes.get(name, span.resource.get(name, 0))
    return value if isinstance(value, int) else 0


def ns_of(span: Span, name: str) -> float | None:
    """The attribute of the span, which is in ms, in nanoseconds; None where it has none."""
    value = span.attributes.get(name)
    return value * 1e6 if isinstance(value, (int, float)) else None


@dataclasses.dataclass
class PassedOver:
    """Something that was not read: how often, and where first."""

    count: int
    first: str


@dataclasses.dataclass
class Reading:
    """What was read of a folder and what was not; complete once the spans have been consumed."""

    directory: Path
    files: int = 0
    """Files of which at least one line was read."""
    lines: int = 0
    spans: int = 0
    passed_over: dict[str, PassedOver] = dataclasses.field(default_factory=dict[str, PassedOver])
    """By reason."""
    removed: int = 0
    """Full files of processes in this folder that their rotation has removed."""

    def pass_over(self, reason: str, where: str) -> None:
        entry = self.passed_over.setdefault(reason, PassedOver(0, where))
        entry.count += 1


def read_spans(reading: Reading, without: Collection[str] = ()) -> Iterator[Span]:
    """The spans of all `*.jsonl` files directly in `reading.directory`, except files whose names are in `without`; of
    that file, where it is one.

    Raises OSError where the folder itself cannot be listed.
    """
    if reading.directory.is_file():
        yield from _read_file(reading.directory, reading)
        return
    paths = sorted(reading.directory.iterdir())
    reading.removed = _removed(path.name for path in paths if path.name not in without)
    for path in paths:
        if path.suffix == SUFFIX:
            continue  # a status page, of a process that runs or was killed: `otel-dl status` tells of those
        if path.name in without:
            reading.pass_over("file of an earlier run", path.name)
        elif path.suffix != ".jsonl" or not path.is_file():
            reading.pass_over("folder" if path.is_dir() else "foreign file", path.name)
        else:
            yield from _read_file(path, reading)


def file_name_of(host: str, pid: int) -> str:
    """With what the names of a process's files begin."""
    return f"spans-{re.sub(r'[^A-Za-z0-9_.-]', '_', host)}-{pid}"


def _removed(names: Iterable[str]) -> int:
    """A process numbers its files from 1, and removes the oldest ones when there are too many."""
    first: dict[str, int] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match:
            number = int(match[2] or 1)
            first[match[1]] = min(first.get(match[1], number), number)
    return sum(first.values()) - len(first)


def _read_file(path: Path, reading: Reading) -> Iterator[Span]:
    read_before = reading.lines
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    spans = list(_spans_of(json.loads(line)))
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    torn = not line.endswith(b"\n")
                    reason = "torn last line" if torn else "line that is not OTLP JSON with spans"
                    reading.pass_over(reason, f"{path.name}:{number}")
                    continue
                reading.lines += 1
                reading.spans += len(spans)
                yield from spans
    except OSError as error:
        reading.pass_over(f"file that cannot be read ({error.strerror})", path.name)
    if reading.lines > read_before:
        reading.files += 1
    elif path.exists() and path.stat().st_size == 0:
        reading.pass_over("empty file", path.name)


def _spans_of(request: Any) -> Iterator[Span]:
    for resource_spans in request["resourceSpans"]:
        resource = _attributes(resource_spans.get("resource", {}))
        for scope_spans in resource_spans.get("scopeSpans", ()):
            scope = str(scope_spans.get("scope", {}).get("name", ""))
            for span in scope_spans.get("spans", ()):
                yield Span(
                    trace_id=str(span["traceId"]).lower(),
                    span_id=str(span["spanId"]).lower(),
                    parent_id=str(span.get("parentSpanId", "")).lower(),
                    name=str(span.get("name", "")),
                    start_ns=int(span["startTimeUnixNano"]),
                    end_ns=int(span["endTimeUnixNano"]),
                    attributes=_attributes(span),
                    resource=resource,
                    scope=scope,
                    failed=span.get("status", {}).get("code") == _STATUS_ERROR,
                    message=str(span.get("status", {}).get("message", "")),
                    links=tuple((str(link["traceId"]), str(link["spanId"])) for link in span.get("links", ())),
                )


def _attributes(holder: Any) -> Mapping[str, Any]:
    return {str(item["key"]): _value(item.get("value", {})) for item in holder.get("attributes", ())}


def _value(value: Any) -> Any:
    """The Python value of an OTLP `AnyValue`; None for one that is not set."""
    for kind, content in value.items():
        if kind == "intValue":
            return int(content)
        if kind == "doubleValue":
            return float(content)
        if kind == "bytesValue":
            return base64.b64decode(content)
        if kind == "arrayValue":
            return [_value(item) for item in content.get("values", ())]
        if kind == "kvlistValue":
            return {str(item["key"]): _value(item.get("value", {})) for item in content.get("values", ())}
        return content
    return None
