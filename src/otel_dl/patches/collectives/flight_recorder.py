"""torch's Flight Recorder, for what C++ issues where groups have no hooks (torch 2.8 to 2.14).

It is read for gloo. NCCL has one of its own (`_dump_nccl_trace_json`), which is left alone: to dump it is to query the
CUDA events of what is under way, which another thread must not do while a graph is captured
(torch/csrc/distributed/c10d/FlightRecorderDetail.hpp::update_state, 2.10).
"""

from __future__ import annotations

import json
import os
import weakref
from typing import Any, Final

from otel_dl.patches.collectives.tracker import Tracker, native_c10d
from otel_dl.patches.groups import ask, distributed_c10d, group_of
from otel_dl.recording.collectives import Communicator
from otel_dl.recording.flight_recorder import Dump, FlightRecorder
from otel_dl.recording.ranks import Group

_SIZES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RING: Final = 512
"""Entries, for which a dump takes 4 ms. torch's own default is 2,000 from 2.13 on; before, it is 0, and nothing is
recorded (read in 2.10)."""
_MOST: Final = 4_096
"""Of a larger one a dump would hold up training."""


def install(tracker: Tracker) -> None:
    """The run reads it, where this torch has one that is on, or can be switched on."""
    dump: Dump | None = getattr(native_c10d(), "_dump_fr_trace_json", None)
    if dump is None:
        return
    ring = _switch_on(dump)
    if 0 < ring <= _MOST:
        tracker.run.flight_recorder = FlightRecorder(tracker.run, dump, ring, _groups)


def remedy() -> str:
    """What the user can do where it is not read."""
    if not hasattr(native_c10d(), "_dump_fr_trace_json"):
        return "torch 2.8 and newer: they are, over gloo; torch 2.15 and newer: over NCCL as well"
    name = _size_name()
    if name in os.environ:
        return f"{name}={os.environ[name]}: torch's Flight Recorder is read where it is from 1 to {_MOST}"
    return f"torch's Flight Recorder was off when the first group was made: call instrument() before, or set {name}"


def _size_name() -> str:
    return next((name for name in _SIZES if name in os.environ), _SIZES[0])


def _switch_on(dump: Dump) -> int:
    """The entries that it keeps; 0 where the user has switched it off.

    torch makes it once in a process, when it is first asked for, and reads its size then: the variable is set no longer
    than that, so that children inherit nothing. It stays on after `uninstrument()`; 1 µs a collective (torch 2.10).
    """
    name = _size_name()
    if name in os.environ:
        try:
            return int(os.environ[name])
        except ValueError:
            return 0  # torch refuses it, once it makes a group
    os.environ[name] = str(_RING)
    try:
        made = json.loads(dump(includeCollectives=False))
    finally:
        del os.environ[name]
    # Where there are groups it has been made before, and tells of them only where it is on.
    return 0 if ask(distributed_c10d().is_initialized, False) and not made.get("pg_config") else _RING


def _groups() -> dict[str, Communicator]:
    """All that there are, by name."""
    groups = [(group, str(group.group_name)) for group in list(distributed_c10d()._world.pg_map)]
    return {name: _communicator(name, group.size(), weakref.ref(group)) for group, name in groups}


def _communicator(name: str, size: int, reference: weakref.ref[Any]) -> Communicator:
    def describe() -> Group:
        alive = reference()
        return (group_of(alive) if alive is not None else None) or Group(name, tuple(range(size)), "", 0.0)

    return Communicator(name, size, describe, lambda: 0)
