"""What a failed span says of its exception: class and message, and never at the price of the exception itself."""

from __future__ import annotations

import gc
import signal
import weakref
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan
from support.inprocess import Recorded, recording
from torch.utils.data import DataLoader, Dataset

from otel_dl.export.otlp_json import encode


class Raising(torch.nn.Linear):
    def __init__(self, error: BaseException) -> None:
        super().__init__(1, 1)
        self.error = error

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise self.error


def step_with(error: BaseException, caught: type[BaseException] | None = None) -> Recorded:
    def train() -> None:
        for x in DataLoader(torch.ones(2, 1)):
            Raising(error)(x)

    with recording() as recorded, pytest.raises(caught or type(error)):
        train()
    return recorded


def said(span: ReadableSpan) -> tuple[Any, str | None]:
    return span.attributes["error.type"], span.status.description


def test_the_phase_that_raised_and_its_step_say_class_and_message() -> None:
    recorded = step_with(ValueError("loss is nan"))
    for name in ("forward", "train.step"):
        (span,) = recorded.named(name)
        assert said(span) == ("ValueError", "loss is nan")
        assert span.events == (), "the vocabulary has none"


def test_an_exception_without_a_message_leaves_the_status_without_one() -> None:
    (span,) = step_with(KeyError()).named("forward")
    assert said(span) == ("KeyError", None)


def test_a_long_message_is_cut() -> None:
    (span,) = step_with(RuntimeError("0123456789" * 100_000)).named("forward")
    assert span.status.description == ("0123456789" * 26)[:256]


def test_a_message_that_utf_8_cannot_hold_does_not_cost_its_neighbours_their_export() -> None:
    (span,) = step_with(OSError("no file \udcff")).named("forward")
    assert span.status.description == "no file ?"
    encode([span])


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise AttributeError("not initialised")


def test_an_exception_whose_text_raises_arrives_and_has_no_message(caplog: pytest.LogCaptureFixture) -> None:
    (span,) = step_with(Unspeakable()).named("forward")
    assert said(span) == (f"{__name__}.Unspeakable", None)
    assert not caplog.records


class Late(Exception):
    def __str__(self) -> str:
        signal.raise_signal(signal.SIGUSR1)
        return "late"


def test_what_a_signal_handler_raises_while_the_text_is_made_arrives() -> None:
    def handler(number: int, frame: object) -> None:
        raise TimeoutError("the user's own")

    former = signal.signal(signal.SIGUSR1, handler)
    try:
        step_with(Late(), caught=TimeoutError)
    finally:
        signal.signal(signal.SIGUSR1, former)


class Own(Exception):
    pass


def test_neither_the_exception_nor_what_its_frames_hold_is_kept_alive() -> None:
    def train() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        error, batch = Own("as it was"), torch.ones(1, 1)
        try:
            Raising(error)(batch)
        except Own:
            return weakref.ref(error), weakref.ref(batch)
        raise AssertionError

    with recording() as recorded:
        for _ in DataLoader(torch.ones(1, 1)):
            references = train()
        gc.collect()
        assert [reference() for reference in references] == [None, None]
    assert said(recorded.named("forward")[0]) == (f"{__name__}.Own", "as it was")


class Torn(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        try:
            raise KeyError("the first cause")
        except KeyError:
            raise Own("record 17 is torn:\nValueError: of length 3") from None


def test_a_fetch_in_a_worker_says_the_message_of_the_dataset_not_torchs() -> None:
    with recording() as recorded, pytest.raises(Own):
        next(iter(DataLoader(Torn(), num_workers=1, multiprocessing_context="fork")))
    fetches = {span.attributes["dl.batch.index"]: said(span) for span in recorded.named("dataloader.fetch")}
    assert fetches[0] == (f"{__name__}.Own", "record 17 is torn:\nValueError: of length 3")
    (wait,) = recorded.named("dataloader.next")
    assert "; Caught Own in DataLoader worker process 0.\nOriginal Traceback" in wait.status.description
