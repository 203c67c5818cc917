"""What a step leaves out where its spans would make a trace that nobody can open, and what that sums up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from otel_dl.recording.details import Detail
from otel_dl.recording.records import NAMES, Record

if TYPE_CHECKING:
    from otel_dl.recording.collectives import Collective


def reduce(
    records: list[Record], collectives: Sequence[Collective], room: int
) -> tuple[list[Record], Sequence[Collective], list[str]]:
    """As many of both as make `room` spans, and what was left out, as words: `forward: 12, 3.4 ms`.

    What failed stays. Of records the longest do: what is around one lasts at least as long, so it stays as well. Of
    collectives every so many-th does, the same on every rank, or it could not be told who came last.
    """
    if 2 * len(records) + len(collectives) <= room:
        return records, collectives, []
    left_out: dict[str, list[int]] = defaultdict(list)
    most = room - min(len(collectives), room // 2)
    kept: list[int] = []
    spans = 0
    for i in sorted(range(len(records)), key=lambda i: _order(records[i], i)):
        record = records[i]
        if spans + _spans(record) <= most:
            spans += _spans(record)
            kept.append(i)
        else:
            most = spans  # whatever is shorter stays out as well
            left_out[_name(record)].append(record.end - record.start)
    every = max(1, -(-len(collectives) // max(1, room - spans)))
    for i, one in enumerate(collectives):
        if i % every and one.failure is None:
            left_out[one.name].append(max(0, one.end - one.start))
    return (
        [records[i] for i in sorted(kept)],
        [one for i, one in enumerate(collectives) if i % every == 0 or one.failure is not None],
        [f"{name}: {len(times)}, {sum(times) / 1e6:.1f} ms" for name, times in sorted(left_out.items())],
    )


def _order(record: Record, place: int) -> tuple[bool, int, int]:
    return record.error is None, record.start - record.end, -place


def _spans(record: Record) -> int:
    """How many it becomes in the step's trace: a batch that the main process read has a second one."""
    return 2 if record.batch is not None and record.batch[5] is None else 1


def _name(record: Record) -> str:
    if isinstance(record.kind, str):
        return record.kind.encode("utf-8", "replace").decode()
    if isinstance(record.kind, Detail):
        return record.kind.name
    return NAMES[int(record.kind)]
