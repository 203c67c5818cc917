"""No loader: optimizers alone tell steps apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from support.loops.base import UPDATE, Diary, batch, form, network, sgd, update
from support.loops.failures import Picky
from support.loops.several_optimizers import (
    CRITIC,
    GENERATOR,
    IN_BACKWARD,
    critic_update,
    gan_networks,
    generator_update,
    muon_adamw,
    step_in_backward,
    update_with_both,
)
from torch import Tensor, nn
from torch.nn import functional as F


@form
def no_loader(diary: Diary) -> Iterator[Any]:
    model = network()
    optimizer = sgd(model)
    yield model
    for _ in range(5):
        diary.step(UPDATE, update(model, optimizer, *batch()))


@form
def no_loader_zero_grad_last(diary: Diary) -> Iterator[Any]:
    """Without a batch to tell where a step ends, a zero_grad begins the next one; the last begins none."""
    model = network()
    optimizer = sgd(model)
    yield model
    for number in range(5):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        diary.step("forward backward optimizer" if number == 0 else "zero_grad forward backward optimizer", loss)


@form
def no_loader_accumulation(diary: Diary) -> Iterator[Any]:
    model = network()
    optimizer = sgd(model)
    yield model
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(3):
            x, y = batch()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        diary.step("zero_grad" + " forward backward" * 3 + " optimizer", loss)


@form
def no_loader_gan(diary: Diary) -> Iterator[Any]:
    generator, critic, of_generator, of_critic = gan_networks()
    yield generator, critic
    for _ in range(5):
        loss = critic_update(generator, critic, of_critic, torch.randn(4, 6))
        loss = loss + generator_update(generator, critic, of_generator)
        diary.step(f"{CRITIC} {GENERATOR}", loss)


@form
def no_loader_gan_samples_without_gradients(diary: Diary) -> Iterator[Any]:
    """A forward without gradients between two optimizers of a step is that step's."""
    generator, critic, of_generator, of_critic = gan_networks()
    yield generator, critic
    for _ in range(4):
        of_generator.zero_grad()
        loss = -critic(generator(torch.randn(4, 2))).mean()
        loss.backward()
        of_generator.step()
        with torch.no_grad():
            sample = generator(torch.randn(4, 2))
        of_critic.zero_grad()
        loss = critic(sample).mean() - critic(torch.randn(4, 6)).mean()
        loss.backward()
        of_critic.step()
        diary.step(f"{GENERATOR} forward zero_grad forward forward backward optimizer", loss)


@form
def no_loader_muon_and_adamw(diary: Diary) -> Iterator[Any]:
    model = network()
    optimizers = muon_adamw(model)
    yield model
    for _ in range(5):
        diary.step(f"{UPDATE} optimizer", update_with_both(model, optimizers, *batch()))


@form
def no_loader_lbfgs(diary: Diary) -> Iterator[Any]:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    yield model
    x, y = batch()
    for _ in range(4):
        inner: list[str] = []

        def closure(inner: list[str] = inner) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            inner.append("zero_grad forward backward")
            return loss

        loss = optimizer.step(closure)
        diary.step(f"optimizer({' '.join(inner)})", loss)


@form
def no_loader_optimizer_in_backward(diary: Diary) -> Iterator[Any]:
    model = network()
    step_in_backward(model)
    yield model
    for _ in range(5):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        diary.step(IN_BACKWARD, loss)


@form
def no_loader_grad_scaler_that_skips(diary: Diary) -> Iterator[Any]:
    model = network()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    yield model
    for number in range(6):
        optimizer.zero_grad()
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        if number in (0, 3):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        diary.step("zero_grad forward backward" + (" optimizer" if loss.isfinite() else ""), loss)


@form
def no_loader_evaluation(diary: Diary) -> Iterator[Any]:
    """Forwards without gradients once every optimizer has stepped, up to the next training: evaluation."""
    model = network()
    optimizer = sgd(model)
    yield model
    for _ in range(4):
        diary.step(UPDATE, update(model, optimizer, *batch()))
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                model(batch()[0])
        model.train()
        diary.evaluations.append("forward forward")


@form
def no_loader_evaluation_of_several(diary: Diary) -> Iterator[Any]:
    """In the first step it is told from a forward between two optimizers when the first one steps again."""
    generator, critic, of_generator, of_critic = gan_networks()
    yield generator, critic
    for _ in range(4):
        loss = critic_update(generator, critic, of_critic, torch.randn(4, 6))
        loss = loss + generator_update(generator, critic, of_generator)
        diary.step(f"{CRITIC} {GENERATOR}", loss)
        with torch.no_grad():
            critic(generator(torch.randn(4, 2)))
        diary.evaluations.append("forward forward")


@form
def no_loader_forward_that_raises(diary: Diary) -> Iterator[Any]:
    model = Picky(6, 3)
    optimizer = sgd(model)
    yield model
    for number in range(5):
        x, y = batch()
        if number in (0, 3):
            x = x + 1000
        try:
            diary.step(UPDATE, update(model, optimizer, x, y))
        except ValueError:
            diary.step("zero_grad forward!")
