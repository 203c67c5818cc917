"""Who this process is within its job: run id, rank, attempt, and the resource that names it on each of its spans."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from opentelemetry.sdk.resources import Resource

from otel_dl.log import logger
from otel_dl.settings import say_once

_LABELS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


_LONGEST_LABEL = 128
_LARGEST = 2**31 - 1


def _integer(environ: Mapping[str, str], names: tuple[str, ...], default: int, least: int = 0) -> int:
    for name in names:
        text = environ.get(name)
        if not text:
            continue
        try:
            value = int(text)
            if not least <= value <= _LARGEST:
                raise ValueError(text)
            return value
        except ValueError:
            say_once(
                "otel-dl: %s has the value %r; allowed: a whole number from %d. In traces it counts as not set.",
                name,
                text,
                least,
            )
    return default


class SharedRun(NamedTuple):
    """The run of all ranks: rank 0's."""

    run: str
    """The whole `dl.run.id`."""
    trace_id: int
    """Of the run's own trace."""
    former: tuple[int, int] | None = None
    """(trace id, span id) of rank 0's first span in the run before, of which this is a restart."""


class Expected:
    """Rank 0's run, on its way to this process. Every thread may ask; one fills it in."""

    WAIT_S: Final = 1.0

    def __init__(self) -> None:
        self._come = threading.Event()
        self._waited = False
        self.shared: SharedRun | None = None

    def fill(self, shared: SharedRun) -> None:
        self.shared = shared
        self._come.set()

    @property
    def due(self) -> bool:
        """Whether the thread that bounds steps has to look: it has not waited yet, or it has come."""
        return not self._waited or self._come.is_set()

    def look(self) -> SharedRun | None:
        """What has come; the first time it is waited for, WAIT_S at most. Where it comes later it is taken then."""
        if not self._waited:
            self._waited = True
            if not self._come.wait(self.WAIT_S):
                logger.warning(
                    "otel-dl: rank 0's run id, which the job's store should hold, has not come within %g s of the first"
                    " step: until it does, this rank's steps are traces of their own. Is otel-dl on in rank 0?",
                    self.WAIT_S,
                )
        return self.shared if self._come.is_set() else None


class Identity(NamedTuple):
    """One process of a run. `run` is the whole `dl.run.id`: a label where the scheduler gives one, and a nonce."""

    run: str
    attempt: int
    rank: int
    local_rank: int
    world_size: int
    shared: bool = False
    """Whether `run` is the same on all ranks: rank 0's."""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Identity:
        """From the variables that torchrun and SLURM set; 0, 0, 1 outside them. The nonce is 16 bytes of os.urandom.

        Schedulers' ids alone collide in sweeps, requeues and pod restarts. Each call is a run of its own.
        """
        environ = os.environ if environ is None else environ
        label = next((environ[name] for name in _LABELS if environ.get(name, "none") not in ("none", "")), "")
        label = label.encode("utf-8", "replace").decode()[:_LONGEST_LABEL]
        nonce = os.urandom(16).hex()
        identity = cls(
            run=f"{label}-{nonce}" if label else nonce,
            attempt=_integer(environ, ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"), 0),
            rank=_integer(environ, ("RANK", "SLURM_PROCID"), 0),
            local_rank=_integer(environ, ("LOCAL_RANK", "SLURM_LOCALID"), 0),
            world_size=_integer(environ, ("WORLD_SIZE", "SLURM_NTASKS"), 1, least=1),
        )
        if identity.rank >= identity.world_size > 1:
            say_once(
                "otel-dl: by its environment (RANK and WORLD_SIZE, or SLURM_PROCID and SLURM_NTASKS) this process has"
                " rank %d in a world of %d, which cannot be. Traces say both as they are.",
                identity.rank,
                identity.world_size,
            )
        return identity

    def by_now(self, member: tuple[int, int] | None = None) -> Identity:
        """The same run, with the rank that is known now: a script may set its variables, or the process group, itself.

        Ranks of `torch.multiprocessing.spawn` have neither when they start. `member` is the rank and the world size
        that `init_process_group` was called with, before it has returned.
        """
        now = Identity.read()._replace(run=self.run, shared=self.shared)
        if member is not None:
            return now._replace(rank=member[0], world_size=member[1])
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return now._replace(rank=distributed.get_rank(), world_size=distributed.get_world_size())
        return now

    def resource(self, base: Resource, worker: int | None = None, pid: int | None = None) -> Resource:
        """`base` (service name, OTEL_RESOURCE_ATTRIBUTES) with what names this process, or its worker."""
        attributes: dict[str, str | int] = {
            "service.instance.id": f"{self.run}/{self.rank}" + ("" if worker is None else f"/{worker}"),
            "process.pid": os.getpid() if pid is None else pid,
            "host.name": socket.gethostname(),
            "dl.run.id": self.run,
            "dl.rank": self.rank,
            "dl.local_rank": self.local_rank,
            "dl.world_size": self.world_size,
        }
        if worker is not None:
            attributes["dl.worker.id"] = worker
        return base.merge(Resource(attributes))
