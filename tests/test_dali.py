"""DALI's iterators, by a stand-in module of the same public shape: DALI needs a GPU to be of any use."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.inprocess import recording
from support.loops import Points, network, sgd, update
from support.phases import lines
from support.validate import from_sdk, validate
from torch.utils.data import DataLoader

MODULE = "nvidia.dali.plugin.pytorch"


class BaseIterator:
    """As DALI's `_DaliBaseIterator`: the pipelines run ahead, and `_get_outputs` waits for them."""

    def _get_outputs(self) -> list[Any]:
        self._counter += 1
        if self._counter > self.size:
            self._counter = 0 if self.auto_reset else self._counter
            raise StopIteration
        if self._counter == self.fails_at:
            raise RuntimeError("Critical error in pipeline")
        return [torch.ones(4, 6), torch.zeros(4, dtype=torch.long)]

    def reset(self) -> None:
        if self._counter >= self.size:
            self._counter = 0

    def __iter__(self) -> Any:
        return self

    def next(self) -> Any:
        return self.__next__()


class Generic(BaseIterator):
    """As `DALIGenericIterator`, which reads its first batch when it is made."""

    def __init__(self, size: int, auto_reset: bool = True, fails_at: int = 0) -> None:
        self._pipes = [SimpleNamespace(device_id=0)]
        self._counter, self.size, self.auto_reset, self.fails_at = 0, size, auto_reset, fails_at
        self._first_batch: Any = None
        self._first_batch = next(self)

    def __next__(self) -> list[dict[str, Any]]:
        if self._first_batch is not None:
            batch, self._first_batch = self._first_batch, None
            return batch
        data, label = self._get_outputs()
        return [{"data": data, "label": label}]


@pytest.fixture
def dali(monkeypatch: pytest.MonkeyPatch) -> Any:
    generic = type("DALIGenericIterator", (BaseIterator,), dict(vars(Generic)))
    module: Any = types.ModuleType(MODULE)
    module.DALIGenericIterator = generic
    for name in ("nvidia", "nvidia.dali", "nvidia.dali.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def epoch(iterator: Any, model: Any, optimizer: Any) -> None:
    for (batch,) in iterator:
        update(model, optimizer, batch["data"], batch["label"])


def test_its_batches_are_those_of_a_loader_with_number_and_epoch(dali: Any) -> None:
    model = network()
    optimizer = sgd(model)
    with recording() as recorded:
        iterator = dali.DALIGenericIterator(3)
        for _ in range(2):
            epoch(iterator, model, optimizer)
        for batch in DataLoader(Points(4), batch_size=4):
            update(model, optimizer, *batch)
    assert validate([from_sdk(span) for span in recorded.spans], whole=False) == []
    steps = sorted(recorded.named("train.step"), key=lambda step: step.attributes["dl.step"])
    assert [step.attributes["dl.epoch"] for step in steps] == [0, 0, 0, 1, 1, 1, 0]
    nexts = sorted(recorded.named("dataloader.next"), key=lambda span: span.start_time)
    assert [span.attributes["dl.batch.index"] for span in nexts] == [0, 1, 2, 0, 1, 2, 0]
    assert [span.attributes["dl.loader.id"] for span in nexts] == [0] * 6 + [1], "numbers are shared with DataLoaders"


def test_the_wait_for_its_pipeline_lies_within_next(dali: Any) -> None:
    model = network()
    with recording() as recorded:
        iterator = dali.DALIGenericIterator(3)
        epoch(iterator, model, sgd(model))
    told = lines(recorded.spans, "train.step")
    assert "dali.run" not in told[0], "the first batch was ready"
    for line in told[1:3]:
        assert line.startswith(("next(fetch dali.run)", "next(dali.run fetch)")), told
    assert {span.attributes["dl.device"] for span in recorded.named("dali.run")} == {"cuda:0"}


def test_a_pipeline_that_fails_fails_the_step(dali: Any) -> None:
    model = network()
    with recording() as recorded:
        iterator = dali.DALIGenericIterator(5, fails_at=3)
        with pytest.raises(RuntimeError, match="Critical error in pipeline"):
            epoch(iterator, model, sgd(model))
    (failed,) = [span for span in recorded.named("dali.run") if not span.status.is_unset]
    assert failed.attributes["error.type"] == "RuntimeError"
    assert [span.attributes["error.type"] for span in recorded.named("dataloader.next") if not span.status.is_unset]


def test_a_module_that_lacks_the_class_is_left_alone(dali: Any, caplog: pytest.LogCaptureFixture) -> None:
    del dali.DALIGenericIterator
    with recording():
        pass
    assert "this DALI lacks" in caplog.text


def test_it_is_taken_back_whole(dali: Any) -> None:
    before = dict(vars(dali.DALIGenericIterator))
    with recording():
        assert dict(vars(dali.DALIGenericIterator)) != before
    assert dict(vars(dali.DALIGenericIterator)) == before
