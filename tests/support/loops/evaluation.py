"""Evaluation, and forwards without gradients that are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from support.loops.base import UPDATE, Diary, form, loader, network, sgd, update
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


def evaluate(model: nn.Module, data: DataLoader[Any]) -> str:
    """The phases of an evaluation."""
    model.eval()
    phases: list[str] = []
    with torch.no_grad():
        for x, y in data:
            F.cross_entropy(model(x), y)
            phases.append("next forward")
    model.train()
    return " ".join(phases)


@form
def evaluation_between_epochs(diary: Diary) -> Iterator[Any]:
    model, data, held_out = network(), loader(4), loader(3)
    optimizer = sgd(model)
    yield model
    diary.evaluations.append(evaluate(model, held_out))
    for _ in range(2):
        for x, y in data:
            diary.step(f"next {UPDATE}", update(model, optimizer, x, y))
        diary.evaluations.append(evaluate(model, held_out))


@form
def evaluation_in_the_middle_of_an_epoch(diary: Diary) -> Iterator[Any]:
    model, data, held_out = network(), loader(6), loader(2)
    optimizer = sgd(model)
    yield model
    for number, (x, y) in enumerate(data, 1):
        diary.step(f"next {UPDATE}", update(model, optimizer, x, y))
        if number % 2 == 0:
            diary.evaluations.append(evaluate(model, held_out))


@form
def evaluation_in_the_middle_of_an_accumulating_step(diary: Diary) -> Iterator[Any]:
    model, data, held_out = network(), loader(8), loader(2)
    optimizer = sgd(model)
    yield model
    for number, (x, y) in enumerate(data, 1):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if number % 4 == 2:
            diary.evaluations.append(evaluate(model, held_out))
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            diary.step("next forward backward " * 4 + "optimizer zero_grad", loss)


@form
def evaluation_in_training_mode_without_gradients(diary: Diary) -> Iterator[Any]:
    """Only `no_grad` says that it is one; the loss is a module."""
    model, data, held_out, criterion = network(), loader(3), loader(2), nn.CrossEntropyLoss()
    optimizer = sgd(model)
    yield model
    for _ in range(2):
        for x, y in data:
            diary.step(f"next {UPDATE}", update(model, optimizer, x, y))
        with torch.no_grad():
            for x, y in held_out:
                criterion(model(x), y)
        diary.evaluations.append("next forward forward next forward forward")


@form
def forward_without_gradients_within_a_step(diary: Diary) -> Iterator[Any]:
    """A teacher's forward is part of the step that trains the student."""
    teacher, model, data = network().eval(), network(), loader(5)
    optimizer = sgd(model)
    yield model
    for x, _ in data:
        with torch.no_grad():
            wanted = teacher(x)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), wanted)
        loss.backward()
        optimizer.step()
        diary.step("next forward zero_grad forward backward optimizer", loss)
