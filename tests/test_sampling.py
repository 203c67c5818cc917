"""Which steps are exported, and why: one test a line of the design's table, the rules of `slow`, and the caps."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from support import children
from support.inprocess import recording
from support.loops import Picky, batch, seed, sgd, update
from support.phases import lines
from support.validate import digest, from_sdk, validate
from torch.utils.data import DataLoader, TensorDataset

import otel_dl
from otel_dl.export.sampling import SamplerHead
from otel_dl.recording import keep, lane, records
from otel_dl.recording.keep import AdaptiveHead, Head, Keep, NeverHead, SlowSteps
from otel_dl.recording.records import Step
from otel_dl.viewing.reading import Reading, read_spans

STEPS, FAILS = 1300, 1077

SCRIPT = f"""
    import otel_dl

    {{set_up}}
    otel_dl.instrument()
    for number in range({STEPS}):
        try:
            with otel_dl.step():
                if number == {FAILS}:
                    raise ArithmeticError
        except ArithmeticError:
            pass
    otel_dl.uninstrument()
    """

FOREIGN = """
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider, sampling
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from otel_dl.export.file import FileSpanExporter

    provider = TracerProvider({sampler})
    provider.add_span_processor(SimpleSpanProcessor(FileSpanExporter()))
    trace.set_tracer_provider(provider)
"""

SENDER_SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SENDER_NOT_SAMPLED = SENDER_SAMPLED[:-1] + "0"


class Exported:
    def __init__(self, directory: Path, set_up: str = "", **environment: str) -> None:
        script = children.textwrap.dedent(SCRIPT).replace("{set_up}", children.textwrap.dedent(set_up))
        done = children.run(
            script, {"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(directory), **environment}
        )
        assert done.code == 0, done
        self.spans = list(read_spans(Reading(directory))) if directory.exists() else []
        self.reasons: dict[int, str] = {
            span.attributes["dl.step"]: span.attributes["dl.keep.reason"]
            for span in self.spans
            if span.name == "train.step"
        }

    @property
    def run(self) -> str:
        return self.spans[0].attributes["dl.run.id"]

    def assert_head_is(self, chosen: Callable[[int], bool]) -> None:
        """Just those that `chosen` names, and on top: the first, the one that failed, slow ones."""
        assert self.reasons.pop(0) == "warmup"
        assert self.reasons.pop(FAILS) == "error"
        on_top = {number for number, reason in self.reasons.items() if reason == "slow"}
        heads = {number for number, reason in self.reasons.items() if reason == "head"}
        assert self.reasons.keys() == on_top | heads
        wanted = {number for number in range(1, STEPS) if number != FAILS and chosen(number)}
        assert heads == wanted - on_top

    def ratio(self, ratio: float) -> Callable[[int], bool]:
        """By the trace id that the run's id gives, as the sampler itself would say."""
        sampler = TraceIdRatioBased(ratio)

        def chosen(number: int) -> bool:
            trace_id = int(digest(self.run, "step", number), 16)
            return sampler.should_sample(None, trace_id, "train.step").decision.is_sampled()

        return chosen


def adaptive(number: int) -> bool:
    return number < 1000 or number % 64 == 0


def never(number: int) -> bool:
    return False


def always(number: int) -> bool:
    return True


