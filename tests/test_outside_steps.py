"""What happens outside of any step: spans that the user names there, and how long all of it took."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from support.inprocess import Recorded, recording
from support.loops import Points, loader, network, seed, sgd, update
from support.validate import from_sdk, validate
from torch.utils.data import DataLoader

import otel_dl
from otel_dl.recording import lane, outside, run
from otel_dl.recording.keep import NeverHead

MS = 1_000_000


def training(epochs: int, between: Callable[[Any], None]) -> None:
    seed()
    model = network()
    optimizer, data = sgd(model), loader(3)
    for _ in range(epochs):
        for x, y in data:
            update(model, optimizer, x, y)
        between(model)


def checkpoint(_: Any) -> None:
    with otel_dl.span("checkpoint"):
        pass


def is_in(span: ReadableSpan, around: ReadableSpan) -> bool:
    assert span.parent is not None
    return (span.parent.trace_id, span.parent.span_id) == (around.context.trace_id, around.context.span_id)


def of_the_run(recorded: Recorded, name: str) -> list[ReadableSpan]:
    (startup,) = recorded.named("train.startup")
    return [span for span in recorded.named(name) if is_in(span, startup)]


class TestSpansOfTheUsers:
    def test_before_between_and_after_the_steps_they_are_the_runs(self) -> None:
        with recording() as recorded:
            with otel_dl.span("build"):
                pass
            training(2, checkpoint)
            with otel_dl.span("upload"):
                pass
        assert len(of_the_run(recorded, "build")) == 1
        assert len(of_the_run(recorded, "checkpoint")) == 2
        assert len(of_the_run(recorded, "upload")) == 1
        assert validate([from_sdk(span) for span in recorded.spans]) == []
        assert not recorded.run.dropped

    def test_one_within_another_is_its_child(self) -> None:
        with recording() as recorded:
            training(1, checkpoint)
            with otel_dl.span("checkpoint of all"):
                with otel_dl.span("gather"):
                    pass
                with otel_dl.span("write"), otel_dl.span("sync"):
                    pass
            with otel_dl.span("upload"):
                pass
        (around,), (gather,), (write,), (sync,) = map(recorded.named, ("checkpoint of all", "gather", "write", "sync"))
        assert is_in(gather, around)
        assert is_in(write, around)
        assert is_in(sync, write)
        assert len(of_the_run(recorded, "checkpoint of all")) == len(of_the_run(recorded, "upload")) == 1
        assert validate([from_sdk(span) for span in recorded.spans]) == []

    def test_one_that_is_closed_after_the_one_around_it_leaves_nothing_behind(self) -> None:
        def reading(name: str) -> Iterator[None]:
            with otel_dl.span(name):
                yield

        with recording() as recorded:
            training(1, checkpoint)
            shards = [reading("first"), reading("second")]
            for shard in shards:
                next(shard)
            for shard in shards:
                next(shard, None)
            with otel_dl.span("upload"):
                pass
        (first,), (second,) = map(recorded.named, ("first", "second"))
        assert is_in(second, first)
        assert len(of_the_run(recorded, "first")) == len(of_the_run(recorded, "upload")) == 1

    def test_tasks_that_run_side_by_side_are_not_in_each_other(self) -> None:
        async def upload(number: int) -> None:
            with otel_dl.span(f"upload {number}"):
                await asyncio.sleep(0)  # the others' turn
                with otel_dl.span(f"part of {number}"):
                    await asyncio.sleep(0)

        async def uploads() -> None:
            with otel_dl.span("uploads"):
                await asyncio.gather(*map(upload, range(3)))

        with recording() as recorded:
            training(1, checkpoint)
            asyncio.run(uploads())
            checkpoint(None)
        (around,) = recorded.named("uploads")
        for number in range(3):
            (span,), (part,) = recorded.named(f"upload {number}"), recorded.named(f"part of {number}")
            assert is_in(span, around)
            assert is_in(part, span)
        assert len(of_the_run(recorded, "checkpoint")) == 2

    def test_one_that_is_open_when_the_run_ends_ends_with_it(self) -> None:
        with recording() as recorded:
            training(1, checkpoint)
            with otel_dl.span("the whole"):
                with otel_dl.span("a part"):
                    pass
                recorded.finish()
        (whole,), (part,) = recorded.named("the whole"), recorded.named("a part")
        assert is_in(part, whole)
        assert len(of_the_run(recorded, "the whole")) == 1
        assert validate([from_sdk(span) for span in recorded.spans]) == []

    def test_around_steps_and_the_spans_in_them_it_is_the_runs_and_those_are_the_steps(self) -> None:
        with recording() as recorded, otel_dl.span("the whole training"):
            seed()
            model = network()
            optimizer = sgd(model)
            for x, y in loader(3):
                with otel_dl.span("augment"):
                    x = x.flip(1)
                update(model, optimizer, x, y)
        assert len(of_the_run(recorded, "the whole training")) == 1
        for span, step in zip(recorded.named("augment"), recorded.named("train.step"), strict=True):
            assert is_in(span, step)

    def test_in_another_thread_too(self) -> None:
        with recording() as recorded:
            thread = threading.Thread(target=checkpoint, args=(None,))
            training(1, lambda _: thread.start())
            thread.join()
        assert len(of_the_run(recorded, "checkpoint")) == 1

    def test_an_exception_that_leaves_it_marks_it(self) -> None:
        def failing(_: Any) -> None:
            with pytest.raises(OSError, match="full"), otel_dl.span("checkpoint"):
                raise OSError("the disk is full")

        with recording() as recorded:
            training(1, failing)
        (span,) = of_the_run(recorded, "checkpoint")
        assert span.attributes is not None
        assert span.attributes["error.type"] == "OSError"
        assert all(step.status.is_unset for step in recorded.named("train.step"))

    def test_at_a_ratio_of_0_they_go_out_as_the_runs_trace_does(self) -> None:
        with recording(NeverHead()) as recorded:
            training(2, checkpoint)
        assert len(recorded.named("train.step")) == 1, "the first, as warm-up"
        assert len(of_the_run(recorded, "checkpoint")) == 2

    def test_where_nothing_is_exported_neither_are_they(self) -> None:
        with recording(NeverHead(off=True)) as recorded:
            training(2, checkpoint)
        assert recorded.spans == []

    def test_a_flood_of_one_name_leaves_room_for_others_and_is_counted(self) -> None:
        def flood(_: Any) -> None:
            for _ in range(300):
                with otel_dl.span("poll"):
                    pass
            checkpoint(_)

        with recording() as recorded:
            training(1, flood)
        assert len(of_the_run(recorded, "poll")) == 200
        assert len(of_the_run(recorded, "checkpoint")) == 1
        assert recorded.run.dropped == {run.OWN_SPANS: 100}
        (shutdown,) = recorded.named("train.shutdown")
        assert shutdown.attributes is not None
        assert shutdown.attributes["otel_dl.dropped"] == 100

    def test_a_flood_of_names_is_bounded(self) -> None:
        def flood(_: Any) -> None:
            for number in range(1_500):
                with otel_dl.span(f"file {number}"):
                    pass

        with recording() as recorded:
            training(1, flood)
        assert sum(span.name.startswith("file ") for span in recorded.spans) == outside.OF_ALL
        assert recorded.run.dropped == {run.OWN_SPANS: 500}


class Clock:
    """Stands still but for what a test lets pass."""

    def __init__(self) -> None:
        self.now = 10**9

    def __call__(self) -> int:
        return self.now

    def lasts(self, ms: float) -> None:
        self.now += round(ms * MS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lane, "clock", clock)
    monkeypatch.setattr(run, "clock", clock)
    return clock


def totals(recorded: Recorded) -> dict[str, Any]:
    (shutdown,) = of_the_run(recorded, "train.shutdown")
    return {
        name.removeprefix("dl.run."): value
        for name, value in (shutdown.attributes or {}).items()
        if name.startswith("dl.run.")
    }


def timed_update(clock: Clock, model: Any, optimizer: Any, x: Any, y: Any) -> None:
    update(model, optimizer, x, y)
    clock.lasts(10)


class TestWhatTheTimeWentTo:
    @pytest.mark.parametrize("head", [None, NeverHead()], ids=["all kept", "one kept"])
    def test_of_steps_kept_or_not_of_evaluation_and_of_what_is_neither(self, clock: Clock, head: Any) -> None:
        with recording(head, native=False) as recorded:
            seed()
            model = network()
            optimizer, data, held_out = sgd(model), loader(40), loader(5)
            clock.lasts(1_000)  # start-up
            for epoch in range(4):
                for x, y in data:
                    timed_update(clock, model, optimizer, x, y)
                clock.lasts(3)
                model.eval()
                for x, _ in held_out:
                    model(x)
                    clock.lasts(20)
                model.train()
                clock.lasts(7 if epoch != 2 else 50)  # a checkpoint
        assert len(recorded.named("train.step")) == (160 if head is None else 1)
        # Of the last batch of an evaluation what follows the forward is not its own.
        assert totals(recorded) == {
            "steps": 160,
            "steps_ms": 1_600.0,
            "evals": 4,
            "evals_ms": 4 * 4 * 20.0,
            "start_workers_ms": 0.0,
            "longest_outside_ms": 3 + 20 + 50.0,
            "longest_outside_after": 119,
        }

    @pytest.mark.parametrize("head", [None, NeverHead()], ids=["all kept", "one kept"])
    def test_in_the_middle_of_an_epoch(self, clock: Clock, head: Any) -> None:
        with recording(head, native=False) as recorded:
            seed()
            model = network()
            optimizer, data, held_out = sgd(model), loader(40), loader(5)
            for number, (x, y) in enumerate(data):
                timed_update(clock, model, optimizer, x, y)
                if number in (9, 29):
                    model.eval()
                    for x, _ in held_out:
                        model(x)
                        clock.lasts(20)
                    model.train()
                    clock.lasts(7)
        assert totals(recorded) == {
            "steps": 40,
            "steps_ms": 400.0,
            "evals": 2,
            "evals_ms": 2 * 4 * 20.0,
            "start_workers_ms": 0.0,
            "longest_outside_ms": 27.0,
            "longest_outside_after": 9,
        }

    def test_without_a_loader(self, clock: Clock) -> None:
        with recording(native=False) as recorded:
            seed()
            model = network()
            optimizer = sgd(model)
            batches = list(loader(6))
            for number, (x, y) in enumerate(batches):
                timed_update(clock, model, optimizer, x, y)
                if number == 3:
                    model.eval()
                    for _ in range(3):
                        model(x)
                        clock.lasts(20)
                    model.train()
        found = totals(recorded)
        assert (found["steps"], found["evals"], found["evals_ms"]) == (6, 1, 40.0)

    def test_a_long_evaluation_lasts_until_its_end_though_not_all_of_it_has_room(self, clock: Clock) -> None:
        with recording(native=False, step_records=16) as recorded:
            seed()
            model = network()
            optimizer, data, held_out = sgd(model), loader(4), loader(40)
            for x, y in data:
                timed_update(clock, model, optimizer, x, y)
            model.eval()
            for x, _ in held_out:
                model(x)
                clock.lasts(20)
        (evaluation,) = recorded.named("train.eval")
        assert evaluation.end_time is not None
        assert evaluation.start_time is not None
        assert evaluation.end_time - evaluation.start_time == 39 * 20 * MS
        assert totals(recorded)["evals_ms"] == 39 * 20.0

    def test_a_run_without_a_step_has_only_a_start_up(self) -> None:
        with recording() as recorded:
            recorded.run.start()
        assert recorded.named("train.shutdown") == []

    def test_the_run_after_another_one_starts_when_that_has_ended(self) -> None:
        with recording() as former:
            training(1, checkpoint)
        with recording() as recorded:
            training(1, checkpoint)
        (shutdown,), (startup,) = former.named("train.shutdown"), recorded.named("train.startup")
        assert shutdown.end_time is not None
        assert startup.start_time is not None
        assert startup.start_time >= shutdown.end_time
        assert recorded.named("train.startup.import_torch") == []

    def test_by_the_real_clock_it_is_what_the_spans_say(self, in_c: bool) -> None:
        with recording(native=in_c) as recorded:
            seed()
            model = network()
            optimizer = sgd(model)
            data = DataLoader(Points(24), batch_size=2, num_workers=1, multiprocessing_context="fork")
            for _ in range(2):
                for x, y in data:
                    update(model, optimizer, x, y)
                model.eval()
                for x, _ in loader(3):
                    model(x)
                model.train()
        found = totals(recorded)
        steps, evaluations = recorded.named("train.step"), recorded.named("train.eval")
        _, started = recorded.named("dataloader.start_workers")
        assert (found["steps"], found["evals"]) == (len(steps), len(evaluations)) == (24, 2)
        assert found["steps_ms"] == pytest.approx(sum(map(milliseconds, steps)), abs=1e-3)
        assert found["evals_ms"] == pytest.approx(sum(map(milliseconds, evaluations)), abs=1e-3)
        assert found["start_workers_ms"] == pytest.approx(milliseconds(started), abs=1e-3)


def milliseconds(span: ReadableSpan) -> float:
    assert span.end_time is not None
    assert span.start_time is not None
    return (span.end_time - span.start_time) / 1e6
