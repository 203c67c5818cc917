"""Reading files of traces back, and the summary made of them."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from otel_dl.export.file import FileSpanExporter
from otel_dl.forensics import layout
from otel_dl.forensics.processes import process_started
from otel_dl.forensics.reader import read_all
from otel_dl.forensics.writer import create
from otel_dl.recording.identity import Identity
from otel_dl.viewing.reading import Reading, Span, read_spans
from otel_dl.viewing.summary import Summary, summarize
from otel_dl.viewing.text import render_reading, render_summary

MS = 1_000_000
EPOCH = 1_700_000_000 * 10**9


class Run:
    """Makes spans as a training run does: `step()` and what is in it, with durations in milliseconds."""

    def __init__(self, rank: int = 0, run: str = "job/1") -> None:
        self.spans: list[ReadableSpan] = []
        self.rank = rank
        self.run = run
        self.resource = Resource({"service.name": "digits", "dl.run.id": run, "dl.rank": rank, "host.name": "node-1"})

    def span(
        self,
        name: str,
        trace: int,
        ms: float,
        *,
        parent: SpanContext | None = None,
        scope: str = "otel_dl",
        error: str = "",
        words: str = "",
        links: Sequence[Link] = (),
        **attributes: Any,
    ) -> SpanContext:
        context = SpanContext(trace, int.from_bytes(os.urandom(8), "big") | 1, False, TraceFlags(1))
        named = {key.replace("__", "."): value for key, value in attributes.items()}
        if error:
            named["error.type"] = error
        self.spans.append(
            ReadableSpan(
                name,
                context,
                parent=parent,
                resource=self.resource,
                attributes=named,
                links=links,
                status=Status(StatusCode.ERROR, words or None) if error else Status(StatusCode.UNSET),
                start_time=EPOCH,
                end_time=EPOCH + round(ms * MS),
                instrumentation_scope=InstrumentationScope(scope),
            )
        )
        return context

    def step(
        self, number: int, ms: float, reason: str = "head", error: str = "", dropped: int = 0, **phases: float
    ) -> SpanContext:
        step = self.span(
            "train.step",
            number + 1,
            ms,
            error=error,
            dl__run__id=self.run,
            dl__rank=self.rank,
            dl__step=number,
            dl__keep__reason=reason,
            otel_dl__dropped=dropped,
        )
        for phase, phase_ms in phases.items():
            self.span(phase.replace("__", "."), number + 1, phase_ms, parent=step)
        return step


def summary_of(*runs: Run) -> Summary:
    (summary,) = summarize(spans_of(*runs))
    return summary


def spans_of(*runs: Run) -> Iterator[Span]:
    return (
        Span(
            trace_id=f"{one.context.trace_id:032x}",
            span_id=f"{one.context.span_id:016x}",
            parent_id=f"{one.parent.span_id:016x}" if one.parent else "",
            name=one.name,
            start_ns=one.start_time or 0,
            end_ns=one.end_time or 0,
            attributes=dict(one.attributes or {}),
            resource=dict(one.resource.attributes),
            scope=one.instrumentation_scope.name if one.instrumentation_scope else "",
            failed=not one.status.is_ok,
            links=tuple((f"{each.context.trace_id:032x}", f"{each.context.span_id:016x}") for each in one.links),
            message=one.status.description or "",
        )
        for run in runs
        for one in run.spans
    )


def test_which_lines_wait_for_the_device() -> None:
    run = Run()
    for number in range(4):
        step = run.step(number, 100)
        for line, ms, wait in ((41, 40, 39), (7, 5, None)):
            said: dict[str, Any] = {} if wait is None else {"dl__sync__wait_ms": float(wait)}
            run.span(
                "cuda.synchronize", number + 1, ms, parent=step, code__file__path="/home/me/train.py",
                code__line__number=line, dl__sync__op="Tensor.item", **said,
            )  # fmt: skip
        run.span("forward", number + 1, 50, parent=step, dl__sync__summed=3, dl__sync__summed_ms=0.06)
    summary = summary_of(run)
    assert [(one.line.number, one.count, one.total_ns, one.queued_ns) for one in summary.waiting.lines] == [
        (41, 4, 160 * MS, 156 * MS),
        (7, 4, 20 * MS, None),
    ]
    text = render_summary(summary)
    assert "train.py:41 (Tensor.item): 40 ms a step, 40.0% of its time; 4 times in 4 kept steps; 97.5% of that" in text
    assert "train.py:7 (Tensor.item): 5 ms a step" in text
    assert "12 short ones without a span: 60 µs a step" in text


def test_waits_of_an_unending_number_of_lines_are_bounded() -> None:
    run = Run()
    step = run.step(0, 100)
    for line in range(1_200):
        run.span("cuda.synchronize", 1, 1, parent=step, code__file__path="a.py", code__line__number=line)
    summary = summary_of(run)
    assert (len(summary.waiting.lines), summary.waiting.left_out) == (1_000, 200)
    assert "995 more lines" in render_summary(summary)
    assert "200 more were left out" in render_summary(summary)


def report(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "otel_dl.cli", "report", str(directory), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


class TestReading:
    def test_a_span_comes_back_as_it_was_written(self, tmp_path: Path) -> None:
        run = Run()
        other = run.span("dataloader.fetch", 0xFE, 2)
        step = run.span("train.step", 0xAB, 12.5, error="ValueError", dl__step=3, ratio=0.5, ok=True, sizes=[1, 2])
        run.span("dataloader.next", 0xAB, 1, parent=step, links=[Link(other)])
        FileSpanExporter(tmp_path).export(run.spans)
        reading = Reading(tmp_path)
        _, first, second = read_spans(reading)
        assert first == Span(
            trace_id=f"{0xAB:032x}",
            span_id=f"{step.span_id:016x}",
            parent_id="",
            name="train.step",
            start_ns=EPOCH,
            end_ns=EPOCH + 12_500_000,
            attributes={"dl.step": 3, "ratio": 0.5, "ok": True, "sizes": [1, 2], "error.type": "ValueError"},
            resource={"service.name": "digits", "dl.run.id": "job/1", "dl.rank": 0, "host.name": "node-1"},
            scope="otel_dl",
            failed=True,
            links=(),
        )
        assert first.duration_ns == 12_500_000
        assert second.parent_id == first.span_id
        assert second.links == ((f"{0xFE:032x}", f"{other.span_id:016x}"),)
        assert (reading.files, reading.lines, reading.spans, reading.passed_over) == (1, 1, 3, {})

    def test_what_cannot_be_read_is_passed_over_and_named(self, tmp_path: Path) -> None:
        run = Run()
        run.step(0, 10)
        FileSpanExporter(tmp_path).export(run.spans)
        (whole,) = tmp_path.iterdir()
        line = whole.read_bytes()
        (tmp_path / "a-torn.jsonl").write_bytes(line + line[: len(line) // 2])
        (tmp_path / "b-foreign.jsonl").write_text(
            '{"resourceLogs": []}\n[1]\nhello\n"text"\n{"resourceSpans": [{"scopeSpans": 7}]}\n'
        )
        (tmp_path / "c-empty.jsonl").touch()
        (tmp_path / "d-binary.jsonl").write_bytes(b"\xff\xfe\0\n" * 3)
        (tmp_path / "notes.txt").write_text("my notes")
        (tmp_path / "plots").mkdir()
        reading = Reading(tmp_path)
        assert len(list(read_spans(reading))) == 2
        found = {reason: (entry.count, entry.first) for reason, entry in reading.passed_over.items()}
        assert found == {
            "torn last line": (1, "a-torn.jsonl:2"),
            "line that is not OTLP JSON with spans": (8, "b-foreign.jsonl:1"),
            "empty file": (1, "c-empty.jsonl"),
            "foreign file": (1, "notes.txt"),
            "folder": (1, "plots"),
        }
        text = render_reading(reading)
        assert f"2 spans in 2 files of {tmp_path}" in text
        assert "8 × line that is not OTLP JSON with spans (first: b-foreign.jsonl:1)" in text

    def test_files_of_an_earlier_run_can_be_left_out(self, tmp_path: Path) -> None:
        first = Run()
        first.step(0, 10)
        FileSpanExporter(tmp_path).export(first.spans)
        earlier = {path.name for path in tmp_path.iterdir()}
        second = Run()
        second.step(7, 10)
        FileSpanExporter(tmp_path).export(second.spans)
        (span,) = read_spans(Reading(tmp_path), without=earlier)
        assert span.attributes["dl.step"] == 7


def loaded(
    run: Run, *, wait: float, busy: float, steps: int = 100, epochs: int = 1, ready_ms: float = 0, fetch_ms: float = 6,
    slow_ms: float = 18, start_ms: float = 0, rare_ms: float = 0, workers: int = 2,
) -> None:  # fmt: skip
    """`steps` steps of 10 ms in `epochs` epochs, of which `wait` is for data; workers that start anew in each, of which
    the last takes `slow_ms` a batch, not `fetch_ms`. The first of an epoch waits `start_ms` more; where `rare_ms` is
    given only each 20th batch is waited for, and takes so long."""
    length = steps // epochs
    for number in range(steps):
        epoch, place = divmod(number, length)
        worker = place % workers
        if place == 0:
            started: dict[str, Any] = {"dl__worker__count": workers, "dl__shm__free_bytes": 64 * 2**20}
            run.span("dataloader.start_workers", 999, 5, dl__loader__id=0, **started)
        rare = rare_ms if number % 20 == 19 else 0
        took = rare or (slow_ms if worker == workers - 1 else fetch_ms)
        shorter = fetch_ms < slow_ms and workers > 1
        waited = rare if rare_ms else 10 * wait * ((1.5 if worker else 0.5) if shorter else 1)
        extra = start_ms if place == 0 else 0
        step = run.step(number, 10 + rare + extra)
        batch: dict[str, Any] = {
            "dl__loader__id": 0,
            "dl__worker__id": worker,
            "dl__worker__pid": 70 + epoch * workers + worker,
            "dl__batch__index": place,
        }
        known: dict[str, Any] = {
            "dl__queue__depth": number % 3,
            "dl__fetch__duration_ms": float(took),
            "dl__fetch__ready_ms": ready_ms,
        }
        run.span("dataloader.next", number + 1, waited + extra, parent=step, **batch, **known)
        samples: dict[str, Any] = {"dl__sample__indices": "82-83"} if number == 41 else {}
        run.span("dataloader.fetch", 1000 + number, took, **batch, **samples)
    for worker in range(workers * epochs):
        life: dict[str, Any] = {"dl__worker__busy_ms": 1000 * busy, "dl__worker__idle_ms": 1000 * (1 - busy)}
        life |= {"dl__loader__id": 0, "dl__worker__id": worker % workers, "dl__worker__end": "finished"}
        run.span("dataloader.worker", 999, 1000, **life)


def said(label: str, run: Run) -> str:
    """The rows with this label, as one line."""
    lines = render_summary(summary_of(run)).splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(label + " ")), None)
    if first is None:
        return ""
    more = itertools.takewhile(lambda line: line.startswith(" "), lines[first + 1 :])
    return " ".join([lines[first], *(line.strip() for line in more)])


class TestLoading:
    def test_more_workers_would_not_help_steps_that_hardly_wait(self) -> None:
        run = Run()
        loaded(run, wait=0.05, busy=0.9)
        line = said("More workers", run)
        assert (
            "would not help: steps wait for data 5.0% of their time, the 2 workers read during 90.0% of theirs" in line
        )
        assert not said("Waiting", run)

    def test_more_workers_would_help_where_reading_is_the_limit_and_from_what_it_follows(self) -> None:
        run = Run()
        loaded(run, wait=0.4, busy=0.95, fetch_ms=12, slow_ms=12)
        line = said("More workers", run)
        assert "Reading is the limit: a batch takes 12 ms in a worker, a step computes in 6 ms;" in line
        assert "steps wait for data 40.0% of their time, the 2 workers read during 95.0% of theirs" in line

    @pytest.mark.parametrize(
        ("how", "cause"),
        [
            ({"wait": 0.4}, "75.0% of that waiting is for batches of a slow worker (see above)"),
            ({"wait": 0.1, "epochs": 20, "slow_ms": 1, "fetch_ms": 1, "start_ms": 30}, "they were started 20 times"),
            ({"wait": 0.4, "ready_ms": 3.0}, "100.0% of that waiting is for batches that a worker had read already"),
            (
                {"wait": 0.4, "slow_ms": 6, "rare_ms": 80},
                "100.0% of that waiting is for batches that took over 4",
            ),
            ({"wait": 0.4, "slow_ms": 6}, "what most of that waiting is for is not known from these traces"),
        ],
    )
    def test_what_steps_wait_for_while_workers_are_idle(self, how: dict[str, Any], cause: str) -> None:
        run = Run()
        loaded(run, busy=0.1, **how)
        assert cause in said("Waiting", run)
        assert not said("More workers", run)

    def test_busy_workers_are_not_too_few_where_batches_lie_ready(self) -> None:
        run = Run()
        loaded(run, wait=0.4, busy=0.95, ready_ms=3)
        assert "a worker had read already" in said("Waiting", run)

    def test_persistent_workers_are_not_advised_where_workers_were_started_once(self) -> None:
        run = Run()
        loaded(run, wait=0.1, busy=0.1, steps=25, start_ms=100)
        assert "not known" in said("Waiting", run)

    def test_a_few_steps_say_nothing_of_what_they_wait_for(self) -> None:
        run = Run()
        loaded(run, wait=0.4, busy=0.95, steps=19)
        assert not said("Waiting", run)
        assert not said("More workers", run)

    def test_workers_of_another_loader_count_for_nothing(self) -> None:
        """They are idle while the training waits for those of its own, and read other data."""
        run = Run()
        loaded(run, wait=0.4, busy=0.95, fetch_ms=12, slow_ms=12)
        for number in range(10):
            batch: dict[str, Any] = {
                "dl__loader__id": 7,
                "dl__worker__id": 0,
                "dl__worker__pid": 500,
                "dl__batch__index": number,
            }
            run.span("dataloader.fetch", 5000 + number, 90, **batch)
        run.span("dataloader.worker", 999, 1, dl__loader__id=7, dl__worker__busy_ms=1.0, dl__worker__idle_ms=1e6)
        assert "Reading is the limit: a batch takes 12 ms" in said("More workers", run)
        assert not said("Slow worker", run)

    def test_one_worker(self) -> None:
        run = Run()
        loaded(run, wait=0.4, busy=0.95, workers=1)
        assert "the one worker reads during 95.0% of its" in said("More workers", run)

    def test_a_slow_worker_is_found_though_it_is_another_process_each_epoch(self) -> None:
        run = Run()
        loaded(run, wait=0.1, busy=0.5, epochs=25)
        lines = [line for line in render_summary(summary_of(run)).splitlines() if "the others" in line]
        (line,) = lines
        assert "(100 batches by 2 workers)" in said("Batch reading", run)
        assert "worker 1 (25 processes, the last: pid " in line
        assert "median 18 ms a batch, the others 6 ms" in line

    def test_a_slow_worker_of_one_rank_is_told_from_those_of_others(self) -> None:
        runs = [Run(rank=0), Run(rank=1)]
        for run in runs:
            loaded(run, wait=0.1, busy=0.5, workers=1, slow_ms=18 if run.rank else 6)
        text = render_summary(summary_of(*runs))
        assert "rank 1 worker 0 (pid 70) of loader 0: median 18 ms a batch, the others 6 ms" in text

    def test_which_worker_and_which_samples_are_slow(self) -> None:
        run = Run()
        loaded(run, wait=0.1, busy=0.5)
        text = render_summary(summary_of(run))
        assert "worker 1 (pid 71) of loader 0: median 18 ms a batch, the others 6 ms" in text
        assert "82-83: 18 ms in worker 1" in text
        assert "busy 50.0% of their time, 1 batch ready at a next (median), 64 MiB of /dev/shm free" in text

    @pytest.mark.parametrize(("slow", "named"), [(3, False), (30, True)])
    def test_a_last_batch_that_is_smaller_accuses_no_worker(self, slow: int, named: bool) -> None:
        """Of 18 batches an epoch, by two workers, the last is small; so is each worker's last, of an iterable dataset.
        The other loader has too few batches to say anything."""
        run = Run()
        for loader, epochs, length in ((0, 3, 18), (1, 3, 4)):
            for epoch, place in itertools.product(range(epochs), range(length)):
                worker = place % 2
                took = 1 if place >= length - 1 else slow if worker else 3
                run.span(
                    "dataloader.fetch", 1000 + 100 * epoch + place, took, dl__loader__id=loader,
                    dl__worker__id=worker, dl__worker__pid=70 + worker, dl__batch__index=place,
                )  # fmt: skip
        told = said("Slow worker", run)
        assert told.endswith("worker 1 (pid 71) of loader 0: median 30 ms a batch, the others 3 ms") == named
        assert bool(told) == named

    def test_batches_of_two_sizes_that_alternate_by_epoch_end_accuse_no_worker(self) -> None:
        """Worker 0 reads 64 and 64 samples an epoch, worker 1 64 and 8."""
        run = Run()
        for epoch, place in itertools.product(range(20), range(4)):
            took = 1 if place == 3 else 40
            run.span(
                "dataloader.fetch", 1000 + 100 * epoch + place, took, dl__loader__id=1,
                dl__worker__id=place % 2, dl__worker__pid=70 + place % 2, dl__batch__index=place,
            )  # fmt: skip
        assert not said("Slow worker", run)

    def test_nothing_is_said_of_workers_where_there_are_none(self) -> None:
        run = Run()
        run.step(0, 10, forward=5)
        text = render_summary(summary_of(run))
        assert "Workers" not in text
        assert "More workers" not in text


class TestSummary:
    def test_nothing(self) -> None:
        summary = summary_of(Run())
        assert (summary.kept, summary.times, summary.fetches) == (0, None, [])
        assert "Steps          none" in render_summary(summary)

    def test_steps_are_counted_and_the_kept_ones_told_by_reason(self) -> None:
        run = Run()
        for number, reason in [(0, "warmup"), (1, "head"), (2, "head"), (63, "slow")]:
            run.step(number, 10, reason)
        summary = summary_of(run)
        assert (summary.kept, summary.total) == (4, 64)
        assert summary.keep_reasons == {"warmup": 1, "head": 2, "slow": 1}
        assert "4 kept of at least 64 (kept as: warmup 1, head 2, slow 1)" in render_summary(summary)

    def test_times_are_those_of_an_even_sample(self) -> None:
        """Slow and failed steps are kept because they are slow and failed: they must not move the median."""
        run = Run()
        run.step(0, 5000, "warmup")
        for number in range(1, 101):
            run.step(number, number)
        summary = summary_of(run)
        assert summary.times is not None
        assert summary.times.by_head
        assert summary.times.steps == (100, 50.5 * MS, 99 * MS)
        assert "median 50.5 ms, p99 99 ms (100 steps kept by the head sampler)" in render_summary(summary)

    def test_without_such_a_sample_all_kept_steps_count_and_that_is_said(self) -> None:
        run = Run()
        run.step(3, 40, "slow")
        run.step(9, 60, "error")
        summary = summary_of(run)
        assert summary.times is not None
        assert not summary.times.by_head
        assert summary.times.steps.median_ns == 50 * MS
        assert "all 2 steps kept, none of them by the head sampler: not an even sample" in render_summary(summary)

    def test_shares_are_of_direct_children_only(self) -> None:
        run = Run()
        run.step(0, 90, "warmup", forward=90)
        step = run.step(1, 100, dataloader__next=20, forward=25, optimizer__step=10, optimizer__zero_grad=5)
        backward = run.span("backward", 2, 30, parent=step)
        run.span("forward", 2, 12, parent=backward)  # activation checkpointing
        summary = summary_of(run)
        assert summary.times is not None
        assert summary.times.shares == pytest.approx(
            {"data wait": 0.2, "forward": 0.25, "backward": 0.3, "optimizer": 0.1, "zero_grad": 0.05, "other": 0.1}
        )
        text = render_summary(summary)
        assert "data wait 20.0%, forward 25.0%, backward 30.0%, optimizer 10.0%, zero_grad 5.0%, other 10.0%" in text
        assert "(of the time of this step)" in text

    def test_children_may_be_read_before_their_step(self) -> None:
        run = Run()
        run.step(0, 100, forward=50)
        run.spans.reverse()
        summary = summary_of(run)
        assert summary.times is not None
        assert summary.times.shares["forward"] == pytest.approx(0.5)

    def test_overlapping_phases_leave_no_negative_rest(self) -> None:
        run = Run()
        run.step(0, 100, forward=80, backward=80)
        summary = summary_of(run)
        assert summary.times is not None
        assert summary.times.shares["other"] == 0

    def test_the_slowest_steps_lead_to_their_traces(self) -> None:
        run = Run()
        for number in range(10):
            run.step(number, 10 + number)
        summary = summary_of(run)
        assert [step.number for step in summary.slowest] == [9, 8, 7, 6, 5]
        assert f"step 9, 19 ms (outside any phase 100.0%), {10:032x}" in render_summary(summary)
        assert f"http://jaeger:16686/trace/{10:032x}" in render_summary(summary, "http://jaeger:16686/")

    @pytest.mark.parametrize(
        ("phases", "own", "told"),
        [
            ({"forward": 10, "backward": 40}, 0, "outside any phase 50.0%"),
            ({"forward": 10, "backward": 60}, 0, "backward 60.0%"),
            ({"forward": 10, "backward": 30}, 85, "augment 55.0%"),
            ({"dataloader__next": 70}, 90, "data wait 70.0%"),
        ],
    )
    def test_of_the_slowest_steps_it_says_where_most_of_the_time_went(
        self, phases: dict[str, float], own: float, told: str
    ) -> None:
        """The spans all begin with the step: of the user's own counts what is outside the phases."""
        run = Run()
        step = run.step(0, 100, **phases)
        if own:
            run.span("augment", 1, own, parent=step, scope="my.pipeline")
        assert f"step 0, 100 ms ({told}), " in render_summary(summary_of(run))

    def test_failed_steps_and_other_failed_spans_name_their_error(self) -> None:
        run = Run()
        run.step(4, 10, "error", error="torch.OutOfMemoryError")
        run.span("dataloader.fetch", 99, 3, error="ValueError", dl__worker__id=0)
        summary = summary_of(run)
        assert [step.error_type for step in summary.failed] == ["torch.OutOfMemoryError"]
        text = render_summary(summary)
        assert "torch.OutOfMemoryError: step 4" in text
        assert "ValueError in 1 dataloader.fetch span" in text

    def test_one_exception_in_a_sample_is_one_failure(self) -> None:
        """It leaves the fetch, the wait for it and the step, and ends the worker; another is another."""
        run = Run()
        batch: dict[str, Any] = {"dl__batch__index": 9, "dl__worker__id": 1, "dl__worker__pid": 71}
        fetch = run.span("dataloader.fetch", 99, 3, error="ValueError", dl__sample__indices="36-39", **batch)
        step = run.step(9, 10, "error", error="ValueError")
        run.span("dataloader.next", 10, 3, parent=step, error="ValueError", links=[Link(fetch)], **batch)
        run.span("dataloader.worker", 98, 9, error="ValueError", dl__worker__id=1, dl__worker__pid=71)
        run.span("dataloader.fetch", 97, 3, error="ValueError", **{**batch, "dl__worker__pid": 72})
        text = render_summary(summary_of(run))
        where = "dataloader.next of batch 9 by worker 1, samples 36-39"
        assert f"Failed         ValueError in {where}: step 9, 10 ms, " in text
        assert "ValueError in 1 dataloader.fetch span" in text
        assert text.count("ValueError") == 2

    @pytest.mark.parametrize("by_sigterm", [True, False])
    def test_workers_that_ended_with_their_rank_are_not_told_beside_the_incident(self, by_sigterm: bool) -> None:
        runs = [Run(rank=0), Run(rank=1)]
        for run in runs:
            run.step(2, 10, "error", error="SIGTERM" if by_sigterm else "KeyError")
            run.span(
                "dataloader.worker", 99, 9, error="SIGTERM", words=f"worker of rank {run.rank} was killed by SIGTERM",
                dl__worker__id=0, dl__worker__signal="SIGTERM",
            )  # fmt: skip
        runs[0].span("dataloader.worker", 99, 9, error="SIGKILL", words="worker was killed by SIGKILL")
        text = render_summary(summary_of(*runs))
        assert ("was killed by SIGTERM" in text) != by_sigterm
        assert "Died           " in text
        assert "worker was killed by SIGKILL" in text
        assert "1 worker ended" not in text
        assert ("Incident " in text) == by_sigterm

    def test_a_failed_worker_is_told_as_a_worker(self) -> None:
        run = Run()
        run.span("dataloader.worker", 99, 3, error="exit", dl__worker__id=0)
        assert "Failed         1 worker ended: exit" in render_summary(summary_of(run))

    def test_batches_read_by_workers_and_by_the_training_process_are_told_apart(self) -> None:
        run = Run()
        for number, pid in enumerate([71, 72, 71, 72]):
            run.span("dataloader.fetch", 100 + number, 4, dl__worker__id=pid % 2, dl__worker__pid=pid)
        run.span("dataloader.fetch", 200, 9)
        text = render_summary(summary_of(run))
        assert "median 4 ms, p99 4 ms (4 batches by 2 workers)" in text
        assert "median 9 ms, p99 9 ms (1 batch by the training process)" in text

    @pytest.mark.parametrize("pids", [(71, 72), (73, 74)])
    def test_batches_that_no_step_took_do_not_count_their_workers_twice(self, pids: tuple[int, int]) -> None:
        """They do not say of which loader they are."""
        run = Run()
        for place in range(4):
            named: dict[str, Any] = {"dl__loader__id": 0} if place < 2 else {}
            pid = (71, 72, *pids)[place]
            run.span(
                "dataloader.fetch", 100 + place, 4, dl__worker__id=place % 2, dl__worker__pid=pid,
                dl__batch__index=place, **named,
            )  # fmt: skip
        assert "(4 batches by 2 workers)" in render_summary(summary_of(run))

    def test_evaluation_own_spans_and_drops(self) -> None:
        run = Run()
        run.step(0, 10, dropped=3)
        run.step(1, 10, dropped=4)
        run.span("train.eval", 77, 1500)
        run.span("augment", 1, 1, scope="my.pipeline")
        run.span("augment", 1, 1, scope="otel_dl.user")
        summary = summary_of(run)
        assert (summary.evaluation, summary.user_spans, summary.dropped) == ((1, 1500 * MS), 2, 7)
        text = render_summary(summary)
        assert "1.5 s in 1 kept stretch" in text
        assert "7 records for lack of room" in text

    def test_ranks_share_a_step_and_each_has_a_line(self) -> None:
        fast, slow = Run(rank=0), Run(rank=1)
        for number in range(4):
            fast.step(number, 10, dataloader__next=1)
            slow.step(number, 20, "slow" if number == 3 else "head", dataloader__next=10)
        summary = summary_of(fast, slow)
        assert (summary.kept, summary.total) == (4, 4)
        assert summary.keep_reasons == {"head": 3, "slow": 1}
        text = render_summary(summary)
        assert "rank 0: 4 kept of at least 4, median 10 ms, p99 10 ms, data wait 10.0% (4 steps)" in text
        assert "rank 1: 4 kept of at least 4, median 20 ms, p99 20 ms, data wait 50.0% (3 steps)" in text
        assert "step 3 rank 1, 20 ms (data wait 50.0%), " in text

    def test_two_runs_are_told_apart(self) -> None:
        first, second = Run(run="a"), Run(run="b")
        first.step(9, 10)
        second.step(0, 10)
        summaries = summarize(spans_of(first, second))
        assert [(summary.run, summary.kept, summary.total) for summary in summaries] == [("a", 1, 10), ("b", 1, 1)]


