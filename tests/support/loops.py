"""Training loops of every form that otel-dl must understand, each with the truth about itself.

A form is a generator. It makes what a script makes first (model, optimizer, loader), yields its models, and trains when
it is resumed. Meanwhile it writes a `Diary`: each step's phases and loss, as the script knows them. Nothing of otel-dl
is asked. Everything is small, and drawn from the global generators, which `seed` sets.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import otel_dl

torch.set_num_threads(1)  # for tensors as small as these others only wait

Form = Callable[["Diary"], Iterator[Any]]

FORMS: dict[str, Form] = {}
LONG: set[str] = set()
"""Those that compile with a C++ compiler."""


def form(function: Form) -> Form:
    FORMS[function.__name__] = function
    return function


@dataclass
class Diary:
    """What a script says of itself, in the notation of `phases`."""

    steps: list[str] = field(default_factory=list)
    evaluations: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    errors: int = 0
    """Steps that an exception left."""
    nexts_elsewhere: int = 0
    """Batches that another thread took; in which step's time is chance."""

    def step(self, phases: str, loss: Tensor | None = None, failed: bool | None = None) -> None:
        self.steps.append(phases)
        self.errors += "!" in phases if failed is None else failed
        if loss is not None:
            self.losses.append(loss.detach().item())


def seed(number: int = 7) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def train(form: Form, after_setup: Callable[[], None] = lambda: None) -> tuple[Diary, list[Tensor]]:
    """Trains in this form: (what it says, the final weights)."""
    seed()
    diary = Diary()
    script = form(diary)
    models: Any = next(script)
    after_setup()
    for _ in script:
        raise AssertionError("a form yields once")
    models = models if isinstance(models, tuple) else (models,)
    return diary, [value.clone() for model in models for value in model.state_dict().values()]


# What they are made of.


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Reading an item draws from all three generators, so that one draw too many would show."""

    def __init__(self, count: int, bad: int | None = None) -> None:
        self.x = torch.randn(count, 6)
        self.y = torch.randint(0, 3, (count,))
        self.bad = bad

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise ValueError(f"sample {index} is damaged")
        noise = random.gauss(0, 0.01) + np.random.normal(0, 0.01)
        return self.x[index] + noise + 0.01 * torch.randn(6), self.y[index]


def loader(batches: int, bad: int | None = None, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(Points(batches * 4, bad), batch_size=4, shuffle=shuffle)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.05, momentum=0.9)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6), torch.randint(0, 3, (4,))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """zero_grad forward backward optimizer"""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


UPDATE = "zero_grad forward backward optimizer"


# One loader, one optimizer.


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
        diary.evaluations.append(_evaluate(model, held_out))


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
        diary.evaluations.append(_evaluate(model, held_out))


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


# Several optimizers.


def _gan() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    generator, critic = nn.Sequential(nn.Linear(2, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    return generator, critic, torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())


def _critic_update(generator: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """zero_grad forward forward forward backward optimizer"""
    optimizer.zero_grad()
    loss = critic(generator(torch.randn(4, 2)).detach()).mean() - critic(x).mean()
    loss.backward()
    optimizer.step()
    return loss


def _generator_update(generator: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
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
    generator, critic, of_generator, of_critic = _gan()
    data = loader(5)
    yield generator, critic
    for x, _ in data:
        loss = _critic_update(generator, critic, of_critic, x)
        loss = loss + _generator_update(generator, critic, of_generator)
        diary.step(f"next {CRITIC} {GENERATOR}", loss)


def _muon_adamw(model: nn.Sequential) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    # torch has Muon from 2.9 on; before, any other will do: what counts is that there are two.
    kind: Any = getattr(torch.optim, "Muon", torch.optim.SGD)
    return kind(matrices, lr=0.01), torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2])


def _update_with_both(model: nn.Module, optimizers: tuple[Any, Any], x: Tensor, y: Tensor) -> Tensor:
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
    optimizers = _muon_adamw(model)
    yield model
    for x, y in data:
        diary.step(f"next {UPDATE} optimizer", _update_with_both(model, optimizers, x, y))


def _step_in_backward(model: nn.Module) -> None:
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
    _step_in_backward(model)
    yield model
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        diary.step(f"next {IN_BACKWARD}", loss)


# Evaluation.


def _evaluate(model: nn.Module, data: DataLoader[Any]) -> str:
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
    diary.evaluations.append(_evaluate(model, held_out))
    for _ in range(2):
        for x, y in data:
            diary.step(f"next {UPDATE}", update(model, optimizer, x, y))
        diary.evaluations.append(_evaluate(model, held_out))


@form
def evaluation_in_the_middle_of_an_epoch(diary: Diary) -> Iterator[Any]:
    model, data, held_out = network(), loader(6), loader(2)
    optimizer = sgd(model)
    yield model
    for number, (x, y) in enumerate(data, 1):
        diary.step(f"next {UPDATE}", update(model, optimizer, x, y))
        if number % 2 == 0:
            diary.evaluations.append(_evaluate(model, held_out))


@form
def evaluation_in_the_middle_of_an_accumulating_step(diary: Diary) -> Iterator[Any]:
    model, data, held_out = network(), loader(8), loader(2)
    optimizer = sgd(model)
    yield model
    for number, (x, y) in enumerate(data, 1):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if number % 4 == 2:
            diary.evaluations.append(_evaluate(model, held_out))
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


# What goes wrong and is caught.


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


# Loaders in other numbers and places.


@form
def two_loaders(diary: Diary) -> Iterator[Any]:
    """The second one is shorter: the first one's batch that found no partner belongs to no step."""
    model, data, other = network(), loader(5), loader(3)
    optimizer = sgd(model)
    yield model
    for _ in range(2):
        for (x, y), (z, _) in zip(data, other, strict=False):
            diary.step(f"next next {UPDATE}", update(model, optimizer, x + z, y))


