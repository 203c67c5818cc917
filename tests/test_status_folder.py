"""Where status pages lie, and what happens where they can't: it is said once, and the job runs on without."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.children import environment
from support.inprocess import recording
from support.loader_jobs import SCRIPTS

from otel_dl.forensics import folder as folders
from otel_dl.forensics import memory, reader
from otel_dl.forensics.folder import StatusFolder
from otel_dl.forensics.writer import StatusPage
from otel_dl.recording.identity import Identity

IDENTITY = Identity("label-" + "0" * 32, 0, 0, 0, 1)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("OTEL_DL_DIR", raising=False)
    return tmp_path


def test_pages_lie_in_the_folder_that_is_named_and_are_gone_at_the_end(tmp_path: Path) -> None:
    named = tmp_path / "a" / "b"
    folder = StatusFolder(str(named))
    assert isinstance(folder.open(IDENTITY), StatusPage)
    paths = [folder.worker("nonce", number) for number in range(2)]
    assert len(names(named)) == 3
    assert {reader.read(path).worker for path in paths} == {0, 1}
    folder.remove(paths[0])
    assert len(names(named)) == 2
    folder.close(unmap=True)
    assert not named.exists()


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    folder = StatusFolder(str(tmp_path))
    folder.open(IDENTITY)
    (tmp_path / "traces.jsonl").touch()
    folder.close(unmap=True)
    assert names(tmp_path) == ["traces.jsonl"]


def test_where_none_is_named_it_is_the_runs_own_which_only_its_user_can_read(temporary: Path) -> None:
    folder = StatusFolder()
    folder.open(IDENTITY)
    (base,) = temporary.iterdir()
    (own,) = base.iterdir()
    assert stat.S_IMODE(base.stat().st_mode) == stat.S_IMODE(own.stat().st_mode) == 0o700
    assert len(names(own)) == 1
    folder.close(unmap=True)
    assert names(base) == []


def test_a_folder_of_somebody_elses_in_its_place_is_not_trusted(temporary: Path) -> None:
    target = temporary / "elsewhere"
    target.mkdir()
    folders.temporary().symlink_to(target)
    folder = StatusFolder()
    assert isinstance(folder.open(IDENTITY), StatusPage)
    assert names(target) == []
    folder.close(unmap=True)


def test_what_dead_processes_left_is_bounded(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "KEPT", 2)
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            StatusFolder().open(IDENTITY._replace(run=f"{number}" * 32))
            os._exit(0)
        os.waitpid(pid, 0)
        (left,) = folders.temporary().glob(f"{pid}-*")
        os.utime(left, (number, number))
    folder = StatusFolder()
    folder.open(IDENTITY)
    assert len(names(folders.temporary())) == 3
    folder.close(unmap=True)


def test_a_session_has_a_page_while_it_lasts(temporary: Path) -> None:
    with recording() as recorded:
        recorded.run.start()
        (page,) = reader.read_all(next(folders.temporary().iterdir()))
        assert (page.pid, page.run, page.worker) == (os.getpid(), recorded.run.identity.run, None)
        recorded.run.status.begin(0, 8, 5)
        assert [phase.name for phase in reader.read(page.path).phases] == ["backward"]
        pid = os.fork()
        if pid == 0:
            recorded.run.status.begin(0, 8, 6)  # a child has none until its run begins
            os._exit(0)
        os.waitpid(pid, 0)
        assert len(reader.read(page.path).phases) == 1
    assert names(folders.temporary()) == []
    recorded.run.status.end(0, 7)


def test_a_filesystem_without_shared_mappings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_mmap(*arguments: object) -> int | None:
        ctypes.set_errno(errno.ENODEV)
        return memory._FAILED

    monkeypatch.setattr(memory._libc, "mmap", no_mmap)
    folder = StatusFolder(str(tmp_path))
    status = folder.open(IDENTITY)
    assert not isinstance(status, StatusPage)
    status.begin(0, 8, 5)
    assert folder.worker("nonce", 0) == ""
    (said,) = caplog.messages
    assert str(tmp_path) in said
    assert os.strerror(errno.ENODEV) in said
    assert names(tmp_path) == []


@pytest.fixture
def mounts() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("mounting a filesystem takes a mount namespace of one's own (unshare -m), which is root's to make")


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize("kind", ["read-only", "full"])
def test_a_folder_that_cannot_take_a_page(kind: str, tmp_path: Path) -> None:
    """A worker is killed: how is known from its exit status, what it had in hand is not."""
    traces, truth = tmp_path / "traces", tmp_path / "truth"
    traces.mkdir()
    truth.mkdir()
    # A page of room is taken by the folder's file; fallocate finds none for another.
    mount = {
        "read-only": f"mount -t tmpfs -o ro none {traces}",
        "full": f"mount -t tmpfs -o size=4k none {traces} && head -c 4096 /dev/zero > {traces}/file",
    }[kind]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh",
         sys.executable, str(SCRIPTS / "worker_ends.py"), "fork", "SIGKILL", "middle", str(truth)],
        env=environment({"OTEL_DL_DIR": str(traces), "OTEL_TRACES_EXPORTER": "otel_dl_file"}),
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "status page" in line]
    assert len(said) == 1, done.stderr
    assert str(traces) in said[0]
    assert {"read-only": "Read-only file system", "full": "No space left on device"}[kind] in said[0]
    seen = json.loads(done.stdout)
    assert seen["type"] == "RuntimeError"
    if sys.version_info >= (3, 11):
        (note,) = seen["notes"]
        assert "was killed by SIGKILL doing what is unknown" in note


@pytest.mark.usefixtures("mounts")
def test_shared_memory_that_is_full_kills_a_worker_and_its_page_says_which(tmp_path: Path) -> None:
    job = """
    import torch, otel_dl
    from torch.utils.data import DataLoader, TensorDataset
    otel_dl.instrument()
    try:
        list(DataLoader(TensorDataset(torch.zeros(4, 2**20)), batch_size=2, num_workers=1))
    except RuntimeError as error:
        print(error, *getattr(error, "__notes__", []))
    """
    script = tmp_path / "job.py"
    script.write_text("\n".join(line[4:] for line in job.splitlines()))
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh",
         sys.executable, str(script)],
        env=environment({"OTEL_DL_DIR": str(tmp_path / "traces"), "OTEL_TRACES_EXPORTER": "otel_dl_file"}),
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "status page" not in done.stderr
    if "No space left" not in done.stdout and sys.version_info >= (3, 11):  # newer torch finds it itself
        assert "was killed by SIGBUS in dataloader.fetch of batch 0, samples 0-1" in done.stdout
