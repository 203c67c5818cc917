"""Where spans leave: bounded whatever the receiver does, nothing lost in silence, deadlines kept."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic

import pytest
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, get_value
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags
from support.children import free_port, run
from support.receiver import Receiver, receiving

from otel_dl.export.exporter_sink import ExporterSink
from otel_dl.export.provider_sink import ProviderSink, _queue_of
from otel_dl.export.queue_sink import QueueSink
from otel_dl.export.sink import Sinks
from otel_dl.settings import Settings

RESOURCE = Resource({"service.name": "test"})
PROTOCOLS = ("grpc", "http/protobuf")


def spans(count: int, name: str = "span") -> list[ReadableSpan]:
    return [
        ReadableSpan(
            name,
            SpanContext(1, number + 1, False, TraceFlags(TraceFlags.SAMPLED)),
            resource=RESOURCE,
            attributes={"number": number},
            start_time=1,
            end_time=2,
        )
        for number in range(count)
    ]


def soon(seconds: float = 20) -> float:
    return monotonic() + seconds


class Remembering(SpanExporter):
    """Keeps what it takes; `answer` says whether it takes a batch."""

    def __init__(self, answer: Callable[[Sequence[ReadableSpan]], bool] = lambda _: True) -> None:
        self.answer = answer
        self.taken: list[ReadableSpan] = []
        self.attempts = 0
        self.was_shut_down = False
        self.suppressed: set[object] = set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.attempts += 1
        self.suppressed.add(get_value(_SUPPRESS_INSTRUMENTATION_KEY))
        if not self.answer(spans):
            return SpanExportResult.FAILURE
        self.taken.extend(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.was_shut_down = True

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


class Hanging(Remembering):
    """Its `export` comes back when `released` is set; `shutdown` does not set it."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Event()
        self.released = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.began.set()
        self.released.wait()
        return super().export(spans)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    exporter = Hanging()
    yield exporter
    exporter.released.set()


def sink_for(exporter: SpanExporter, capacity: int = 16_384, **options: float) -> ExporterSink:
    return ExporterSink(lambda: exporter, capacity, "test", delay=0.01, **options)


def otlp_sink(receiver: Receiver, protocol: str, monkeypatch: pytest.MonkeyPatch) -> QueueSink:
    from otel_dl.export.provider import exporters

    for name, value in receiver.environment(protocol).items():
        monkeypatch.setenv(name, value)
    (named,) = exporters(Settings.read())
    return ExporterSink(named.make, 16_384, named.name, delay=0.01)


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and text in r.getMessage()]


