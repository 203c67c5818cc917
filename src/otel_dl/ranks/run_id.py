"""One run id for all ranks: rank 0's, which it publishes in the job's store under `run`, in the keys of this attempt.

Until it is here a process uses its own, and the first step after `init_process_group` waits for it
(`recording/identity.py::Expected`). Where it does not come (a store that is no TCP store, rank 0 without otel-dl)
that stays: a trace a rank.

Ranks number their steps each for itself, from 0 where recording began, and share a trace by number. One that trained
before it joined, or that left out steps, is off by as many: nothing at hand tells which step of one rank was meant to
be which of another.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any, Final

from otel_dl.log import logger
from otel_dl.recording.identity import Expected, SharedRun

if TYPE_CHECKING:
    from otel_dl.ranks.store import JobStore
    from otel_dl.recording.run import Run

KEY: Final = "run"
_WAIT_S: Final = 0.4
"""Of each tick, while rank 0's is not there."""


def prefix(attempt: int, generation: int = 0) -> str:
    """What the keys of this attempt begin with, after so many process groups. A store of torchrun's own outlives the
    attempts."""
    return f"otel_dl/{attempt}/{generation}/"


def host() -> str:
    """Names this host, and this boot of it: processes with the same have the same clocks."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}"


_taken: Final[set[str]] = set()
"""Runs that this process has been in."""


class RunId:
    """Takes part in the exchange. `joining` and `joined` are called by the thread that calls `init_process_group`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._former = frozenset(_taken)
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child, which is a run of its own."""
        self._expected: Expected | None = None
        self._has_store = False
        self.rank = 0
        self._world = 1
        self._joined = False
        self.host_of_rank_0 = ""
        """As `host` says it, once it is known."""

    def joining(self, has_store: bool, rank: int, world: int) -> None:
        """`init_process_group` begins. Only the first one counts that gets through."""
        if self._joined:
            return
        self._has_store, self.rank, self._world = has_store, rank, world
        self._expected = Expected()

    def joined(self) -> None:
        """It has returned."""
        if self._joined or self._expected is None or self._world == 1:
            return
        self._joined = True
        if self._has_store:
            self._run.expect(self._expected)
        else:
            logger.warning(
                "otel-dl: the process group's store is no TCPStore, so ranks cannot tell each other their run id: each"
                " has traces of its own. With init_method='env://' or 'tcp://…' they share them."
            )

    # In the exchange's thread.

    def connected(self, store: JobStore) -> None:
        if self._expected is None or self._world == 1 or self._expected.shared is not None:
            return
        if self.rank == 0:
            self._publish(store, self._expected)
        else:
            self._receive(store, self._expected)

    def write(self, store: JobStore) -> bool:
        return False

    def read(self, store: JobStore) -> None:
        if self._expected is not None and self._world > 1 and self._expected.shared is None:
            self._receive(store, self._expected)

    def _publish(self, store: JobStore, expected: Expected) -> None:
        run = self._run
        trace_id, span_id = run.run_ids(rank=0)
        attempt = run.identity.attempt
        former = None
        if attempt:
            with contextlib.suppress(KeyError, ValueError, TypeError):
                said = _read(store.get_from_elsewhere(prefix(attempt - 1) + KEY))
                former = said["trace"], said["span"]
        self.host_of_rank_0 = host()
        said = {
            "run": run.identity.run,
            "trace": f"{trace_id:032x}",
            "span": f"{span_id:016x}",
            "former": former,
            "host": self.host_of_rank_0,
        }
        store.set(KEY, json.dumps(said))
        self._fill(expected, said)

    def _receive(self, store: JobStore, expected: Expected) -> None:
        # One question a tick: thousands of ranks may wait for rank 0 to begin.
        value = store.take(KEY, _WAIT_S)
        if value is None:
            return
        said = _read(value)
        if said["run"] in self._former:
            return  # of the run that this process was in before `uninstrument`: rank 0's next one is on its way
        self.host_of_rank_0 = str(said["host"])
        self._fill(expected, said)

    def _fill(self, expected: Expected, said: dict[str, Any]) -> None:
        former = said["former"]
        _taken.add(str(said["run"]))
        expected.fill(
            SharedRun(
                str(said["run"]),
                int(said["trace"], 16),
                None if former is None else (int(former[0], 16), int(former[1], 16)),
            )
        )
        self._run.look_up()


def _read(value: bytes | None) -> dict[str, Any]:
    return json.loads(value or b"")
