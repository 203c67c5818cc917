"""A step with more spans than its trace has room for."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from support.inprocess import recording
from support.loops import Points, network, seed, sgd, update
from support.validate import from_sdk, validate
from torch.utils.data import DataLoader

import otel_dl
from otel_dl.recording import spans
from otel_dl.recording.failure import Failure
from otel_dl.recording.records import Kind, Record
from otel_dl.recording.reduced import reduce

MS = 1_000_000


class Issued(NamedTuple):
    name: str
    start: int
    end: int
    failure: Failure | None = None


def forward(start: int, end: int, error: Failure | None = None) -> Record:
    return Record(Kind.FORWARD, start * MS, end * MS, error, None)


def reduced(
    records: list[Record], collectives: list[Issued], room: int
) -> tuple[list[Record], list[Issued], list[str]]:
    return cast(Any, reduce(records, cast(Any, collectives), room))


def test_what_fits_stays() -> None:
    records = [forward(0, 1), forward(1, 2)]
    assert reduced(records, [], 4) == (records, [], [])


def test_the_longest_records_stay_in_their_order_and_what_failed() -> None:
    failed = forward(30, 31, Failure("ValueError", ""))
    records = [*(forward(2 * i, 2 * i + 1) for i in range(10)), forward(20, 25), failed, forward(40, 50)]
    kept, _, words = reduced(records, [], 4)
    assert kept == [records[9], forward(20, 25), failed, forward(40, 50)]
    assert words == ["forward: 9, 9.0 ms"]


def test_of_collectives_the_same_stay_on_every_rank_whatever_they_last() -> None:
    ranks = [[Issued("dist.all_reduce", i * MS, (i + 1 + rank) * MS) for i in range(100)] for rank in range(2)]
    kept = [reduced([forward(0, 100)], rank, 26)[1] for rank in ranks]
    assert [one.start for one in kept[0]] == [one.start for one in kept[1]] == [4 * i * MS for i in range(25)]


def test_a_collective_that_failed_stays() -> None:
    failed = Issued("dist.all_reduce", 3, 4, Failure("RuntimeError", ""))
    assert failed in reduced([], [*(Issued("dist.barrier", 0, 1) for _ in range(49)), failed], 10)[1]


def test_the_step_says_what_was_left_out(monkeypatch: Any) -> None:
    monkeypatch.setattr(spans, "OF_TRACE", 22)
    seed()
    model = network()
    optimizer = sgd(model)
    with recording() as recorded:
        for x, y in DataLoader(Points(8), batch_size=4):
            update(model, optimizer, x, y)
            for _ in range(30):
                with otel_dl.span("part"):
                    pass
    for step in recorded.named("train.step"):
        assert step.attributes is not None
        assert sum(span.context.trace_id == step.context.trace_id for span in recorded.spans) <= 22
        (words,) = cast(Any, step.attributes["dl.detail.reduced"])
        assert words.startswith("part: ")
    assert validate(from_sdk(span) for span in recorded.spans) == []