class TestTable:
    @pytest.mark.parametrize("variable", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_DL_ENABLED": "false"}])
    def test_switched_off_nothing_is_patched_and_nothing_exported(
        self, variable: dict[str, str], tmp_path: Path
    ) -> None:
        done = children.run(
            """
            import otel_dl
            otel_dl.instrument()
            import torch
            print(torch.nn.Module.__call__.__code__.co_filename.endswith("module.py"))
            print(torch.autograd._engine_run_backward.__code__.co_filename.endswith("graph.py"))
            with otel_dl.step():
                torch.nn.Linear(1, 1)(torch.ones(1))
            otel_dl.uninstrument()
            """,
            {"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(tmp_path / "traces"), **variable},
        )
        assert (done.code, done.stdout, done.stderr) == (0, "True\nTrue\n", "")
        assert not (tmp_path / "traces").exists()

    def test_always_off_exports_nothing_whatever_happens(self, tmp_path: Path) -> None:
        assert Exported(tmp_path, OTEL_TRACES_SAMPLER="always_off").spans == []

    @pytest.mark.parametrize("ratio", [0, 1 / 30000, 0.3, 1])
    @pytest.mark.parametrize("sampler", ["traceidratio", "parentbased_traceidratio"])
    def test_a_ratio_is_followed_exactly_and_the_rest_comes_on_top(
        self, sampler: str, ratio: float, tmp_path: Path
    ) -> None:
        exported = Exported(tmp_path, OTEL_TRACES_SAMPLER=sampler, OTEL_TRACES_SAMPLER_ARG=str(ratio))
        exported.assert_head_is(exported.ratio(ratio))

    def test_always_on_is_followed(self, tmp_path: Path) -> None:
        Exported(tmp_path, OTEL_TRACES_SAMPLER="always_on").assert_head_is(always)

    @pytest.mark.parametrize(
        ("sampler", "chosen"),
        [("always_on", always), ("traceidratio", always), ("parentbased_traceidratio", never)],
    )
    def test_a_sender_that_is_not_sampled_is_the_parent_that_a_sampler_sees(
        self, sampler: str, chosen: Callable[[int], bool], tmp_path: Path
    ) -> None:
        exported = Exported(
            tmp_path, OTEL_TRACES_SAMPLER=sampler, OTEL_TRACES_SAMPLER_ARG="1", TRACEPARENT=SENDER_NOT_SAMPLED
        )
        exported.assert_head_is(chosen)

    def test_a_sender_that_is_sampled_forces_no_step(self, tmp_path: Path) -> None:
        exported = Exported(
            tmp_path,
            OTEL_TRACES_SAMPLER="parentbased_traceidratio",
            OTEL_TRACES_SAMPLER_ARG="0",
            TRACEPARENT=SENDER_SAMPLED,
        )
        exported.assert_head_is(never)
        (startup,) = (span for span in exported.spans if span.name == "train.startup")
        assert (startup.trace_id, startup.parent_id) == tuple(SENDER_SAMPLED.split("-")[1:3])

    def test_without_a_sampler_a_sender_that_is_not_sampled_is_a_ratio_of_0(self, tmp_path: Path) -> None:
        Exported(tmp_path, TRACEPARENT=SENDER_NOT_SAMPLED).assert_head_is(never)

    @pytest.mark.parametrize("sender", [{}, {"TRACEPARENT": SENDER_SAMPLED}], ids=["no sender", "sampled sender"])
    def test_without_a_sampler_short_runs_are_whole_then_one_in_64(
        self, sender: dict[str, str], tmp_path: Path
    ) -> None:
        Exported(tmp_path, **sender).assert_head_is(adaptive)

    def test_somebodys_provider_with_the_default_sampler_is_as_none(self, tmp_path: Path) -> None:
        Exported(tmp_path, FOREIGN.format(sampler="")).assert_head_is(adaptive)

    def test_somebodys_sampler_is_followed(self, tmp_path: Path) -> None:
        exported = Exported(tmp_path, FOREIGN.format(sampler="sampler=sampling.TraceIdRatioBased(0.3)"))
        exported.assert_head_is(exported.ratio(0.3))


# At a ratio of 1/30000.


class Clock:
    """Time that goes on by the same little each time somebody asks."""

    def __init__(self) -> None:
        self.now = records.clock()

    def __call__(self) -> int:
        self.now += 1_000
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(lane, "clock", clock)
    return clock


def test_of_10000_steps_at_1_in_30000_the_one_that_raises_and_the_slow_one_are_whole(clock: Clock) -> None:
    raises, slow = 4321, 8765
    seed()
    model = Picky(6, 3)
    optimizer = sgd(model)
    data = DataLoader(TensorDataset(torch.randn(40_000, 6), torch.zeros(40_000, dtype=torch.long)), batch_size=4)
    with recording(native=False) as recorded:  # a clock of the test's
        head = SamplerHead(TraceIdRatioBased(1 / 30000), lambda number: recorded.run.step_ids(number)[0])
        recorded.run.keep.head = head
        for number, (x, y) in enumerate(data):
            if number == slow:
                clock.now += 10**9
            try:
                update(model, optimizer, x + 1000 if number == raises else x, y)
            except ValueError:
                assert number == raises
        by_head = [number for number in range(1, 10_000) if head.step(number)]
    found = {
        step.attributes["dl.step"]: (step.attributes["dl.keep.reason"], line)
        for step, line in zip(recorded.named("train.step"), lines(recorded.spans, "train.step"), strict=True)
    }
    whole = "next zero_grad forward backward optimizer"
    assert found == {
        0: ("warmup", whole),
        **dict.fromkeys(by_head, ("head", whole)),
        raises: ("error", "next zero_grad forward!"),
        slow: ("slow", whole),
    }
    assert validate(map(from_sdk, recorded.spans)) == []


def test_a_step_that_the_user_asks_for_is_whole() -> None:
    seed()
    model = Picky(6, 3)
    optimizer = sgd(model)
    with recording(NeverHead()) as recorded:
        for number in range(300):
            update(model, optimizer, *batch())
            if number == 222:
                otel_dl.keep()
    found = {
        step.attributes["dl.step"]: (step.attributes["dl.keep.reason"], line)
        for step, line in zip(recorded.named("train.step"), lines(recorded.spans, "train.step"), strict=True)
    }
    assert found[222] == ("requested", "zero_grad forward backward optimizer")
    assert [number for number, (reason, _) in found.items() if reason == "requested"] == [222]


# The order of reasons, and the caps.


def decided(kept: Keep, number: int, duration: int, at: int = 0, **what: Any) -> str:
    step = Step(number, at, True, frozenset(), head=what.pop("head", False))
    step.end = at + duration
    for name, value in what.items():
        setattr(step, name, value)
    return kept.decide(step)


def test_the_reason_is_the_first_that_holds() -> None:
    kept = Keep(AdaptiveHead())
    for number in range(200):
        decided(kept, number + 1, 100)
    everything = {"error": "ValueError", "requested": True, "head": True}
    reasons = []
    for gone in ("", "error", "requested"):
        everything.pop(gone, None)
        reasons.append(decided(kept, 0, 10**6, **everything))
    reasons.append(decided(kept, 0, 100, head=True))
    reasons.append(decided(kept, 7, 100, head=True))
    reasons.append(decided(kept, 7, 100))
    assert reasons == ["error", "requested", "slow", "warmup", "head", ""]


@pytest.mark.parametrize("head", [True, False])
def test_slow_steps_are_6_a_minute_beyond_them_the_next_reason_counts(head: bool) -> None:
    kept, minute = Keep(AdaptiveHead()), 60 * 10**9
    beyond = "head" if head else ""
    for number in range(1000):
        decided(kept, number + 1, 100)
    reasons = [decided(kept, 1, 10**6, at=second * 10**9, head=head) for second in range(8)]
    assert reasons == ["slow"] * 6 + [beyond] * 2
    assert kept.capped["slow"] == 2
    # A minute after the first of them there is room for one.
    reasons = [decided(kept, 1, 10**9, at=minute + at, head=head) for at in (-(10**9) - 1, 0, 1)]
    assert reasons == [beyond, "slow", beyond]


def test_slow_steps_are_1000_a_run() -> None:
    kept = Keep(NeverHead())
    reasons: list[str] = []
    for number in range(1010):
        for _ in range(120):
            decided(kept, 1, 100)
        reasons.append(decided(kept, 1, 10**6, at=number * 11 * 10**9))
    assert reasons == ["slow"] * 1000 + [""] * 10
    assert kept.capped["slow"] == 10


def test_an_error_is_never_capped() -> None:
    kept = Keep(NeverHead())
    assert [decided(kept, n + 1, 100, error="E") for n in range(2000)] == ["error"] * 2000


def test_always_off_keeps_not_even_an_error() -> None:
    assert decided(Keep(NeverHead(off=True)), 0, 100, error="E", requested=True) == ""


# `slow`, exactly.


def durations(shape: str, count: int) -> Iterator[int]:
    draw = random.Random(shape)
    for number in range(count):
        if shape == "even":
            yield 100
        elif shape == "noise":
            yield int(draw.expovariate(1e-3)) + 1
        elif shape == "heavy tail":
            yield int(100 * draw.paretovariate(0.7))
        elif shape == "growing":
            yield 100 + number * number
        elif shape == "falling":
            yield 10**9 - number * 10**5
        elif shape == "two speeds":
            yield 100 if number // 700 % 2 else 1000
        else:
            yield 10**6 if number % 197 == 0 else draw.randrange(90, 110)


SHAPES = ["even", "noise", "heavy tail", "growing", "falling", "two speeds", "spikes"]


@pytest.mark.parametrize("shape", SHAPES)
def test_slow_is_over_3_times_the_99th_percentile_of_the_last_1000_from_100_on(shape: str) -> None:
    slow_steps, history = SlowSteps(), deque[int](maxlen=1000)
    told: list[int] = []
    expected: list[int] = []
    for number, duration in enumerate(durations(shape, 4000)):
        ordered = sorted(history)
        if len(history) >= 100 and duration > 3 * ordered[len(ordered) * 99 // 100]:
            expected.append(number)
        history.append(duration)
        # As the run does it: an ordinary one is not shown to it.
        if duration <= slow_steps.limit and len(slow_steps.new) < SlowSteps.TOGETHER:
            slow_steps.new.append(duration)
        elif slow_steps.add(duration):
            told.append(number)
    assert told == expected
    assert bool(told) == (shape in ("heavy tail", "spikes"))


def test_slow_is_told_by_the_run_as_well(clock: Clock) -> None:
    """Through steps that are made of one another (`Run.advance`): the same as shown one by one."""
    wanted = list(durations("spikes", 1500))
    with recording(NeverHead(), native=False) as recorded:
        own = recorded.run.local.lane
        for duration in wanted:
            start = own.begin_next(0, 0)
            own.end(lane.NEXT, start)
            start = own.begin_optimizer(1)
            own.end_optimizer(start, 1)
            assert own.step is not None
            clock.now = own.step.start + duration * 1000 - 1000
        own.begin_next(0, 0)
    one_by_one = SlowSteps()
    slow = [number for number, duration in enumerate(wanted) if one_by_one.add(duration * 1000)]
    told = [span.attributes["dl.step"] for span in recorded.named("train.step") if span.attributes["dl.step"]]
    assert len(slow) > 6
    assert told == slow[:6]
    assert recorded.run.keep.capped["slow"] == len(slow) - 6


# Heads.


def ratio_head(sampler: Sampler) -> SamplerHead:
    return SamplerHead(sampler, lambda number: int(digest("a run", "step", number), 16))


HEADS: dict[str, Head] = {
    "adaptive": AdaptiveHead(),
    "never": NeverHead(),
    "always on": ratio_head(ALWAYS_ON),
    "always off": ratio_head(ALWAYS_OFF),
    "1/2": ratio_head(TraceIdRatioBased(1 / 2)),
    "1/300": ratio_head(ParentBased(TraceIdRatioBased(1 / 300))),
}


@pytest.mark.parametrize("name", HEADS)
def test_nobody_need_ask_before_the_step_that_a_head_names(name: str) -> None:
    head = HEADS[name]
    for number in range(2000):
        until = min(head.no_earlier(number), 3000)
        assert number <= until
        assert not any(head.step(between) for between in range(number, until))


def test_choices_are_nested_in_those_of_every_smaller_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ranks with different ratios share steps."""
    assert keep.EVERY & (keep.EVERY - 1) == 0
    chosen: list[set[int]] = []
    for every in (1, 2, 4, 64, 1024):
        monkeypatch.setattr(keep, "EVERY", every)
        chosen.append({number for number in range(5000) if AdaptiveHead().step(number)})
    for wider, narrower in itertools.pairwise(chosen):
        assert narrower < wider
