"""What the report says of several ranks: who arrived last, who is missing, who is stuck. The traces are written as
ranks write them, by a model of a job in which a collective ends when its last rank has come."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from otel_dl.export.file import FileSpanExporter
from otel_dl.recording import ids
from otel_dl.viewing.arrivals import OUTSIDE, Arrivals
from otel_dl.viewing.reading import Reading, read_spans
from otel_dl.viewing.summary import Summary, summarize
from otel_dl.viewing.text import render_summary

MS = 1_000_000
USER = "otel_dl.user"
EPOCH = 1_700_000_000 * 10**9


class Rank:
    """One rank: the time that it is, on the true clock, and the spans that it writes, on its own."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.now = EPOCH
        self.spans: list[ReadableSpan] = []
        self.skew = job.skew.get(rank, 0)
        """Of its clock against rank 0's, ms."""
        self.clock: dict[str, Any] = {}
        """What it says of that."""
        if job.error is not None:
            self.clock = {
                "dl.clock.offset_ns": round(self.skew * MS),
                "dl.clock.error_ns": 0 if rank == 0 else round(job.error * MS),
            }
        host = f"node-{rank}" if job.many_hosts else "node"
        self.resource = Resource({"dl.run.id": job.run, "dl.rank": rank, "dl.world_size": job.world, "host.name": host})

    def span(
        self, name: str, trace: int, start: int, end: int, parent: SpanContext | None = None, words: str = "",
        scope: str = "otel_dl", **attributes: Any,
    ) -> SpanContext:  # fmt: skip
        context = SpanContext(trace, random.getrandbits(63) | 1, False, TraceFlags(1))
        named = {key.replace("__", "."): value for key, value in attributes.items()}
        failed = bool(words) or "error.type" in named
        self.spans.append(
            ReadableSpan(
                name,
                context,
                parent=parent,
                resource=self.resource,
                attributes=named,
                status=Status(StatusCode.ERROR, words or None) if failed else Status(StatusCode.UNSET),
                start_time=start + round(self.skew * MS),
                end_time=end + round(self.skew * MS),
                instrumentation_scope=InstrumentationScope(scope),
            )
        )
        return context

    def first(self, name: str, trace: int, start: int, end: int, **attributes: Any) -> SpanContext:
        said = {"dl.run.id": self.job.run, "dl.rank": self.rank, "dl.world_size": self.job.world, **self.clock}
        return self.span(name, trace, start, end, **said, **attributes)


