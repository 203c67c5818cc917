"""A run on a GPU, made by hand: its trace as otel-dl writes it, and its profile as torch.profiler or nsys do.

Kineto events as `export_chrome_trace` writes them on a GPU (third_party/kineto/libkineto/src/output_json.cpp): work of
the device under the device's number as `pid` and the stream as `tid`, bound to its launch by `args.correlation`. Tables
and columns of nsys as in its schema reference, those that are read and the ones around them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from otel_dl.export.file import FileSpanExporter

MS = 1_000_000
EPOCH = 1_700_000_000 * 10**9
BASE = EPOCH - 3_600 * 10**9
"""The profile's own anchor: its times are since an hour before the run."""
STEP_MS = 100.0
PID = 4242


class Work(NamedTuple):
    """Launched by the host at `launch`, run by the device from `start` to `end`; ms since the step began."""

    launch: float
    start: float
    end: float


class Span(NamedTuple):
    name: str
    start: float
    end: float
    device: float | None = None
    """`dl.device.duration_ms`."""


def write_trace(
    directory: Path, spans: Sequence[Span], steps: Iterable[int] = range(3), device: float | None = None
) -> Path:
    """These steps with the same spans in each, all children of the step; ms since it began. `device`: of the step."""
    resource = Resource(
        {"service.name": "made", "dl.run.id": "made/1", "dl.rank": 0, "process.pid": PID, "host.name": "node-1"}
    )
    made: list[ReadableSpan] = []

    def add(span: Span, step: int, number: int, parent: SpanContext | None, **attributes: Any) -> SpanContext:
        context = SpanContext(step + 1, number, is_remote=False, trace_flags=TraceFlags(1))
        if span.device is not None:
            attributes["dl.device.duration_ms"] = span.device
        origin = EPOCH + round(step * STEP_MS * MS)
        made.append(
            ReadableSpan(
                span.name, context, parent=parent, resource=resource, attributes=attributes,
                start_time=origin + round(span.start * MS), end_time=origin + round(span.end * MS),
                instrumentation_scope=InstrumentationScope("otel_dl"),
            )
        )  # fmt: skip
        return context

    for step in steps:
        first = add(
            Span("train.step", 0, STEP_MS, device), step, 1, None,
            **{"dl.step": step, "dl.keep.reason": "head", "is_warmup": False, "dl.run.id": "made/1"},
        )  # fmt: skip
        for number, span in enumerate(spans, 2):
            add(span, step, number, first, is_warmup=span.name.startswith("cudnn::"))
    FileSpanExporter(directory).export(made)
    return directory


def kineto(path: Path, spans: Sequence[Span], work: Sequence[Work], steps: int = 3) -> Path:
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, start_ns: float, ms: float, on: tuple[int, int], **arguments: Any) -> None:
        # fmt: off
        events.append({
            "ph": "X", "cat": category, "name": name, "pid": on[0], "tid": on[1],
            "ts": (start_ns - BASE) / 1000, "dur": ms * 1000, "args": arguments,
        })
        # fmt: on

    host = PID, PID
    for step in range(steps):
        origin = EPOCH + step * STEP_MS * MS
        add("user_annotation", f"ProfilerStep#{step}", origin, STEP_MS, host)
        for span in spans:
            if "." not in span.name or not span.name.startswith("cuda"):
                add("cpu_op", span.name, origin + span.start * MS, span.end - span.start, host)
        for number, each in enumerate(work):
            correlation = 100 * step + number
            add("cuda_runtime", "cudaLaunchKernel", origin + each.launch * MS, 0.01, host, correlation=correlation)
            add(
                "kernel", "void at::native::vectorized_elementwise_kernel<4>", origin + each.start * MS,
                each.end - each.start, (0, 7), device=0, context=1, stream=7, correlation=correlation,
            )  # fmt: skip
    path.write_text(
        json.dumps({"schemaVersion": 1, "deviceProperties": [], "baseTimeNanoseconds": BASE, "traceEvents": events})
    )
    return path


_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, "end" INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, "end" INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, "end" INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
"""


def nsys(path: Path, spans: Sequence[Span], work: Sequence[Work], steps: int = 3) -> Path:
    push_pop, thread, process = 59, (PID << 24) | PID, PID << 24
    names = ["cudaLaunchKernel_v7000", "kernel", *sorted({span.name for span in spans})]
    with sqlite3.connect(path) as database:
        database.executescript(_SCHEMA)
        database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?, '', '')", (BASE,))
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names))
        for step in range(steps):
            origin = EPOCH - BASE + round(step * STEP_MS * MS)

            def at(ms: float, origin: int = origin) -> int:
                return origin + round(ms * MS)

            for number, span in enumerate(spans):
                # nsys gives a text as it is, or by its number in StringIds.
                text, identifier = (span.name, None) if number % 2 else (None, names.index(span.name))
                database.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, NULL, NULL, NULL, ?, ?, NULL, ?, 0)",
                    (at(span.start), at(span.end), push_pop, text, thread, identifier),
                )
            for number, each in enumerate(work):
                correlation = 100 * step + number
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 0, 0)",
                    (at(each.launch), at(each.launch + 0.01), thread, correlation),
                )
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, ?, 1, 1)",
                    (at(each.start), at(each.end), correlation, process),
                )
    database.close()
    return path
