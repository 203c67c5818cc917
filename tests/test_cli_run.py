"""`otel-dl run`: the job is what it would be without us, and afterwards there is a summary."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import psutil
import pytest

from otel_dl.cli.job import BOOTSTRAP

OTEL_DL = [sys.executable, "-m", "otel_dl.cli"]

TRACED = """
import sys
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from otel_dl.export.file import FileSpanExporter

provider = TracerProvider(resource=Resource({"dl.run.id": "job/1"}))
provider.add_span_processor(SimpleSpanProcessor(FileSpanExporter()))
with provider.get_tracer("otel_dl").start_as_current_span("train.step") as step:
    step.set_attributes({"dl.run.id": "job/1", "dl.rank": 0, "dl.step": 0, "dl.keep.reason": "head"})
"""
"""A script that writes the trace of one step with plain OpenTelemetry."""


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_DL_DIR", "OTEL_DL_JAEGER_URL"):
        monkeypatch.delenv(name, raising=False)


def script(tmp_path: Path, text: str, name: str = "train.py") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def run(*arguments: str, stdin: bytes = b"", options: Sequence[str] = ()) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*OTEL_DL, "run", *options, "--", *arguments], input=stdin, capture_output=True, check=False)


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*OTEL_DL, "run", "--", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def is_pending(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    pending = re.search(r"^ShdPnd:\s*(\w+)$", status, re.MULTILINE)
    assert pending
    return bool(int(pending[1], 16) >> (number - 1) & 1)


def line_of(stream: IO[bytes] | None) -> bytes:
    assert stream is not None
    return stream.readline()


class TestOutput:
    def test_what_the_script_reads_and_writes_is_untouched(self, tmp_path: Path) -> None:
        text = r"""
import os, sys
data = sys.stdin.buffer.read()
os.write(1, b"loss 0.1\r\n\0\xff no line feed" + data)
os.write(2, b"\x1b[31mwarning\x1b[0m \xfe")
"""
        path = script(tmp_path, text)
        alone = subprocess.run([sys.executable, path], input=b"\0in\n", capture_output=True, check=True)
        ours = run(sys.executable, path, stdin=b"\0in\n")
        assert ours.stdout == alone.stdout
        assert alone.stderr in ours.stderr

    def test_no_escape_codes_where_stderr_is_no_terminal(self, tmp_path: Path) -> None:
        done = run(sys.executable, script(tmp_path, TRACED), options=["--progress"])
        assert b"\x1b" not in done.stderr

    def test_summary_follows_on_stderr(self, tmp_path: Path) -> None:
        done = run(sys.executable, script(tmp_path, TRACED), options=["--out", "traces", "--jaeger", "http://jaeger"])
        assert (done.returncode, done.stdout) == (0, b"")
        summary = done.stderr.decode()
        assert "1 kept of at least 1" in summary
        assert "http://jaeger/trace/" in summary
        assert f"1 span in 1 file of {tmp_path / 'traces'}" in summary

    def test_each_run_has_a_folder_of_its_own(self, tmp_path: Path) -> None:
        path = script(tmp_path, TRACED)
        assert run(sys.executable, path).returncode == run(sys.executable, path).returncode == 0
        folders = list((tmp_path / "otel-dl-traces").iterdir())
        assert len(folders) == 2
        assert all(re.fullmatch(r"\d{8}-\d{6}-\d+", folder.name) for folder in folders)

    def test_traces_of_an_earlier_run_in_the_folder_do_not_count(self, tmp_path: Path) -> None:
        path = script(tmp_path, TRACED)
        run(sys.executable, path, options=["--out", "traces"])
        summary = run(sys.executable, path, options=["--out", "traces"]).stderr.decode()
        assert "1 kept of at least 1" in summary
        assert "1 × file of an earlier run" in summary

    @pytest.mark.parametrize("command", [["run", "--jaeger", "jaeger:16686", "true"], ["report", "--jaeger", "", "."]])
    def test_an_address_of_jaeger_that_is_none_is_a_usage_error(self, command: list[str]) -> None:
        done = subprocess.run([*OTEL_DL, *command], capture_output=True, check=False)
        assert done.returncode == 2
        assert b"Invalid value for '--jaeger'" in done.stderr
        assert b"http://localhost:16686" in done.stderr

    def test_a_job_that_writes_no_traces_is_said(self, tmp_path: Path) -> None:
        done = run(sys.executable, "-c", "print('hello')")
        assert done.returncode == 0
        assert b"there are no traces in" in done.stderr

    def test_arguments_reach_the_command_as_they_are(self) -> None:
        show = "import sys; print(sys.argv[1:])"
        arguments = ["--out", "x", "--", "-h", "", "a b", "--jaeger=y"]
        assert run(sys.executable, "-c", show, *arguments).stdout.decode() == f"{arguments}\n"
        without_dashes = [*OTEL_DL, "run", sys.executable, "-c", show, "--lr", "0.1"]
        done = subprocess.run(without_dashes, capture_output=True, check=True)
        assert done.stdout == b"['--lr', '0.1']\n"


class TestEnd:
    @pytest.mark.parametrize("status", [0, 1, 3, 255])
    def test_exit_status_is_the_jobs(self, status: int) -> None:
        assert run(sys.executable, "-c", f"raise SystemExit({status})").returncode == status

    @pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGINT", "SIGPIPE"])
    def test_a_job_killed_by_a_signal_ends_us_the_same_way_after_the_summary(self, tmp_path: Path, name: str) -> None:
        die = f"""
