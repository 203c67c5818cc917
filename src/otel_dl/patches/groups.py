"""What torch knows of its process groups, as `Group`s: values only, so that nobody holds a group that was destroyed.

`torch.distributed.distributed_c10d` is asked each time: its registry (`_world`) is the one truth, and a limit may be
changed later (`set_timeout`, torch 2.15). No answer is ever an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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


def told(ranks: Any) -> tuple[int, ...]:
    """Ranks that the user gave; empty where they are no such thing, or can be read only once."""
    return ask(lambda: tuple(map(int, ranks)), ()) if type(ranks) in (list, tuple, range) else ()
