"""`otel_dl.loader`: what is no DataLoader is recorded as one without workers, and stays what it was."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Iterator, Sized
from typing import Any

import pytest
import torch
from support.inprocess import Recorded, recording
from torch.utils.data import DataLoader

import otel_dl


def train(batches: Any) -> list[Any]:
    """A step a batch; what the batches were."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        seen.append(batch)
    return seen


def places(recorded: Recorded) -> list[tuple[int, int, int]]:
    """(loader, epoch, batch) of each step, which has one batch."""
    steps = recorded.named("train.step")
    waits = {span.parent.span_id: span for span in recorded.named("dataloader.next")}
    assert len(waits) == len(steps) == len(recorded.named("dataloader.fetch"))
    return [
        (
            waits[step.context.span_id].attributes["dl.loader.id"],
            step.attributes["dl.epoch"],
            waits[step.context.span_id].attributes["dl.batch.index"],
        )
        for step in steps
    ]


class Stream:
    """Can be read again and again, has no length."""

    batch_size = 3

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


def test_a_step_a_batch_and_an_epoch_each_time_it_is_read() -> None:
    stream, other = Stream(), [7, 8]
    batches, others = otel_dl.loader(stream), otel_dl.loader(other)
    with recording() as recorded:
        assert [train(batches), train(others), train(batches), train(others)] == [[0, 1, 2], [7, 8]] * 2
        assert train(otel_dl.loader(stream)) == [0, 1, 2], "wrapped anew for an epoch, it is the same loader"
    assert places(recorded) == [
        *((0, 0, place) for place in range(3)),
        *((1, 0, place) for place in range(2)),
        *((0, 1, place) for place in range(3)),
        *((1, 1, place) for place in range(2)),
        *((0, 2, place) for place in range(3)),
    ]


def test_a_generator_stays_an_iterator_that_is_read_once() -> None:
    with recording() as recorded:
        batches = otel_dl.loader(iter(Stream()))
        assert iter(batches) is batches
        assert train([next(batches)]) == [0]
        assert train(batches) == [1, 2]
        assert train(batches) == []
    assert places(recorded) == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]


class Closing:
    """Says when its generator is closed."""

    def __init__(self) -> None:
        self.closed = 0

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            self.closed += 1


def test_a_generator_is_closed_when_the_loop_is_left() -> None:
    source = Closing()
    with recording():
        for _ in otel_dl.loader(source):
            break
        assert source.closed == 1
        for _ in otel_dl.loader(iter(source)):
            break
        assert source.closed == 2
        batches = otel_dl.loader(iter(source))
        next(batches)
        batches.close()
        assert source.closed == 3
        assert next(batches, None) is None


@pytest.mark.parametrize("recorded_too", [False, True])
def test_what_it_raises_is_what_the_iterable_raises(recorded_too: bool) -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise KeyError("two")

    with recording() as recorded:
        if not recorded_too:
            recorded.finish()
        with pytest.raises(KeyError, match="two"):
            train(otel_dl.loader(failing()))
        with pytest.raises(TypeError, match="'int' object is not iterable"):
            train(otel_dl.loader(3))
    errors = [
        span.attributes["error.type"]
        for span in recorded.spans
        if span.name == "dataloader.next" and not span.status.is_unset
    ]
    assert errors == (["KeyError"] if recorded_too else [])


def test_length_and_attributes_are_the_iterables() -> None:
    sized, unsized = otel_dl.loader([1, 2]), otel_dl.loader(Stream())
    assert len(sized) == 2
    assert not otel_dl.loader([])
    assert isinstance(sized, Sized)
    assert not isinstance(unsized, Sized)
    with pytest.raises(TypeError):
        len(unsized)
    assert list(unsized) == [0, 1, 2]
    assert unsized.batch_size == 3
    with pytest.raises(AttributeError, match="'Stream' object has no attribute 'sampler'"):
        _ = unsized.sampler
    assert list(pickle.loads(pickle.dumps(sized))) == list(copy.deepcopy(sized)) == [1, 2]


def test_it_may_be_made_before_the_run_begins_and_read_after_it_has_ended() -> None:
    batches = otel_dl.loader(Stream())
    older = iter(batches)
    with recording() as recorded:
        assert train(batches) == [0, 1, 2]
        assert train(older) == [0, 1, 2]
        newer = iter(batches)
    assert train(newer) == train(batches) == [0, 1, 2]
    known = ["dl.batch.index" in wait.attributes for wait in recorded.named("dataloader.next")]
    assert known == [True] * 3 + [False] * 3


def test_a_dataloader_in_it_is_recorded_as_ever() -> None:
    loader = DataLoader(range(4), num_workers=1, multiprocessing_context="fork")
    with recording() as recorded:
        assert train(otel_dl.loader(loader)) == [0, 1, 2, 3]
        train(otel_dl.loader(otel_dl.loader(loader)))
    waits = recorded.named("dataloader.next")
    assert [wait.attributes["dl.worker.id"] for wait in waits] == [0] * 8
    assert len(recorded.named("dataloader.fetch")) == 8


def test_a_dataset_of_hugging_faces() -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets pulls in pandas and pyarrow")
    source = datasets.Dataset.from_dict({"x": [0, 1, 2]}).to_iterable_dataset().map(lambda row: {"x": row["x"] + 1})
    with recording() as recorded:
        for _ in range(2):
            assert train(otel_dl.loader(source)) == [{"x": 1}, {"x": 2}, {"x": 3}]
    assert places(recorded) == [(0, epoch, place) for epoch in range(2) for place in range(3)]


def test_a_webdataset() -> None:
    webdataset = pytest.importorskip("webdataset")
    source = webdataset.DataPipeline(lambda: iter(Stream()), webdataset.map(lambda sample: sample + 1))
    with recording() as recorded:
        for _ in range(2):
            assert train(otel_dl.loader(source)) == [1, 2, 3]
    assert places(recorded) == [(0, epoch, place) for epoch in range(2) for place in range(3)]


class Prefetcher:
    """Its own iterator, which each `iter()` begins again, as hand-written loaders are."""

    epoch = 0

    def __init__(self) -> None:
        self.left = 0

    def __iter__(self) -> Prefetcher:
        self.left = 3
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("recorded_too", [False, True])
def test_what_is_its_own_iterator_begins_again_with_each_loop(recorded_too: bool) -> None:
    source = Prefetcher()
    with recording() as recorded:
        if not recorded_too:
            recorded.finish()
        batches = otel_dl.loader(source)
        assert [list(batches) for _ in range(3)] == [[2, 1, 0]] * 3
        assert len(batches) == 3
        batches.epoch = 7
        assert source.epoch == 7
        assert operator.length_hint(otel_dl.loader(iter([1, 2, 3]))) == 3
        assert otel_dl.loader([1, 2])[0] == 1
        assert list(copy.deepcopy(iter(otel_dl.loader([1, 2])))) == [1, 2]
