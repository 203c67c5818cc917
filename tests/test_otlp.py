"""OTLP over gRPC and HTTP, span for span, and the standard variables that a user expects to be honoured."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.children import INSTRUMENT, Result, run
from support.receiver import Receiver, Span
from test_collector_config import Backend, backend  # noqa: F401

TRAINING = """
import sys
import torch
from opentelemetry import trace
from torch.utils.data import DataLoader, TensorDataset

tracer = trace.get_tracer("user")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))

def train():
    for inputs, targets in DataLoader(data, batch_size=4):
        with tracer.start_as_current_span("mine"):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
"""
INSTRUMENTED = "import otel_dl; otel_dl.instrument()\n" + TRAINING
STEPS = 10
PHASES = ("dataloader.next", "optimizer.zero_grad", "forward", "backward", "optimizer.step")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

QUIET = {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}


def trained(script: str, env: dict[str, str], command: tuple[str, ...] = (sys.executable,)) -> Result:
    result = run(script, env, command=command)
    assert result.code == 0, result
    return result


def written(directory: Path) -> Iterator[dict[str, Any]]:
    """The spans of the files that the same run wrote, as OTLP's JSON has them."""
    for path in directory.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        yield {**span, "scope": scope["scope"]["name"], "resource": resource["resource"]["attributes"]}


def plain(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [plain(each) for each in content.get("values", [])]
    return int(content) if kind == "intValue" else content


def attributes(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: plain(pair["value"]) for pair in pairs}


def from_file(span: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": span["name"],
        "trace_id": span["traceId"],
        "parent": span.get("parentSpanId", ""),
        "times": (int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])),
        "attributes": attributes(span.get("attributes", [])),
        "links": [(link["traceId"], link["spanId"]) for link in span.get("links", [])],
        "scope": span["scope"],
        "resource": attributes(span["resource"]),
    }


def from_receiver(span: Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "trace_id": span.trace_id,
        "parent": span.parent_span_id,
        "times": (span.start, span.end),
        "attributes": span.attributes,
        "links": [(link.trace_id, link.span_id) for link in span.links],
        "scope": span.scope,
        "resource": span.resource,
    }


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_every_span_arrives_once_and_whole(protocol: str, receiver: Receiver, tmp_path: Path) -> None:
    env = {**receiver.environment(protocol), "OTEL_TRACES_EXPORTER": "otlp,otel_dl_file", "OTEL_DL_DIR": str(tmp_path)}
    trained(INSTRUMENTED + "train()", env)
    arrived = {span.span_id: from_receiver(span) for span in receiver.spans()}
    assert arrived == {span["spanId"]: from_file(span) for span in written(tmp_path)}
    assert len(receiver.spans()) == len(arrived)
    names = [span["name"] for span in arrived.values()]
    assert {name: names.count(name) for name in ("train.step", "train.startup", "mine", *PHASES)} == {
        **dict.fromkeys(("train.step", "mine", *PHASES), STEPS),
        "train.startup": 1,
    }
    steps = {(span.trace_id, span.span_id) for span in receiver.named("train.step")}
    assert {(span.trace_id, span.parent_span_id) for span in receiver.named("mine")} == steps
    print(f"\n{protocol}: {len(arrived)} spans, each arrived once, equal to what was written")


class TestTraceparent:
    def test_the_runs_trace_joins_it_and_steps_link_to_the_run(self, receiver: Receiver) -> None:
        trained(INSTRUMENTED + "train()", {**receiver.environment(), "TRACEPARENT": f"00-{TRACE}-{PARENT}-01"})
        (startup,) = receiver.named("train.startup")
        assert (startup.trace_id, startup.parent_span_id) == (TRACE, PARENT)
        steps = receiver.named("train.step")
        assert len(steps) == STEPS
        for step in steps:
            assert step.trace_id != TRACE
            assert TRACE in {link.trace_id for link in step.links}

    def test_flag_00_counts_as_a_ratio_of_0(self, receiver: Receiver) -> None:
        trained(INSTRUMENTED + "train()", {**receiver.environment(), "TRACEPARENT": f"00-{TRACE}-{PARENT}-00"})
        assert [step.attributes["dl.keep.reason"] for step in receiver.named("train.step")] == ["warmup"]
        assert receiver.named("train.startup")[0].trace_id == TRACE


