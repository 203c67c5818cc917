"""Reads a status page, of a process that lives or is dead. What can't be known for certain is None."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from zlib import adler32

from otel_dl.forensics import layout
from otel_dl.forensics.layout import End
from otel_dl.forensics.processes import process_started

_LOOKS: Final = 5
"""A page that changed between two looks is looked at again, so many times."""
SUFFIX: Final = ".status"


class Phase(NamedTuple):
    """An open phase: its span's name, and a reading of `clock`."""

    kind: int
    name: str
    start: int


class Batch(NamedTuple):
    """The batch that was taken in hand last. `round` is the epoch in a training process, in a worker the epochs of its
    iterator before this one, `place` the number of the batch in it; `samples` are the first of its `size` samples,
    empty where they are not known."""

    round: int
    place: int
    start: int
    size: int
    samples: tuple[int, ...] | str


class Done(NamedTuple):
    """A worker's last fetch that was finished, and its sums until then (ns)."""

    round: int
    place: int
    end: int
    fetches: int
    busy: int
    idle: int


class Collective(NamedTuple):
    """The collective that was issued, waited for or completed last: `name` as its span's, `seq` its number in `group`,
    0 of a transfer; `state` is `issued`, `waiting` (in Python) or `complete`."""

    state: str
    name: str
    seq: int
    size: int
    start: int
    group: str


class Page(NamedTuple):
    """What a status page says. Instants are readings of `clock` (`time.perf_counter_ns`) on `host`."""

    path: str
    pid: int
    started: int
    began: int
    epoch: int
    parent: int
    rank: int
    worker: int | None
    """None: the training process itself."""
    nonce: str
    run: str
    host: str
    step: int | None
    end: End
    error: str
    phases: tuple[Phase, ...] | None
    """Those that are open, outermost first; None: not known."""
    idle_since: int
    """When the last phase ended, where none is open; 0: not known."""
    batch: Batch | None
    done: Done | None
    collective: Collective | None = None

    @property
    def fetching(self) -> bool | None:
        """Whether a worker has a batch in hand; None: not known."""
        return None if self.phases is None else any(phase.kind == layout.FETCH for phase in self.phases)

    def last(self) -> int:
        """The time of the last event that it tells of."""
        return max(
            self.began,
            self.idle_since,
            *(phase.start for phase in self.phases or ()),
            self.batch.start if self.batch is not None else 0,
            self.done.end if self.done is not None else 0,
            self.collective.start if self.collective is not None else 0,
        )

    @property
    def last_at(self) -> int:
        """The same, in ns since the epoch."""
        return self.epoch + self.last() - self.began

    def alive(self) -> bool | None:
        """Whether its process runs; None: not known, as it is another host's, or has not begun."""
        if self.host != os.uname().nodename or not self.pid:
            return None
        return process_started(self.pid) == self.started != 0


def read(path: str) -> Page | None:
    """The page at `path`; None where there is none, or not one that this version knows."""
    data = former = b""
    with contextlib.suppress(OSError):
        for _ in range(_LOOKS):
            with open(path, "rb", buffering=0) as file:
                data = file.read(layout.SIZE)
            if data == former:
                break
            former = data
    return decode(data, path)


def read_all(directory: Path) -> list[Page]:
    """The pages directly in `directory`, by rank, the training process first; OSError where it can't be listed."""
    pages = [read(str(path)) for path in directory.iterdir() if path.suffix == SUFFIX]
    return sorted(
        (page for page in pages if page is not None),
        key=lambda page: (page.rank, page.parent or page.pid, -1 if page.worker is None else page.worker, page.path),
    )


def decode(data: bytes, path: str = "") -> Page | None:
    if len(data) != layout.SIZE:
        return None
    magic, pid, started, began, epoch, parent, rank, worker, nonce, run, host = layout.HEADER_STRUCT.unpack_from(data)
    if magic != layout.MAGIC:
        return None
    (step,) = layout.NUMBER_STRUCT.unpack_from(data, layout.STEP)
    (end,) = layout.NUMBER_STRUCT.unpack_from(data, layout.END)
    (error,) = layout.ERROR_STRUCT.unpack_from(data, layout.ERROR)
    return Page(
        path=path,
        pid=pid,
        started=started,
        began=began,
        epoch=epoch,
        parent=parent,
        rank=rank,
        worker=worker if worker >= 0 else None,
        nonce=_text(nonce),
        run=_text(run),
        host=_text(host),
        step=step if step >= 0 else None,
        end=End(end) if end in set(End) else End.NONE,
        error=_text(error),
        phases=_phases(data),
        idle_since=_idle_since(data),
        batch=_batch(data),
        done=Done._make(done) if (done := _block(layout.DONE_STRUCT, data, layout.DONE)) is not None else None,
        collective=_collective(data),
    )


def _block(struct: Struct, data: bytes, offset: int, extra: int = 0) -> tuple[int, ...] | None:
    """The numbers of a block without its check word; None where it is torn, or was never written."""
    *numbers, check = struct.unpack_from(data, offset)
    for number in numbers:
        check ^= number
    return tuple(numbers) if check ^ extra == layout.CHECK else None


def _phases(data: bytes) -> tuple[Phase, ...] | None:
    phases: list[Phase] = []
    for offset in range(layout.PHASES, layout.PHASES + layout.DEPTH * layout.PHASE_SIZE, layout.PHASE_SIZE):
        block = _block(layout.PHASE_STRUCT, data, offset)
        if block is None:
            never = not any(data[offset : offset + layout.PHASE_SIZE])
            return tuple(phases) if never else None
        kind, start = block
        if kind == 0:
            break
        phases.append(Phase(kind, layout.NAMES_OF_PHASES.get(kind, "an unknown phase"), start))
    return tuple(phases)


def _idle_since(data: bytes) -> int:
    block = _block(layout.PHASE_STRUCT, data, layout.PHASES)
    return block[1] if block is not None and block[0] == 0 else 0


def _batch(data: bytes) -> Batch | None:
    count, form = layout.BATCH_STRUCT.unpack_from(data, layout.BATCH)[3:5]
    size = {
        layout.FORM_NONE: 0,
        layout.FORM_INTEGERS: 8 * min(count, layout.SAMPLES_MOST),
        layout.FORM_TEXT: layout.SAMPLES_SIZE,
    }.get(form, -1)
    if size < 0:
        return None
    samples = data[layout.SAMPLES : layout.SAMPLES + size]
    block = _block(layout.BATCH_STRUCT, data, layout.BATCH, adler32(samples))
    if block is None:
        return None
    round, index, start, _, _ = block
    if form == layout.FORM_TEXT:
        return Batch(round, index, start, count, _text(samples))
    return Batch(round, index, start, count, Struct(f"<{size // 8}q").unpack(samples))


def _collective(data: bytes) -> Collective | None:
    *numbers, check, group = layout.COLLECTIVE_STRUCT.unpack_from(data, layout.COLLECTIVE)
    group = group.rstrip(b"\0")
    for number in numbers:
        check ^= number
    state, op, seq, size, start = numbers
    if check ^ adler32(group) != layout.CHECK or not 0 < op < len(layout.OPS) or not 0 < state < len(layout.STATES):
        return None
    return Collective(layout.STATES[state], layout.OPS[op], seq, size, start, _text(group))


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")
