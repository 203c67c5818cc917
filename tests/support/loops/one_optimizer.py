"""A loader and an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from support.loops.base import LONG, UPDATE, Diary, form, loader, network, sgd, update
from support.loops.evaluation import evaluate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@form
def plain(diary: Diary) -> Iterator[Any]:
    model, data = network(), loader(5)
    optimizer = sgd(model)
    yield model
    for _ in range(2):
        for x, y in data:
            diary.step(f"next {UPDATE}", update(model, optimizer, x, y))


@form
def loss_module(diary: Diary) -> Iterator[Any]:
    """A loss that is a module is a forward pass as well."""
    model, data, criterion = network(), loader(5), nn.CrossEntropyLoss()
    optimizer = sgd(model)
    yield model
    for x, y in data:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        diary.step("next forward forward backward optimizer zero_grad", loss)


@form
def item_and_scheduler_after_the_step(diary: Diary) -> Iterator[Any]:
    model, data = network(), loader(5)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    yield model
    for x, y in data:
        loss = update(model, optimizer, x, y)
        loss.item()
        scheduler.step()
        plateau.step(loss.item())
        diary.step(f"next {UPDATE} scheduler scheduler", loss)


@form
def accumulation(diary: Diary) -> Iterator[Any]:
    """Four batches a step; the last two of an epoch are a step that never came to its optimizer."""
    model, data = network(), loader(10)
    optimizer = sgd(model)
    yield model
    for _ in range(2):
        phases = ""
        for number, (x, y) in enumerate(data, 1):
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
            phases += "next forward backward "
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
                diary.step(f"{phases}optimizer zero_grad", loss)
                phases = ""
        diary.step(phases.strip())


@form
def accumulation_with_a_step_for_the_rest(diary: Diary) -> Iterator[Any]:
    """What an epoch leaves over is stepped for when its loader has ended."""
    model, data, held_out = network(), loader(5), loader(2)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    yield model
    for _ in range(2):
        phases = ""
        for number, (x, y) in enumerate(data, 1):
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
            phases += "next forward backward "
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
                diary.step(f"{phases}optimizer zero_grad", loss)
                phases = ""
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        diary.step(f"{phases}optimizer zero_grad scheduler", loss)
        diary.evaluations.append(evaluate(model, held_out))


@form
def accumulation_whose_rest_is_evaluated_first(diary: Diary) -> Iterator[Any]:
    model, data, held_out = network(), loader(3), loader(2)
    optimizer = sgd(model)
    yield model
    for _ in range(2):
        phases = ""
        for number, (x, y) in enumerate(data, 1):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            phases += "next forward backward "
            if number == 2:
                optimizer.step()
                diary.step(f"{phases}optimizer", loss)
                phases = ""
        diary.step(phases.strip(), loss)
        diary.evaluations.append(evaluate(model, held_out))


@form
def lbfgs(diary: Diary) -> Iterator[Any]:
    model, data = nn.Linear(6, 3), loader(4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    yield model
    for x, y in data:
        inner: list[str] = []

        def closure(x: Tensor = x, y: Tensor = y, inner: list[str] = inner) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            inner.append("zero_grad forward backward")
            return loss

        loss = optimizer.step(closure)
        diary.step(f"next optimizer({' '.join(inner)})", loss)


@form
def grad_scaler_that_skips(diary: Diary) -> Iterator[Any]:
    model, data = network(), loader(6)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    yield model
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if number in (0, 3):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        diary.step("next zero_grad forward backward" + (" optimizer" if loss.isfinite() else ""), loss)


def _checkpointed(diary: Diary, reentrant: bool) -> Iterator[Any]:
    first, second, head, data = network(), network(), nn.Linear(3, 3), loader(4)
    second[0] = nn.Linear(3, 8)
    optimizer = sgd(first, second, head)
    yield first, second, head
    for x, y in data:
        optimizer.zero_grad()
        hidden = first(x)
        hidden = checkpoint(second, hidden, use_reentrant=reentrant)
        loss = F.cross_entropy(head(hidden), y)
        loss.backward()
        optimizer.step()
        diary.step("next zero_grad forward forward forward backward(forward) optimizer", loss)


@form
def activation_checkpointing(diary: Diary) -> Iterator[Any]:
    yield from _checkpointed(diary, reentrant=False)


@form
def activation_checkpointing_reentrant(diary: Diary) -> Iterator[Any]:
    yield from _checkpointed(diary, reentrant=True)


def _compiled(diary: Diary, backend: str) -> Iterator[Any]:
    torch.compiler.reset()
    model, data = network(), loader(4)
    compiled: Any = torch.compile(model, backend=backend)
    optimizer = sgd(model)
    yield model
    for x, y in data:
        diary.step(f"next {UPDATE}", update(compiled, optimizer, x, y))


@form
def compiled_eager(diary: Diary) -> Iterator[Any]:
    yield from _compiled(diary, "eager")


@form
def compiled_aot_eager(diary: Diary) -> Iterator[Any]:
    yield from _compiled(diary, "aot_eager")


@form
def compiled_inductor(diary: Diary) -> Iterator[Any]:
    yield from _compiled(diary, "inductor")


LONG.add("compiled_inductor")
