"""`otel-dl compare`: a trace beside a profile of the same run."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from support import children, made_profiles
from support.made_profiles import Span, Work

from otel_dl.semconv import PHASES, SpanName
from otel_dl.viewing.comparing import causes, kineto, nsys
from otel_dl.viewing.comparing.causes import Comparison, compare
from otel_dl.viewing.comparing.meanings import MEANINGS
from otel_dl.viewing.comparing.pairing import pair
from otel_dl.viewing.comparing.steps import BETWEEN, processes
from otel_dl.viewing.comparing.text import render
from otel_dl.viewing.reading import Reading, read_spans

SCRIPT = Path(__file__).with_name("scripts") / "profiled.py"
STEPS, FIRST, ACTIVE = 24, 10, 8
"""As in the script: of STEPS steps, ACTIVE are profiled from FIRST on."""
COMPILED, IN_PROFILE = [0, 5, 12], 12
"""Steps in which something is compiled, and the one of them that is profiled."""
SLEEP_NS = 10_000_000
INSIDE = range(FIRST, FIRST + ACTIVE)
MOST_UNEXPLAINED = 0.02


class Profiled:
    """A run of the script."""

    def __init__(self, directory: Path, *planted: str) -> None:
        self.profile = directory / "profile.json"
        self.traces = directory / "traces"
        ran = children.run(
            SCRIPT.read_text(),
            {"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(self.traces)},
            command=(sys.executable, str(SCRIPT), str(directory), *planted),
        )
        assert ran.code == 0, str(ran)
        self.truth: dict[str, list[Any]] = json.loads((directory / "truth.json").read_text())

    def compare(self, profile: Path | None = None) -> Comparison:
        found = processes(read_spans(Reading(self.traces)))
        return compare(pair(kineto.read(profile or self.profile), found))

    def events(self) -> dict[str, Any]:
        return json.loads(self.profile.read_text())


def command(trace: Path, profile: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "otel_dl.cli", "compare", str(trace), str(profile)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(children.SOURCE)},
    )


def assert_adds_up(comparison: Comparison) -> None:
    """The causes of each row are its difference, and what is unexplained of them is little of the step."""
    for row in (*comparison.rows, comparison.total):
        assert sum(row.causes.values()) == pytest.approx(row.difference, abs=1), row
        assert abs(row.rest) <= MOST_UNEXPLAINED * comparison.step_ns, row
    assert comparison.total.trace == pytest.approx(comparison.step_ns, abs=1)


def row(comparison: Comparison, name: str) -> causes.Row:
    (found,) = (row for row in comparison.rows if row.name == name)
    return found


def spans(comparison: Comparison, name: str) -> float:
    """ns a profiled step, by the trace."""
    pieces = [piece for step in comparison.pairing.steps for piece in step.pieces if piece.name == name]
    return sum(piece.end - piece.start for piece in pieces) / len(comparison.pairing.steps)


def after(comparison: Comparison, name: str) -> float:
    """ns a step in no operation after this phase."""
    return sum(ns for gap, ns in comparison.gaps if gap.after == name)


@pytest.fixture(scope="module")
def slept(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """A sleep between two phases of each step."""
    return Profiled(tmp_path_factory.mktemp("slept"), "sleep", "stack")


class TestRealProfiles:
    def test_a_sleep_between_two_phases_is_in_no_operation(self, slept: Profiled) -> None:
        comparison = slept.compare()
        assert_adds_up(comparison)
        between = row(comparison, BETWEEN)
        truth = fmean(slept.truth["slept"][i] for i in INSIDE)
        assert truth <= between.causes[causes.NO_OPERATION]
        assert after(comparison, SpanName.BACKWARD) >= truth
        assert causes.Gap(SpanName.BACKWARD, "<built-in function sleep>") in dict(comparison.gaps)

    def test_every_phase_has_a_range_of_its_own_name(self, slept: Profiled) -> None:
        pairing = slept.compare().pairing
        assert [step.number for step in pairing.steps] == list(INSIDE)
        assert len(pairing.others) == STEPS - ACTIVE - 1  # and one in which the profiler starts
        # next, zero_grad, forward of the model and of the loss, backward, optimizer
        assert (pairing.spans, pairing.by_name) == (6 * ACTIVE, 6 * ACTIVE)
        assert pairing.offset is None

    def test_the_time_of_a_phase_is_the_same_in_both(self, slept: Profiled) -> None:
        comparison = slept.compare()
        forward = row(comparison, SpanName.FORWARD)
        around = forward.causes.get(causes.EDGES, 0) + forward.causes.get(causes.LATE, 0)
        assert forward.profile + around == pytest.approx(spans(comparison, SpanName.FORWARD), abs=1)

    def test_a_recompilation_is_warm_up_of_its_step(self, tmp_path: Path) -> None:
        run = Profiled(tmp_path, "compile")
        comparison = run.compare()
        assert_adds_up(comparison)
        assert run.truth["compiled"] == COMPILED
        one_time = comparison.one_time
        assert list(one_time) == COMPILED
        for step in COMPILED:
            assert one_time[step] > SLEEP_NS
        # That of the profiled step is in the profile as well, and weighs more there: a step of ACTIVE, not of STEPS.
        expected = sum(one_time.values()) / STEPS - one_time[IN_PROFILE] / ACTIVE
        assert comparison.total.causes[causes.WARM_UP] == pytest.approx(expected, abs=1)

    def test_what_the_profiler_adds_is_its_overhead(self, tmp_path: Path) -> None:
        run = Profiled(tmp_path, "slow", "stack")
        comparison = run.compare()
        assert_adds_up(comparison)
        assert comparison.overhead is not None
        assert comparison.overhead.sure
        forward = run.truth["forward"]
        truth = fmean(forward[i] for i in INSIDE) - fmean(
            ns for i, ns in enumerate(forward) if i not in (0, FIRST - 1, *INSIDE)
        )
        outside = STEPS - ACTIVE - 1
        # The first step is one of them, without its warm-up: as fast as is usual.
        mine = -row(comparison, SpanName.FORWARD).causes[causes.OVERHEAD] * STEPS / outside
        assert mine == pytest.approx(truth, rel=0.2)

    def test_torchs_own_ranges_do_where_ours_are_missing(self, slept: Profiled, tmp_path: Path) -> None:
        trace = slept.events()
        trace["traceEvents"] = [event for event in trace["traceEvents"] if event["name"] not in PHASES]
        (tmp_path / "profile.json").write_text(json.dumps(trace))
        comparison = slept.compare(tmp_path / "profile.json")
        assert_adds_up(comparison)
        assert (comparison.pairing.by_name, comparison.pairing.by_torch) == (0, 3 * ACTIVE)
        for name in (SpanName.FORWARD, SpanName.BACKWARD):
            assert 0 < row(comparison, name).profile <= spans(comparison, name)
        assert after(comparison, SpanName.BACKWARD) == after(slept.compare(), SpanName.BACKWARD)

    def test_without_an_anchor_the_clocks_are_put_together_by_the_ranges(self, slept: Profiled, tmp_path: Path) -> None:
        trace = slept.events()
        base = trace.pop("baseTimeNanoseconds")
        (tmp_path / "profile.json").write_text(json.dumps(trace))
        comparison = slept.compare(tmp_path / "profile.json")
        assert_adds_up(comparison)
        assert comparison.pairing.offset == pytest.approx(base, abs=200_000)
        assert after(comparison, SpanName.BACKWARD) == pytest.approx(
            after(slept.compare(), SpanName.BACKWARD), rel=0.05
        )
        assert "put together by the paired ranges" in render(comparison, "profile.json")

    def test_a_clock_that_was_set_meanwhile_is_put_right(self, slept: Profiled, tmp_path: Path) -> None:
        trace = slept.events()
        whole = kineto.read(slept.profile)
        late = (whole.last - whole.first) // 2  # so that it lies over other steps than its own
        trace["baseTimeNanoseconds"] -= late
        (tmp_path / "profile.json").write_text(json.dumps(trace))
        comparison = slept.compare(tmp_path / "profile.json")
        assert_adds_up(comparison)
        assert comparison.pairing.offset == pytest.approx(late, abs=200_000)

    def test_the_command_prints_it_gzipped_or_not(self, slept: Profiled, tmp_path: Path) -> None:
        plain = command(slept.traces, slept.profile)
        assert plain.returncode == 0, plain.stderr
        assert "no operation" in plain.stdout
        assert "sleep" in plain.stdout
        packed = tmp_path / "profile.json.gz"
        with gzip.open(packed, "wb") as file:
            file.write(slept.profile.read_bytes())
        (file,) = slept.traces.glob("*.jsonl")
        gzipped = command(file, packed)
        assert gzipped.stdout == plain.stdout.replace("profile.json", "profile.json.gz")


LAST = Span("lr_scheduler.step", 99.9, 100)
"""The profile's last range of a step: it ends where the step does."""
QUEUED = [
    Span("dataloader.next", 0, 10),
    Span("forward", 10, 20),
    Span("backward", 20, 40),
    Span("optimizer.step", 40, 45),
    LAST,
]
WORK = [Work(12, 14, 30), Work(15, 32, 36), Work(22, 36, 60), Work(25, 61, 75), Work(41, 75, 85), Work(46, 85, 86)]


