"""Several optimizers and one loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from support.loops.base import UPDATE, Diary, form, loader, network
from torch import Tensor, nn
from torch.nn import functional as F


def gan_networks() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    generator, critic = nn.Sequential(nn.Linear(2, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    return generator, critic, torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())


def critic_update(generator: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """zero_grad forward forward forward backward optimizer"""
    optimizer.zero_grad()
    loss = critic(generator(torch.randn(4, 2)).detach()).mean() - critic(x).mean()
    loss.backward()
    optimizer.step()
    return loss


def generator_update(generator: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """zero_grad forward forward backward optimizer"""
    optimizer.zero_grad()
    loss = -critic(generator(torch.randn(4, 2))).mean()
    loss.backward()
    optimizer.step()
    return loss


CRITIC = "zero_grad forward forward forward backward optimizer"
GENERATOR = "zero_grad forward forward backward optimizer"


@form
def gan(diary: Diary) -> Iterator[Any]:
    generator, critic, of_generator, of_critic = gan_networks()
    data = loader(5)
    yield generator, critic
    for x, _ in data:
        loss = critic_update(generator, critic, of_critic, x)
        loss = loss + generator_update(generator, critic, of_generator)
        diary.step(f"next {CRITIC} {GENERATOR}", loss)


def muon_adamw(model: nn.Sequential) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    # torch has Muon from 2.9 on; before, any other will do: what counts is that there are two.
    kind: Any = getattr(torch.optim, "Muon", torch.optim.SGD)
    return kind(matrices, lr=0.01), torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2])


def update_with_both(model: nn.Module, optimizers: tuple[Any, Any], x: Tensor, y: Tensor) -> Tensor:
    """zero_grad forward backward optimizer optimizer"""
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss


@form
def muon_and_adamw(diary: Diary) -> Iterator[Any]:
    model, data = network(), loader(5)
    optimizers = muon_adamw(model)
    yield model
    for x, y in data:
        diary.step(f"next {UPDATE} optimizer", update_with_both(model, optimizers, x, y))


def step_in_backward(model: nn.Module) -> None:
    """An optimizer for each parameter, which steps when its gradient is there."""
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.05)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


IN_BACKWARD = f"forward backward({' '.join(['optimizer zero_grad'] * 4)})"


@form
def optimizer_in_backward(diary: Diary) -> Iterator[Any]:
    model, data = network(), loader(5)
    step_in_backward(model)
    yield model
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        diary.step(f"next {IN_BACKWARD}", loss)
