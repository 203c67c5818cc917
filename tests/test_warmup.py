"""What a summary says of one-time work: how long, in which phases, and when tuning can't have paid."""

from __future__ import annotations

import pytest
from test_report import MS, Run, summary_of

from otel_dl.viewing.intervals import total, union
from otel_dl.viewing.text import render_summary
from otel_dl.viewing.warmup import BENCHMARK, Work


class Training(Run):
    """Steps of 10 ms beside what they tune; `tuned` is in ms."""

    def train(self, tuned: list[float], keep_all: bool = True) -> None:
        for number, ms in enumerate(tuned):
            if ms or keep_all:
                self.tune(number, ms)

    def tune(self, number: int, ms: float, key: str = "") -> None:
        warm = ms > 0
        step = self.step(number, 10 + ms, "warmup" if warm else "head")
        self.warm(step, warm)
        forward = self.span("forward", number + 1, 5 + ms, parent=step, is_warmup=warm)
        if warm:
            self.span(
                "cudnn::conv2d", number + 1, ms, parent=forward, is_warmup=True,
                dl__conv__key=key or f"x={number}", dl__warmup__source="predicted",
            )  # fmt: skip

    def warm(self, step: object, warm: bool) -> None:
        span = self.spans[-1]
        assert span.context == step
        span._attributes = {**(span.attributes or {}), "is_warmup": warm}  # type: ignore[assignment]


def told(run: Run) -> list[str]:
    lines = render_summary(summary_of(run)).splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Warm-up")), None)
    if start is None:
        return []
    end = next(i for i, line in enumerate(lines) if i > start and line[0] != " " and not line.startswith("Benchmark"))
    return [line.strip() for line in lines[start:end]]


def test_no_one_time_work_no_word_of_it() -> None:
    run = Training()
    run.train([0, 0, 0])
    assert summary_of(run).warmup is None
    assert told(run) == []


def test_how_long_of_which_kind_and_in_which_phases() -> None:
    run = Training()
    run.train([100, 0, 0, 0])
    step = run.step(4, 1010, "warmup", forward=1)
    forward = run.span("forward", 5, 1005, parent=step, is_warmup=True)
    run.span("torch.compile", 5, 1000, parent=forward, is_warmup=True)
    run.span("torch.compile", 5, 30, parent=step, is_warmup=True)
    warmup = summary_of(run).warmup
    assert warmup is not None
    assert warmup.kinds == {BENCHMARK: Work(1, 100 * MS), "torch.compile": Work(2, 1030 * MS)}
    assert warmup.parts == {"forward": 1100 * MS, "": 30 * MS}
    assert told(run) == [
        "Warm-up        1.13 s of one-time work, in 2 of at least 5 steps: torch.compile 1.03 s (2), cuDNN benchmark"
        " 100 ms (1); in forward 1.1 s, other 30 ms",
        "what cuDNN tuned is predicted from the convolutions' keys, not observed",
    ]


def test_what_is_compiled_in_an_evaluation_is_in_no_step() -> None:
    run = Training()
    step = run.step(0, 1010, "warmup")
    evaluation = run.span("train.eval", 99, 500)
    for trace, parent in ((1, step), (1, step), (1, step), (99, evaluation), (99, evaluation)):
        run.span("torch.compile", trace, 300, parent=parent, is_warmup=True)
    (line,) = told(run)
    assert "in 1 of at least 1 step and in evaluation: torch.compile" in line
    assert " (5, 2 of them in train.eval); in " in line


def test_both_backward_directions_are_one_time() -> None:
    run = Training()
    step = run.step(0, 120, "warmup")
    backward = run.span("backward", 1, 100, parent=step, is_warmup=True)
    for direction in ("input", "weight"):
        run.span(f"cudnn::conv2d_backward_{direction}", 1, 80, parent=backward, is_warmup=True, dl__conv__shared=True)
    warmup = summary_of(run).warmup
    assert warmup is not None
    assert warmup.time_ns == 80 * MS
    assert warmup.kinds == {BENCHMARK: Work(2, 80 * MS)}


def test_steady_convolutions_are_no_warm_up() -> None:
    run = Training()
    step = run.step(0, 10)
    run.span("cudnn::conv2d", 1, 1, parent=step, is_warmup=False)
    assert summary_of(run).warmup is None


class TestBenchmark:
    def test_ever_changing_shapes(self) -> None:
        run = Training()
        run.train([100, 100, 100, 0, 100, 100, 0, 100, 100, 100])
        assert told(run)[-1] == (
            "Benchmark      costs more than it brings, as shapes keep changing: 8 keys were tuned in 8 of at least 10"
            " steps, which took 800 ms; it would have to save 400 ms in each of the others, which take 10 ms."
            " torch.backends.cudnn.benchmark = False ends it, and so do shapes that repeat (padding, drop_last)"
        )

    def test_where_every_step_tunes(self) -> None:
        run = Training()
        run.train([1] * 8)
        assert "8 of at least 8 steps, which took 8 ms; no step found all its plans." in told(run)[-1]

    @pytest.mark.parametrize(
        "tuned",
        [
            pytest.param([1000, *[0] * 9], id="the first step alone"),
            pytest.param([1000] * 4 + [0] * 16, id="the first steps alone"),
            pytest.param([1000, 0, 0, 0, 0, 0, 0, 0, 0, 1000], id="a ragged last batch"),
            pytest.param([5] * 3 + [0, 5] * 8, id="what might be saved"),
        ],
    )
    def test_nothing_is_said_where_nothing_shows_it(self, tuned: list[float]) -> None:
        run = Training()
        run.train(tuned)
        warmup = summary_of(run).warmup
        assert warmup is not None
        assert warmup.benchmark is None

    def test_steps_that_were_not_kept_count_as_those_that_found_their_plans(self) -> None:
        run = Training()
        run.train([*[0] * 500, *([0] * 99 + [1000]) * 5], keep_all=False)
        warmup = summary_of(run).warmup
        assert warmup is not None
        assert warmup.benchmark is None


def test_what_overlaps_counts_once() -> None:
    assert total(union([(0, 10), (2, 5), (8, 12), (20, 21), (20, 21)])) == 13
