"""What goes wrong and is caught."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.loops.base import UPDATE, Diary, form, loader, network, sgd, update
from torch import Tensor, nn


@form
def batch_that_fails_and_is_skipped(diary: Diary) -> Iterator[Any]:
    """Taking it is a step of its own, which failed."""
    model, data = network(), loader(5, bad=9, shuffle=False)
    optimizer = sgd(model)
    yield model
    batches = iter(data)
    while True:
        try:
            x, y = next(batches)
        except StopIteration:
            break
        except ValueError:
            diary.step("next!")
            continue
        diary.step(f"next {UPDATE}", update(model, optimizer, x, y))


class Picky(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if input[0, 0] > 100:
            raise ValueError("too large")
        return super().forward(input)


@form
def forward_that_raises_and_is_caught(diary: Diary) -> Iterator[Any]:
    model, data = Picky(6, 3), loader(5)
    optimizer = sgd(model)
    yield model
    for number, (x, y) in enumerate(data):
        if number in (0, 3):
            x = x + 1000
        try:
            diary.step(f"next {UPDATE}", update(model, optimizer, x, y))
        except ValueError:
            diary.step("next zero_grad forward!")


@form
def exception_of_the_users_between_phases(diary: Diary) -> Iterator[Any]:
    """Caught outside any phase: marks nothing, and the step goes on."""
    model, data = network(), loader(4)
    optimizer = sgd(model)
    yield model
    for x, y in data:
        loss = update(model, optimizer, x, y)
        try:
            raise KeyError("an image logger that failed")
        except KeyError:
            diary.step(f"next {UPDATE}", loss)
