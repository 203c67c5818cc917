"""Which provider there is, and what follows: each line of the table of sampling, each case of the sink."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.children import run

from otel_dl.viewing.reading import Reading, read_spans

W3C_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = {"TRACEPARENT": f"00-{W3C_TRACE}-00f067aa0ba902b7-01"}
UNSAMPLED = {"TRACEPARENT": f"00-{W3C_TRACE}-00f067aa0ba902b7-00"}

DESCRIBE = """
import json, threading
from otel_dl.export.provider import connect
from otel_dl.recording.keep import AdaptiveHead
from otel_dl.recording.run import Run
from otel_dl.settings import Settings
{before}
run = Run(Settings.read(), AdaptiveHead())
connection = connect(Settings.read(), lambda: run, set_up={set_up})
head = connection.head
decisions = [head.step(number) for number in range(5000)]
from opentelemetry import trace
print(json.dumps({{
    "head": type(head).__name__,
    "adaptive": head.adaptive,
    "off": head.off,
    "kept": sum(decisions),
    "sink": type(connection.sink).__name__,
    "where": connection.where,
    "foreign": connection.foreign,
    "remote": f"{{connection.remote.trace_id:032x}}" if connection.remote else None,
    "provider": type(trace.get_tracer_provider()).__name__,
    "service": connection.resource.attributes.get("service.name"),
    "threads": threading.active_count(),
    "grpc": "grpc" in __import__("sys").modules,
}}))
"""

PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.sdk.resources import Resource
trace.set_tracer_provider(TracerProvider(sampler={sampler}, resource=Resource.create({{"service.name": "theirs"}})))
"""

STRANGE_PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
class Provider(trace.NoOpTracerProvider):
    resource = Resource({"service.name": "strange"})
trace.set_tracer_provider(Provider())
"""


def connected(before: str = "", set_up: bool = True, **environ: str) -> tuple[dict[str, object], str]:
    """What `connect` found, and what it said on standard error."""
    result = run(DESCRIBE.format(before=before, set_up=set_up), environ)
    assert result.code == 0, result
    return json.loads(result.stdout), result.stderr


def sdk(sampler: str = "None") -> str:
    return PROVIDER.format(sampler=sampler)


class TestSampling:
    """The table of the design, from top to bottom."""

    @pytest.mark.parametrize(
        ("case", "environ", "before", "expected"),
        [
            ("SDK disabled", {"OTEL_SDK_DISABLED": "true"}, "", ("NeverHead", True, 0)),
            ("always_off", {"OTEL_TRACES_SAMPLER": "always_off"}, "", ("NeverHead", True, 0)),
            ("always_off, foreign", {"OTEL_TRACES_SAMPLER": "always_off"}, sdk(), ("NeverHead", True, 0)),
            ("always_on", {"OTEL_TRACES_SAMPLER": "always_on"}, "", ("SamplerHead", False, 5000)),
            ("default, set", {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, "", ("SamplerHead", False, 5000)),
            (
                "ratio 0",
                {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"},
                "",
                ("SamplerHead", False, 0),
            ),
            (
                "ratio 1",
                {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1"},
                "",
                ("SamplerHead", False, 5000),
            ),
            (
                "ratio 1, flag 00, parent-based",
                {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1", **UNSAMPLED},
                "",
                ("SamplerHead", False, 0),
            ),
            (
                "ratio 1, flag 00, not parent-based",
                {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1", **UNSAMPLED},
                "",
                ("SamplerHead", False, 5000),
            ),
            (
                "ratio 0, flag 01 forces no step",
                {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0", **SAMPLED},
                "",
                ("SamplerHead", False, 0),
            ),
            ("foreign sampler", {}, sdk("sampling.ALWAYS_OFF"), ("SamplerHead", False, 0)),
            ("foreign ratio", {}, sdk("sampling.TraceIdRatioBased(1.0)"), ("SamplerHead", False, 5000)),
            ("foreign default", {}, sdk(), ("AdaptiveHead", False, 1000 + 62)),
            ("foreign default, flag 00", UNSAMPLED, sdk(), ("NeverHead", False, 0)),
            ("not set, flag 00", UNSAMPLED, "", ("NeverHead", False, 0)),
            ("not set, flag 01", SAMPLED, "", ("AdaptiveHead", False, 1000 + 62)),
            ("not set", {}, "", ("AdaptiveHead", False, 1000 + 62)),
        ],
    )
    def test_table(self, case: str, environ: dict[str, str], before: str, expected: tuple[str, bool, int]) -> None:
        found, _ = connected(before, **environ)
        print(f"{case:36} {found['head']:13} kept {found['kept']} of 5000")
        head, off, kept = expected
        assert (found["head"], found["off"]) == (head, off)
        # numbers from 1,000 on that 64 divides: 62 or 63 of the 4,000.
        assert abs(int(str(found["kept"])) - kept) <= 1

    def test_a_ratio_decides_by_the_steps_trace_id(self) -> None:
        found, _ = connected(OTEL_TRACES_SAMPLER="traceidratio", OTEL_TRACES_SAMPLER_ARG="0.5")
        assert 2_000 < int(str(found["kept"])) < 3_000

    def test_a_sampler_that_raises_counts_as_no_and_is_named_once(self) -> None:
        before = """
