"""A real OTLP receiver in a process of its own: gRPC and HTTP/protobuf on loopback, that can be made to misbehave.

As a program it is told what to do by lines on its standard input and answers each with one line of JSON:
`mode fine|silent|unavailable`, `spans`, `requests`. `Receiver` is the other end.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODES = ("fine", "silent", "unavailable")


@dataclass(frozen=True)
class Link:
    trace_id: str
    span_id: str


@dataclass(frozen=True)
class Span:
    """A span as it arrived; ids in hex, times in ns since the epoch."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    links: tuple[Link, ...]
    status: int
    scope: str
    resource: dict[str, Any]
    protocol: str


class Receiver:
    """A running receiver. `grpc` and `http` are its ports."""

    def __init__(self, mode: str = "fine", grpc: int = 0, http: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(grpc), str(http)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ports = self._answer()
        self.grpc: int = ports["grpc"]
        self.http: int = ports["http"]
        if mode != "fine":
            self.mode(mode)

    def environment(self, protocol: str = "grpc") -> dict[str, str]:
        """The OTEL_* variables of a job that sends here; `protocol` as in OTEL_EXPORTER_OTLP_PROTOCOL."""
        return otlp_environment(protocol, self.grpc if protocol == "grpc" else self.http)

    def mode(self, name: str) -> None:
        """`fine`; `silent`: accepts and never answers; `unavailable`: 503, gRPC's UNAVAILABLE."""
        self._ask(f"mode {name}")

    def requests(self) -> int:
        """Export requests that came, whatever became of them."""
        return self._ask("requests")

    def spans(self) -> list[Span]:
        return [Span(**{**span, "links": tuple(Link(**link) for link in span["links"])}) for span in self._ask("spans")]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans() if span.name == name]

    def wait_for(self, arrived: Callable[[list[Span]], bool], timeout: float = 30) -> list[Span]:
        """The spans, as soon as `arrived` holds of them."""
        end = time.monotonic() + timeout
        while True:
            spans = self.spans()
            if arrived(spans):
                return spans
            if time.monotonic() > end:
                raise AssertionError(f"not arrived within {timeout} s; there: {sorted(span.name for span in spans)}")
            time.sleep(0.05)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, command: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def otlp_environment(protocol: str, port: int) -> dict[str, str]:
    return {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
    }


@contextlib.contextmanager
def receiving(mode: str = "fine", grpc: int = 0, http: int = 0) -> Iterator[Receiver]:
    receiver = Receiver(mode, grpc, http)
    try:
        yield receiver
    finally:
        receiver.close()


# The program.


class _Store:
    def __init__(self) -> None:
        self.mode = "fine"
        self.requests = 0
        self.spans: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    def set_mode(self, name: str) -> None:
        with self._changed:
            self.mode = name
            self._changed.notify_all()

    def take(self, request: Any, protocol: str) -> bool:
        """Whether the sender is answered well; does not return while the receiver is silent."""
        with self._changed:
            self.requests += 1
            swallowed = self.mode == "silent"
            self._changed.wait_for(lambda: self.mode != "silent")
            if swallowed or self.mode == "unavailable":
                return False
            self.spans.extend(_spans(request, protocol))
            return True


def _spans(request: Any, protocol: str) -> Iterator[dict[str, Any]]:
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield {
                    "name": span.name,
                    "trace_id": span.trace_id.hex(),
                    "span_id": span.span_id.hex(),
                    "parent_span_id": span.parent_span_id.hex(),
                    "start": span.start_time_unix_nano,
                    "end": span.end_time_unix_nano,
                    "attributes": _attributes(span.attributes),
                    "links": [{"trace_id": x.trace_id.hex(), "span_id": x.span_id.hex()} for x in span.links],
                    "status": span.status.code,
                    "scope": scope_spans.scope.name,
                    "resource": resource,
                    "protocol": protocol,
                }


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


def main(grpc_port: int, http_port: int) -> None:
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    store = _Store()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            if not store.take(request, "grpc"):
                context.abort(grpc.StatusCode.UNAVAILABLE, "told to be unavailable")
            return trace_service_pb2.ExportTraceServiceResponse()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
            good = store.take(request, "http/protobuf")
            answer = trace_service_pb2.ExportTraceServiceResponse().SerializeToString() if good else b""
            with contextlib.suppress(ConnectionError):
                self.send_response(200 if good else 503)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = grpc.server(ThreadPoolExecutor(64))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    grpc_port = server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    server.start()
    http = ThreadingHTTPServer(("127.0.0.1", http_port), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    print(json.dumps({"grpc": grpc_port, "http": http.server_address[1]}), flush=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        answer: Any = None
        if command == "mode":
            store.set_mode(argument)
        elif command == "spans":
            answer = store.spans
        elif command == "requests":
            answer = store.requests
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
