"""Process groups and the other ranks, as the recorder sees them.

`otel_dl.ranks` is what stands behind `Ranks`; where there is no process group, nothing is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from otel_dl.places import code_attributes


class Group(NamedTuple):
    """A process group that this rank belongs to."""

    id: str
    """Its name in torch, the same on all its ranks; "0" is the default group."""
    ranks: tuple[int, ...]
    """Global ranks, in the order of their ranks in the group."""
    backend: str
    """`gloo`, `nccl`, …"""
    limit_s: float
    """The time limit in force, in seconds."""


class Wait(NamedTuple):
    """Something that needs the other ranks, and that this one is in."""

    name: str
    """The span's: `dist.all_reduce`, `dist.init_process_group`, …"""
    group: Group
    seq: int
    """Number of the collective in its group, from 1; 0 where it is none."""
    start: int
    """Reading of `clock` at which it was issued."""
    size: int = -1
    """Bytes that this rank gives into it; -1: not known. Ranks that differ in it do not fit together."""


class Explained(NamedTuple):
    """What is known of a failure or of a stall: who is missing, and why."""

    error_type: str
    """`GLOO_TIMEOUT`, `GLOO_PEER_LOST`, … for the attribute `error.type`."""
    words: str
    attributes: dict[str, Any]
    """`rank_id`, `nccl_uid`, `dl.missing_ranks`, …"""


class Stall(NamedTuple):
    """Something has not come back in its time, between these readings of `clock`."""

    ordinal: int
    name: str
    """The span's, of what it is."""
    start: int
    end: int
    explained: Explained
    """`error_type` is empty until the time limit is near."""
    file: str
    line: int
    function: str

    def attributes(self) -> dict[str, Any]:
        """Its span's own."""
        place = code_attributes(self.file, self.line, self.function)
        return {**self.explained.attributes, "dl.stall.in": self.name, **place}

    """The user's line that waits; empty, 0 and empty where it is not known."""


class Ranks:
    """No other ranks: every call is lost. Calls come from the threads that train; none may talk to a store there."""

    def joining(self, wait: Wait, address: tuple[str, int] | None, rank: int, world: int) -> None:
        """`init_process_group` begins; the job's store is, or will be, at `address` (None: no TCP store)."""

    def joined(self, group: Group) -> None:
        """It has returned, or a further group was made."""

    def waiting(self, wait: Wait | None) -> None:
        """A further group is being made, which takes the others; None: not any more."""

    def left(self) -> None:
        """`destroy_process_group` of the default group: there are no other ranks any more."""

    def explain(self, error: BaseException, wait: Wait) -> Explained | None:
        """`error` left `wait`: adds a note that names who is missing, after 1 s at the latest.

        None where it is not the other ranks' business (a wrong argument). Asked again for the same error, it answers
        the same.
        """
        return None

    def recovered(self, group: str) -> None:
        """A collective of this group is complete after all, of which a wait had failed."""

    def of_this_error(self, error: BaseException) -> Explained | None:
        """What `explain` has said of it, None where it was not asked."""
        return None

    def lost(self) -> Explained | None:
        """SIGTERM ends this process, as launchers end a job that has lost a rank: the ranks of this host that have died
        before it; None where none has."""
        return None

    def kept(self, number: int, reason: str, milliseconds: int) -> None:
        """This rank keeps step `number`, which lasted so long, for a reason that the others can't know of."""
