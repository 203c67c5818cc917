"""Loops that say themselves what a step or a span is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.loops.base import UPDATE, Diary, batch, form, loader, network, sgd, update
from torch.nn import functional as F

import otel_dl


@form
def explicit_steps(diary: Diary) -> Iterator[Any]:
    """No optimizer; what is outside belongs to no step."""
    model = network()
    yield model
    for number in range(4):
        with otel_dl.step(global_step=100 + number):
            x, y = batch()
            loss = F.cross_entropy(model(x), y)
            diary.step("forward", loss)
        model(x)


@form
def explicit_steps_with_a_loader(diary: Diary) -> Iterator[Any]:
    """The batch taken before is the step's."""
    model, data = network(), loader(4)
    optimizer = sgd(model)
    yield model
    for x, y in data:
        with otel_dl.step():
            diary.step(f"next {UPDATE}", update(model, optimizer, x, y))


@form
def explicit_steps_of_several_batches(diary: Diary) -> Iterator[Any]:
    model, data = network(), loader(6)
    optimizer = sgd(model)
    yield model
    batches = iter(data)
    for _ in range(3):
        with otel_dl.step():
            for _ in range(2):
                loss = update(model, optimizer, *next(batches))
        diary.step(f"next {UPDATE} next {UPDATE}", loss)


@form
def explicit_step_that_raises(diary: Diary) -> Iterator[Any]:
    model, data = network(), loader(4)
    optimizer = sgd(model)
    yield model
    for number, (x, y) in enumerate(data):
        try:
            with otel_dl.step():
                loss = update(model, optimizer, x, y)
                if number == 1:
                    raise ArithmeticError("not converging")
        except ArithmeticError:
            pass
        diary.step(f"next {UPDATE}", loss, failed=number == 1)


@form
def spans_of_ones_own(diary: Diary) -> Iterator[Any]:
    model, data = network(), loader(4)
    optimizer = sgd(model)
    yield model
    with otel_dl.span("outside any step"):
        pass
    for x, y in data:
        with otel_dl.span("augment"):
            x = x.flip(1)
        with otel_dl.span("update"):
            loss = update(model, optimizer, x, y)
        diary.step(f"next augment update({UPDATE})", loss)


@form
def span_that_an_exception_left(diary: Diary) -> Iterator[Any]:
    """No phase, and caught by the user: marks the span alone."""
    model, data = network(), loader(3)
    optimizer = sgd(model)
    yield model
    for x, y in data:
        try:
            with otel_dl.span("augment"):
                raise OSError("a file that is not there")
        except OSError:
            diary.step(f"next augment! {UPDATE}", update(model, optimizer, x, y), failed=False)