@form
def short_loader_cycled(diary: Diary) -> Iterator[Any]:
    model, data, short = network(), loader(5), loader(2)
    optimizer = sgd(model)
    yield model
    partners = iter(short)
    for _ in range(2):
        for x, y in data:
            try:
                z, _ = next(partners)
            except StopIteration:
                partners = iter(short)
                z, _ = next(partners)
            diary.step(f"next next {UPDATE}", update(model, optimizer, x + z, y))


@form
def short_loader_cycled_first(diary: Diary) -> Iterator[Any]:
    model, data, short = network(), iter(loader(5)), loader(2)
    optimizer = sgd(model)
    yield model
    partners = iter(short)
    for _ in range(5):
        try:
            z, _ = next(partners)
        except StopIteration:
            partners = iter(short)
            z, _ = next(partners)
        x, y = next(data)
        diary.step(f"next next {UPDATE}", update(model, optimizer, x + z, y))


@form
def prefetching_wrapper(diary: Diary) -> Iterator[Any]:
    """The next batch is taken before the step (Accelerate): a batch's step is the one whose `next` returned it."""
    model, data = network(), loader(4)
    optimizer = sgd(model)
    yield model
    for _ in range(2):
        batches = iter(data)
        waiting: Any = next(batches)
        nexts = "next next "
        while waiting is not None:
            x, y = waiting
            waiting = next(batches, None)
            diary.step(nexts + UPDATE if waiting is not None else UPDATE, update(model, optimizer, x, y))
            nexts = "next "


@form
def break_and_start_over(diary: Diary) -> Iterator[Any]:
    model, data = network(), loader(5)
    optimizer = sgd(model)
    yield model
    for _ in range(3):
        for number, (x, y) in enumerate(data):
            diary.step(f"next {UPDATE}", update(model, optimizer, x, y))
            if number == 2:
                break


@form
def break_before_the_step(diary: Diary) -> Iterator[Any]:
    """The batch in hand is left behind, and belongs to no step."""
    model, data = network(), loader(5)
    optimizer = sgd(model)
    yield model
    for _ in range(3):
        for number, (x, y) in enumerate(data):
            if number == 2:
                break
            diary.step(f"next {UPDATE}", update(model, optimizer, x, y))


@form
def loader_in_a_thread(diary: Diary) -> Iterator[Any]:
    model, data = network(), loader(5)
    optimizer = sgd(model)
    yield model
    # Asked one by one, so that the generators are drawn from in the same order each time.
    asked: queue.Queue[bool] = queue.Queue()
    read: queue.Queue[Any] = queue.Queue()

    def produce() -> None:
        batches = iter(data)
        while asked.get():
            read.put(next(batches, None))

    thread = threading.Thread(target=produce)
    thread.start()
    while True:
        asked.put(True)
        got = read.get()
        if got is None:
            break
        diary.nexts_elsewhere += 1
        diary.step(UPDATE, update(model, optimizer, *got))
    asked.put(False)
    thread.join()


@form
def training_in_a_thread(diary: Diary) -> Iterator[Any]:
    model, data = network(), loader(5)
    optimizer = sgd(model)
    yield model

    def work() -> None:
        for _ in range(2):
            for x, y in data:
                diary.step(f"next {UPDATE}", update(model, optimizer, x, y))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# No loader.


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
    generator, critic, of_generator, of_critic = _gan()
    yield generator, critic
    for _ in range(5):
        loss = _critic_update(generator, critic, of_critic, torch.randn(4, 6))
        loss = loss + _generator_update(generator, critic, of_generator)
        diary.step(f"{CRITIC} {GENERATOR}", loss)


@form
def no_loader_gan_samples_without_gradients(diary: Diary) -> Iterator[Any]:
    """A forward without gradients between two optimizers of a step is that step's."""
    generator, critic, of_generator, of_critic = _gan()
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
    optimizers = _muon_adamw(model)
    yield model
    for _ in range(5):
        diary.step(f"{UPDATE} optimizer", _update_with_both(model, optimizers, *batch()))


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
    _step_in_backward(model)
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
    generator, critic, of_generator, of_critic = _gan()
    yield generator, critic
    for _ in range(4):
        loss = _critic_update(generator, critic, of_critic, torch.randn(4, 6))
        loss = loss + _generator_update(generator, critic, of_generator)
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


# Loops that say themselves what a step is.


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