@pytest.mark.parametrize("exported", [9, 0])
def test_what_a_killed_rank_had_kept_and_not_exported_is_lost(tmp_path: Path, exported: int) -> None:
    dead_page(tmp_path / "pages" / "1.status", EPOCH)
    with (tmp_path / "pages" / "1.status").open("r+b") as file:
        file.seek(layout.STEP)
        file.write((49).to_bytes(8, "little"))
    (page,) = read_all(tmp_path / "pages")
    run = Run(rank=page.rank, run=page.run)
    run.resource = run.resource.merge(Resource({"process.pid": page.pid}))
    for number in range(exported):
        run.step(number, 10)
    if not exported:
        run.span("train.startup", 1, 10)
    (summary,) = summarize(spans_of(run), [page])
    assert (summary.kept, summary.total) == (exported, 50)
    text = render_summary(summary)
    assert ("9 kept of at least 50" in text) == bool(exported)
    assert "the tail of rank 0 is lost: its status page says step 49, " in text
    assert ("its last exported step is 8" if exported else "no step of it is here") in text
    assert "nothing in these traces" not in text


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (["size"] * 3, ": 4, 4 ms, 3 again, because: size"),
        (["size", "size", "type"], ": 4, 4 ms, 3 again, 2 because: size, 1 because: type"),
        (
            [*"abcdef"],
            ": 7, 7 ms, 6 again, 1 because: a, 1 because: b, 1 because: c, 1 because: d, and for 2 more reasons",
        ),
    ],
)
def test_each_reason_of_a_recompilation_is_told(reasons: list[str], words: str) -> None:
    run = Run()
    for number, reason in enumerate(["", *reasons]):
        again: dict[str, Any] = {"dl__compile__recompiled": True, "dl__compile__reason": reason} if reason else {}
        name: dict[str, Any] = {"code__function__name": "forward", "dl__compile__graph_breaks": 0}
        run.span("torch.compile", 1 + number, 1, **name, **again)
    assert said("Compiled", run).endswith(words)


