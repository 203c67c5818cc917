"""The user's own spans are the same with and without otel-dl: number, names, attributes, relations among themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import Tracer
from support import children
from support.inprocess import recording
from support.loops import batch, loader, network, seed, sgd, update

from otel_dl.export.sampling import SamplerHead
from otel_dl.recording.keep import NeverHead
from otel_dl.viewing.reading import Reading, read_spans

Script = Callable[[Tracer], None]


def _training() -> tuple[Any, ...]:
    seed()
    model = network()
    return model, sgd(model), loader(4)


def in_the_step(tracer: Tracer) -> None:
    """None is current when a step begins."""
    model, optimizer, data = _training()
    for number, (x, y) in enumerate(data):
        with tracer.start_as_current_span("augment", attributes={"number": number}):
            x = x.flip(1)
            with tracer.start_as_current_span("flip"):
                pass
        update(model, optimizer, x, y)
        tracer.start_span("log").end()


def around_all_steps(tracer: Tracer) -> None:
    with tracer.start_as_current_span("the job"):
        in_the_step(tracer)


def over_several_steps(tracer: Tracer) -> None:
    """Begun in the first step, ended in the third."""
    model, optimizer, data = _training()
    with contextlib.ExitStack() as open_spans:
        for number, (x, y) in enumerate(data):
            if number == 0:
                open_spans.enter_context(tracer.start_as_current_span("a stretch"))
            update(model, optimizer, x, y)
            with tracer.start_as_current_span("log", attributes={"number": number}):
                pass
            if number == 2:
                open_spans.close()
    with tracer.start_as_current_span("after"):
        pass


def ended_after_its_step(tracer: Tracer) -> None:
    """Leaving the `with` puts the context of a step back that is over."""
    model, optimizer, data = _training()
    batches = iter(data)
    x, y = next(batches)
    for number in range(4):
        with tracer.start_as_current_span("step", attributes={"number": number}):
            update(model, optimizer, x, y)
            following = next(batches, None)
        with tracer.start_as_current_span("between"):
            pass
        if following is not None:
            x, y = following
    with tracer.start_as_current_span("after"):
        pass


def without_a_loader(tracer: Tracer) -> None:
    seed()
    model = network()
    optimizer = sgd(model)
    for number in range(4):
        with tracer.start_as_current_span("iteration", attributes={"number": number}):
            update(model, optimizer, *batch())
            with tracer.start_as_current_span("log"):
                pass


def in_evaluation(tracer: Tracer) -> None:
    model, optimizer, data = _training()
    held_out = loader(2)
    for x, y in data:
        update(model, optimizer, x, y)
    model.eval()
    for x, _ in held_out:
        with tracer.start_as_current_span("evaluate"):
            model(x)
    with tracer.start_as_current_span("report"):
        pass


SCRIPTS: list[Script] = [
    in_the_step, around_all_steps, over_several_steps, ended_after_its_step, without_a_loader, in_evaluation
]  # fmt: skip
scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)

Told = tuple[str, dict[str, Any], str | None, int]


def told(spans: list[ReadableSpan]) -> list[Told]:
    """(name, attributes, name of the parent where that is one of them, number of links) of each."""
    names = {span.context.span_id: span.name for span in spans}
    return [
        (
            span.name,
            dict(span.attributes or {}),
            names.get(span.parent.span_id) if span.parent is not None else None,
            len(span.links),
        )
        for span in sorted(spans, key=lambda span: span.start_time)
    ]


class Provider:
    def __init__(self, sampler: Sampler = DEFAULT_ON) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("a script")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())


class Alternating:
    """Otel-dl's own decision, which says no to every other step."""

    adaptive, off = True, False

    def step(self, number: int) -> bool:
        return number % 2 == 0

    def no_earlier(self, number: int) -> int:
        return number

    def other(self, trace_id: int, name: str) -> bool:
        return True


def without(script: Script, sampler: Sampler = DEFAULT_ON) -> list[Told]:
    provider = Provider(sampler)
    script(provider.tracer)
    return told(provider.spans)


class TestSomebodysProvider:
    @scripts
    def test_default_sampler(self, script: Script) -> None:
        provider = Provider()
        with recording(foreign=True):
            script(provider.tracer)
        assert told(provider.spans) == without(script)

    @scripts
    def test_default_sampler_where_our_decision_says_no(self, script: Script) -> None:
        """A flag of 00 there would take the user's spans away: such a step leaves the context alone."""
        provider = Provider()
        with recording(Alternating(), foreign=True):
            script(provider.tracer)
        assert told(provider.spans) == without(script)

    def test_they_join_the_step(self) -> None:
        provider = Provider()
        with recording(foreign=True) as recorded:
            in_the_step(provider.tracer)
        steps = {step.context.trace_id: step.context.span_id for step in recorded.named("train.step")}
        tops = [span for span in provider.spans if span.name in ("augment", "log")]
        assert len(tops) == 8
        for span in tops:
            assert steps[span.context.trace_id] == span.parent.span_id

    def test_a_step_that_is_kept_late_says_that_they_could_not_be_had(self) -> None:
        provider = Provider(ParentBased(TraceIdRatioBased(0)))
        with recording(NeverHead(), foreign=True) as recorded:
            in_the_step(provider.tracer)
        (first,) = recorded.named("train.step")
        assert first.attributes["dl.keep.reason"] == "warmup"
        assert first.attributes["dl.user_spans"] == "not_recorded"
        assert provider.spans == []

    def test_around_a_step_they_are_left_alone_and_the_step_has_a_link(self) -> None:
        provider = Provider()
        with recording(foreign=True) as recorded:
            around_all_steps(provider.tracer)
        job = next(span for span in provider.spans if span.name == "the job")
        assert {span.context.trace_id for span in provider.spans} == {job.context.trace_id}
        for step in recorded.named("train.step"):
            assert job.context in [link.context for link in step.links]

    def test_the_context_of_a_step_that_is_over_stands_for_nothing(self) -> None:
        provider = Provider()
        with recording(foreign=True):
            ended_after_its_step(provider.tracer)
        last = next(span for span in provider.spans if span.name == "after")
        assert last.parent is None
        assert not trace.get_current_span().get_span_context().is_valid


