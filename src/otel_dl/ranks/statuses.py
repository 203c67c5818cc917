"""What each rank says of itself once a second, and what its neighbours can read of it besides.

The ranks of a host find each other's status pages through the store, and keep them mapped: a page shows what a rank
does that can't say so itself, because it is stopped or dead, and it can be read where the store is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from otel_dl.forensics import ends, layout, reader
from otel_dl.forensics.layout import End
from otel_dl.forensics.memory import Memory
from otel_dl.forensics.processes import is_dead, is_stopped, process_started, status_of_exiting
from otel_dl.places import place_of
from otel_dl.ranks.run_id import host
from otel_dl.ranks.store import JobStore
from otel_dl.ranks.verdict import LEFT, Issued, Life, RankStatus
from otel_dl.recording.records import to_epoch_ns

if TYPE_CHECKING:
    from otel_dl.forensics.reader import Page
    from otel_dl.recording.run import Run

_NEIGHBOURS: Final = 64
"""Ranks of this host whose pages are kept mapped, at most."""
_STILL_NS: Final = 1_000_000_000
"""After so long in one phase the user's line is looked up."""
_SEARCHES: Final = 30
"""Ticks in which neighbours are looked for."""


def neighbourhood() -> str:
    """The same for all processes that see each other: a host, and in it a container."""
    try:
        return f"{host()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return host()


def is_in_distributed(thread: threading.Thread) -> bool:
    """Whether the innermost function of Python's that a thread is in is torch.distributed's."""
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
    return frame is not None and f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename


