"""Loaders in other numbers and places."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from support.loops.base import UPDATE, Diary, form, loader, network, sgd, update


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
