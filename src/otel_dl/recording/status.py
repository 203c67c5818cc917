"""Where the hot path leaves word of what runs now: the status page, as the recorder sees it.

`otel_dl.forensics.writer.StatusPage` is what stands behind it; where there is no page (no room, no folder), nothing is.
"""

from __future__ import annotations


class Status:
    """No page: every call is lost. Only the thread that bounds steps writes, but for `collective`."""

    address = 0
    """Where the page is mapped, for writers in C; 0 where there is none. Its layout: `otel_dl.forensics.layout`."""

    path = ""
    """Its file's."""
    page = b""
    """What it says now."""

    def belongs_to(self, run: str) -> None:
        """The run's id is this one from now on: rank 0's."""

    def begin(self, depth: int, kind: int, start: int) -> None:
        """A phase (a `Kind`) began at `start`, a reading of `clock`, within `depth` others."""

    def end(self, depth: int, end: int) -> None:
        """The phase within `depth` others ended at `end`, and whatever was open in it."""

    def step(self, number: int) -> None:
        """The step that is open is this one; -1: none is."""

    def ended(self, error: str = "", terminated: bool = False) -> None:
        """The run has ended: by the exception of this name where there is one, or by SIGTERM."""

    def batch(self, epoch: int, index: int, start: int) -> None:
        """The batch in hand: `index` in this epoch of its loader, since `start`."""

    def collective(self, state: int, op: int, seq: int, size: int, start: int, group: bytes) -> None:
        """The collective that was issued, waited for or completed last (`state` as in `recording.collectives`): `op` of
        `layout.OPS`, number `seq` in `group`, of `size` bytes, issued at `start`. Any thread says it."""