class Statuses:
    """Publishes this rank's, and reads the others'."""

    def __init__(
        self, run: Run, waits: Callable[[], tuple[str, str, int] | None], groups: Callable[[], Sequence[str]]
    ) -> None:
        """`waits`: (span name, group, number) of what this rank waits in now; `groups`: those it has joined."""
        self._groups = groups
        self.rank = 0
        self._run = run
        self._waits = waits
        self._begin()

    def _begin(self) -> None:
        self._host = neighbourhood()
        self._searches = 0
        self._neighbours: dict[int, tuple[int, Memory]] = {}
        """Rank → (pid, its page)."""
        self._died: dict[int, str] = {}
        """By pid: how neighbours ended that could not say so. Once their parent has waited for them nobody knows."""
        self.end = ""

    # Participant of the exchange.

    def connected(self, store: JobStore) -> None:
        self._searches = 0
        store.append(f"host/{self._host}", f"{self.rank}\t{os.getpid()}\t{self._run.status.path}\n")

    def write(self, store: JobStore) -> bool:
        self.publish(store)
        return True

    def read(self, store: JobStore) -> None:
        if self._searches < _SEARCHES:
            self._searches += 1
            self.find_neighbours(store)

    def publish(self, store: JobStore) -> None:
        status = self.own()
        store.set(f"status/{status.rank}", status.encode())

    def find_neighbours(self, store: JobStore) -> None:
        """Maps the pages of the ranks of this host."""
        found = (store.get(f"host/{self._host}") or b"").decode("utf-8", "replace")
        for line in found.splitlines():
            number, pid, path = line.split("\t", 2)
            rank = int(number)
            former = self._neighbours.get(rank)
            if rank == self.rank or (former is not None and former[0] == int(pid)) or not path:
                continue
            if len(self._neighbours) >= _NEIGHBOURS and former is None:
                continue
            try:
                self._neighbours[rank] = int(pid), Memory(path, layout.SIZE)
            except OSError:
                continue  # it has ended already, or it is another container's
            if former is not None:
                former[1].close()
        if len(self._neighbours) + 1 >= int(os.environ.get("LOCAL_WORLD_SIZE") or self._run.identity.world_size):
            self._searches = _SEARCHES

    @property
    def has_found_all(self) -> bool:
        """Whether the ranks of this host are known, as far as they will be."""
        return self._searches >= _SEARCHES

    # What is known.

    def own(self) -> RankStatus:
        run = self._run
        page = reader.decode(run.status.page)
        now, step = self.now(), run.current
        status = RankStatus(
            rank=self.rank, at=now if self.knows_clock else 0, pid=os.getpid(), doing="", since=0, where="",
            step=step.number if step is not None else None, issued=self._issued(), latest=None, waits=self._waits(),
            end=self.end,
        )  # fmt: skip
        if page is not None:
            doing, since = self._doing(page)
            status = status._replace(step=page.step, doing=doing, since=since)
        if status.since and now - status.since > _STILL_NS:
            status = status._replace(where=str(place_of(run.trainer)))
        return status

    def _issued(self) -> Mapping[str, Issued]:
        issued = self._run.collectives.issued
        return {group: Issued(*issued(group)) for group in self._groups()}

    def neighbours(self) -> dict[int, RankStatus]:
        """What the pages of the other ranks of this host say, now."""
        found: dict[int, RankStatus] = {}
        for rank, (pid, memory) in list(self._neighbours.items()):
            page = reader.decode(bytes(memory.view)) if memory.whole else None
            if page is not None and page.pid == pid:
                found[rank] = self._of_page(rank, page)
        return found

    def dead(self) -> dict[int, RankStatus]:
        """Ranks of this host that have died, otherwise than at their end or by SIGTERM."""
        fine = ("finished", "SIGTERM", LEFT)
        return {
            rank: status
            for rank, status in self.neighbours().items()
            if status.life is Life.DEAD and status.end not in fine
        }

    def read_all(self, store: JobStore | None, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """The latest status of each of `ranks`, by the store and by pages: none where nothing is known of it."""
        found: dict[int, RankStatus] = {}
        if store is not None:
            for rank, value in zip(ranks, store.get_many([f"status/{rank}" for rank in ranks]), strict=True):
                if value is not None:
                    status = RankStatus.decode(value)
                    found[rank] = status if self.knows_clock else status._replace(at=0)
        asked = frozenset(ranks)
        for rank, page in self.neighbours().items():
            if rank in asked:
                found[rank] = _joined(found.get(rank), page)
        return found

    def _of_page(self, rank: int, page: Page) -> RankStatus:
        """What a page of this host says of its rank now."""
        doing, since = self._doing(page)
        # Of a transfer the page has no number, and none of what went before.
        latest = page.collective if page.collective is not None and page.collective.seq else None
        life = Life.STOPPED if is_stopped(page.pid) else Life.RUNS
        died = ""
        if is_dead(page.pid, page.started):
            life = Life.DEAD
            died = self._died[page.pid] = _died(page) or self._died.get(page.pid, "")
        return RankStatus(
            rank=rank, at=self.now(), pid=page.pid, step=page.step, doing=doing, since=since, where="",
            issued={latest.group: Issued(latest.seq, latest.name, latest.size)} if latest is not None else {},
            latest=latest.group if latest is not None else "",
            waits=(latest.name, latest.group, latest.seq) if latest is not None and latest.state == "waiting" else None,
            end=_end(page),
            life=life,
            died=died,
        )  # fmt: skip

    def _doing(self, page: Page) -> tuple[str, int]:
        """(the innermost phase, since when)."""
        if page.phases:
            return page.phases[-1].name, self._time(page, page.phases[-1].start)
        return "", self._time(page, page.idle_since) if page.idle_since else 0

    def _time(self, page: Page, instant: int) -> int:
        return page.epoch + instant - page.began - self._offset

    # All times are nanoseconds since the epoch on rank 0's clock.

    @property
    def knows_clock(self) -> bool:
        """Whether it is known how far this host's clock is before rank 0's."""
        return self._run.clock is not None

    @property
    def _offset(self) -> int:
        return self._run.clock[0] if self._run.clock is not None else 0

    def now(self) -> int:
        return time.time_ns() - self._offset

    def time(self, instant: int) -> int:
        """Of a reading of `clock`."""
        return to_epoch_ns(instant) - self._offset

    def close(self) -> None:
        neighbours = self._neighbours
        self._begin()
        for _, memory in neighbours.values():
            memory.close()

    def after_fork(self) -> None:
        self._begin()


def _joined(said: RankStatus | None, page: RankStatus) -> RankStatus:
    """What a rank last said of itself, brought up to date by its page."""
    if said is None:
        return page
    return page._replace(
        # That it waits to be let into a group stands in no page.
        waits=page.waits or (said.waits if said.waits is not None and said.waits[2] == 0 else None),
        # What C++ issues unseen stands in no page either.
        issued={**said.issued}
        | {key: one for key, one in page.issued.items() if one.seq >= said.issued.get(key, one).seq},
        end=page.end or said.end,
        whole_at=said.at,
        where=said.where if (said.doing, said.since) == (page.doing, page.since) else "",
    )


def _died(page: Page) -> str:
    """As long as its parent has not waited for it, the kernel knows how it ended."""
    status = status_of_exiting(page.pid)
    if status is None or process_started(page.pid) != page.started:
        return ""
    return f"killed by {ends.signal_name(-status)}" if status < 0 else f"exited with status {status}"


def _end(page: Page) -> str:
    return {End.NONE: "", End.FINISHED: "finished", End.EXCEPTION: page.error, End.TERMINATED: "SIGTERM"}[page.end]
