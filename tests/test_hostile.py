"""What a hostile script found: each of these did harm once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support.children import Child, Result, run
from support.validate import validate

from otel_dl.faults import is_ours
from otel_dl.viewing.reading import Reading, read_spans

BASE = """
import otel_dl; otel_dl.instrument()
import os, signal, sys, threading, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))

def epoch(loader=None):
    count = 0
    for x, y in loader or DataLoader(dataset, batch_size=4):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        count += 1
    return count

epoch()
"""


def hostile(directory: Path, script: str, **env: str) -> Result:
    files = {"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(directory / "traces")}
    return run(BASE + script, {**files, **env})


def test_a_signal_that_the_user_blocks_waits_and_reaches_no_thread_of_ours(tmp_path: Path) -> None:
    done = hostile(
        tmp_path,
        """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
print(signal.sigtimedwait({signal.SIGUSR1}, 10).si_signo == signal.SIGUSR1)
""",
    )
    assert (done.code, done.stdout) == (0, "True\n"), done


def test_nothing_of_ours_lands_in_files_that_take_over_closed_descriptors(tmp_path: Path) -> None:
    done = hostile(
        tmp_path,
        f"""
otel_dl.flush(10)
os.closerange(3, 64)
files = [open(f"{tmp_path}/checkpoint{{i}}", "w+b", buffering=0) for i in range(8)]
epoch()
otel_dl.flush(10)
signal.signal(signal.SIGUSR1, lambda *_: None)
os.kill(os.getpid(), signal.SIGUSR1)
print([os.path.getsize(file.name) for file in files])
""",
    )
    assert (done.code, done.stdout) == (0, f"{[0] * 8}\n"), done


def test_no_signal_number_lands_in_a_file_that_takes_over_the_wakeup_descriptor(tmp_path: Path) -> None:
    """Nor does SIGTERM need it: what was kept still leaves, and the process still ends by it."""
    done = hostile(
        tmp_path,
        f"""
