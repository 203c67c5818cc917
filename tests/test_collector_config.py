"""The configurations of `collector-config/`, with the real programs: what goes in arrives in Jaeger."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

pytestmark = pytest.mark.long

CONFIG = Path(__file__).parent.parent / "collector-config"

PORTS = [
    f"{program}_{port}_PORT"
    for program, ports in {
        "COLLECTOR": ["GRPC", "HTTP", "HEALTH", "METRICS"],
        "JAEGER": ["UI", "QUERY_GRPC", "GRPC", "HTTP", "HEALTH", "METRICS"],
    }.items()
    for port in ports
]


class Backend(NamedTuple):
    """A running collector with a Jaeger behind it."""

    grpc: str
    http: str
    jaeger: str

    def trace(self, trace_id: str) -> dict[str, Any]:
        """The trace as Jaeger's HTTP API gives it, once it is there (the collector holds it for 0.2 s)."""
        url = f"{self.jaeger}/api/traces/{trace_id}"
        while True:
            try:
                with urllib.request.urlopen(url) as answer:
                    return json.load(answer)["data"][0]
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
    programs = subprocess.Popen(
        [CONFIG / "start.sh"], env={**os.environ, **ports}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert programs.stdout is not None
    said = ""
    while "Ctrl-C stops both." not in said:
        line = programs.stdout.readline()
        assert line, f"start.sh ended early: {said}"
        said += line
    yield Backend(
        f"http://127.0.0.1:{ports['COLLECTOR_GRPC_PORT']}",
        f"http://127.0.0.1:{ports['COLLECTOR_HTTP_PORT']}/v1/traces",
        f"http://127.0.0.1:{ports['JAEGER_UI_PORT']}",
    )
    os.killpg(programs.pid, signal.SIGINT)
    assert programs.wait() == 130


def send(exporter: SpanExporter) -> str:
    provider = TracerProvider(resource=Resource({"service.name": "digits"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("otel_dl").start_as_current_span("train.step") as span:
        span.set_attribute("dl.step", 7)
    provider.shutdown()
    return f"{span.get_span_context().trace_id:032x}"


def test_grpc(backend: Backend) -> None:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    assert_is_in_jaeger(backend, send(OTLPSpanExporter(endpoint=backend.grpc, insecure=True)))


def test_http(backend: Backend) -> None:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    assert_is_in_jaeger(backend, send(OTLPSpanExporter(endpoint=backend.http)))


def assert_is_in_jaeger(backend: Backend, trace_id: str) -> None:
    (span,) = backend.trace(trace_id)["spans"]
    assert span["operationName"] == "train.step"
    assert {"key": "dl.step", "type": "int64", "value": 7} in span["tags"]
