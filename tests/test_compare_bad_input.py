"""`otel-dl compare` with a profile that can't be compared: a message that says why, and exit status 1."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import children, made_profiles
from support.made_profiles import BASE, Span, Work

from otel_dl.viewing.comparing import kineto, nsys
from otel_dl.viewing.comparing.causes import compare
from otel_dl.viewing.comparing.pairing import pair
from otel_dl.viewing.comparing.profile import ProfileError
from otel_dl.viewing.comparing.steps import processes
from otel_dl.viewing.reading import Reading, read_spans

SPANS = [Span("dataloader.next", 0, 10), Span("forward", 10, 40), Span("lr_scheduler.step", 99.9, 100)]
WORK = [Work(11, 12, 20), Work(25, 26, 38)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return made_profiles.write_trace(tmp_path / "traces", SPANS)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return made_profiles.kineto(tmp_path / "profile.json", SPANS, WORK)


def refused(trace: Path, profile: Path) -> str:
    """What the command says; it is one line, and no traceback."""
    ran = subprocess.run(
        [sys.executable, "-m", "otel_dl.cli", "compare", str(trace), str(profile)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(children.SOURCE)},
    )
    assert ran.returncode == 1, ran.stdout
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert ran.stderr.startswith("otel-dl: ")
    return ran.stderr


def changed(profile: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads(profile.read_text())
    change(content)
    profile.write_text(json.dumps(content))
    return profile


class TestAnotherRun:
    def test_another_process(self, trace: Path, profile: Path) -> None:
        def other(content: dict[str, Any]) -> None:
            for event in content["traceEvents"]:
                if event["pid"] == made_profiles.PID:
                    event["pid"] = 7

        message = refused(trace, changed(profile, other))
        assert f"is of process 7; the trace has steps of {made_profiles.PID} (rank 0)" in message

    def test_another_time(self, trace: Path, profile: Path) -> None:
        """The same process number again, as in a container: a day later, with the same ranges at the same distances."""

        def later(content: dict[str, Any]) -> None:
            content["baseTimeNanoseconds"] = BASE + 86_400 * 10**9

        message = refused(trace, changed(profile, later))
        assert "is not of this run: process 4242, 2023-11-15 22:13:20" in message
        assert "the trace has that process 2023-11-14 22:13:20" in message

    def test_another_time_by_a_clock_that_says_nothing(self, trace: Path, profile: Path) -> None:
        def unanchored(content: dict[str, Any]) -> None:
            del content["baseTimeNanoseconds"]
            for number, event in enumerate(content["traceEvents"]):
                event["ts"] = number * 17_001.5

        assert "it does not say when it was" in refused(trace, changed(profile, unanchored))

    def test_steps_that_are_all_alike_without_an_anchor(self, trace: Path, profile: Path) -> None:
        """Which of them the profile shows could only be guessed."""

        def second_and_third(content: dict[str, Any]) -> None:
            content["traceEvents"] = content["traceEvents"][len(content["traceEvents"]) // 3 :]
            for event in content["traceEvents"]:
                event["ts"] -= 1e9
            del content["baseTimeNanoseconds"]

        assert "under several" in refused(trace, changed(profile, second_and_third))

    def test_another_host(self, trace: Path, profile: Path) -> None:
        """Two containers, whose processes all have the same number."""

        def elsewhere(content: dict[str, Any]) -> None:
            content["host_name"] = "node-2"

        assert "is of host node-2; the trace has process 4242 of node-1" in refused(trace, changed(profile, elsewhere))

    def test_the_same_process_and_time_without_one_common_name(self, trace: Path, profile: Path) -> None:
        """Then the operations in the spans are compared, and it is said that no range was there."""

        def renamed(content: dict[str, Any]) -> None:
            for event in content["traceEvents"]:
                if event["cat"] == "cpu_op":
                    event["name"] = "aten::mm"

        comparison = compare(pair(kineto.read(changed(profile, renamed)), processes(read_spans(Reading(trace)))))
        assert (comparison.pairing.by_name, comparison.pairing.by_torch) == (0, 0)

    def test_of_none_of_the_kept_steps(self, tmp_path: Path, profile: Path) -> None:
        """Those before and after it were kept, and look the same."""
        trace = made_profiles.write_trace(tmp_path / "others", SPANS, steps=(0, 2))
        began = made_profiles.EPOCH + 10**8

        def only_the_second(content: dict[str, Any]) -> None:
            content["traceEvents"] = [
                event for event in content["traceEvents"] if began <= round(event["ts"] * 1000 + BASE) < began + 10**8
            ]

        assert "none of the steps that it shows was kept" in refused(trace, changed(profile, only_the_second))


_ONE_OPERATION = (
    b'{"baseTimeNanoseconds": %s, "traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1, "tid": 1}]}'
)


class TestNoProfile:
    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"", "is empty"),
            (b"loss 0.3\nloss 0.2\n", "is not JSON"),
            (b'{"a": 1}', "has no traceEvents"),
            (b'{"traceEvents": []}', "has no operation in its 0 events"),
            (b'{"traceEvents": {"a": 1}}', "has no traceEvents"),
            (b'{"traceEvents": [1, "a", null, {}, {"ph": "X"}, {"ph": "X", "cat": "cpu_op"}]}', "has no operation"),
            (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": NaN, "dur": 1, "name": 3}]}', "has no operation"),
            (_ONE_OPERATION % b"-1e30", "no time since 1970"),
            (_ONE_OPERATION % b"1e300", "no time since 1970"),
            (_ONE_OPERATION % b"NaN", "no time since 1970"),
            (
                b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1e300, "dur": 1, "name": "a"}]}',
                "has no operation",
            ),
            (b'{"traceEvents": [{"ph" "X", "cat": "cpu_op"}]}', "is not JSON at character 17"),
            (b"[" * 100_000, "is not JSON"),
            (b"\x00\xff\xfe" * 1000, "is not JSON"),
            (b"\x1f\x8b" + b"\x00" * 50, "is damaged"),
            (lzma.compress(b"{}"), "is compressed with xz"),
            (bz2.compress(b"{}"), "is compressed with bzip2"),
            (b"PK\x03\x04 and so on", "is compressed with zip"),
            (b"\x28\xb5\x2f\xfd and so on", "is compressed with zstd"),
            (nsys.MAGIC + b"\x00" * 500, "is no export of Nsight Systems that can be read"),
        ],
    )
    def test_a_file_that_is_none(self, trace: Path, tmp_path: Path, content: bytes, why: str) -> None:
        path = tmp_path / "profile"
        path.write_bytes(content)
        with pytest.raises(ProfileError, match=why):
            nsys.read(path, []) if content.startswith(nsys.MAGIC) else kineto.read(path)

    def test_the_command_says_so(self, trace: Path, tmp_path: Path) -> None:
        empty = tmp_path / "profile.json"
        empty.touch()
        assert refused(trace, empty) == f"otel-dl: {empty} is empty.\n"
        assert (
            refused(trace, tmp_path / "none")
            == f"otel-dl: {tmp_path / 'none'} cannot be read: No such file or directory.\n"
        )
        assert "cannot be read: Is a directory" in refused(trace, tmp_path)
        assert "cannot be read" in refused(tmp_path / "none", empty)

    def test_a_database_of_somebody_else(self, trace: Path, tmp_path: Path) -> None:
        path = tmp_path / "profile.sqlite"
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE mine (a INTEGER)")
        assert "has no table of NVTX ranges or CUDA calls" in refused(trace, path)

    def test_a_report_of_nsys_has_to_be_exported(self, trace: Path, tmp_path: Path) -> None:
        path = tmp_path / "profile.nsys-rep"
        path.write_bytes(b"NVIDIA")
        assert f"nsys export --type sqlite {path}" in refused(trace, path)

    def test_a_folder_without_steps(self, tmp_path: Path, profile: Path) -> None:
        (tmp_path / "nothing").mkdir()
        assert "there are no steps in" in refused(tmp_path / "nothing", profile)

    def test_a_folder_of_runs_names_the_newest(self, tmp_path: Path, profile: Path) -> None:
        (tmp_path / "runs" / "monday").mkdir(parents=True)
        (tmp_path / "runs" / "monday" / "spans.jsonl").write_text("")
        advice = f"otel-dl compare {tmp_path / 'runs' / 'monday'} {profile}"
        assert advice in refused(tmp_path / "runs", profile)


class TestDamaged:
    @pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
    def test_one_that_is_cut_off_is_not_taken_for_whole(self, trace: Path, profile: Path, share: float) -> None:
        content = profile.read_bytes()
        profile.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(ProfileError, match="is cut off"):
            kineto.read(profile)

    def test_the_last_bracket_is_missing(self, trace: Path, profile: Path) -> None:
        profile.write_bytes(profile.read_bytes()[:-1])
        assert "is cut off" in refused(trace, profile)

    @pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
    def test_a_gzip_that_is_cut_off(self, profile: Path, share: float) -> None:
        content = gzip.compress(profile.read_bytes())
        profile.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(ProfileError, match="is cut off"):
            kineto.read(profile)

    def test_a_gzip_with_a_changed_byte(self, trace: Path, profile: Path) -> None:
        content = bytearray(gzip.compress(profile.read_bytes()))
        content[len(content) // 2] ^= 0xFF
        profile.write_bytes(content)
        with pytest.raises(ProfileError):
            kineto.read(profile)

    def test_a_database_that_is_cut_off(self, trace: Path, tmp_path: Path) -> None:
        path = made_profiles.nsys(tmp_path / "profile.sqlite", SPANS, WORK)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert "is no export of Nsight Systems that can be read" in refused(trace, path)


class TestWhatProfilersWrite:
    def test_values_that_strict_json_has_not(self, trace: Path, profile: Path) -> None:
        """torch has written NaN, control characters in names, and a comma behind the last member."""
        content = json.loads(profile.read_text())
        content["traceEvents"].append({"ph": "i", "name": "a\tb", "ts": 1.0, "args": {"bandwidth": float("inf")}})
        text = json.dumps(content).replace("a\\tb", "a\tb")
        profile.write_text(text[:-1] + ", }")
        assert kineto.read(profile).events == len(content["traceEvents"])

    def test_events_alone(self, profile: Path) -> None:
        """The format allows the array without an object around it."""
        whole = kineto.read(profile)
        changed(profile, lambda content: None)
        profile.write_text(json.dumps(json.loads(profile.read_text())["traceEvents"]))
        alone = kineto.read(profile)
        assert (alone.events, alone.anchored) == (whole.events, False)


_SIZED = """
import json, sys
from pathlib import Path
from otel_dl.viewing.comparing import kineto

