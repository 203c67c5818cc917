"""What a step leaves out where its spans would make a trace that nobody can open: the shortest, and what they sum up
to."""

from __future__ import annotations

from collections import defaultdict

from otel_dl.recording.records import NAMES, Record


def spans_of(record: Record) -> int:
    """How many spans it becomes in the step's trace: a batch that the main process read has a second one."""
    return 2 if record.batch is not None and record.batch[5] is None else 1


def reduce(records: list[Record], room: int) -> tuple[list[Record], list[str]]:
    """As many of `records` as make `room` spans, and what was left out, as words: `forward: 12, 3.4 ms`.

    What failed stays, then the longest do: what is around a record lasts at least as long, so it stays as well.
    """
    if 2 * len(records) <= room or sum(map(spans_of, records)) <= room:
        return records, []
    order = sorted(range(len(records)), key=lambda i: (records[i].error is None, records[i].start - records[i].end, -i))
    left_out: dict[str, list[int]] = defaultdict(list)
    kept: list[int] = []
    for i in order:
        record = records[i]
        room -= spans_of(record)
        if room >= 0:
            kept.append(i)
        else:
            room = 0  # whatever is shorter stays out as well
            left_out[_name(record)].append(record.end - record.start)
    words = [f"{name}: {len(times)}, {sum(times) / 1e6:.1f} ms" for name, times in sorted(left_out.items())]
    return [records[i] for i in sorted(kept)], words


def _name(record: Record) -> str:
    if isinstance(record.kind, str):
        return record.kind.encode("utf-8", "replace").decode()
    return NAMES[int(record.kind)]
