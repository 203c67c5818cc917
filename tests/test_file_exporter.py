"""The file of traces: what stands in it, and what happens when it cannot be written."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from otel_dl.descriptors import Descriptor
from otel_dl.export.file import FileSpanExporter
from otel_dl.export.otlp_json import encode

RESOURCE = Resource({"service.name": "train", "process.pid": 4}, schema_url="https://opentelemetry.io/schemas/1.44.0")
SCOPE = InstrumentationScope("otel_dl", "0.1.0", "https://opentelemetry.io/schemas/1.44.0", {"part": "sink"})


def context(
    span_id: int, *, trace_id: int = 0xABC, remote: bool = False, state: TraceState | None = None
) -> SpanContext:
    return SpanContext(trace_id, span_id, remote, TraceFlags(1), state)


def span(name: str = "forward", span_id: int = 1, **keywords: Any) -> ReadableSpan:
    keywords.setdefault("resource", RESOURCE)
    keywords.setdefault("instrumentation_scope", SCOPE)
    keywords.setdefault("context", context(span_id))
    return ReadableSpan(name, start_time=1_700_000_000_000_000_001, end_time=1_700_000_000_000_000_009, **keywords)


def with_attributes(attributes: Mapping[str, Any]) -> ReadableSpan:
    return span(attributes=BoundedAttributes(attributes=attributes))


SPANS: dict[str, list[ReadableSpan]] = {
    "plain": [span()],
    "boolean": [with_attributes({"yes": True, "no": False})],
    "integers": [with_attributes({"zero": 0, "small": -5, "largest": 2**63 - 1, "smallest": -(2**63)})],
    "floats": [with_attributes({"zero": 0.0, "tiny": 5e-324, "third": 1 / 3, "large": 1.7e308, "whole": 3.0})],
    "non-finite floats": [with_attributes({"up": float("inf"), "down": float("-inf"), "many": [float("inf"), 1.0]})],
    "strings": [with_attributes({"empty": "", "line": 'a\nb\t"c"\\', "unicode": "Größe 学习 🔥", "nul": "\0"})],
    "bytes": [with_attributes({"uid": bytes(range(256)), "empty": b""})],
    "arrays": [with_attributes({"s": ["a", "b"], "i": [1, 2], "b": [True, False], "f": [0.5], "empty": []})],
    "nested": [with_attributes({"map": {"a": 1, "b": {"c": [1, "x", None]}}, "mixed": [1, "a", None, {"k": b"v"}]})],
    "none": [with_attributes({"nothing": None})],
    "dropped attributes": [span(attributes=BoundedAttributes(1, {"a": 1, "b": 2}))],
    "events": [span(events=[Event("exception", {"exception.type": "ValueError"}, 5), Event("bare", None, 6)])],
    "links": [span(links=[Link(context(7), {"why": "fetch"}), Link(context(8, trace_id=2**128 - 1, remote=True))])],
    "parents": [span(parent=context(3)), span(span_id=2, parent=context(2**64 - 1, remote=True))],
    "trace state": [span(context=context(1, state=TraceState([("a", "1"), ("b", "x:2")])))],
    "status": [
        span(status=Status(StatusCode.ERROR, "out of memory")),
        span(span_id=2, status=Status(StatusCode.OK)),
        span(span_id=3, status=Status(StatusCode.ERROR)),
    ],
    "kinds": [span(span_id=i + 1, kind=kind) for i, kind in enumerate(SpanKind)],
    "several resources and scopes": [
        span(span_id=1),
        span(span_id=2, resource=Resource({"service.name": "worker"})),
        span(span_id=3, instrumentation_scope=InstrumentationScope("user", None)),
        span(span_id=4, instrumentation_scope=None),
        # equal to the first, but another object: must land in the same group
        span(span_id=5, resource=Resource(dict(RESOURCE.attributes), RESOURCE.schema_url)),
    ],
}


def parsed(text: bytes) -> ExportTraceServiceRequest:
    """OTLP JSON → protobuf, as a receiver does it: proto3's JSON mapping, except that ids are hex."""

    def ids_to_base64(value: Any) -> Any:
        import base64

        if isinstance(value, dict):
            return {
                key: base64.b64encode(bytes.fromhex(item)).decode()
                if key in ("traceId", "spanId", "parentSpanId")
                else ids_to_base64(item)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [ids_to_base64(item) for item in value]
        return value

    return ParseDict(ids_to_base64(json.loads(text)), ExportTraceServiceRequest())


def lines(directory: Path) -> list[ExportTraceServiceRequest]:
    return [parsed(line) for path in sorted(directory.glob("*.jsonl")) for line in path.read_bytes().splitlines()]


def names(directory: Path) -> list[str]:
    return [
        found.name
        for request in lines(directory)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for found in scope.spans
    ]


class TestEncoding:
    @pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
    def test_says_what_opentelemetry_proto_says(self, spans: list[ReadableSpan]) -> None:
        assert parsed(encode(spans)) == encode_spans(spans)

    def test_all_kinds_of_spans_in_one_batch(self) -> None:
        spans = [one for group in SPANS.values() for one in group]
        assert parsed(encode(spans)) == encode_spans(spans)

    def test_not_a_number(self) -> None:
        (resource,) = json.loads(encode([with_attributes({"loss": float("nan")})]))["resourceSpans"]
        assert resource["scopeSpans"][0]["spans"][0]["attributes"] == [{"key": "loss", "value": {"doubleValue": "NaN"}}]

    def test_is_the_json_of_the_otlp_specification(self) -> None:
        one = span(parent=context(0xFF), attributes=BoundedAttributes(attributes={"dl.step": 12}))
        (encoded,) = json.loads(encode([one]))["resourceSpans"][0]["scopeSpans"][0]["spans"]
        assert encoded == {
            "traceId": "00000000000000000000000000000abc",
            "spanId": "0000000000000001",
            "parentSpanId": "00000000000000ff",
            "flags": 256,
            "name": "forward",
            "kind": 1,
            "startTimeUnixNano": "1700000000000000001",
            "endTimeUnixNano": "1700000000000000009",
            "attributes": [{"key": "dl.step", "value": {"intValue": "12"}}],
            "status": {},
        }

    def test_a_value_that_otlp_cannot_hold_costs_its_attribute_only(self) -> None:
        one = ReadableSpan(
            "forward", context(1), attributes={"big": 2**63, "odd": object(), "fine": 1}, resource=RESOURCE
        )
        (encoded,) = json.loads(encode([one]))["resourceSpans"][0]["scopeSpans"][0]["spans"]
        assert [item["key"] for item in encoded["attributes"]] == ["fine"]

    def test_a_lone_surrogate_does_not_spoil_the_line(self) -> None:
        assert b"caf?" in encode([span("caf\udce9")])

    @pytest.mark.skipif(not gc.isenabled(), reason="shown by the garbage collector's own counts")
    def test_a_batch_is_no_work_for_the_garbage_collector(self) -> None:
        """It would hold up training: a full collection with torch loaded takes 0.15 s."""
        batch = [with_attributes(dict.fromkeys("abcdefgh", "value")) for _ in range(512)]
        gc.collect()
        before = [generation["collections"] for generation in gc.get_stats()]
        encode(batch)
        assert [generation["collections"] for generation in gc.get_stats()] == before


class TestFile:
    def test_each_batch_is_a_line(self, tmp_path: Path) -> None:
        exporter = FileSpanExporter(tmp_path)
        assert exporter.export([span("a", 1), span("b", 2)]) is SpanExportResult.SUCCESS
        assert exporter.export([span("c", 3)]) is SpanExportResult.SUCCESS
        assert lines(tmp_path) == [encode_spans([span("a", 1), span("b", 2)]), encode_spans([span("c", 3)])]

    def test_nothing_exported_leaves_no_file_and_no_folder(self, tmp_path: Path) -> None:
        exporter = FileSpanExporter(tmp_path / "traces")
        assert exporter.export([]) is SpanExportResult.SUCCESS
        exporter.shutdown()
        assert not (tmp_path / "traces").exists()

    def test_name_tells_the_process_and_only_the_owner_may_read(self, tmp_path: Path) -> None:
        exporter = FileSpanExporter(tmp_path)
        exporter.export([span()])
        assert exporter.path is not None
        assert f"-{os.getpid()}-" in exporter.path.name
        assert exporter.path.stat().st_mode & 0o777 == 0o600

    def test_folder_comes_from_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OTEL_DL_DIR", str(tmp_path / "from-environment"))
        FileSpanExporter().export([span("a")])
        assert names(tmp_path / "from-environment") == ["a"]

    def test_default_folder_stays_where_the_process_began(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("OTEL_DL_DIR", raising=False)
        monkeypatch.chdir(tmp_path)
        exporter = FileSpanExporter()
        monkeypatch.chdir("/")
        exporter.export([span("a")])
        assert names(tmp_path / "otel-dl-traces") == ["a"]

    def test_after_shutdown_export_fails(self, tmp_path: Path) -> None:
        exporter = FileSpanExporter(tmp_path)
        exporter.export([span("a")])
        assert exporter.force_flush()
        exporter.shutdown()
        exporter.shutdown()
        assert exporter.export([span("b")]) is SpanExportResult.FAILURE
        assert names(tmp_path) == ["a"]

    def test_a_removed_file_is_begun_anew(self, tmp_path: Path) -> None:
        exporter = FileSpanExporter(tmp_path / "traces")
        exporter.export([span("a")])
        assert exporter.path is not None
        exporter.path.unlink()
        exporter.path.parent.rmdir()
        assert exporter.export([span("b")]) is SpanExportResult.SUCCESS
        assert names(tmp_path / "traces") == ["b"]

    def test_a_forked_child_writes_its_own_file(self, tmp_path: Path) -> None:
        exporter = FileSpanExporter(tmp_path)
        exporter.export([span("parent")])
        child = os.fork()
        if child == 0:
            result = exporter.export([span("child")])
            os._exit(0 if result is SpanExportResult.SUCCESS else 1)
        assert os.waitpid(child, 0)[1] == 0
        exporter.export([span("parent again")])
        assert {path.name.split("-")[-2]: path.read_bytes().count(b"\n") for path in tmp_path.iterdir()} == {
            str(os.getpid()): 2,
            str(child): 1,
        }

    def test_a_fork_during_an_export_does_not_block_the_child(self, tmp_path: Path) -> None:
        exporter = FileSpanExporter(tmp_path)
        with exporter._lock:
            child = os.fork()
            if child == 0:
                os._exit(0 if exporter.export([span()]) is SpanExportResult.SUCCESS else 1)
            assert os.waitpid(child, 0)[1] == 0

    def test_does_not_import_torch(self) -> None:
        code = "import sys, otel_dl.export.file; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_is_found_by_the_name_otel_dl_file(self) -> None:
        from importlib.metadata import entry_points

        (found,) = entry_points(group="opentelemetry_traces_exporter", name="otel_dl_file")
        assert found.load() is FileSpanExporter


class TestSize:
    LINE = 40_000
    """Characters in a span's name, so that two lines do not fit into the smallest cap."""

    def test_a_full_file_is_followed_by_the_next_and_the_oldest_goes(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        exporter = FileSpanExporter(tmp_path, max_bytes=65_536, max_files=2)
        for letter in "abcde":
            assert exporter.export([span(letter * self.LINE)]) is SpanExportResult.SUCCESS
        assert sorted(name[0] for name in names(tmp_path)) == ["c", "d", "e"]
        assert all(path.stat().st_size <= 65_536 for path in tmp_path.iterdir())
        assert exporter.removed_spans == 2
        (warning,) = caplog.messages
        assert str(tmp_path) in warning
        assert "OTEL_DL_FILE_MAX_FILES" in warning

    def test_a_batch_larger_than_the_cap_becomes_several_files_that_keep_to_it(self, tmp_path: Path) -> None:
        exporter = FileSpanExporter(tmp_path, max_bytes=65_536, max_files=10)
        exporter.export([span("before")])
        exporter.export([span(letter * 20_000) for letter in "abcdefgh"])
        exporter.export([span("after")])
        assert sorted(name[0] for name in names(tmp_path)) == ["a", "a", *"bbcdefgh"]
        assert all(path.stat().st_size <= 65_536 for path in tmp_path.iterdir())

    def test_such_a_batch_is_written_whole_or_not_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        exporter = FileSpanExporter(tmp_path, max_bytes=65_536, max_files=10)
        exporter.export([span("before")])
        batch = [span(letter * 20_000) for letter in "abcdefgh"]
        write, writes = os.write, itertools.count()

        def full_disk(descriptor: int, data: bytes) -> int:
            if next(writes) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", full_disk)
        assert exporter.export(batch) is SpanExportResult.FAILURE
        assert names(tmp_path) == ["before"]
        assert exporter.export(batch) is SpanExportResult.SUCCESS
        assert sorted(name[0] for name in names(tmp_path)) == [*"abbcdefgh"]

    def test_a_single_span_larger_than_the_cap_is_written_whole(self, tmp_path: Path) -> None:
        exporter = FileSpanExporter(tmp_path, max_bytes=65_536)
        exporter.export([span("a" * 100_000)])
        exporter.export([span("b")])
        assert sorted(name[0] for name in names(tmp_path)) == ["a", "b"]

    def test_cap_comes_from_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OTEL_DL_FILE_MAX_BYTES", "65536")
        monkeypatch.setenv("OTEL_DL_FILE_MAX_FILES", "1")
        exporter = FileSpanExporter(tmp_path)
        for letter in "abc":
            exporter.export([span(letter * self.LINE)])
        assert sorted(name[0] for name in names(tmp_path)) == ["b", "c"]

    def test_a_wrong_cap_is_named_and_the_default_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("OTEL_DL_FILE_MAX_BYTES", "lots")
        assert FileSpanExporter(tmp_path).export([span()]) is SpanExportResult.SUCCESS
        assert "OTEL_DL_FILE_MAX_BYTES" in caplog.text
        assert "lots" in caplog.text


class TestFaults:
    def test_a_folder_that_cannot_be_made_is_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").write_text("not a folder")
        directory = tmp_path / "file" / "traces"
        exporter = FileSpanExporter(directory)
        results = {exporter.export([span()]) for _ in range(3)}
        assert results == {SpanExportResult.FAILURE}
        (warning,) = caplog.messages
        assert str(directory) in warning
        assert "Not a directory" in warning
        assert "OTEL_DL_DIR" in warning

    def test_goes_on_once_the_folder_can_be_made(self, tmp_path: Path) -> None:
        obstacle = tmp_path / "traces"
        obstacle.write_text("not a folder")
        exporter = FileSpanExporter(obstacle)
        assert exporter.export([span("a")]) is SpanExportResult.FAILURE
        obstacle.unlink()
        assert exporter.export([span("b")]) is SpanExportResult.SUCCESS
        assert names(obstacle) == ["b"]

    def test_a_disk_that_fills_up_leaves_no_torn_line(self, tmp_path: Path) -> None:
        """A limit on the file's size: the kernel takes a part of a line and refuses the rest, as with a full disk."""
        script = """
import logging, resource, sys
sys.path.insert(0, sys.argv[2])
from test_file_exporter import span, FileSpanExporter
logging.basicConfig(stream=sys.stdout, format="%(message)s")
exporter = FileSpanExporter(sys.argv[1])
print(exporter.export([span("before")]).name)
size = exporter.path.stat().st_size
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, unlimited[1]))
print(exporter.export([span("x" * 1000)]).name, exporter.path.stat().st_size - size)
print(exporter.export([span("y" * 1000)]).name, exporter.path.stat().st_size - size)
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
print(exporter.export([span("after")]).name)
"""
        run = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)],
            capture_output=True,
            text=True,
            check=True,
        )
        first, warning, *rest = run.stdout.splitlines()
        assert [first, *rest] == ["SUCCESS", "FAILURE 0", "FAILURE 0", "SUCCESS"]
        assert "File too large" in warning
        assert str(tmp_path) in warning
        assert names(tmp_path) == ["before", "after"]

    def test_a_file_that_cannot_be_cut_back_is_left(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        exporter = FileSpanExporter(tmp_path)
        exporter.export([span("before")])
        full = os.open("/dev/full", os.O_WRONLY)
        assert exporter._descriptor is not None
        os.dup2(full, exporter._descriptor.number)
        exporter._descriptor = Descriptor(exporter._descriptor.number)
        os.close(full)
        assert exporter.export([span("lost")]) is SpanExportResult.FAILURE
        assert "No space left on device" in caplog.text
        assert "free some space" in caplog.text
        assert exporter.export([span("after")]) is SpanExportResult.SUCCESS
        assert sorted(names(tmp_path)) == ["after", "before"]