watcher = next(thread for thread in threading.enumerate() if thread.name == "otel-dl-sigterm")
os.closerange(3, 4096)
watcher.join()  # it has noticed
files = [os.open(f"{tmp_path}/checkpoint", os.O_RDWR | os.O_CREAT | os.O_APPEND) for _ in range(600)]
signal.signal(signal.SIGUSR1, lambda *_: None)
os.kill(os.getpid(), signal.SIGUSR1)
epoch()
print(os.path.getsize("{tmp_path}/checkpoint"), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
threading.Event().wait()
""",
    )
    assert (done.code, done.stdout) == (-signal.SIGTERM, "0\n"), done
    assert (tmp_path / "checkpoint").read_bytes() == b""
    steps = [span for span in read_spans(Reading(tmp_path / "traces")) if span.name == "train.step"]
    assert len(steps) == 32


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait()"])
def test_a_script_that_stops_the_clock_has_its_traces_and_its_end(end: str, tmp_path: Path) -> None:
    """As freezegun does; `time.sleep` may be replaced as well."""
    done = hostile(
        tmp_path,
        f"""
for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"):
    setattr(time, name, lambda *_: 0)
epoch()
{end}
""",
    )
    assert done.code == (-signal.SIGTERM if end else 0), done
    found = list(read_spans(Reading(tmp_path / "traces")))
    assert sum(span.name == "train.step" for span in found) == 32
    assert validate(found) == []


def test_a_stopped_and_continued_job_loses_nothing(tmp_path: Path) -> None:
    child = Child(
        BASE + "while sys.stdin.readline(): print('epochs', epoch(), flush=True)\n",
        {"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(tmp_path)},
        stdin=True,
    )
    for _ in range(2):
        child.ask("go on")
        child.wait_for_line("epochs 16")
        child.send(signal.SIGSTOP)  # SIGTSTP stops no process whose group has no shell, as in many a CI
        os.waitid(os.P_PID, child.process.pid, os.WSTOPPED | os.WNOWAIT)
        child.ask("go on")
        child.send(signal.SIGCONT)
        child.wait_for_line("epochs 16")
    done = child.finish()
    assert done.code == 0, done
    found = list(read_spans(Reading(tmp_path)))
    assert sum(span.name == "train.step" for span in found) == 5 * 16
    assert validate(found) == []


def test_what_replaces_the_process_inherits_nothing_of_ours(tmp_path: Path) -> None:
    show = "import os, signal as s; print(s.getsignal(15), s.pthread_sigmask(0, []), len(os.listdir('/proc/self/fd')))"
    script = f"""
epoch()
os.execv(sys.executable, [sys.executable, "-c", {show!r}])
"""
    assert hostile(tmp_path, script).stdout == hostile(tmp_path, script, OTEL_DL_ENABLED="false").stdout


@pytest.mark.parametrize(
    ("environ", "identity", "said"),
    [
        ({"RANK": "abc", "WORLD_SIZE": "2"}, (0, 2), "RANK has the value 'abc'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, (0, 2), "RANK has the value '-1'"),
        ({"RANK": str(10**30), "WORLD_SIZE": "2"}, (0, 2), f"RANK has the value '{10**30}'"),
        ({"RANK": "1", "WORLD_SIZE": "0"}, (1, 1), "WORLD_SIZE has the value '0'"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, (5, 2), "rank 5 in a world of 2"),
        ({"RANK": "", "WORLD_SIZE": ""}, (0, 1), ""),
    ],
)
def test_a_rank_that_cannot_be_is_said_once_and_traced(
    environ: dict[str, str], identity: tuple[int, int], said: str, tmp_path: Path
) -> None:
    done = hostile(tmp_path, "", **environ)
    found = list(read_spans(Reading(tmp_path / "traces")))
    steps = [span.attributes for span in found if span.name == "train.step"]
    assert {(step["dl.rank"], step["dl.world_size"]) for step in steps} == {identity}
    assert validate(found) == []
    lines = [line for line in done.stderr.splitlines() if line.startswith("otel-dl: ")]
    assert [said in line for line in lines] == [True] * bool(said)


def test_names_and_numbers_of_the_users_that_no_span_can_have(tmp_path: Path) -> None:
    done = hostile(
        tmp_path,
        """
class Text(str):
    pass

values = [3, Text("text"), "\\udcff", None, torch.tensor(7), 10**30, 1.5]
for (x, y), value in zip(DataLoader(dataset, batch_size=4), values):
    with otel_dl.step(global_step=value), otel_dl.span(value):
        model(x).sum().backward()
        optimizer.step()
""",
        TORCHELASTIC_RUN_ID="label \udcff",
    )
    found = list(read_spans(Reading(tmp_path / "traces")))
    steps = [span.attributes for span in found if span.name == "train.step"][16:]
    assert [step.get("dl.global_step") for step in steps] == [3, None, None, None, 7, None, None]
    named = [span.name for span in found if span.scope == "otel_dl.user"]
    assert named == ["3", "text", "?", "None", "tensor(7)", str(10**30), "1.5"]
    assert steps[0]["dl.run.id"].startswith("label ?-")
    assert validate(found) == []
    assert done.stderr.count("otel-dl: ") == 1
    assert "global_step" in done.stderr


def test_uninstrument_in_another_thread_leaves_no_closed_wakeup_descriptor(tmp_path: Path) -> None:
    done = hostile(
        tmp_path,
        """
signal.signal(signal.SIGUSR1, lambda *_: None)
thread = threading.Thread(target=otel_dl.uninstrument)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGUSR1)
print(epoch(DataLoader(dataset, batch_size=4, num_workers=1)))
""",
    )
    assert (done.code, done.stdout) == (0, "16\n"), done
    assert "wakeup fd" not in done.stderr


@pytest.mark.parametrize("stream", ["sys.stderr.close()", "sys.stderr = None"])
def test_training_does_not_need_a_stream_for_our_words(stream: str, tmp_path: Path) -> None:
    script = BASE.replace("\nepoch()\n", f"\n{stream}\nprint(epoch())\n")
    done = run(script, {"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(tmp_path)})
    assert (done.code, done.stdout) == (0, "16\n"), done


def test_a_worker_outlives_uninstrument_where_sigpipe_has_its_default_action(tmp_path: Path) -> None:
    done = hostile(
        tmp_path,
        """
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
count = 0
for _ in DataLoader(dataset, batch_size=1, num_workers=2):
    count += 1
    if count == 4:
        otel_dl.uninstrument()