class TestContext:
    """What else the user puts into the context stays there."""

    def test_baggage_set_in_a_step_is_there_after_it(self) -> None:
        model, optimizer, data = _training()
        before = context.get_current()
        with recording():
            for number, (x, y) in enumerate(data):
                if number == 1:
                    context.attach(baggage.set_baggage("phase", "warm"))
                assert baggage.get_baggage("phase") == ("warm" if number > 0 else None)
                update(model, optimizer, x, y)
            assert baggage.get_baggage("phase") == "warm"
        assert baggage.get_baggage("phase") == "warm"
        assert not trace.get_current_span().get_span_context().is_valid
        context.attach(before)

    def test_a_token_taken_before_is_good_in_a_later_step(self) -> None:
        model, optimizer, data = _training()
        token = context.attach(baggage.set_baggage("phase", "first"))
        with recording():
            for number, (x, y) in enumerate(data):
                update(model, optimizer, x, y)
                if number == 2:
                    context.detach(token)
                assert baggage.get_baggage("phase") == ("first" if number < 2 else None)
        assert baggage.get_baggage("phase") is None


SDK = """
    import otel_dl
    from opentelemetry import trace
    import test_user_spans

    otel_dl.instrument()
    tracer = trace.get_tracer("a script")
    for script in test_user_spans.SCRIPTS:
        script(tracer)
    otel_dl.uninstrument()
    trace.get_tracer_provider().force_flush()
    """


class TestTheSdkThatOtelDlSetUp:
    def run(self, directory: Path, script: str, **environment: str) -> list[Any]:
        done = children.run(
            script,
            {
                "OTEL_TRACES_EXPORTER": "otel_dl_file",
                "OTEL_DL_DIR": str(directory),
                "PYTHONPATH": str(Path(__file__).parent),
                **environment,
            },
        )
        assert done.code == 0, done
        return list(read_spans(Reading(directory)))

    def test_as_without(self, tmp_path: Path) -> None:
        spans = self.run(tmp_path, SDK)
        own = [span for span in spans if span.scope == "a script"]
        names = {span.span_id: span.name for span in own}
        lines = [(s.name, s.attributes, names.get(s.parent_id) if s.parent_id else None, len(s.links)) for s in own]
        assert sorted(lines, key=repr) == sorted((line for script in SCRIPTS for line in without(script)), key=repr)

    def test_they_share_the_fate_of_their_step(self, tmp_path: Path) -> None:
        """At a ratio of 0 those are there whose step is: the first one, and one that failed."""
        spans = self.run(
            tmp_path,
            """
            import otel_dl
            from opentelemetry import trace
            from support.loops import loader, network, seed, sgd, update

            otel_dl.instrument()
            tracer = trace.get_tracer("a script")
            seed()
            model = network()
            optimizer = sgd(model)
            for number, (x, y) in enumerate(loader(6)):
                with tracer.start_as_current_span("before", attributes={"number": number}):
                    tracer.start_span("within").end()
                try:
                    update(model, optimizer, x if number != 3 else x[:, :2], y)
                except RuntimeError:
                    pass
                tracer.start_span("after", attributes={"number": number}).end()
            tracer.start_span("outside", attributes={"number": -1}).end()
            otel_dl.uninstrument()
            """,
            OTEL_TRACES_SAMPLER="parentbased_traceidratio",
            OTEL_TRACES_SAMPLER_ARG="0",
        )
        steps = {
            s.trace_id: (s.attributes["dl.step"], s.attributes["dl.keep.reason"])
            for s in spans
            if s.name == "train.step"
        }
        assert sorted(steps.values()) == [(0, "warmup"), (3, "error")]
        own = sorted((steps[s.trace_id][0], s.name) for s in spans if s.scope == "a script")
        assert own == [(n, name) for n in (0, 3) for name in ("after", "before", "within")]
        numbers = {(steps[s.trace_id][0], s.attributes["number"]) for s in spans if "number" in s.attributes}
        assert numbers == {(0, 0), (3, 3)}


@pytest.fixture(autouse=True)
def _context_as_it_was() -> Iterator[None]:
    before = context.get_current()
    yield
    context.attach(before)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("parent_based", [True, False])
def test_with_a_ratio_they_share_the_decision_of_their_step(ratio: float, parent_based: bool) -> None:
    sampler: Sampler = TraceIdRatioBased(ratio)
    provider = Provider(ParentBased(sampler) if parent_based else sampler)
    with recording(foreign=True) as recorded:
        head = SamplerHead(sampler, lambda number: recorded.run.step_ids(number)[0])
        recorded.run.keep.head = head
        in_the_step(provider.tracer)
        chosen = {recorded.run.step_ids(n)[0] for n in range(4) if head.step(n)}
    whole = {"augment": 1, "flip": 1, "log": 1}
    for trace_id in chosen:
        names = [span.name for span in provider.spans if span.context.trace_id == trace_id]
        assert {name: names.count(name) for name in names} == whole
    assert {span.context.trace_id for span in provider.spans} == chosen
    if ratio in (0.0, 1.0):
        assert told(provider.spans) == without(in_the_step, sampler)