from opentelemetry.sdk.trace.sampling import Sampler
class Broken(Sampler):
    def should_sample(self, *args, **kwargs): raise KeyError("shape")
    def get_description(self): return "Broken"
""" + sdk("Broken()")
        found, said = connected(before)
        assert found["kept"] == 0
        assert said.count("the sampler Broken raised") == 1
        assert said.count("KeyError: 'shape'") == 1

    def test_what_a_signal_handler_raises_inside_a_sampler_arrives_at_the_user(self) -> None:
        result = run("""
            import signal
            from opentelemetry.sdk.trace.sampling import Sampler
            from otel_dl.export.sampling import SamplerHead

            class Alarm(Exception): pass
            def on_alarm(number, frame): raise Alarm

            class Raising(Sampler):
                def should_sample(self, *args, **kwargs): signal.raise_signal(signal.SIGALRM)
                def get_description(self): return "Raising"

            signal.signal(signal.SIGALRM, on_alarm)
            try:
                SamplerHead(Raising(), lambda number: 1).step(0)
            except Alarm:
                print("arrived")
        """)
        assert result.stdout == "arrived\n", result

    @pytest.mark.parametrize(
        ("environ", "named"),
        [
            ({"OTEL_TRACES_SAMPLER": "sometimes"}, ("'sometimes'", "parentbased_traceidratio")),
            (
                {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "half"},
                ("OTEL_TRACES_SAMPLER_ARG", "'half'", "from 0 to 1"),
            ),
        ],
    )
    def test_a_wrong_value_is_named_with_what_is_allowed(self, environ: dict[str, str], named: tuple[str, ...]) -> None:
        found, said = connected(**environ)
        assert int(str(found["kept"])) > 0
        lines = [line for line in said.splitlines() if "otel-dl" in line]
        assert len(lines) == 1
        assert all(part in lines[0] for part in named)


class TestProvider:
    def test_where_nobody_has_set_up_the_sdk_it_is_set_up_without_a_thread_or_an_exporter(self) -> None:
        found, said = connected(OTEL_SERVICE_NAME="job", OTEL_EXPORTER_OTLP_ENDPOINT="http://collector:4317")
        assert found["provider"] == "TracerProvider"
        assert (found["sink"], found["foreign"]) == ("ExporterSink", False)
        assert (found["service"], found["where"]) == ("job", "http://collector:4317")
        assert (found["threads"], found["grpc"]) == (1, False)
        assert said == ""

    def test_it_is_not_set_up_where_that_was_not_asked_for(self) -> None:
        found, said = connected(set_up=False)
        assert found["provider"] == "ProxyTracerProvider"
        assert (found["sink"], found["foreign"], said) == ("ExporterSink", False, "")

    def test_an_sdk_that_is_there_gets_our_spans_and_keeps_its_resource(self) -> None:
        found, said = connected(sdk())
        assert (found["sink"], found["foreign"], found["service"]) == ("ProviderSink", True, "theirs")
        assert said == ""

    def test_a_provider_that_is_not_the_sdks_is_passed_by_with_one_warning(self) -> None:
        found, said = connected(STRANGE_PROVIDER)
        assert (found["sink"], found["foreign"], found["service"]) == ("ExporterSink", True, "strange")
        assert said.count("not the OpenTelemetry SDK's") == 1

    def test_always_off_and_a_disabled_sdk_set_nothing_up(self) -> None:
        for environ in ({"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_SAMPLER": "always_off"}):
            found, _ = connected(**environ)
            assert (found["provider"], found["sink"], found["where"]) == ("ProxyTracerProvider", "NoSink", "nowhere")

    @pytest.mark.parametrize(
        ("environ", "sink", "where"),
        [
            ({"OTEL_TRACES_EXPORTER": "none"}, "NoSink", "nowhere"),
            ({"OTEL_TRACES_EXPORTER": "console"}, "ExporterSink", "console"),
            ({"OTEL_TRACES_EXPORTER": "otlp,console"}, "Sinks", "http://localhost:4317, console"),
            ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "ExporterSink", "http://localhost:4318"),
        ],
    )
    def test_exporters_are_those_that_the_standard_variables_name(
        self, environ: dict[str, str], sink: str, where: str
    ) -> None:
        found, said = connected(**environ)
        assert (found["sink"], found["where"], said) == (sink, where, "")

    @pytest.mark.parametrize(
        ("environ", "named"),
        [
            ({"OTEL_TRACES_EXPORTER": "zipkin9"}, ("OTEL_TRACES_EXPORTER", "'zipkin9'", "console", "otlp")),
            ({"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"}, ("OTEL_EXPORTER_OTLP_PROTOCOL", "'smoke'", "http/protobuf")),
        ],
    )
    def test_an_exporter_that_is_not_there_is_one_warning_and_no_export(
        self, environ: dict[str, str], named: tuple[str, ...]
    ) -> None:
        found, said = connected(**environ)
        assert (found["sink"], found["where"]) == ("NoSink", "nowhere")
        lines = [line for line in said.splitlines() if "otel-dl" in line]
        assert len(lines) == 1
        assert all(part in lines[0] for part in named)

    def test_traceparent_names_the_remote_parent(self) -> None:
        assert connected(**SAMPLED)[0]["remote"] == W3C_TRACE
        assert connected(TRACEPARENT="00-zz-11-01")[0]["remote"] is None

    def test_ids_of_the_users_spans_draw_nothing_from_random(self) -> None:
        result = run(
            """
            import random
            from opentelemetry import trace
            from otel_dl.export.provider import connect
            from otel_dl.settings import Settings
            connect(Settings.read(), lambda: None, set_up=True)
            random.seed(42)
            trace.get_tracer("user").start_span("x").end()
            drawn = random.random()
            random.seed(42)
            print(drawn == random.random())
        """,
            {"OTEL_TRACES_EXPORTER": "none"},
        )
        assert result.stdout == "True\n", result

    def test_a_second_connection_uses_the_provider_of_the_first(self) -> None:
        result = run(
            """
            import time
            from opentelemetry import trace
            from otel_dl.export.provider import connect
            from otel_dl.settings import Settings
            first = connect(Settings.read(), lambda: None, set_up=True)
            provider = trace.get_tracer_provider()
            second = connect(Settings.read(), lambda: None, set_up=True)
            assert trace.get_tracer_provider() is provider
            assert type(second.sink).__name__ == "ExporterSink" and not second.foreign and second.head.adaptive
            trace.get_tracer("user").start_span("mine").end()
            second.sink.flush(time.monotonic() + 20)
            print(first.sink.exported, second.sink.exported)
        """,
            {"OTEL_TRACES_EXPORTER": "console"},
        )
        assert result.stdout.endswith("0 1\n"), result


class TestUserSpans:
    """The user's spans in a step share its fate, where otel-dl set up the SDK."""

    SCRIPT = """
        from opentelemetry import trace
        from otel_dl.export.provider import connect
        from otel_dl.recording.keep import {head}
        from otel_dl.recording.run import Run
        from otel_dl.settings import Settings

        settings = Settings.read(held_spans=3)
        run = Run(settings, {head}())
        connection = connect(settings, lambda: run, set_up=True)
        tracer = trace.get_tracer("user")
        exported = []
        connection.sink.offer = lambda spans: exported.extend(span.name for span in spans)

        run.close(run.open(0, True, frozenset()), 10)  # the first step, which is kept for its warm-up
        tracer.start_span("before").end()
        step = run.open(20, True, frozenset())
        with tracer.start_as_current_span("outer"):
            with tracer.start_as_current_span("inner") as inner:
                assert inner.is_recording()
                assert inner.get_span_context().trace_id == run.step_ids(1)[0]
        late = tracer.start_span("ends after the step")
        held = [span.name for span in step.user_spans]
        step.error = {error}
        run.close(step, 30)
        late.end()
        tracer.start_span("between").end()

        full = run.open(40, True, frozenset())
        for number in range(5):
            tracer.start_span(f"span {{number}}").end()
        print(held, exported, len(full.user_spans), dict(run.dropped))
    """

    def observed(self, head: str, error: str | None = None) -> str:
        result = run(self.SCRIPT.format(head=head, error=repr(error)), {"OTEL_TRACES_EXPORTER": "console"})
        assert result.code == 0, result
        return result.stdout.strip()

    HELD = "['inner', 'outer']"
    FULL = "3 {'user spans': 2}"

    def test_those_of_a_sampled_step_are_held_and_leave_with_it(self) -> None:
        exported = "['before', 'ends after the step', 'between']"
        assert self.observed("AdaptiveHead") == f"{self.HELD} {exported} {self.FULL}"

    def test_those_of_a_step_that_is_kept_late_are_there(self) -> None:
        exported = "['before', 'ends after the step', 'between']"
        assert self.observed("NeverHead", "ValueError") == f"{self.HELD} {exported} {self.FULL}"

    def test_those_of_a_step_that_is_dropped_go_with_it(self) -> None:
        assert self.observed("NeverHead") == f"{self.HELD} ['before', 'between'] {self.FULL}"

    def test_the_end_waits_as_long_as_the_latest_run_says(self) -> None:
        """The receiver takes the connection and never answers. A test that the child outlives fails."""
        result = run(
            """
            import os, socket
            silent = socket.create_server(("127.0.0.1", 0))
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
            from opentelemetry import trace
            from otel_dl.export.provider import connect
            from otel_dl.settings import Settings
            connect(Settings.read(exit_delay=3600), lambda: None, set_up=True)
            connect(Settings.read(exit_delay=0.5), lambda: None, set_up=True)
            trace.get_tracer("user").start_span("mine").end()
            """,
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            timeout=60,
        )
        assert result.code == 0, result
        assert "1 spans did not reach" in result.stderr


