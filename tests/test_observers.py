"""Whoever observes phases and steps is told of the same boundaries by C and by Python, and of those alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.inprocess import Recorded, recording
from support.loops import FORMS, Picky, Points, seed, sgd, train, update
from torch.utils.data import DataLoader

from otel_dl.recording import native
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.observers import STEP, Observer
from otel_dl.recording.records import Kind

compiled = pytest.mark.skipif(native.hooks is None, reason="nothing is compiled")
in_both = pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])


class Few(NeverHead):
    """One step in five."""

    def step(self, number: int) -> bool:
        return number % 5 == 3

    def no_earlier(self, number: int) -> int:
        return number + (3 - number) % 5


def listen(recorded: Recorded, told: list[tuple[int, bool, int]]) -> Observer:
    def observer(kind: int, begins: bool, instant: int) -> None:
        told.append((kind, begins, instant))

    recorded.run.observers.of_steps(observer)
    recorded.run.observers.of_phases(observer)
    return observer


def loop(steps: int, after: Callable[[int], object] = lambda number: None) -> None:
    seed()
    model = Picky(6, 3)
    optimizer = sgd(model)
    for number, (x, y) in enumerate(DataLoader(Points(4 * steps), batch_size=4)):
        update(model, optimizer, x, y)
        after(number)


@compiled
@pytest.mark.parametrize("name", ["plain", "accumulation", "no_loader", "evaluation_between_epochs"])
def test_c_and_python_tell_the_same(name: str) -> None:
    outcomes: list[list[tuple[int, bool]]] = []
    for in_c in (True, False):
        told: list[tuple[int, bool, int]] = []
        with recording(Few(), native=in_c) as recorded:
            listen(recorded, told)
            train(FORMS[name])
        outcomes.append([(kind, begins) for kind, begins, _ in told])
    assert outcomes[0] == outcomes[1]


@in_both
def test_it_is_told_the_instants_that_stand_in_the_spans(in_c: bool) -> None:
    told: list[tuple[int, bool, int]] = []
    with recording(native=in_c) as recorded:
        listen(recorded, told)
        loop(8)
    begun = sorted({instant for _, begins, instant in told if begins})
    ended = sorted({instant for _, begins, instant in told if not begins})
    spans = [span for span in recorded.spans if span.name.startswith(("train.step", "forward", "dataloader.next"))]
    assert len(spans) == 24
    offset = min(span.start_time for span in spans) - begun[0]
    assert {span.start_time - offset for span in spans} <= set(begun)
    assert {span.end_time - offset for span in spans} <= set(ended)


@in_both
def test_what_is_ordinary_is_told_too_and_ends_as_it_began(in_c: bool) -> None:
    told: list[tuple[int, bool, int]] = []
    with recording(NeverHead(), native=in_c) as recorded:
        listen(recorded, told)
        loop(200)
    open_ones: list[int] = []
    for kind, begins, _ in told:
        if begins:
            open_ones.append(kind)
        else:
            assert open_ones.pop() == kind
    assert open_ones == []
    # The `next` that ends the loop begins one that comes to nothing.
    assert sum(begins for kind, begins, _ in told if kind == STEP) == 201
    assert len(told) > 200 * 10


@in_both
def test_several_are_told_from_the_outside_inwards_and_one_that_leaves_hears_no_more(in_c: bool) -> None:
    told: list[tuple[str, int, bool]] = []
    with recording(NeverHead(), native=in_c) as recorded:
        observers = recorded.run.observers

        def outer(kind: int, begins: bool, instant: int) -> None:
            told.append(("outer", kind, begins))

        def inner(kind: int, begins: bool, instant: int) -> None:
            told.append(("inner", kind, begins))
            if len(told) > 200:
                observers.of_phases(inner, False)

        observers.of_phases(outer)
        observers.of_phases(inner)
        loop(60)
        observers.of_phases(outer, False)
        assert recorded.run.fast.on_phase is None
        heard = len(told)
        loop(60)
        assert len(told) == heard
    together = told[:200]
    for one, other in zip(together[::2], together[1::2], strict=True):
        assert one[1:] == other[1:]
        assert [one[0], other[0]] == (["outer", "inner"] if one[2] else ["inner", "outer"])
    assert {who for who, *_ in told[202:]} == {"outer"}


@in_both
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("kind", [0, 1, 4, 8])
def test_what_a_signal_handler_raises_in_one_arrives(in_c: bool, kind: int, begins: bool) -> None:
    done = 0

    class Alarm(Exception):
        pass

    def raising(what: int, at_begin: bool, instant: int) -> None:
        if done == 150 and (what, at_begin) == (kind, begins):
            raise Alarm

    with recording(NeverHead(), native=in_c) as recorded:
        recorded.run.observers.of_steps(raising)
        recorded.run.observers.of_phases(raising)

        def count(number: int) -> None:
            nonlocal done
            done = number + 1

        with pytest.raises(Alarm):
            loop(300, count)
        done = 0
        loop(5)
    assert recorded.run.number > 150


@in_both
@pytest.mark.parametrize("phase", [Kind.NEXT, Kind.FORWARD, Kind.EVAL_FORWARD, Kind.BACKWARD, Kind.OPTIMIZER])
def test_what_was_left_half_done_is_told_to_have_ended(in_c: bool, phase: int) -> None:
    class Alarm(Exception):
        pass

    def raising(kind: int, begins: bool, instant: int) -> None:
        if begins and kind == phase:
            raise Alarm

    told: list[tuple[int, bool, int]] = []
    model = Picky(6, 3).eval()
    with recording(NeverHead(), native=in_c) as recorded:
        loop(20)
        listen(recorded, told)
        recorded.run.observers.of_phases(raising)
        with pytest.raises(Alarm):
            loop(20, lambda number: model(torch.ones(1, 6)))
    phases = Counter((kind, begins) for kind, begins, _ in told if kind != STEP)
    assert phases[phase, True] == 1
    assert all(phases[kind, False] == count for (kind, begins), count in phases.items() if begins)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@in_both
def test_in_a_forked_child_they_are_told_of_its_steps(in_c: bool) -> None:
    told: list[tuple[int, bool, int]] = []
    with recording(NeverHead(), native=in_c) as recorded:
        listen(recorded, told)
        loop(5)
        before = len(told)
        child = os.fork()
        if child == 0:
            recorded.run.restart()
            told.clear()
            loop(5)
            os._exit(0 if len(told) == before else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@in_both
def test_a_fault_in_one_is_no_exception_of_the_users(in_c: bool, caplog: pytest.LogCaptureFixture) -> None:
    def faulty(kind: int, begins: bool, instant: Any) -> None:
        instant.no_such_attribute  # noqa: B018

    with recording(NeverHead(), native=in_c) as recorded:
        loop(20)
        faulty.__code__ = faulty.__code__.replace(co_filename=native.__file__)  # as if it were ours
        recorded.run.observers.of_phases(faulty)
        loop(20)
    assert "a fault of ours in the instrumentation of" in caplog.text