class TestExporterSink:
    def test_nothing_exists_before_the_first_span(self) -> None:
        made: list[SpanExporter] = []
        sink = ExporterSink(lambda: made.append(Remembering()) or made[0], 1_000, "test")
        before = threading.active_count()
        assert sink.flush(soon())
        sink.offer([])
        assert made == []
        assert threading.active_count() == before
        assert sink.close(soon())
        assert made == []

    def test_flush_is_true_when_everything_offered_before_was_exported(self) -> None:
        exporter = Remembering()
        sink = sink_for(exporter)
        sink.offer(spans(3_000))
        assert sink.flush(soon())
        assert len(exporter.taken) == sink.exported == 3_000
        assert sink.waiting == 0
        assert not sink.dropped

    def test_spans_that_come_just_before_a_flush_are_not_taken_for_delivered(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sink = ExporterSink(Remembering, 1024, "remembering")
        monkeypatch.setattr(sink, "_start", lambda: None)
        sink.offer(spans(10))
        # The thread found nothing to do, then both came.
        sink._exporter, sink._wanted = Remembering(), 10
        sink._finish_flush()
        assert sink._flushed == 0

    def test_batches_hold_512_spans_at_most(self) -> None:
        sizes: list[int] = []
        sink = sink_for(Remembering(lambda batch: sizes.append(len(batch)) is None))
        sink.offer(spans(2_000))
        assert sink.flush(soon())
        assert max(sizes) <= 512

    def test_64_spans_do_not_wait_for_others(self, hanging: Hanging) -> None:
        sink = ExporterSink(lambda: hanging, 16_384, "test", delay=60)
        sink.offer(spans(64))
        assert hanging.began.wait(20)

    def test_the_export_runs_with_instrumentation_suppressed(self) -> None:
        exporter = Remembering()
        sink = sink_for(exporter)
        sink.offer(spans(1))
        assert sink.flush(soon())
        assert exporter.suppressed == {True}

    def test_a_full_queue_drops_the_oldest_counts_them_and_says_so_once(
        self, hanging: Hanging, caplog: pytest.LogCaptureFixture
    ) -> None:
        sink = sink_for(hanging, capacity=1_000)
        sink.offer(spans(500, "in hand"))
        assert hanging.began.wait(20)
        for _ in range(100):
            sink.offer(spans(100, "later"))
        assert sink.waiting == 1_000
        assert sink.dropped == {"queue_full": 500 + 10_000 - 1_000}
        assert len(warnings(caplog, "OTEL_DL_QUEUE_SPANS")) == 1
        hanging.released.set()
        assert sink.flush(soon())
        assert [span.attributes["number"] for span in hanging.taken[500:]] == [*range(100)] * 5

    def test_what_failed_is_held_and_sent_when_the_exporter_answers_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        answers = iter([False, False, True])
        exporter = Remembering(lambda _: next(answers, True))
        sink = sink_for(exporter)
        sink.offer(spans(700))
        assert sink.flush(soon())
        assert sorted(span.attributes["number"] for span in exporter.taken) == [*range(700)]
        assert len(warnings(caplog, "can't be exported")) == 1
        assert len(warnings(caplog, "again")) == 2  # "held and sent when it answers again", "exported to … again"

    def test_what_an_exporter_raises_counts_as_a_failure(self, caplog: pytest.LogCaptureFixture) -> None:
        failures = iter([ValueError("no")])

        def answer(_: object) -> bool:
            for error in failures:
                raise error
            return True

        exporter = Remembering(answer)
        sink = sink_for(exporter)
        sink.offer(spans(10))
        assert sink.flush(soon())
        assert len(exporter.taken) == 10
        assert "ValueError: no" in warnings(caplog, "can't be exported")[0]

    def test_a_batch_that_is_refused_for_good_holds_up_no_other(self) -> None:
        exporter = Remembering(lambda batch: all(span.name != "poison" for span in batch))
        sink = sink_for(exporter, batch=10)
        sink.offer(spans(10, "poison"))
        for _ in range(12):
            sink.offer(spans(10))
            sink.flush(soon(5))
        assert len(exporter.taken) == 120
        assert sink.dropped == {"export_failed": 10}

    def test_flush_gives_up_early_where_the_receiver_is_away(self) -> None:
        exporter = Remembering(lambda _: False)
        sink = sink_for(exporter)
        sink.offer(spans(10))
        began = monotonic()
        assert not sink.flush(began + 60)
        assert monotonic() - began < 20
        assert sink.waiting == 10

    def test_a_hanging_exporter_holds_neither_flush_nor_close_beyond_their_deadline(
        self, hanging: Hanging, caplog: pytest.LogCaptureFixture
    ) -> None:
        sink = sink_for(hanging)
        sink.offer(spans(600))
        began = monotonic()
        assert not sink.flush(began + 0.3)
        assert not sink.close(began + 1)
        assert monotonic() - began < 2
        assert sink.dropped == {"exit": 600}
        assert hanging.was_shut_down
        assert "600 spans" in warnings(caplog, "OTEL_DL_EXIT_DELAY")[0]

    def test_close_exports_shuts_the_exporter_down_and_takes_no_more(self) -> None:
        exporter = Remembering()
        sink = sink_for(exporter)
        sink.offer(spans(10))
        assert sink.close(soon())
        assert len(exporter.taken) == 10
        assert exporter.was_shut_down
        sink.offer(spans(3))
        assert sink.dropped == {"exit": 3}

    def test_an_exporter_that_cannot_be_made_ends_the_export_with_one_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken() -> SpanExporter:
            raise ValueError("could not convert string to float: 'soon'")

        sink = ExporterSink(broken, 1_000, "otlp", delay=60)  # so that the flush asks before it fails
        sink.offer(spans(5))
        assert not sink.flush(soon())
        sink.offer(spans(5))
        assert sink.dropped == {"export_failed": 10}
        assert len(warnings(caplog, "'soon'")) == 1

    def test_offers_from_many_threads_all_arrive_once(self) -> None:
        exporter = Remembering()
        sink = sink_for(exporter, capacity=100_000)

        def offer() -> None:
            for span in spans(2_000):
                sink.offer([span])

        threads = [threading.Thread(target=offer) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sink.flush(soon())
        assert len(exporter.taken) == 16_000

    def test_one_of_several_exporters_that_hangs_holds_up_no_other(self, hanging: Hanging) -> None:
        exporter = Remembering()
        sinks = Sinks([sink_for(hanging), sink_for(exporter)])
        sinks.offer(spans(100))
        began = monotonic()
        assert not sinks.close(began + 1)
        assert monotonic() - began < 3
        assert len(exporter.taken) == 100
        assert sinks.dropped == {"exit": 100}


@pytest.mark.parametrize("protocol", PROTOCOLS)
class TestOtlp:
    def test_spans_arrive_when_an_unavailable_receiver_is_back(
        self, protocol: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        sink = otlp_sink(receiver, protocol, monkeypatch)
        receiver.mode("unavailable")
        sink.offer(spans(1_200))
        assert not sink.flush(soon())
        assert sink.waiting == 1_200
        receiver.mode("fine")
        assert sink.flush(soon())
        assert sorted(span.attributes["number"] for span in receiver.spans()) == [*range(1_200)]
        assert not sink.dropped
        assert len(caplog.records) == 2, "one line when it fails, one when it works, none of the exporter's own"
        assert sink.close(soon())

    def test_spans_arrive_when_a_receiver_is_started_late(self, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
        grpc, http = free_port(), free_port()
        with receiving() as placeholder:
            placeholder.grpc, placeholder.http = grpc, http
            sink = otlp_sink(placeholder, protocol, monkeypatch)
        sink.offer(spans(100))
        assert not sink.flush(soon())
        with receiving(grpc=grpc, http=http) as receiver:
            receiver.wait_for(lambda arrived: len(arrived) == 100)
            assert sink.close(soon())

    def test_a_silent_receiver_holds_neither_flush_nor_close(
        self, protocol: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        receiver.mode("silent")
        sink = otlp_sink(receiver, protocol, monkeypatch)
        sink.offer(spans(100))
        began = monotonic()
        assert not sink.flush(began + 0.5)
        assert not sink.close(began + 1.5)
        assert monotonic() - began < 3
        assert sink.dropped == {"exit": 100}

    @pytest.mark.parametrize("mode", ["fine", "unavailable"])
    def test_an_export_draws_nothing_from_the_users_random(
        self, protocol: str, mode: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        receiver.mode(mode)
        sink = otlp_sink(receiver, protocol, monkeypatch)
        random.seed(42)
        sink.offer(spans(600))
        sink.flush(soon())
        assert receiver.requests() >= 2
        drawn = random.random()
        random.seed(42)
        assert drawn == random.random()
        sink.close(soon(1))


def provider_with(*processors: SpanProcessor) -> TracerProvider:
    provider = TracerProvider(resource=RESOURCE, shutdown_on_exit=False)
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


class TestProviderSink:
    def test_more_spans_than_the_queue_holds_all_arrive_and_no_span_of_the_users_is_lost(self) -> None:
        exporter = Remembering()
        provider = provider_with(BatchSpanProcessor(exporter))
        sink = ProviderSink(provider, 100_000)
        tracer = provider.get_tracer("user")
        for _ in range(100):
            sink.offer(spans(100))
            tracer.start_span("user's").end()
        assert sink.flush(soon())
        assert len(exporter.taken) == 10_000 + 100
        assert sum(span.name == "user's" for span in exporter.taken) == 100
        assert sink.exported == 10_000
        assert not sink.dropped
        provider.shutdown()

    def test_the_queue_is_never_more_than_half_ours(self, hanging: Hanging) -> None:
        processor = BatchSpanProcessor(hanging, max_queue_size=600, max_export_batch_size=100)
        sink = ProviderSink(provider_with(processor), 1_000)
        sink.offer(spans(5_000))
        assert hanging.began.wait(20)
        began = monotonic()
        assert not sink.flush(began + 1)
        assert monotonic() - began < 3
        queue, _ = _queue_of(processor)
        assert len(queue) <= 300
        assert sink.waiting <= 1_000
        assert sink.dropped["queue_full"] == 5_000 - sink.waiting - sink.exported

    def test_other_processors_get_every_span(self) -> None:
        exporter = Remembering()
        seen: list[str] = []

        class Own(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                seen.append(span.name)

            def force_flush(self, timeout_millis: int = 30_000) -> bool:
                return True

        sink = ProviderSink(provider_with(SimpleSpanProcessor(exporter), Own()), 10_000)
        sink.offer(spans(2_000))
        assert sink.flush(soon())
        assert len(exporter.taken) == len(seen) == 2_000

    def test_a_forked_child_begins_with_a_pace_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("otel_dl.export.provider_sink._queue_of", lambda processor: (None, None))
        provider = provider_with(BatchSpanProcessor(Remembering()))
        sink = ProviderSink(provider, 10_000)
        assert sink._room() > 0
        assert sink._room() == 0, "until the queue that can't be read has surely drained"
        sink.after_fork()
        assert sink._room() > 0
        provider.shutdown()

    def test_a_provider_that_exports_nowhere_holds_nothing(self) -> None:
        sink = ProviderSink(provider_with(), 10_000)
        sink.offer(spans(2_000))
        assert sink.close(soon())
        assert sink.waiting == 0


def test_a_forked_child_exports_its_own_spans_and_none_of_the_parents() -> None:
    with receiving() as receiver:
        result = run(
            """
            import os, sys, time
            from opentelemetry import trace
            from otel_dl.export.provider import connect
            from otel_dl.settings import Settings

            connection = connect(Settings.read(), lambda: None, set_up=True)
            tracer = trace.get_tracer("user")
            tracer.start_span("first").end()
            assert connection.sink.flush(time.monotonic() + 20)
            for number in range(100):
                tracer.start_span("parent's").end()
            children = []
            with tracer.start_as_current_span("open in the parent"):
                for number in range(5):
                    child = os.fork()
                    if not child:
                        break
                    children.append(child)
            if not children or not child:
                with tracer.start_as_current_span("child's"):
                    pass
            if child:
                for child in children:
                    assert os.waitpid(child, 0)[1] == 0
            """,
            {**receiver.environment("http/protobuf"), "OTEL_BSP_SCHEDULE_DELAY": "60000"},
        )
        assert result.code == 0, result
        counted = {name: len(receiver.named(name)) for name in ("first", "parent's", "open in the parent", "child's")}
        assert counted == {"first": 1, "parent's": 100, "open in the parent": 1, "child's": 5}


def test_a_fork_waits_until_the_exporter_is_imported(tmp_path: Path) -> None:
    """A module that another thread is importing at the fork stays locked in the child for ever."""
    (tmp_path / "slow_exporter.py").write_text("import builtins, time\nbuiltins.importing.set()\ntime.sleep(0.5)\n")
    done = run(
        """
        import builtins, faulthandler, os, threading, time
        from otel_dl.export.exporter_sink import ExporterSink
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        builtins.importing = threading.Event()

        def factory():
            import slow_exporter
            return ConsoleSpanExporter()

        sink = ExporterSink(factory, 1024, "slow")
        threading.Thread(target=sink.open, daemon=True).start()
        builtins.importing.wait()
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(20, exit=True)
            import slow_exporter
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """,
        {"PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout == "0\n", done


def test_queue_settings_have_room_for_a_batch() -> None:
    assert Settings().queue_spans >= 512