import os, signal
for handled_by_python in (signal.SIGINT, signal.SIGPIPE):
    signal.signal(handled_by_python, signal.SIG_DFL)
os.kill(os.getpid(), signal.{name})
"""
        done = run(sys.executable, script(tmp_path, TRACED + die))
        assert done.returncode == -getattr(signal, name)
        assert b"1 kept of at least 1" in done.stderr

    def test_a_script_that_is_not_there(self) -> None:
        alone = subprocess.run([sys.executable, "missing.py"], capture_output=True, check=False)
        done = run(sys.executable, "missing.py")
        assert done.returncode == alone.returncode == 2
        assert alone.stderr in done.stderr

    def test_a_command_that_is_not_there(self, tmp_path: Path) -> None:
        done = run("no-such-command-of-otel-dl")
        assert (done.returncode, done.stderr) == (127, b"otel-dl: no-such-command-of-otel-dl: command not found\n")
        assert list((tmp_path / "otel-dl-traces").iterdir()) == []

    def test_a_path_that_is_not_there(self) -> None:
        done = run("./missing.sh")
        assert (done.returncode, done.stderr) == (127, b"otel-dl: ./missing.sh: No such file or directory\n")

    def test_a_command_that_cannot_be_executed(self, tmp_path: Path) -> None:
        (tmp_path / "train.sh").write_text("echo hello")
        done = run("./train.sh")
        assert (done.returncode, done.stderr) == (126, b"otel-dl: ./train.sh: Permission denied\n")

    def test_no_command_is_a_usage_error(self) -> None:
        done = subprocess.run([*OTEL_DL, "run"], capture_output=True, check=False)
        assert done.returncode == 2
        assert b"Missing argument 'COMMAND...'" in done.stderr


@pytest.mark.parametrize(("name", "hint"), [("SIGKILL", True), ("SIGSEGV", False)])
def test_a_job_that_is_killed_is_said_to_be(name: str, hint: bool, tmp_path: Path) -> None:
    done = run(sys.executable, script(tmp_path, TRACED + f"import os, signal; os.kill(os.getpid(), signal.{name})"))
    assert done.returncode == -getattr(signal, name)
    assert f"the job was killed by {name}; what it had not exported is lost".encode() in done.stderr
    assert (b"dmesg" in done.stderr) == hint


class TestSignals:
    WAIT = """