@pytest.fixture(params=["torch.profiler", "nsys"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    return Made(tmp_path, request.param)


class Made:
    """Compares a run that was made by hand, seen by torch.profiler or by nsys."""

    def __init__(self, directory: Path, tool: str) -> None:
        self.directory = directory
        self.tool = tool

    def files(
        self, spans: Sequence[Span], work: Sequence[Work], steps: int = 3, device: float | None = None
    ) -> tuple[Path, Path]:
        trace = made_profiles.write_trace(self.directory / "traces", spans, range(steps), device)
        write = made_profiles.kineto if self.tool == "torch.profiler" else made_profiles.nsys
        return trace, write(self.directory / "profile", [s for s in spans if s.name in PHASES], work, steps)

    def compare(
        self, spans: Sequence[Span], work: Sequence[Work], steps: int = 3, device: float | None = None
    ) -> Comparison:
        trace, profile = self.files(spans, work, steps, device)
        found = processes(read_spans(Reading(trace)))
        read = kineto.read(profile) if self.tool == "torch.profiler" else nsys.read(profile, [made_profiles.PID])
        return compare(pair(read, found))


def in_ms(row: causes.Row) -> dict[str, float]:
    return {cause: round(ns / made_profiles.MS, 3) for cause, ns in row.causes.items()}


class TestDevices:
    def test_work_that_runs_later_is_queueing(self, made: Made) -> None:
        comparison = made.compare(QUEUED, WORK)
        assert_adds_up(comparison)
        assert comparison.on_device
        forward = row(comparison, "forward")
        assert (forward.trace, forward.profile) == (10 * made_profiles.MS, 20 * made_profiles.MS)
        assert in_ms(forward) == {causes.QUEUED_AFTER: -14, causes.BEFORE_KERNELS: 4}
        backward = row(comparison, "backward")
        assert in_ms(backward) == {
            causes.QUEUED_AFTER: -34,
            causes.QUEUED_BEFORE: 14,
            causes.BEFORE_KERNELS: 2,
        }
        assert in_ms(row(comparison, "optimizer.step")) == {causes.QUEUED_AFTER: -10, causes.QUEUED_BEFORE: 5}
        assert in_ms(row(comparison, "dataloader.next")) == {causes.NO_KERNEL: 10}

    def test_waiting_for_the_device_is_synchronisation(self, made: Made) -> None:
        comparison = made.compare([*QUEUED, Span("cuda.synchronize", 45, 90)], WORK)
        assert_adds_up(comparison)
        between = row(comparison, BETWEEN)
        assert between.profile == made_profiles.MS
        assert in_ms(between) == {causes.SYNCHRONISATION: 44, causes.AFTER_KERNELS: 9.9}

    def test_a_device_that_idles_between_kernels_of_a_phase_is_launch_gaps(self, made: Made) -> None:
        spans = [Span("dataloader.next", 0, 10), Span("forward", 10, 40), LAST]
        comparison = made.compare(spans, [Work(11, 12, 20), Work(25, 26, 38)])
        assert_adds_up(comparison)
        assert in_ms(row(comparison, "forward")) == {
            causes.GAPS: 6,
            causes.BEFORE_KERNELS: 2,
            causes.AFTER_KERNELS: 2,
        }

    def test_autotuning_in_a_phase_is_warm_up(self, made: Made) -> None:
        spans = [Span("forward", 10, 40), Span("cudnn::conv2d", 11, 25), Span("torch.compile", 25, 26), LAST]
        comparison = made.compare(spans, [Work(26, 27, 39)])
        assert_adds_up(comparison)
        assert in_ms(row(comparison, "forward")) == {
            causes.WARM_UP: 15,
            causes.BEFORE_KERNELS: 2,
            causes.AFTER_KERNELS: 1,
        }

    def test_what_is_not_known_is_said_to_be_so(self, made: Made) -> None:
        comparison = made.compare(QUEUED, WORK)
        assert comparison.overhead is None
        comparison.pairing.profile.kernels.unlaunched = 2
        text = render(comparison, "profile")
        assert "what the profiler adds is not known" in text
        assert "which phase launched 2 of 18 kernels" in text

    def test_the_command_reads_both(self, made: Made) -> None:
        ran = command(*made.files(QUEUED, WORK))
        assert ran.returncode == 0, ran.stderr
        assert "queueing: ran after the host went on −14 ms" in ran.stdout
        assert "the device did this phase's work after the host had gone on" in ran.stdout
        assert "on the device" not in ran.stdout

    def test_the_devices_time_stands_beside_its_kernels(self, made: Made) -> None:
        """Of the forward the device's time has 2 ms in which it idled between two kernels (`WORK`); of the backward as
        much less as a second stream would take off."""
        spans = [
            span._replace(device={"forward": 22.0, "backward": 37.0, "dataloader.next": 0.5}.get(span.name))
            for span in QUEUED
        ]
        comparison = made.compare(spans, WORK, device=86.0)
        ms = made_profiles.MS
        # A profile's times have a fraction of a microsecond.
        rows = [(row.name, row.trace / ms, round(row.kernels / ms, 3), row.steps) for row in comparison.device]
        assert rows == [
            ("train.step", 86.0, 69.0, 3),
            ("dataloader.next", 0.5, 0.0, 3),
            ("forward", 22.0, 20.0, 3),
            ("backward", 37.0, 38.0, 3),
        ]
        text = render(comparison, "profile")
        table = [line.split() for line in text[text.index("on the device") :].splitlines()[1:5]]
        assert table == [
            ["train.step", "86.0", "ms", "69.0", "ms", "+17.0", "ms", "of", "3"],
            ["dataloader.next", "0.5", "ms", "0.0", "ms", "+0.5", "ms", "of", "3"],
            ["forward", "22.0", "ms", "20.0", "ms", "+2.0", "ms", "of", "3"],
            ["backward", "37.0", "ms", "38.0", "ms", "−1.0", "ms", "of", "3"],
        ]

    def test_a_profile_without_the_device_is_said_to_lack_it_where_the_trace_has_its_time(self, made: Made) -> None:
        text = render(made.compare([span._replace(device=1.0) for span in QUEUED], [], device=86.0), "profile")
        assert "on the device" not in text
        assert "the trace has the device's time (86 ms of a train.step)" in text
        assert "ProfilerActivity.CUDA" in text

    def test_each_cause_that_is_shown_is_explained(self, made: Made) -> None:
        text = render(made.compare([*QUEUED, Span("cuda.synchronize", 45, 90)], WORK), "profile")
        rows, _, meanings = text.partition("What is meant")
        explained = [cause for cause in MEANINGS if f"\n  {cause}  " in meanings]
        assert explained == [cause for cause in MEANINGS if f"{cause} +" in rows or f"{cause} −" in rows]
        assert len(explained) > 3


def test_every_cause_has_a_meaning() -> None:
    kinds = {value for name, value in vars(causes).items() if name.isupper() and name[0] != "_" and type(value) is str}
    assert kinds - {causes.REST, BETWEEN} == set(MEANINGS)
