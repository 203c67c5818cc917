"""What torch knows of its process groups, as `Group`s: values only, so that nobody holds a group that was destroyed.

`torch.distributed.distributed_c10d` is asked each time: its registry (`_world`) is the one truth, and a limit may be
changed later (`set_timeout`, torch 2.15). No answer is ever an exception.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from otel_dl.faults import from_signal_handler
from otel_dl.recording.ranks import Group

T = TypeVar("T")


def ask(question: Callable[[], T], default: T) -> T:
    """The answer to a question about torch's state, `default` where it can't be had.

    A traceback through torch would not count as a fault of ours, and reach the user.
    """
    try:
        return question()
    except Exception as error:
        if from_signal_handler(error):
            raise
        return default


def distributed_c10d() -> Any:
    """torch's module. Imported late: importing otel-dl imports no torch."""
    from torch.distributed import distributed_c10d

    return distributed_c10d


def group_of(group: Any = None) -> Group | None:
    """The process group `group` (None: the default one); None where it is none, or none of this rank's."""
    return ask(lambda: _group_of(distributed_c10d(), group), None)


def known_groups() -> list[Group]:
    """All groups of this rank that were not destroyed, the default one first."""

    def known() -> list[Group]:
        c10d = distributed_c10d()
        groups = [_group_of(c10d, group) for group in list(c10d._world.pg_map)]
        return [group for group in groups if group is not None]

    return ask(known, [])


def _group_of(c10d: Any, group: Any) -> Group | None:
    group = c10d.GroupMember.WORLD if group is None else group
    if group not in c10d._world.pg_map:
        return None
    name, _ = c10d._world.pg_map[group]
    places: dict[int, int] = c10d._world.pg_group_ranks[group]  # from global ranks to those in the group
    return Group(
        id=str(c10d._world.pg_names[group]),
        ranks=tuple(sorted(places, key=places.__getitem__)),
        backend=_backend(str(name), ask(lambda: str(c10d._world.pg_backend_config[group]), "")),
        limit_s=limit_of(group, 0.0),
    )


def _backend(name: str, config: str) -> str:
    """`gloo` rather than `undefined` or `cpu:gloo`, where one backend serves all devices."""
    backends = {part.rpartition(":")[2] for part in config.split(",") if part}
    return backends.pop() if len(backends) == 1 else name if name != "undefined" else config


def limit_of(group: Any, default: float) -> float:
    """The time limit in force in a group, in seconds: the longest of its backends'. `default` where none says it.

    `Backend.options._timeout`: gloo's and nccl's have it in 2.4 as in 2.15, `fake` and `mpi` have none.
    """

    def limit(device: Any) -> float:
        return float(group._get_backend(device).options._timeout.total_seconds())

    devices: list[Any] = ask(lambda: list(group._device_types), [])
    limits = [seconds for device in devices if (seconds := ask(lambda device=device: limit(device), -1.0)) >= 0]
    return max(limits, default=default)


def address_of(store: Any) -> tuple[str, int] | None:
    """Host and port of a TCPStore, also within PrefixStores; None for any other store."""

    def address() -> tuple[str, int] | None:
        from torch._C._distributed_c10d import TCPStore

        inner = store
        while not isinstance(inner, TCPStore):
            inner = inner.underlying_store  # a PrefixStore's; others have none
        return str(inner.host), int(inner.port)

    return ask(address, None)


class Rendezvous:
    """How ranks will find each other, from the arguments of `init_process_group`, before it is called.

    As torch/distributed/rendezvous.py reads them (2.4 to 2.15). `rank` and `world` are -1 where nobody says them.
    """

    def __init__(self, method: Any, store: Any, rank: Any, world: Any) -> None:
        self.address: tuple[str, int] | None = None
        self.rank = _number(rank)
        self.world = _number(world)
        if store is not None:
            self.address = address_of(store)
        else:
            ask(lambda: self._read("env://" if method is None else str(method)), None)

    def _read(self, method: str) -> None:
        url = urlsplit(method)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        environ: Mapping[str, str] = os.environ if url.scheme == "env" else {}
        if self.rank < 0:
            self.rank = _number(query.get("rank", environ.get("RANK")))
        if self.world < 0:
            self.world = _number(query.get("world_size", environ.get("WORLD_SIZE")))
        if url.scheme == "env":
            self.address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        elif url.scheme == "tcp" and url.hostname is not None and url.port is not None:
            self.address = url.hostname, url.port

    @property
    def member(self) -> tuple[int, int] | None:
        """Rank and world size; None where they are not known, or cannot be."""
        return (self.rank, self.world) if 0 <= self.rank < self.world else None


def _number(value: Any) -> int:
    return ask(lambda: int(value), -1)


def told(ranks: Any) -> tuple[int, ...]:
    """Ranks that the user gave; empty where they are no such thing, or can be read only once."""
    return ask(lambda: tuple(map(int, ranks)), ()) if type(ranks) in (list, tuple, range) else ()