def peak():
    # Not ru_maxrss: a child begins with its parent's.
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

path, megabytes = Path(sys.argv[1]), int(sys.argv[2])
with path.open("w") as file:
    file.write('{"baseTimeNanoseconds": 0, "traceEvents": [\\n')
    written, number = 0, 0
    while written < megabytes << 20:
        # One operation with nine inside it, as torch has them; a kernel for each of them.
        lines = []
        for inner in range(10):
            ts = 1e9 + number * 100 + inner * 10
            lines.append(json.dumps({"ph": "X", "cat": "cpu_op", "name": "aten::linear", "pid": 1, "tid": 1, "ts": ts,
                                     "dur": 100.0 if inner == 0 else 9.0,
                                     "args": {"External id": number, "Sequence number": 7, "Fwd thread id": 0}}))
        lines.append(json.dumps({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
                                 "ts": ts, "dur": 3.0, "args": {"correlation": number, "cbid": 211}}))
        lines.append(json.dumps({"ph": "X", "cat": "kernel", "name": "void at::native::gemm<float, 4>", "pid": 0,
                                 "tid": 7, "ts": ts + 20, "dur": 50.0,
                                 "args": {"correlation": number, "device": 0, "stream": 7, "grid": [1, 1, 1]}}))
        text = ",\\n".join(lines) + ",\\n"
        written += file.write(text)
        number += 1
    file.write('{"ph": "M"}]}')
before = peak()
profile = kineto.read(path)
print(profile.events, number, len(profile.kernels), before, peak())
"""


def memory_of(path: Path, megabytes: int) -> float:
    """MiB that reading a profile of this size takes beyond what the process had."""
    ran = children.run(_SIZED, command=(sys.executable, "-c", _SIZED, str(path), str(megabytes)), timeout=600)
    path.unlink()
    assert ran.code == 0, str(ran)
    events, groups, kernels, before, peak = (float(word) for word in ran.stdout.split())
    assert (events, kernels) == (12 * groups + 1, groups)
    return peak - before


class TestSize:
    def test_it_is_read_as_a_stream(self, tmp_path: Path) -> None:
        assert memory_of(tmp_path / "profile.json", 32) < 16

    @pytest.mark.long
    def test_a_gigabyte_takes_little_memory(self, tmp_path: Path) -> None:
        assert memory_of(tmp_path / "profile.json", 1024) < 256