class Job:
    """Ranks that train, step by step, like DDP: `next`, forward, backward with three buckets, a collective that is
    waited for, optimizer. Each phase takes a few ms, and up to `jitter` ms more."""

    def __init__(
        self, world: int = 4, run: str = "job-1", skew: dict[int, float] | None = None, error: float | None = 0.05,
        many_hosts: bool = True, jitter: float = 1, groups: Sequence[Sequence[int]] | None = None, ddp: bool = True,
        own: str = "", around: str = "",
    ) -> None:  # fmt: skip
        """`own`: a span of the script's own before the forward; `around`: one around both."""
        self.own, self.around = own, around
        self.world, self.run, self.skew, self.error = world, run, skew or {}, error
        self.many_hosts, self.jitter, self.ddp = many_hosts, jitter, ddp
        self.ranks = [Rank(self, rank) for rank in range(world)]
        self.groups = groups or [range(world)]
        """Each step ends with one collective of each of these, in this order."""
        self.numbers: dict[str, int] = {}
        self.random = random.Random(0)

    def step(
        self, number: int, slow: dict[tuple[int, str], float] | None = None, kept: Sequence[int] | None = None,
        ahead: dict[int, int] | None = None,
    ) -> None:  # fmt: skip
        """`slow`: (rank, phase) → ms more. Only ranks in `kept` write it. `ahead`: rank → how many steps more it has
        counted."""
        slow, ahead = slow or {}, ahead or {}
        spans: dict[Rank, list[tuple[Any, ...]]] = {rank: [] for rank in self.ranks}
        starts = {rank: rank.now for rank in self.ranks}

        def phase(name: str, ms: float) -> None:
            for rank in self.ranks:
                begun = rank.now
                work = ms + slow.get((rank.rank, name), 0) + self.random.uniform(0, self.jitter)
                rank.now += round(work * MS)
                if name != OUTSIDE:
                    spans[rank].append((name, begun, rank.now, {}))

        phase("dataloader.next", 2)
        begun = {rank: rank.now for rank in self.ranks}
        if self.own:
            phase(self.own, 1)
        phase("forward", 5)
        if self.around:
            phase(OUTSIDE, 1)
            for rank in self.ranks:
                spans[rank].append((self.around, begun[rank], rank.now, {}))
        if self.ddp:
            begun = {rank: rank.now for rank in self.ranks}
            phase("backward", 4)
            computed = {rank: rank.now - begun[rank] for rank in self.ranks}
            for bucket in range(3):
                issues = {rank: begun[rank] + computed[rank] * (bucket + 1) // 3 for rank in self.ranks}
                ended = self.collective("0", issues, 1, spans, bucket)
                for rank in self.ranks:
                    rank.now = max(rank.now, ended)
            for rank in self.ranks:  # it waits for its buckets
                at = next(at for at, each in enumerate(spans[rank]) if each[0] == "backward")
                spans[rank][at] = ("backward", begun[rank], rank.now, {})
        phase(OUTSIDE, 1)
        for at, members in enumerate(self.groups):
            issues = {rank: rank.now for rank in self.ranks if rank.rank in members}
            ended = self.collective(str(at), issues, 1, spans)
            for rank in issues:
                rank.now = ended
            phase(OUTSIDE + str(at), 0)
        phase("optimizer.step", 1)
        for rank in self.ranks:
            if kept is not None and rank.rank not in kept:
                continue
            mine = number + ahead.get(rank.rank, 0)
            trace = ids.trace_id(self.run, "step", mine)
            step = rank.first("train.step", trace, starts[rank], rank.now, dl__step=mine, dl__keep__reason="head")
            around = step
            for name, start, end, attributes in sorted(spans[rank], key=lambda each: (each[1], -each[2])):
                mine = name in (self.own, self.around)
                parent = around if name in (self.own, "forward") else step
                context = rank.span(name, trace, start, end, parent, scope=USER if mine else "otel_dl", **attributes)
                around = context if name == self.around else around

    def collective(
        self, group: str, issues: dict[Rank, int], ms: float, spans: dict[Rank, list[tuple[Any, ...]]],
        bucket: int | None = None,
    ) -> int:  # fmt: skip
        """Ends when the last rank has come, and the transfer is done."""
        ended = max(issues.values()) + round(ms * MS)
        self.numbers[group] = self.numbers.get(group, 0) + 1
        for rank, issue in issues.items():
            said: dict[str, Any] = {
                "dl__group__id": group,
                "dl__group__size": len(issues),
                "dl__collective__seq": self.numbers[group],
                "dl__collective__async": bucket is not None,
            }
            if bucket is not None:
                said["dl__bucket__index"] = bucket
            spans[rank].append(("dist.all_reduce", issue, ended, said))
        return ended

    def write(self, folder: Path, without: Sequence[int] = ()) -> None:
        for rank in self.ranks:
            if rank.rank not in without:
                FileSpanExporter(folder).export(rank.spans)

    def summary(self, folder: Path, without: Sequence[int] = ()) -> Summary:
        self.write(folder, without)
        (summary,) = summarize(read_spans(Reading(folder)))
        return summary

    def arrivals(self, folder: Path, without: Sequence[int] = ()) -> Arrivals:
        return self.summary(folder, without).arrivals


def lines(summary: Summary, label: str, each_step: bool = False) -> Iterator[str]:
    """The text of all rows under that label."""
    current = ""
    for line in render_summary(summary, each_step=each_step).splitlines():
        current = line[:15].strip() or current
        if current == label:
            yield line[15:]


class TestArrivedLast:
    @pytest.mark.parametrize("ddp", [True, False])
    def test_a_rank_drawn_anew_each_step_is_named_in_every_step_with_what_took_it_longer(
        self, tmp_path: Path, ddp: bool
    ) -> None:
        job = Job(8, ddp=ddp, skew={rank: 20 * (-1) ** rank for rank in range(1, 8)})
        phases = ["dataloader.next", "forward", *(["backward"] if ddp else []), OUTSIDE]
        drawn = [(job.random.randrange(8), job.random.choice(phases)) for _ in range(100)]
        for number, who in enumerate(drawn):
            job.step(number, {who: 50})
        arrivals = job.arrivals(tmp_path)
        assert (arrivals.compared, arrivals.even, arrivals.lacking, arrivals.unclear) == (100, 0, [], [])
        assert [(arrival.rank, arrival.longer) for arrival in arrivals.steps] == drawn
        for arrival in arrivals.steps:
            assert arrival.late_ns == pytest.approx(50 * MS, abs=4 * MS)
        assert sum(late.steps for late in arrivals.ranks) == 100
        (operation,) = arrivals.operations
        assert operation.collectives == 100 * (4 if ddp else 1)
        assert set(operation.transfer_ns) == {MS}

    def test_lateness_at_buckets_is_lost_once_and_what_is_lost_after_a_wait_comes_on_top(self, tmp_path: Path) -> None:
        job = Job(jitter=0)
        job.step(0, {(2, "forward"): 50})
        job.step(1, {(2, "forward"): 50, (2, OUTSIDE): 30})
        first, second = job.arrivals(tmp_path).steps
        assert (first.rank, first.late_ns, first.collectives, first.of) == (2, 50 * MS, 3, 4)
        assert (second.rank, second.late_ns, second.collectives) == (2, 80 * MS, 4)
        assert second.longer == "forward"

    def test_nobody_is_named_where_all_come_within_the_errors_of_their_clocks(self, tmp_path: Path) -> None:
        job = Job(error=30)
        job.step(0, {(1, "forward"): 50})
        job.step(1, {(1, "forward"): 80})
        arrivals = job.arrivals(tmp_path)
        assert [arrival.step for arrival in arrivals.steps] == [1]
        assert (arrivals.compared, arrivals.even) == (2, 1)

    def test_two_ranks_that_are_equally_late_are_not_told_apart(self, tmp_path: Path) -> None:
        job = Job(jitter=0)
        job.step(0, {(1, "forward"): 50, (2, "forward"): 50.05})
        assert job.arrivals(tmp_path).steps == []

    def test_clocks_of_several_hosts_that_nobody_compared_say_nothing(self, tmp_path: Path) -> None:
        job = Job(error=None)
        job.step(0, {(1, "forward"): 50})
        summary = job.summary(tmp_path)
        assert (summary.arrivals.steps, summary.arrivals.unclear) == ([], [0])
        assert "clocks are apart is not known" in " ".join(lines(summary, "Arrived last"))

    def test_ranks_of_one_host_read_one_clock(self, tmp_path: Path) -> None:
        job = Job(error=None, many_hosts=False)
        job.step(0, {(1, "forward"): 50})
        assert [arrival.rank for arrival in job.arrivals(tmp_path).steps] == [1]

    def test_where_a_rank_is_missing_nothing_is_said_of_the_step(self, tmp_path: Path) -> None:
        job = Job()
        for number in range(4):
            job.step(number, {(3, "forward"): 50, (1, "forward"): 20}, kept=[0, 1, 2] if number == 2 else None)
        summary = job.summary(tmp_path)
        assert [arrival.step for arrival in summary.arrivals.steps] == [0, 1, 3]
        assert summary.arrivals.lacking == [2]
        assert "step 2: not told, ranks are missing" in list(lines(summary, "Last in", each_step=True))

    def test_where_the_file_of_a_rank_is_missing_nobody_is_named_and_the_rank_is(self, tmp_path: Path) -> None:
        job = Job()
        for number in range(4):
            job.step(number, {(3, "forward"): 50, (1, "forward"): 20})
        summary = job.summary(tmp_path, without=[3])
        assert (summary.arrivals.steps, summary.arrivals.operations) == ([], [])
        assert list(lines(summary, "Missing")) == ["nothing was read of rank 3 of 4"]
        assert list(lines(summary, "Arrived last")) == ["not told of 4 kept steps: ranks are missing in them"]

    def test_ranks_that_count_steps_differently_are_still_compared(self, tmp_path: Path) -> None:
        job = Job()
        for number in range(10):
            job.step(number, {(number % 4, "forward"): 50}, ahead={1: 2, 3: number})
        arrivals = job.arrivals(tmp_path)
        assert [(each.step, each.rank) for each in arrivals.steps] == [(number, number % 4) for number in range(10)]
        assert {each.longer for each in arrivals.steps} == {"forward"}

    @pytest.mark.parametrize(
        ("slow", "named"),
        [
            ({(0, "forward"): 50}, (0, 50)),
            ({(3, "forward"): 50}, (3, 50)),
            ({(1, "forward"): 50}, (1, 50)),
            ({(0, "forward"): 50, (1, OUTSIDE + "0"): 70}, (1, 70)),
        ],
    )
    def test_a_late_rank_of_one_group_is_not_laid_on_those_that_waited_for_it(
        self, tmp_path: Path, slow: dict[tuple[int, str], float], named: tuple[int, float]
    ) -> None:
        """Rank 0 holds up rank 1 in their group; rank 1 comes late for rank 2 then, in theirs, through no fault of
        its own."""
        job = Job(groups=[[0, 1], [2, 3], [1, 2]], ddp=False, jitter=0)
        job.step(0, slow)
        (arrival,) = job.arrivals(tmp_path).steps
        assert (arrival.rank, arrival.late_ns / MS) == named

    def test_a_rank_that_comes_after_the_others_have_given_up_has_held_them_up_until_then(self, tmp_path: Path) -> None:
        job = Job(2, ddp=False)
        for rank, issue, end in [(0, 0, 20), (1, 50, 51)]:
            trace = ids.trace_id(job.run, "step", 0)
            step = job.ranks[rank].first("train.step", trace, EPOCH, EPOCH + 60 * MS, dl__step=0)
            said: dict[str, Any] = {"dl__group__id": "0", "dl__group__size": 2, "dl__collective__seq": 1}
            start, end = EPOCH + issue * MS, EPOCH + end * MS
            job.ranks[rank].span("dist.all_reduce", trace, start, end, step, error__type="GLOO_TIMEOUT", **said)
        assert [(each.rank, each.late_ns) for each in job.arrivals(tmp_path).steps] == [(1, 20 * MS)]

    @pytest.mark.parametrize(("lost_in", "named"), [("optimizer.step", "optimizer.step"), (OUTSIDE + "0", OUTSIDE)])
    def test_what_is_lost_after_the_last_collective_of_a_step_makes_the_rank_late_in_the_next(
        self, tmp_path: Path, lost_in: str, named: str
    ) -> None:
        job = Job()
        job.step(0)
        job.step(1, {(1, "forward"): 50, (2, lost_in): 80})
        job.step(2)
        steps = {each.step: (each.rank, each.longer) for each in job.arrivals(tmp_path).steps}
        assert steps[1] == (1, "forward")
        assert steps[2] == (2, named)

    def test_a_rank_is_not_late_for_what_it_lost_after_the_last_collective(self, tmp_path: Path) -> None:
        job = Job()
        job.step(0, {(2, "forward"): 50, (2, "optimizer.step"): 80})
        (arrival,) = job.arrivals(tmp_path).steps
        assert (arrival.rank, arrival.longer) == (2, "forward")

    @pytest.mark.parametrize("kept", [[], [2], [0, 1, 3]])
    def test_a_phase_is_not_named_where_the_numbers_show_none(self, tmp_path: Path, kept: list[int]) -> None:
        """The time was lost in a step that is not there of all ranks."""
        job = Job()
        job.step(0)
        job.step(1, {(2, "optimizer.step"): 50}, kept=kept)
        job.step(2)
        summary = job.summary(tmp_path)
        arrival = next(each for each in summary.arrivals.steps if each.step == 2)
        assert (arrival.rank, arrival.longer) == (2, "")
        assert "step 2: rank 2, 5" in "\n".join(lines(summary, "Last in", each_step=True))
        assert "what took it longer: not known" in list(lines(summary, "Last in", each_step=True))[-1]

    def test_a_broadcast_that_a_rank_comes_late_to_holds_nobody_up(self, tmp_path: Path) -> None:
        job = Job(2, ddp=False)
        for rank, issue, end in [(0, 0, 1), (1, 50, 51)]:
            it = job.ranks[rank]
            trace = ids.trace_id(job.run, "step", 0)
            step = it.first("train.step", trace, EPOCH, EPOCH + 60 * MS, dl__step=0)
            said: dict[str, Any] = {"dl__group__id": "0", "dl__group__size": 2, "dl__collective__seq": 1}
            it.span("dist.broadcast", trace, EPOCH + issue * MS, EPOCH + end * MS, step, **said)
        arrivals = job.arrivals(tmp_path)
        assert (arrivals.compared, arrivals.steps) == (1, [])
        assert list(arrivals.operations[0].wait_ns) == [0, 0]
        assert list(arrivals.operations[0].transfer_ns) == [MS, MS]

    def test_another_operation_under_the_same_number_is_another_collective(self, tmp_path: Path) -> None:
        job = Job(2, ddp=False)
        for rank, name in enumerate(["dist.all_reduce", "dist.all_gather"]):
            trace = ids.trace_id(job.run, "step", 0)
            step = job.ranks[rank].first("train.step", trace, EPOCH, EPOCH + 60 * MS, dl__step=0)
            said: dict[str, Any] = {"dl__group__id": "0", "dl__group__size": 2, "dl__collective__seq": 1}
            job.ranks[rank].span(name, trace, EPOCH, EPOCH + MS, step, **said)
        arrivals = job.arrivals(tmp_path)
        assert (arrivals.steps, arrivals.lacking) == ([], [0])

    def test_a_number_that_comes_twice_on_a_rank_says_nothing(self, tmp_path: Path) -> None:
        """The process group was made anew."""
        job = Job(2)
        job.step(0, {(1, "forward"): 50})
        job.numbers.clear()
        job.step(1, {(1, "forward"): 50})
        arrivals = job.arrivals(tmp_path)
        assert arrivals.steps == []
        assert arrivals.lacking == [0]

    def test_numbers_beyond_all_bounds_are_left_out(self, tmp_path: Path) -> None:
        job = Job(2)
        job.step(0, {(1, "forward"): 50})
        said: dict[str, Any] = {"dl__group__id": "0", "dl__group__size": 2, "dl__collective__seq": 2**62}
        job.ranks[0].span("dist.all_reduce", 7, EPOCH, EPOCH, **said)
        assert [each.rank for each in job.arrivals(tmp_path).steps] == [1]

    def test_what_the_summary_says(self, tmp_path: Path) -> None:
        job = Job(jitter=0)
        for number in range(10):
            job.step(number, {(2, "dataloader.next"): 50} if number % 2 else {})
        summary = job.summary(tmp_path)
        assert list(lines(summary, "Arrived last")) == [
            "rank 2: in 5 of 10 kept steps, the others waited 250 ms for it in all, 62.5% of the steps' time; what took"
            " it longer: data wait in 5",
            "no rank for sure: in 5 of 10 kept steps",
        ]
        assert list(lines(summary, "Collectives")) == [
            "40 × dist.all_reduce: until the last rank came median 0 µs, p99 50 ms; from then on median 1 ms, p99 1 ms"
        ]
        assert next(lines(summary, "Longest waits")) == (
            "step 1: 50 ms for rank 2, at 3 of 4 collectives; what took it longer: data wait"
        )

    def test_one_rank_has_nobody_to_wait_for(self, tmp_path: Path) -> None:
        job = Job(1)
        job.step(0)
        text = render_summary(job.summary(tmp_path))
        assert "Missing" not in text
        assert "Longest waits" not in text
        assert "Arrived last" not in text

    @pytest.mark.parametrize(("around", "told"), [("", "augment"), ("train_batch", "train_batch")])
    def test_a_span_of_the_scripts_own_that_took_a_rank_longer_is_named(
        self, tmp_path: Path, around: str, told: str
    ) -> None:
        """Of spans within each other the outermost; the forward in it still counts as the forward."""
        job = Job(own="augment", around=around, jitter=0)
        for number in range(20):
            job.step(number, {(1, "augment"): 30} if number < 17 else {(2, "forward"): 30})
        summary = job.summary(tmp_path)
        assert {late.rank: dict(late.longer) for late in summary.arrivals.ranks} == {1: {told: 17}, 2: {"forward": 3}}
        assert f"longer: {told} in 17" in next(lines(summary, "Arrived last"))
        own = {each.name: (each.spans, each.median_ns, each.total_ns) for each in summary.own_spans}
        assert own["augment"] == (80, MS, 590 * MS)
        assert summary.times is not None
        assert summary.times.shares["forward"] > 0
        assert "augment: 80, median 1 ms, 590 ms in all" in list(lines(summary, "Own spans"))


class TestStandsOut:
    """Somebody is always the last: who is told has to be it by more than noise."""

    @pytest.mark.parametrize("world", [2, 3, 4, 8])
    def test_ranks_that_are_late_in_turn_are_not_listed(self, tmp_path: Path, world: int) -> None:
        job = Job(world, jitter=3)
        for number in range(60):
            job.step(number)
        summary = job.summary(tmp_path)
        assert len(summary.arrivals.ranks) == world, "each is last some time"
        (told,) = lines(summary, "Arrived last")
        assert told.startswith(
            "no rank more often than by chance, of 60 kept steps; waiting for whichever was the last"
        )
        assert list(lines(summary, "Longest waits")) == []

    @pytest.mark.parametrize(("world", "slow"), [(2, 1), (4, 3), (8, 0)])
    def test_a_slow_rank_is_listed_alone(self, tmp_path: Path, world: int, slow: int) -> None:
        job = Job(world, jitter=3)
        for number in range(20):
            job.step(number, {(slow, "forward"): 3})
        summary = job.summary(tmp_path)
        assert [line.split(":")[0] for line in lines(summary, "Arrived last") if line.startswith("rank")] == [
            f"rank {slow}"
        ]
        assert all(f" for rank {slow}, " in line for line in lines(summary, "Longest waits"))

    def test_a_rank_that_is_always_last_by_next_to_nothing_is_not_listed(self, tmp_path: Path) -> None:
        job = Job(jitter=0, error=0.01)
        for number in range(20):
            job.step(number, {(1, "forward"): 0.1})
        summary = job.summary(tmp_path)
        assert [late.rank for late in summary.arrivals.ranks] == [1]
        assert next(lines(summary, "Arrived last")).startswith("no rank more often")

    @pytest.mark.parametrize(("every", "named"), [(1, True), (2, True), (5, False)])
    def test_a_rank_is_named_only_by_half_of_the_steps_that_ran(self, tmp_path: Path, every: int, named: bool) -> None:
        job = Job(2, jitter=0)
        for number in range(61):
            job.step(number, {(1, "forward"): 50}, kept=None if number % every == 0 else [])
        (told,) = lines(job.summary(tmp_path), "Arrived last")
        compared = len(range(0, 61, every))
        if named:
            of = "" if every == 1 else " (of at least 61 that ran)"
            assert told.startswith(f"rank 1: in {compared} of {compared} kept steps{of}, the others waited")
        else:
            assert told == f"no rank is named: {compared} kept steps could be compared, of at least 61 that ran"

    def test_an_even_sample_names_a_rank_of_however_many_steps(self, tmp_path: Path) -> None:
        job = Job(2, jitter=0)
        for number in range(0, 3001, 100):
            job.step(number, {(1, "forward"): 50})
        (told,) = lines(job.summary(tmp_path), "Arrived last")
        assert told.startswith("rank 1: in 31 of 31 kept steps (of at least 3,001 that ran), ")

    def test_warm_up_accuses_nobody(self, tmp_path: Path) -> None:
        """One rank compiles; the collectives are counted all the same."""
        job = Job(2, jitter=0)
        for number in range(12):
            job.step(number, {(1, "forward"): 500} if number < 4 else {})
        for span in (span for rank in job.ranks for span in rank.spans):
            attributes = dict(span.attributes or {})
            if span.name == "train.step" and int(str(attributes["dl.step"])) < 4:
                said = {"dl.keep.reason": "warmup"} if attributes["dl.step"] == 0 else {"is_warmup": True}
                span._attributes = attributes | said  # type: ignore[assignment]
        summary = job.summary(tmp_path)
        assert (summary.arrivals.compared, summary.arrivals.warmup, summary.arrivals.steps) == (8, 4, [])
        assert next(lines(summary, "Collectives")).startswith("48 × ")
        assert next(lines(summary, "Arrived last")).startswith("no rank more often than by chance, of 8 kept steps")

    def test_one_step_in_which_all_waited_long_is_told(self, tmp_path: Path) -> None:
        job = Job(jitter=3)
        for number in range(40):
            job.step(number, {(2, "forward"): 100} if number == 17 else {})
        (told,) = lines(job.summary(tmp_path), "Longest waits")
        assert told.startswith("step 17: ")
        assert "for rank 2" in told


class TestBetweenSteps:
    def late(self, tmp_path: Path, name: str, scope: str = "otel_dl") -> str:
        """Rank 1 does this for 50 ms between steps 3 and 4, the others do not."""
        job = Job(jitter=0)
        starts = {rank.rank: rank.first("train.startup", 7, EPOCH - MS, EPOCH + 15 * MS) for rank in job.ranks}
        for number in range(8):
            if number == 4:
                late = job.ranks[1]
                begun = late.now
                late.now += 50 * MS
                parent = None if name == "train.eval" else starts[1]
                late.span(name, 7 if parent else 99, begun, late.now, parent=parent, scope=scope)
            job.step(number)
        (told,) = lines(job.summary(tmp_path), "Longest waits")
        assert told.startswith("step 4: 50 ms for rank 1, at ")
        return told.rpartition("; what took it longer: ")[2]

    def test_the_start_of_workers_is_named(self, tmp_path: Path) -> None:
        assert self.late(tmp_path, "dataloader.start_workers") == "start of workers"

    def test_evaluation_is_named(self, tmp_path: Path) -> None:
        assert self.late(tmp_path, "train.eval") == "evaluation"

    def test_a_span_of_the_users_is_named(self, tmp_path: Path) -> None:
        assert self.late(tmp_path, "checkpoint", USER) == "checkpoint"

    def test_what_has_no_span_is_outside_any_phase(self, tmp_path: Path) -> None:
        assert self.late(tmp_path, "dataloader.worker") == OUTSIDE


def test_steps_of_several_ranks_are_said_to_be_so(tmp_path: Path) -> None:
    job = Job(world=2, jitter=0)
    for number in range(8):
        job.step(number)
    summary = job.summary(tmp_path)
    assert list(lines(summary, "Steps")) == ["8 kept of at least 8 on 2 ranks (kept as: head 8)"]
    (told,) = lines(summary, "Step time")
    assert told.endswith("(16 steps of 2 ranks, a step once for each rank, kept by the head sampler)")


class TestOwnTime:
    def test_the_slow_rank_shows_where_all_steps_take_equally_long(self, tmp_path: Path) -> None:
        job = Job(jitter=0)
        for number in range(5):
            job.step(number, {(2, "forward"): 50})
        summary = job.summary(tmp_path)
        assert {rank.times.steps.median_ns for rank in summary.ranks} == {65 * MS}
        own = {rank.rank: rank.own.own.median_ns / MS for rank in summary.ranks if rank.own is not None}
        assert own == {0: 15, 1: 15, 2: 65, 3: 15}
        told = list(lines(summary, "Ranks"))
        assert told[2] == (
            "rank 2: 5 kept of at least 5, median 65 ms, p99 65 ms, own median 65 ms (5 steps), data wait 3.1%"
            " (5 steps)"
        )
        assert "own median 15 ms" in told[0]
        assert told[4].startswith("(own: ")

    def test_it_is_told_with_the_whole_of_the_same_steps(self, tmp_path: Path) -> None:
        """Those that could be compared are the long ones here."""
        job = Job(jitter=0)
        for number in range(9):
            job.step(number, {(2, "forward"): 50} if number < 3 else {}, kept=None if number < 3 else [0, 2])
        summary = job.summary(tmp_path)
        (told,) = [line for line in lines(summary, "Ranks") if line.startswith("rank 2")]
        assert "median 15 ms, p99 65 ms, own median 65 ms of 65 ms (3 steps), data wait" in told
        (told,) = [line for line in lines(summary, "Ranks") if line.startswith("rank 1")]
        assert "median 65 ms, p99 65 ms, own median 15 ms (3 steps), data wait" in told

    def test_steps_that_are_not_told_of_do_not_count_for_it(self, tmp_path: Path) -> None:
        """Of what is no even sample nothing is told where there is one."""
        job = Job(2, jitter=0)
        for number in range(6):
            job.step(number, {(1, "forward"): 50} if number < 2 else {})
        for rank in job.ranks:
            for span in rank.spans:
                attributes = dict(span.attributes or {})
                if span.name == "train.step" and attributes["dl.step"] in (0, 1):
                    span._attributes = attributes | {"dl.keep.reason": "slow"}  # type: ignore[assignment]
        summary = job.summary(tmp_path)
        assert [(rank.own.own.median_ns, rank.own.own.size) for rank in summary.ranks if rank.own] == [(15 * MS, 4)] * 2

    def test_it_is_not_told_where_a_rank_is_missing(self, tmp_path: Path) -> None:
        job = Job()
        job.step(0, {(3, "forward"): 50})
        summary = job.summary(tmp_path, without=[3])
        assert {rank.own for rank in summary.ranks} == {None}
        assert "own" not in " ".join(lines(summary, "Ranks"))


def waited(job: Job, rank: int, ms: float, seq: int = 3, began: float = 0, error: str = "", **said: Any) -> None:
    """A rank waits in collective `seq` of step 2, and fails with `error`; without one it tells of a stall only. What
    it says of who is missing: `missing` ranks, `reason`, `words`."""
    it, start = job.ranks[rank], EPOCH + round(began * MS)
    end = start + round(ms * MS)
    about: dict[str, Any] = {
        "dl__group__id": said.get("group", "0"),
        "dl__group__size": 4,
        "dl__collective__seq": seq,
        "rank_id": rank,
    }
    if "missing" in said:
        about["dl__missing_ranks"] = said["missing"]
        about["dl__missing__reason"] = [said["reason"]] * len(said["missing"])
        about["dl__missing__words"] = [said.get("words", "")] * len(said["missing"])
    if not error:
        words = f"rank {rank} has waited"
        it.first("train.stall", 99 + rank, start, end, words=words, dl__stall__in="dist.all_reduce", **about)
        return
    trace = ids.trace_id(job.run, "step", 2)
    about["error__type"] = error
    step = it.first("train.step", trace, start, end, words="torch's words", dl__step=2, **about)
    phase = it.span("backward", trace, start, end, step, **about)
    it.span("dist.all_reduce", trace, start, end, phase, words="torch's words", **about)


def ended(job: Job, rank: int, error: str, began: float = 0, words: str = "", phase: str = "") -> None:
    """Step 2 of a rank fails with `error`, in `phase`."""
    trace = ids.trace_id(job.run, "step", 2)
    start, end = EPOCH + round(began * MS), EPOCH + round(began * MS) + MS
    step = job.ranks[rank].first("train.step", trace, start, end, words=words, dl__step=2, error__type=error)
    if phase:
        job.ranks[rank].span(phase, trace, start, end, step, words=words, error__type=error)


class TestIncidents:
    def paragraph(self, job: Job, folder: Path, number: int = 1) -> list[str]:
        """Without its last line, the trace."""
        found = list(lines(job.summary(folder), "Incident" if number == 1 else f"Incident {number}"))
        assert found[-1].startswith("trace: ")
        return found[:-1]

    def test_a_hang_is_told_once_the_culprit_first(self, tmp_path: Path) -> None:
        """Each rank has a stall, a failed collective, a failed phase and a failed step of it."""
        job = Job()
        late: dict[str, Any] = {"missing": [2], "reason": "late", "words": "has been in forward at step 2 for 3.0 s"}
        for rank in (0, 1, 3):
            waited(job, rank, 3000, **late)
            waited(job, rank, 5000, **late)
            waited(job, rank, 6000 + rank, error="GLOO_TIMEOUT", **late | {"words": "has been in forward for 6.0 s"})
        job.ranks[2].first("train.step", 1, EPOCH - 9 * MS, EPOCH - 8 * MS, dl__step=1)
        summary = job.summary(tmp_path)
        assert list(lines(summary, "Incident"))[:-1] == [
            "rank 2 had not come (late): it has been in forward for 6.0 s",
            "ranks 0-1,3 waited 6 s in all_reduce 3 of the default group at step 2; failed in backward: GLOO_TIMEOUT",
        ]
        assert list(lines(summary, "Failed")) == []
        assert "Stalled" not in render_summary(summary)

    def test_a_rank_that_died_then_who_waited_then_what_ended_the_rest(self, tmp_path: Path) -> None:
        job = Job()
        dead: dict[str, Any] = {
            "missing": [3],
            "reason": "dead",
            "words": "is dead (killed by SIGKILL); it was outside any phase at step 2",
        }
        for rank in (0, 2):
            waited(job, rank, 50, error="GLOO_PEER_LOST", **dead)
        waited(job, 1, 50, **dead)
        ended(job, 1, "SIGTERM", began=50)
        assert self.paragraph(job, tmp_path) == [
            "rank 3 is dead (killed by SIGKILL); it was outside any phase at step 2",
            "ranks 0,2 waited 50 ms in all_reduce 3 of the default group at step 2; failed in backward: GLOO_PEER_LOST",
            "rank 1 waited 50 ms in all_reduce 3 of the default group",
            "SIGTERM then ended rank 1 in step 2 (launchers send it to the others when one rank has ended)",
        ]

    @pytest.mark.parametrize("phase", ["", "forward"])
    def test_a_rank_that_raised_is_told_with_its_exception(self, tmp_path: Path, phase: str) -> None:
        job = Job(3)
        for rank in (0, 1):
            waited(job, rank, 50, error="GLOO_PEER_LOST", missing=[2], reason="dead", words="has ended (ValueError)")
        ended(job, 2, "ValueError", words="no such class", phase=phase)
        summary = job.summary(tmp_path)
        where = f"in {phase}" if phase else "outside any phase"
        assert next(lines(summary, "Incident")) == (
            f"rank 2 has ended (ValueError); ValueError {where} of step 2: no such class"
        )
        assert [line for line in lines(summary, "Failed") if "step" in line] == []

    def test_who_comes_when_the_others_have_given_up_does_not_accuse_them(self, tmp_path: Path) -> None:
        job = Job(2)
        waited(job, 0, 6000, error="GLOO_TIMEOUT", missing=[1], reason="late", words="has been in forward")
        waited(job, 1, 1, began=9000, error="GLOO_PEER_LOST", missing=[0], reason="dead", words="has ended (finished)")
        assert self.paragraph(job, tmp_path) == [
            "rank 1 had not come (late): it has been in forward; it came 9 s after the first and failed as well:"
            " GLOO_PEER_LOST",
            "rank 0 waited 6 s in all_reduce 3 of the default group at step 2; failed in backward: GLOO_TIMEOUT",
        ]

    def test_where_nobody_can_know_who_had_not_come_nobody_is_named(self, tmp_path: Path) -> None:
        job = Job(2)
        waited(job, 0, 6000, error="GLOO_TIMEOUT")
        assert self.paragraph(job, tmp_path)[0] == "which rank had not come is not known"

    def test_a_wait_that_ended_well_is_said_to_have(self, tmp_path: Path) -> None:
        job = Job(2)
        waited(job, 0, 3000, missing=[1], reason="late", words="has been in forward")
        assert self.paragraph(job, tmp_path / "at once")[1].endswith("; how that ended is not in these traces")
        job.ranks[0].first("train.step", 1, EPOCH + 3600 * MS, EPOCH + 3601 * MS, dl__step=3)
        assert self.paragraph(job, tmp_path / "later")[1].endswith("; went on later")

    def test_a_stall_is_told_with_the_length_that_it_had_in_the_end(self, tmp_path: Path) -> None:
        """It is written while the wait goes on. The others' waits, and those in other collectives, are other waits."""
        job = Job(2)
        waited(job, 0, 2000, missing=[1], reason="late", words="has been outside any phase at step 29 for 2.0 s")
        said: dict[str, Any] = {"dl__group__id": "0", "dl__group__size": 2}
        trace = ids.trace_id(job.run, "step", 30)
        step = job.ranks[0].first("train.step", trace, EPOCH, EPOCH + 9500 * MS, dl__step=30)
        for rank, seq, ms in ((0, 3, 9000), (0, 4, 9300), (1, 3, 9400)):
            said["dl__collective__seq"] = seq
            job.ranks[rank].span("dist.all_reduce", trace, EPOCH, EPOCH + ms * MS, step, **said)
        assert self.paragraph(job, tmp_path)[1] == (
            "rank 0 waited 9 s in all_reduce 3 of the default group at step 30, which rank 1 had not begun; went on"
            " later"
        )

    def test_ranks_that_do_not_fit_together_are_one_incident(self, tmp_path: Path) -> None:
        job = Job(2)
        for rank in (0, 1):
            words = f"has issued all_reduce of {16 + rank} bytes under this number"
            waited(job, 1 - rank, 50, error="GLOO_PEER_LOST", missing=[rank], reason="mismatch", words=words)
        assert self.paragraph(job, tmp_path) == [
            "rank 0 had not issued the same: it has issued all_reduce of 16 bytes under this number",
            "rank 1 had not issued the same: it has issued all_reduce of 17 bytes under this number",
            "ranks 0-1 waited 50 ms in all_reduce 3 of the default group at step 2; failed in backward: GLOO_PEER_LOST",
        ]

    def test_one_death_is_one_incident_whatever_the_others_waited_in(self, tmp_path: Path) -> None:
        job = Job()
        dead: dict[str, Any] = {"missing": [3], "reason": "dead", "words": "is dead"}
        waited(job, 0, 50, group="0", error="GLOO_PEER_LOST", **dead)
        waited(job, 1, 40, group="1", began=5, seq=7, error="GLOO_PEER_LOST", **dead)
        assert [line.split(" at step")[0] for line in self.paragraph(job, tmp_path)] == [
            "rank 3 is dead",
            "rank 0 waited 50 ms in all_reduce 3 of the default group",
            "rank 1 waited 40 ms in all_reduce 7 of group 1",
        ]

    def test_two_hangs_are_two_incidents(self, tmp_path: Path) -> None:
        job = Job(2)
        for seq in (3, 9):
            late: dict[str, Any] = {"missing": [1], "reason": "late", "words": f"has been in forward, {seq}"}
            waited(job, 0, 3000, seq=seq, began=seq * 1000, **late)
        assert self.paragraph(job, tmp_path / "1")[0].endswith("forward, 3")
        assert self.paragraph(job, tmp_path / "2", 2)[0].endswith("forward, 9")

    def test_the_same_number_of_a_group_that_was_made_anew_is_another_incident(self, tmp_path: Path) -> None:
        job = Job(2)
        for began, who in ((0, "late"), (60_000, "silent")):
            waited(job, 0, 3000, began=began, error="GLOO_TIMEOUT", missing=[1], reason=who, words="is somewhere")
        assert "(late)" in self.paragraph(job, tmp_path / "1")[0]
        assert "(silent)" in self.paragraph(job, tmp_path / "2", 2)[0]

    def test_sigterm_alone_is_one_line(self, tmp_path: Path) -> None:
        job = Job(4)
        for rank in range(4):
            ended(job, rank, "SIGTERM", words="cut off" if rank != 1 else "cut off: rank 7 is dead")
        summary = job.summary(tmp_path)
        assert list(lines(summary, "Incident")) == [
            "SIGTERM ended ranks 0-3 in step 2; no failure or stall between ranks came before it in these traces",
            "as said then by rank 1: cut off: rank 7 is dead",
        ]
        assert list(lines(summary, "Failed")) == []

    def test_a_collective_that_failed_for_what_its_own_rank_did_is_no_incident(self, tmp_path: Path) -> None:
        job = Job(2)
        said: dict[str, Any] = {"dl__group__id": "0", "dl__collective__seq": 1, "error__type": "ValueError"}
        job.ranks[0].span("dist.all_reduce", 7, EPOCH, EPOCH + MS, **said)
        summary = job.summary(tmp_path)
        assert list(lines(summary, "Incident")) == []
        assert list(lines(summary, "Failed")) == ["ValueError in 1 dist.all_reduce span"]

    def test_many_culprits_are_told_by_their_ranks(self, tmp_path: Path) -> None:
        job = Job(2)
        waited(job, 0, 50, error="GLOO_TIMEOUT", missing=list(range(1, 100)), reason="late")
        assert self.paragraph(job, tmp_path)[:5] == [
            *(f"rank {rank} had not come (late); what it did is not known" for rank in range(1, 5)),
            "nor had ranks 5-99 (late)",
        ]

    def test_ranks_that_could_not_join_end_before_a_first_step(self, tmp_path: Path) -> None:
        job = Job(3)
        for rank in (0, 1):
            said: dict[str, Any] = {"error__type": "GLOO_TIMEOUT", "dl__missing_ranks": [2]}
            said |= {"dl__missing__reason": ["silent"], "dl__missing__words": ["has given no sign of itself yet"]}
            it = job.ranks[rank]
            startup = it.first("train.startup", 7, EPOCH, EPOCH + 9 * MS, error__type="DistStoreError")
            it.span("dist.init_process_group", 7, EPOCH, EPOCH + 8 * MS, startup, **said)
        summary = job.summary(tmp_path)
        assert list(lines(summary, "Incident"))[:-1] == [
            "rank 2 had not come (silent): it has given no sign of itself yet",
            "ranks 0-1 waited 8 ms in init_process_group; failed: GLOO_TIMEOUT, and ended by DistStoreError before a"
            " first step",
        ]
        assert list(lines(summary, "Failed")) == []


class TestMissing:
    def test_a_rank_of_which_nothing_was_read_is_named(self, tmp_path: Path) -> None:
        job = Job()
        for rank in (0, 1, 3):
            job.ranks[rank].first("train.startup", 5, EPOCH, EPOCH + MS)
        assert list(lines(job.summary(tmp_path), "Missing")) == ["nothing was read of rank 2 of 4"]

    def test_a_rank_without_a_step_is_named(self, tmp_path: Path) -> None:
        job = Job(2)
        job.step(0, kept=[0])
        job.ranks[1].first("train.startup", 5, EPOCH, EPOCH + MS)
        assert list(lines(job.summary(tmp_path), "Missing")) == ["no step was kept of rank 1"]


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "otel_dl.cli", "report", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))


class TestCommand:
    def test_several_runs_of_one_folder_are_told_apart_the_latest_last(self, tmp_path: Path) -> None:
        for at in (4, 2, 1, 3):
            job = Job(2, run=f"job-{at}")
            for rank in job.ranks:
                rank.now += at * 1000 * MS
            for number in range(at):
                job.step(number, {(1, "forward"): 50})
            job.write(tmp_path)
        done = report(str(tmp_path), "--steps")
        runs = [line[15:] for line in done.stdout.splitlines() if line.startswith("Run ")]
        assert runs == ["job-1: 1 kept of at least 1 on 2 ranks (kept as: head 1)", "job-2", "job-3", "job-4"]
        assert "of each of these more: --run ID" in done.stdout
        assert done.stdout.count("step 3: rank 1, 5") == 1
        only = report(str(tmp_path), "--run", "job-1")
        assert "Steps          1 kept of at least 1" in only.stdout
        assert "job-2" not in only.stdout
        none = report(str(tmp_path), "--run", "job-9")
        assert none.returncode == 1
        assert "none has an id that begins with 'job-9'" in none.stderr
