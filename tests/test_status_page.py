"""The status page: what its writer said is there for whoever looks, and what was torn is not known."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support import children

from otel_dl.forensics import layout, reader, writer
from otel_dl.forensics.reader import Page
from otel_dl.forensics.samples import ranges
from otel_dl.forensics.writer import StatusPage
from otel_dl.recording.identity import Identity
from otel_dl.recording.records import Kind

BACKWARD, FORWARD = int(Kind.BACKWARD), int(Kind.FORWARD)


def page(path: Path, worker: int = -1) -> StatusPage:
    writer.create(str(path), Identity("a-run", 0, 3, 0, 4), worker=worker, parent=17, nonce="n" * 32)
    return StatusPage(str(path))


def read(path: Path) -> Page:
    found = reader.read(str(path))
    assert found is not None
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.status"


def test_who_writes_and_what_is_open_stands_in_the_page(path: Path) -> None:
    status = page(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == layout.SIZE
    status.step(7)
    status.begin(0, BACKWARD, 100)
    status.begin(1, FORWARD, 110)
    status.end(1, 120)
    status.begin(1, FORWARD, 130)
    status.batch(2, 5, 90)
    found = read(path)
    assert (found.pid, found.rank, found.worker, found.run, found.step) == (os.getpid(), 3, None, "a-run", 7)
    assert [(phase.name, phase.start) for phase in found.phases or ()] == [("backward", 100), ("forward", 130)]
    assert found.batch is not None
    assert (found.batch.round, found.batch.place) == (2, 5)
    assert found.alive()
    status.belongs_to("rank 0's")
    assert read(path).run == "rank 0's"
    status.end(1, 140)
    assert [phase.name for phase in read(path).phases or ()] == ["backward"]
    status.begin(1, FORWARD, 145)
    status.end(0, 150)  # and with it what was open in it
    status.step(-1)
    assert (read(path).phases, read(path).step) == ((), None)


def test_phases_deeper_than_there_is_room_for_are_left_out(path: Path) -> None:
    status = page(path)
    for depth in range(layout.DEPTH + 3):
        status.begin(depth, FORWARD, depth + 1)
    assert [phase.start for phase in read(path).phases or ()] == list(range(1, layout.DEPTH + 1))
    for depth in reversed(range(1, layout.DEPTH + 3)):
        status.end(depth, 99)
    assert [phase.start for phase in read(path).phases or ()] == [1]


def test_a_worker_says_which_samples_it_has_in_hand_and_how_it_spent_its_time(path: Path) -> None:
    status = page(path, worker=2)
    began = read(path).began
    status.fetching(1, 17, began + 50, [34, 35, 2**40])
    found = read(path)
    assert found.worker == 2
    assert found.fetching
    assert found.batch == reader.Batch(1, 17, began + 50, 3, (34, 35, 2**40))
    status.fetched(1, 17, began + 50, began + 80)
    status.fetching(1, 19, began + 100, ["a", "b"])
    found = read(path)
    assert found.done == reader.Done(1, 17, began + 80, fetches=1, busy=30, idle=50)
    assert found.batch is not None
    assert found.batch.samples == "a,b"
    status.fetched(1, 19, began + 100, began + 101)
    assert not read(path).fetching
    status.fetching(1, 20, began + 102, list(range(10_000)))
    found = read(path)
    assert found.batch is not None
    assert (found.batch.size, found.batch.samples) == (10_000, tuple(range(layout.SAMPLES_MOST)))


@pytest.mark.parametrize("samples", [[None, None], [object()], [2**70], [[1, 2], [3]], [1.5]])
def test_samples_that_are_no_indices_are_not_known(samples: list[object], path: Path) -> None:
    page(path, worker=0).fetching(0, 0, 1, samples)
    found = read(path)
    assert found.batch is not None
    assert (found.batch.size, found.batch.samples) == (len(samples), ())


def test_a_block_that_was_torn_is_not_known(path: Path) -> None:
    """Each single byte wrong: what the block says is what was written, or nothing."""
    status = page(path, worker=0)
    status.begin(0, FORWARD, 1_000)
    status.fetching(0, 1, 2_000, [5, 6, 7])
    status.fetched(0, 1, 2_000, 3_000)
    status.fetching(0, 2, 4_000, [5, 6, 7])
    right = read(path)
    for place in range(layout.PHASES, layout.DONE + layout.DONE_STRUCT.size):
        data = bytearray(path.read_bytes())
        data[place] ^= 0x41
        torn = reader.decode(bytes(data))
        assert torn is not None
        assert torn.phases in (right.phases, None)
        assert torn.batch in (right.batch, None)
        assert torn.done in (right.done, None)


def test_what_is_no_page_is_none(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("short", b"x" * 100), ("other", b"x" * layout.SIZE)):
        (tmp_path / name).write_bytes(content)
        assert reader.read(str(tmp_path / name)) is None
    with pytest.raises(OSError, match="shorter"):
        StatusPage(str(tmp_path / "short"))
    assert reader.read(str(tmp_path / "missing")) is None


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_page_outlives_the_death_of_its_writer(end: signal.Signals, path: Path) -> None:
    page(path)
    pid = os.fork()
    if pid == 0:
        signal.signal(end, signal.SIG_DFL) if end != signal.SIGKILL else None
        status = StatusPage(str(path))
        status.step(3)
        status.begin(0, BACKWARD, 5)
        os.kill(os.getpid(), end)
    os.waitpid(pid, 0)
    found = read(path)
    assert (found.pid, found.step, found.alive()) == (pid, 3, False)
    assert [phase.name for phase in found.phases or ()] == ["backward"]


def test_ranges() -> None:
    assert ranges(()) == ""
    assert ranges((7, 1, 2, 3)) == "1-3,7"
    assert ranges((1, 2), count=9) == "1-2,…"
    long = ranges(tuple(range(0, 1000, 2)))
    assert len(long) <= 256
    assert long.startswith("0,2,4,")
    assert long.endswith(",…")
    assert ranges("a,b") == "a,b"


@pytest.mark.parametrize("most", range(2, 40))
def test_ranges_that_do_not_fit_are_as_many_as_fit(most: int) -> None:
    parts = [str(number) for number in range(0, 30, 2)]
    whole = ",".join(parts)
    fitting = max(
        (text for text in (",".join([*parts[:count], "…"]) for count in range(len(parts) + 1)) if len(text) <= most),
        key=len,
    )
    assert ranges(range(0, 30, 2), most=most) == (whole if len(whole) <= most else fitting)


def test_ranges_of_very_many_numbers() -> None:
    assert ranges(range(0, 2_000_000, 2)) == ranges(range(0, 2_000, 2))
    assert ranges(set(range(1_000_000))) == "0-999999"
    assert ranges([1, 3], most=10_000_000) == "1,3"


def test_names_are_cut_as_ranges_are() -> None:
    assert ranges("a,b", count=3) == "a,b,…"
    assert len(ranges("abc," * 200)) <= 256


def test_a_thread_may_be_in_the_middle_of_a_store_when_it_is_closed(path: Path) -> None:
    done = children.run(
        f"""
        from pathlib import Path
        from otel_dl.forensics import layout, writer
        from otel_dl.recording.identity import Identity

        def is_mapped():
            return {str(path)!r} in Path("/proc/self/maps").read_text()

        writer.create({str(path)!r}, Identity("a-run", 0, 3, 0, 4))
        status = writer.StatusPage({str(path)!r})
        store = layout.NUMBER_STRUCT.pack_into
        begun = (status._memory, layout.STEP, 7)
        status.close()
        store(*begun)
        assert is_mapped()
        del begun
        assert not is_mapped()
        status.step(8)
        """
    )
    assert done.code == 0, done
    assert read(path).step == 7