print(count)
""",
    )
    assert (done.code, done.stdout) == (0, "64\n"), done


@pytest.mark.parametrize(
    "variable", ["OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_PROPAGATORS", "OTEL_PYTHON_TRACER_PROVIDER"]
)
def test_a_value_that_the_sdk_refuses_does_not_end_training(variable: str, tmp_path: Path) -> None:
    done = hostile(tmp_path, "print(epoch())", **{variable: "nonsense"})
    assert (done.code, done.stdout) == (0, "16\n"), done


def test_a_handler_that_calls_what_was_there_before_decides_the_end_itself(tmp_path: Path) -> None:
    done = hostile(
        tmp_path,
        """
def handler(number, frame):
    if callable(previous):
        previous(number, frame)
previous = signal.signal(signal.SIGTERM, handler)
os.kill(os.getpid(), signal.SIGTERM)
print(epoch())
""",
    )
    assert (done.code, done.stdout) == (0, "16\n"), done


def test_a_class_of_the_users_that_is_pickled_by_value_can_be(tmp_path: Path) -> None:
    done = hostile(
        tmp_path,
        f"""
import cloudpickle, pickle, subprocess
class Mine(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)
mine = Mine(model.parameters(), lr=0.1)
mine.step()
with open("{tmp_path}/pickled", "wb") as file:
    cloudpickle.dump(mine, file)
read = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb')).step(); print('stepped')"
subprocess.run([{sys.executable!r}, "-c", read, "{tmp_path}/pickled"], check=True)
""",
    )
    assert (done.code, done.stdout) == (0, "stepped\n"), done


def test_a_sampler_that_counts_is_asked_once_for_each_step(tmp_path: Path) -> None:
    done = hostile(
        tmp_path,
        """
otel_dl.uninstrument()
import collections
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from otel_dl.export.sampling import SamplerHead

class Counting(Sampler):
    asked = collections.Counter()
    def should_sample(self, context, trace_id, name, *args, **kwargs):
        self.asked[trace_id] += 1
        return SamplingResult(Decision.DROP)
    def get_description(self):
        return "counting"

otel_dl.instrument()
from otel_dl import session
run = session.current().run
run.keep.head = SamplerHead(Counting(), lambda number: run.step_ids(number)[0])
for _ in range(10):
    epoch()
print(set(Counting.asked.values()), len(Counting.asked) >= 160)
""",
    )
    assert (done.code, done.stdout) == (0, "{1} True\n"), done


def test_the_recursion_limit_costs_no_target_and_says_nothing(tmp_path: Path) -> None:
    done = hostile(
        tmp_path,
        """
def deep(left):
    if left:
        return deep(left - 1)
    optimizer.zero_grad()
reached = 0
for depth in range(900, 1000):
    try:
        deep(depth)
        reached = depth
    except RecursionError:
        pass
otel_dl.flush(10)
print(reached > 950, type(torch.optim.Optimizer.zero_grad.__wrapped__).__name__)
""",
    )
    assert (done.code, done.stdout) == (0, "True function\n"), done
    assert "fault" not in done.stderr


def test_an_exception_thrown_into_our_code_from_outside_is_the_users() -> None:
    class Timeout(Exception):
        pass

    try:
        raise Timeout
    except Timeout as error:
        thrown = error.with_traceback(None)
    assert not is_ours(thrown)
    assert is_ours(ValueError())


@pytest.mark.parametrize(("name", "lost"), [("SIGCHLD", 0), ("SIGALRM", 1)])
def test_a_signal_handler_that_raises_while_the_process_ends_takes_no_trace_away(
    name: str, lost: int, tmp_path: Path
) -> None:
    """As torch's of SIGCHLD does for a worker that has died. It strikes as our functions are called; another signal's
    handler may so come into the middle of closing the last step."""
    done = hostile(
        tmp_path,
        f"""
import atexit
calls = struck = 0

def raises(number, frame):
    global struck
    struck += 1
    raise RuntimeError("a worker is killed")

def strike(frame, event, argument):
    global calls
    if event == "call" and "otel_dl" in frame.f_code.co_filename:
        calls += 1
        if calls % 50 == 7 and calls < 600:
            signal.raise_signal(signal.{name})

signal.signal(signal.{name}, raises)
atexit.register(sys.setprofile, strike)
raise ValueError("the user fails")
""",
    )
    assert done.code == 1
    assert "a fault of ours" not in done.stderr
    steps = [span for span in read_spans(Reading(tmp_path / "traces")) if span.name == "train.step"]
    assert 16 - lost <= len(steps) <= 16