class TestSwitchedOff:
    UNTOUCHED = """
train()
import threading
assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("otel-dl")]
assert torch.optim.SGD.step.__module__.startswith("torch.")
assert torch.Tensor.backward.__module__.startswith("torch.")
"""

    @pytest.mark.parametrize("variable", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_DL_ENABLED": "false"}])
    def test_nothing_is_exported_and_nothing_is_patched(self, variable: dict[str, str], receiver: Receiver) -> None:
        result = trained(INSTRUMENTED + self.UNTOUCHED, {**receiver.environment(), **variable})
        assert receiver.requests() == 0
        assert result.stderr == ""

    def test_always_off_exports_nothing(self, receiver: Receiver) -> None:
        trained(INSTRUMENTED + "train()", {**receiver.environment(), "OTEL_TRACES_SAMPLER": "always_off"})
        assert receiver.requests() == 0

    def test_disabled_among_the_instrumentations_of_zero_code(self, receiver: Receiver) -> None:
        env = {**receiver.environment(), **QUIET}
        trained(TRAINING + "train()", env, INSTRUMENT)
        names = {span.name for span in receiver.spans()}
        assert {"train.step", "mine", *PHASES} <= names
        before = len(receiver.spans())
        trained(TRAINING + self.UNTOUCHED, {**env, "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "torch"}, INSTRUMENT)
        assert [span.name for span in receiver.spans()[before:]] == ["mine"] * STEPS

    def test_steps_under_suppress_instrumentation_are_not_recorded(self, receiver: Receiver) -> None:
        script = """
from opentelemetry.instrumentation.utils import suppress_instrumentation
train()
with suppress_instrumentation():
    train()
train()
"""
        trained(INSTRUMENTED + script, receiver.environment())
        assert len(receiver.named("train.step")) == 2 * STEPS
        assert len(receiver.named("forward")) == 2 * STEPS


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_the_real_collector_and_jaeger(protocol: str, backend: Backend, tmp_path: Path) -> None:  # noqa: F811
    endpoint = backend.grpc if protocol == "grpc" else backend.http.removesuffix("/v1/traces")
    env = {
        "OTEL_TRACES_EXPORTER": "otlp,otel_dl_file",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_DL_DIR": str(tmp_path),
    }
    trained(INSTRUMENTED + "train()", env)
    expected = list(written(tmp_path))
    there = {
        span["spanID"]: span
        for trace_id in {span["traceId"] for span in expected}
        for span in whole_trace(backend, trace_id, sum(span["traceId"] == trace_id for span in expected))
    }
    assert there.keys() == {span["spanId"] for span in expected}
    for span in expected:
        found = there[span["spanId"]]
        start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        parents = [ref["spanID"] for ref in found["references"] if ref["refType"] == "CHILD_OF"]
        assert (found["operationName"], found["traceID"]) == (span["name"], span["traceId"])
        assert parents == [span["parentSpanId"]] if span.get("parentSpanId") else not parents
        # Jaeger's API counts in microseconds.
        assert (found["startTime"], found["duration"]) == (start // 1000, (end - start) // 1000)
        tags = {tag["key"]: tag["value"] for tag in found["tags"]}
        for name, value in attributes(span.get("attributes", [])).items():
            assert tags[name] == (json.dumps(value, separators=(",", ":")) if isinstance(value, list) else value), name
    print(f"\n{protocol}: {len(expected)} spans, each in Jaeger")


def whole_trace(backend: Backend, trace_id: str, spans: int) -> list[dict[str, Any]]:  # noqa: F811
    """A trace's spans as soon as as many as were sent are there."""
    end = time.monotonic() + 60
    while True:
        backend.trace(trace_id)
        with urllib.request.urlopen(f"{backend.jaeger}/api/traces/{trace_id}") as answer:
            found = json.load(answer)["data"][0]["spans"]
        if len(found) >= spans or time.monotonic() > end:
            return found
        time.sleep(0.1)