class TestCommand:
    def test_prints_the_summary_on_stdout(self, tmp_path: Path) -> None:
        run = Run()
        run.step(0, 10, forward=5)
        FileSpanExporter(tmp_path).export(run.spans)
        done = report(tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "1 kept of at least 1" in done.stdout
        assert f"2 spans in 1 file of {tmp_path}" in done.stdout

    def test_trace_ids_become_links_by_option_or_environment(self, tmp_path: Path) -> None:
        run = Run()
        run.step(0, 10)
        FileSpanExporter(tmp_path).export(run.spans)
        link = f"http://jaeger:16686/trace/{1:032x}"
        assert link in report(tmp_path, "--jaeger", "http://jaeger:16686").stdout
        assert link in report(tmp_path, OTEL_DL_JAEGER_URL="http://jaeger:16686").stdout

    def test_empty_folder(self, tmp_path: Path) -> None:
        done = report(tmp_path)
        assert done.returncode == 1
        assert f"there are no traces in {tmp_path}" in done.stderr

    def test_folder_of_runs_names_the_newest(self, tmp_path: Path) -> None:
        run = Run()
        run.step(0, 10)
        FileSpanExporter(tmp_path / "monday").export(run.spans)
        done = report(tmp_path)
        assert done.returncode == 1
        assert f"The newest in its folders: otel-dl report {tmp_path / 'monday'}\n" in done.stderr

    def test_says_that_full_files_were_removed(self, tmp_path: Path) -> None:
        rotating, whole = FileSpanExporter(tmp_path, max_bytes=65_536, max_files=1), FileSpanExporter(tmp_path)
        for number in range(4):
            run = Run()
            run.step(number, 10)
            whole.export(run.spans)
            run.span("x" * 40_000, 1, 1)
            rotating.export(run.spans)
        done = report(tmp_path)
        assert "Removed        2 full files, the oldest, to make room: OTEL_DL_FILE_MAX_FILES" in done.stdout

    def test_foreign_file_only(self, tmp_path: Path) -> None:
        (tmp_path / "log.jsonl").write_text("hello\n")
        done = report(tmp_path)
        assert done.returncode == 1
        assert "1 × line that is not OTLP JSON with spans (log.jsonl:1)" in done.stdout

    def test_torn_last_line(self, tmp_path: Path) -> None:
        run = Run()
        run.step(0, 10)
        FileSpanExporter(tmp_path).export(run.spans)
        (path,) = tmp_path.iterdir()
        with path.open("ab") as file:
            file.write(b'{"resourceSp')
        done = report(tmp_path)
        assert done.returncode == 0
        assert "1 × torn last line" in done.stdout

    def test_no_such_folder(self, tmp_path: Path) -> None:
        done = report(tmp_path / "missing")
        assert done.returncode == 1
        assert f"{tmp_path / 'missing'} cannot be read: No such file or directory" in done.stderr


def status(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "otel_dl.cli", "status", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


RUN = "0" * 31 + "1"
DEAD = 2**22 + 1
"""A pid that no process has."""


def dead_page(path: Path, began: int, rank: int = 0, run: str = RUN, pid: int = DEAD, started: int = 1) -> None:
    """As of a process that began then and was killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    create(str(path), identity=Identity(run=run, rank=rank, local_rank=0, world_size=1, attempt=0))
    with path.open("r+b") as file:
        file.seek(layout.PID)
        file.write(layout.PROCESS_STRUCT.pack(pid, started, 0, began))


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[int]:
    """A worker of rank 1 that lives, with its page: its pid."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        path = tmp_path / "2.status"
        identity = Identity(run=RUN, rank=1, local_rank=0, world_size=2, attempt=0)
        create(str(path), identity=identity, worker=0, parent=DEAD)
        with path.open("r+b") as file:
            file.seek(layout.PID)
            file.write(layout.PROCESS_STRUCT.pack(process.pid, process_started(process.pid), 0, EPOCH))
        yield process.pid
        process.communicate()


class TestStatus:
    def test_all_runs_without_a_folder_newest_first_with_when_they_began_and_how_they_go(self, tmp_path: Path) -> None:
        base = tmp_path / f"otel-dl-{os.getuid()}"
        for name, hour in (("1-b", 1), ("2-c", 3), ("3-a", 2)):
            dead_page(base / name / "1.status", EPOCH + hour * 3600 * 10**9, run=name * 8)
        done = status("--all", TMPDIR=str(tmp_path), TZ="UTC")
        heads = [line for line in done.stdout.splitlines() if line.startswith(str(base))]
        assert heads == [
            f"{base / '2-c'}: began 2023-11-15 01:13:20",
            f"{base / '3-a'}: began 2023-11-15 00:13:20",
            f"{base / '1-b'}: began 2023-11-14 23:13:20",
        ]
        assert "all but the latest 32 folders" in done.stderr
        assert "rm -r DIR" in done.stderr
        assert done.returncode == 0

    def test_without_all_those_that_run_and_the_one_that_ended_last(self, tmp_path: Path) -> None:
        base = tmp_path / f"otel-dl-{os.getuid()}"
        for hour in range(1, 6):
            dead_page(base / f"{hour}-old" / "1.status", EPOCH + hour * 3600 * 10**9, run=f"{hour}" * 32)
        dead_page(base / "8-of-the-last" / "1.status", EPOCH + 5 * 3600 * 10**9, rank=1, run="5" * 32)
        me = {"pid": os.getpid(), "started": process_started(os.getpid())}
        dead_page(base / "6-runs" / "1.status", EPOCH, run="6" * 32, **me)
        dead_page(base / "7-runs" / "1.status", EPOCH + 9 * 3600 * 10**9, run="7" * 32, **me)
        done = status(TMPDIR=str(tmp_path), TZ="UTC")
        heads = [line.partition(":")[0] for line in done.stdout.splitlines() if line.startswith(str(base))]
        assert heads[0] == str(base / "7-runs")
        assert set(heads[1:3]) == {str(base / "5-old"), str(base / "8-of-the-last")}
        assert heads[3:] == [str(base / "6-runs")]
        assert "4 older runs that ended without taking their pages away are not shown: " in done.stderr
        assert done.stderr.count("otel-dl status --all") == 1
        assert done.stdout.count("runs, outside any step") == 2
        assert "older run" not in status("--all", TMPDIR=str(tmp_path)).stderr

    def test_where_none_is_older_nothing_is_said_of_such(self, tmp_path: Path) -> None:
        dead_page(tmp_path / f"otel-dl-{os.getuid()}" / "1-a" / "1.status", EPOCH)
        done = status(TMPDIR=str(tmp_path))
        assert "died outside any step" in done.stdout
        assert "older run" not in done.stderr

    def test_an_empty_folder_says_so(self, tmp_path: Path) -> None:
        done = status(str(tmp_path))
        assert "has not begun, or ended in order" in done.stderr
        assert done.returncode == 1

    def test_of_a_job_that_has_ended_the_traces_tell_how(self, tmp_path: Path) -> None:
        run = Run()
        run.step(0, 10)
        FileSpanExporter(tmp_path).export(run.spans)
        done = status(str(tmp_path))
        assert "(rank 0) ended after step 0, without a failure in these traces; last span 20" in done.stdout
        assert f"More of them: otel-dl report {tmp_path}" in done.stderr
        assert done.returncode == 0

    def test_while_workers_outlive_a_death_it_tells_of_those_that_took_their_page_away(
        self, tmp_path: Path, orphan: int
    ) -> None:
        dead_page(tmp_path / "1.status", EPOCH, rank=1)
        ended, of_another_run = Run(rank=0, run=RUN), Run(rank=5, run="2" * 32)
        ended.step(0, 10, error="SIGTERM")
        of_another_run.step(0, 10)
        for run in (ended, of_another_run):
            FileSpanExporter(tmp_path).export(run.spans)
        done = status(str(tmp_path))
        first, second, third = done.stdout.splitlines()
        assert first.startswith("a process (rank 0) was ended by SIGTERM in step 0; last span ")
        assert second.startswith(f"pid {DEAD} (rank 1) died ")
        assert third.startswith(f"pid {orphan} (rank 1 worker 0) runs,")
        assert done.returncode == 0

    def test_where_no_trace_is_left_pages_are_told_all_the_same(self, tmp_path: Path, orphan: int) -> None:
        dead_page(tmp_path / "1.status", EPOCH, rank=1)
        first, second = status(str(tmp_path)).stdout.splitlines()
        assert f"pid {DEAD} (rank 1) died" in first
        assert f"pid {orphan} (rank 1 worker 0) runs" in second

    def test_a_folder_of_runs_names_the_newest_and_the_others(self, tmp_path: Path) -> None:
        for at, name in enumerate(("monday", "sunday", "tuesday now")):
            dead_page(tmp_path / name / "1.status", EPOCH)
            os.utime(tmp_path / name / "1.status", (at, at))
        done = status(str(tmp_path))
        newest = f"The newest in its folders: otel-dl status '{tmp_path / 'tuesday now'}' (others: sunday, monday)"
        assert f"there are no status pages in {tmp_path}. {newest}\n" in done.stderr
        assert done.returncode == 1

    @pytest.mark.parametrize(
        ("how", "said"),
        [("killed by SIGKILL", "; by what other ranks saw, killed by SIGKILL"), ("how it ended is not known", "")],
    )
    def test_what_a_dead_rank_did_is_told_once(self, tmp_path: Path, how: str, said: str) -> None:
        """By its page, though the words of those that waited for it tell it as well."""
        dead_page(tmp_path / "1.status", EPOCH, rank=1)
        waits = Run(rank=0, run=RUN)
        waits.span(
            "train.stall", 1, 10, error="stalled", dl__missing_ranks=[1], dl__missing__reason=["dead"],
            dl__missing__words=[f"is dead ({how}); it was outside any step"], dl__run__id=RUN, dl__rank=0,
            dl__stall__in="dist.all_reduce", dl__group__id="0", dl__collective__seq=3,
        )  # fmt: skip
        waits.step(0, 10)
        FileSpanExporter(tmp_path).export(waits.spans)
        (line,) = (line for line in status(str(tmp_path)).stdout.splitlines() if "(rank 1)" in line)
        assert re.fullmatch(rf"pid {DEAD} \(rank 1\) died outside any step; last event [\d: -]+{re.escape(said)}", line)