LIMITED = """
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
{before}
import otel_dl
otel_dl.instrument()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.utils.data.DataLoader(torch.ones(3, 1)):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
otel_dl.uninstrument()
{after}
"""


class TestLimits:
    SHOW = """
import json
step = [span for span in exporter.get_finished_spans() if span.name == "train.step"][-1]
print(json.dumps([dict(step.attributes), step.dropped_attributes, len(step.links), step.dropped_links]))
"""

    @staticmethod
    def provider(limits: str) -> str:
        return f"""
provider = TracerProvider(span_limits=SpanLimits({limits}))
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
"""

    def step(self, limits: str) -> tuple[dict[str, object], int, int, int]:
        result = run(LIMITED.format(before=self.provider(limits), after=self.SHOW))
        assert result.code == 0, result
        return tuple(json.loads(result.stdout))

    def test_a_providers_limits_hold_for_our_spans_and_what_they_cost_is_counted(self) -> None:
        whole, *none_dropped = self.step("")
        assert none_dropped == [0, 2, 0]
        attributes, *dropped = self.step("max_span_attributes=4, max_span_attribute_length=3, max_links=1")
        assert dropped == [len(whole) - 4, 1, 1]
        assert attributes == dict(list(whole.items())[-4:]), "as in the SDK the oldest go"
        cut = self.step("max_attribute_length=3")[0]
        assert (cut["dl.trace.kind"], len(cut["dl.run.id"])) == ("ste", 3)

    def test_the_standard_variables_limit_them_where_otel_dl_set_up_the_sdk(self, tmp_path: Path) -> None:
        result = run(
            LIMITED.format(before="", after=""),
            {
                "OTEL_TRACES_EXPORTER": "otel_dl_file",
                "OTEL_DL_DIR": str(tmp_path),
                "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "3",
            },
        )
        assert result.code == 0, result
        steps = [span for span in read_spans(Reading(tmp_path)) if span.name == "train.step"]
        assert [span.attributes["dl.trace.kind"] for span in steps] == ["ste"] * 3


@pytest.mark.parametrize("before", [TestLimits.provider(""), STRANGE_PROVIDER], ids=["theirs", "private"])
def test_a_sink_that_no_span_of_the_users_needs_ends_with_its_run(before: str) -> None:
    show = "import threading; print([t.name for t in threading.enumerate() if 'otel-dl' in t.name])"
    result = run(LIMITED.format(before=before, after=show), {"OTEL_TRACES_EXPORTER": "console"})
    assert result.code == 0, result
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_environment_of_a_test_is_free_of_settings() -> None:
    result = run("import os; print([name for name in os.environ if name.startswith('OTEL_')])")
    assert result.stdout == "[]\n"