import signal, sys, time
def stop(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(7)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
    signal.signal(getattr(signal, name), stop)
print("ready", flush=True)
while True:
    time.sleep(60)
"""

    @pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1"])
    def test_a_signal_to_us_reaches_the_job(self, tmp_path: Path, name: str) -> None:
        job = start(sys.executable, script(tmp_path, TRACED + self.WAIT))
        assert line_of(job.stdout) == b"ready\n"
        job.send_signal(getattr(signal, name))
        out, err = job.communicate()
        assert (job.returncode, out) == (7, f"got {name}\n".encode())
        assert b"1 kept of at least 1" in err

    @pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
    def test_a_signal_to_the_whole_process_group_reaches_the_job_once(self, tmp_path: Path, name: str) -> None:
        """Then one to us alone reaches it as well: the two are told apart, also after a signal of the same number."""
        count = f"""
import signal, time
def heard(number, frame):
    print("heard", flush=True)
signal.signal(signal.{name}, heard)
signal.signal(signal.SIGHUP, lambda *_: exit(7))
print("ready", flush=True)
while True:
    time.sleep(60)
"""
        job = subprocess.Popen(
            [*OTEL_DL, "run", "--", sys.executable, script(tmp_path, count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert line_of(job.stdout) == b"ready\n"
        number = getattr(signal, name)
        (witness,) = [p for p in psutil.Process(job.pid).children() if "otel_dl.cli" in p.cmdline()]
        for to_all in (True, True, False, True, False):
            (os.killpg if to_all else os.kill)(job.pid, number)
            assert line_of(job.stdout) == b"heard\n"
            while is_pending(witness.pid, number):  # we have not dealt with it: a second one would be the same one
                pass
        job.send_signal(signal.SIGHUP)  # passed on when all the others have been dealt with
        out, _ = job.communicate()
        assert (job.returncode, out) == (7, b"")

    def test_a_sender_that_goes_through_the_group_one_by_one_reaches_the_job_once(self, tmp_path: Path) -> None:
        count = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
signal.signal(signal.SIGHUP, lambda *_: exit(7))
print("ready", flush=True)
while True:
    time.sleep(60)
"""
        job = start(sys.executable, script(tmp_path, count))
        assert line_of(job.stdout) == b"ready\n"
        for process in [psutil.Process(job.pid), *psutil.Process(job.pid).children()]:
            process.terminate()
        assert line_of(job.stdout) == b"heard\n"
        job.send_signal(signal.SIGHUP)
        out, _ = job.communicate()
        assert (job.returncode, out) == (7, b"")

    def test_a_signal_during_the_summary_does_not_replace_the_jobs_exit_status(self, tmp_path: Path) -> None:
        text = """
import os, shutil, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
path = provider._active_span_processor._span_processors[0].span_exporter.path
with open(path, "ab") as file:
    file.write(path.read_bytes() * 50_000)
print("ready", flush=True)
os._exit(7)
"""
        job = start(sys.executable, script(tmp_path, TRACED + text))
        assert line_of(job.stdout) == b"ready\n"
        while job.poll() is None:
            job.send_signal(signal.SIGTERM)
        assert job.returncode == 7
        assert b"the summary was interrupted. To have it: otel-dl report" in job.communicate()[1]

    def test_nothing_of_ours_outlives_us(self, tmp_path: Path) -> None:
        job = start(sys.executable, script(tmp_path, self.WAIT))
        assert line_of(job.stdout) == b"ready\n"
        ours = psutil.Process(job.pid).children()
        (training,) = [process for process in ours if "otel_dl.cli" not in process.cmdline()]
        os.kill(job.pid, signal.SIGKILL)
        training.kill()
        gone, alive = psutil.wait_procs(ours, timeout=60)
        assert (len(gone), alive) == (2, [])
        job.communicate()

    def test_the_job_starts_with_the_signals_of_a_shell(self) -> None:
        command = ["sh", "-c", "grep -E 'SigBlk|SigIgn' /proc/self/status"]

        def masks(output: bytes) -> list[int]:
            standard = 2**31 - 1  # beyond are real-time signals, of which the C library keeps two for itself
            return [int(line.split()[1], 16) & standard for line in output.splitlines()]

        alone = subprocess.run(command, capture_output=True, check=True)
        assert masks(run(*command).stdout) == masks(alone.stdout)

    def test_a_job_under_nohup_still_ignores_sighup(self) -> None:
        command = [*OTEL_DL, "run", "--", "sh", "-c", "kill -HUP $$; echo alive"]
        done = subprocess.run(["nohup", *command], capture_output=True, check=True, stdin=subprocess.DEVNULL)
        assert b"alive" in done.stdout


class Terminal:
    """A pseudo-terminal with `otel-dl run` as its foreground process group."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            for number in (signal.SIGINT, signal.SIGQUIT):  # ignored where a shell runs the tests in the background
                signal.signal(number, signal.SIG_DFL)
            os.execv(sys.executable, [*OTEL_DL, "run", *arguments])
        self.seen = b""

    def read_until(self, pattern: bytes) -> None:
        while not re.search(pattern, self.seen):
            more = self._read()
            assert more, f"the terminal ended without {pattern!r}: {self.seen!r}"

    def read_to_the_end(self) -> int:
        """Returns the exit status, as of `os.waitstatus_to_exitcode`."""
        while self._read():
            pass
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bytes:
        try:
            more = os.read(self.descriptor, 65536)
        except OSError:  # how Linux says that nobody has the other end open any more
            return b""
        self.seen += more
        return more

    def press(self, key: bytes) -> None:
        os.write(self.descriptor, key)


class TestTerminal:
    def test_control_c_reaches_the_job_once_and_the_summary_follows(self, tmp_path: Path) -> None:
        text = """
import signal, sys, time
count = 0
def interrupted(number, frame):
    global count
    count += 1
    print("interrupted", count, flush=True)
signal.signal(signal.SIGINT, interrupted)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
import os
print("ready", os.getpid(), flush=True)
while True:
    time.sleep(60)
"""
        terminal = Terminal("--no-progress", "--", sys.executable, script(tmp_path, TRACED + text))
        terminal.read_until(rb"ready (\d+)\r\n")
        terminal.press(b"\x03")
        terminal.read_until(rb"interrupted 1\r\n")
        match = re.search(rb"ready (\d+)", terminal.seen)
        assert match
        os.kill(int(match[1]), signal.SIGUSR1)
        assert terminal.read_to_the_end() == 5
        assert b"interrupted 2" not in terminal.seen
        assert b"1 kept of at least 1" in terminal.seen

    def test_control_z_stops_the_job_and_us_and_the_shell_can_go_on_with_both(self, tmp_path: Path) -> None:
        """A shell with job control, on a terminal, has `otel-dl run` as one of its jobs."""
        text = """
import os, sys
print("ready", os.getpid(), flush=True)
print("read", sys.stdin.readline().strip(), flush=True)
sys.exit(5)
"""
        shell = f"""
set -m
{" ".join(OTEL_DL)} run --no-progress --out traces -- {sys.executable} {script(tmp_path, TRACED + text)}
echo "stopped with $?"
fg
echo "ended with $?"
"""
        pid, descriptor = pty.fork()
        if pid == 0:
            os.execvp("bash", ["bash", "--norc", "-c", shell])
        terminal = Terminal.__new__(Terminal)
        terminal.pid, terminal.descriptor, terminal.seen = pid, descriptor, b""
        terminal.read_until(rb"ready (\d+)\r\n")
        terminal.press(b"\x1a")
        terminal.read_until(rb"stopped with 148\r\n")
        terminal.read_until(rb"run --no-progress[^\n]*\n")
        terminal.press(b"a line\n")
        terminal.read_until(rb"ended with 5\r\n")
        assert terminal.read_to_the_end() == 0
        assert b"read a line" in terminal.seen
        assert b"1 kept of at least 1" in terminal.seen

    def test_a_job_that_control_c_kills_ends_us_by_sigint(self, tmp_path: Path) -> None:
        text = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(60)\n"
        terminal = Terminal("--no-progress", "--", sys.executable, script(tmp_path, TRACED + text))
        terminal.read_until(rb"ready\r\n")
        terminal.press(b"\x03")
        assert terminal.read_to_the_end() == -signal.SIGINT
        assert b"KeyboardInterrupt" in terminal.seen
        assert b"1 kept of at least 1" in terminal.seen

    def test_the_progress_line_stays_out_of_what_the_job_writes(self, tmp_path: Path) -> None:
        """The job writes half a line, waits until the progress line has been drawn, and writes the rest."""
        text = f"""
import os, time
os.write(1, b"loss ")
while not os.path.exists({str(tmp_path / "go-on")!r}):
    time.sleep(0.01)
os.write(1, b"0.25\\n")
"""
        terminal = Terminal("--out", str(tmp_path / "traces"), "--", sys.executable, script(tmp_path, TRACED + text))
        _resize(terminal.descriptor, rows=24, columns=100)
        terminal.read_until(rb"otel-dl 0:00:\d\d  1 step spans, 0.0 MiB in 1 files")
        (tmp_path / "go-on").touch()
        assert terminal.read_to_the_end() == 0
        drawn = re.findall(rb"\x1b7(.*?)\x1b8", terminal.seen, re.DOTALL)
        assert drawn[0] == b"\x1b[1;23r"  # the last of 24 rows no longer scrolls
        assert all(part.startswith(b"\x1b[24;1H\x1b[2K") for part in drawn[1:])
        assert drawn[-1] == b"\x1b[24;1H\x1b[2K\x1b[r"  # and is given back, empty
        beside = re.sub(rb"\x1b7.*?\x1b8|\x1bD|\x1b\[1A", b"", terminal.seen, flags=re.DOTALL)
        assert b"loss 0.25\r\n" in beside
        assert b"\x1b" not in beside


def _resize(descriptor: int, rows: int, columns: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class TestFolder:
    @pytest.mark.parametrize("folder", ["file/traces", "/proc/otel-dl"])
    def test_one_that_cannot_be_written_is_said_before_the_job_which_runs_on(self, tmp_path: Path, folder: str) -> None:
        (tmp_path / "file").write_text("not a folder")
        show = "import os, sys; print(os.environ['OTEL_TRACES_EXPORTER']); sys.stderr.write('job\\n'); sys.exit(4)"
        done = run(sys.executable, "-c", show, options=["--out", folder])
        assert (done.returncode, done.stdout) == (4, b"none\n")
        message = f"otel-dl: traces cannot be written to {tmp_path / folder}: "
        assert done.stderr.decode().startswith(message)
        assert done.stderr.index(b"--out") < done.stderr.index(b"job\n")

    def test_out_makes_no_sense_without_files(self) -> None:
        done = run("true", options=["--to", "otlp", "--out", "x"])
        assert done.returncode == 2
        assert b"--out names a folder for files" in done.stderr


class TestEnvironment:
    SHOW = "import json, os; print(json.dumps(dict(os.environ)))"

    def shown(self, *options: str) -> dict[str, str]:
        return json.loads(run(sys.executable, "-c", self.SHOW, options=options).stdout)

    def test_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, ["/mine", os.environ.get("PYTHONPATH")])))
        shown = self.shown("--out", "traces")
        assert shown["OTEL_TRACES_EXPORTER"] == "otel_dl_file"
        assert shown["OTEL_DL_DIR"] == str(tmp_path / "traces")
        assert shown["PYTHONPATH"].split(os.pathsep)[:2] == [str(BOOTSTRAP), "/mine"]

    def test_otlp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shown = self.shown("--to", "otlp")
        assert shown["OTEL_TRACES_EXPORTER"] == "otlp"
        assert "OTEL_DL_DIR" not in shown
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
        assert self.shown("--to", "otlp")["OTEL_TRACES_EXPORTER"] == "console"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder at the head of the Python path whose `otel_dl` has nothing but `autoload`, told by each test."""
    folder = tmp_path / "stub"
    (folder / "otel_dl").mkdir(parents=True)
    (folder / "otel_dl" / "__init__.py").touch()
    (folder / "otel_dl" / "autoload.py").write_text("def activate():\n    print('activated')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BOOTSTRAP), str(folder)]))
    return folder


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


class TestBootstrap:
    def test_activates_in_each_python_process(self, stub: Path) -> None:
        child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(2)'])"
        assert python(child).stdout == "activated\nactivated\n2\n"

    def test_the_users_sitecustomize_runs_and_is_the_one_that_can_be_imported(self, stub: Path) -> None:
        (stub / "sitecustomize.py").write_text("print('theirs')\nNAME = 'theirs'\n")
        done = python("import sitecustomize, sys; print(sitecustomize.NAME, sitecustomize.__file__)")
        assert done.stdout == f"theirs\nactivated\ntheirs {stub / 'sitecustomize.py'}\n"

    def test_an_error_in_the_users_sitecustomize_is_told_as_without_us(
        self, stub: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (stub / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
        done = python("print('runs')")
        assert done.stdout == "activated\nruns\n"
        monkeypatch.setenv("PYTHONPATH", str(stub))
        assert done.stderr == python("").stderr

    def test_an_activation_that_fails_is_one_line(self, stub: Path) -> None:
        (stub / "otel_dl" / "autoload.py").write_text("def activate():\n    raise RuntimeError('broken')\n")
        done = python("print('runs')")
        assert (done.returncode, done.stdout) == (0, "runs\n")
        assert re.fullmatch(r"otel-dl: this process \(pid \d+, .*\) is not traced: RuntimeError: broken\n", done.stderr)

    def test_a_python_without_otel_dl_is_one_line(self, stub: Path) -> None:
        (stub / "otel_dl" / "autoload.py").unlink()
        done = python("print('runs')")
        assert (done.returncode, done.stdout) == (0, "runs\n")
        assert done.stderr.count("\n") == 1
        assert "install otel-dl for this Python" in done.stderr

    def test_the_scripts_module_path_is_what_it_would_be(self, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        show = "import sys; print(sys.path)"
        ours = python(show).stdout.removeprefix("activated\n")
        monkeypatch.setenv("PYTHONPATH", str(stub))
        assert ours == python(show).stdout


class TestCommand:
    def test_version(self) -> None:
        done = subprocess.run([*OTEL_DL, "--version"], capture_output=True, text=True, check=True)
        assert re.fullmatch(r"otel-dl \d+\.\d+\.\d+\S*\n", done.stdout)

    def test_without_click_one_line_says_what_to_install(self) -> None:
        code = "import sys; sys.modules['click'] = None; from otel_dl.cli.main import main; main()"
        done = python(code)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "pip install otel-dl[cli]" in done.stderr
