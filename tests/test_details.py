"""What happens within phases: where its span stands, what becomes warm-up, what is summed up."""

from __future__ import annotations

from typing import Any

import torch
from support.inprocess import Recorded, recording
from support.loops import Points, network, seed, sgd, update
from support.phases import lines
from support.validate import from_sdk, validate
from torch.utils.data import DataLoader

from otel_dl.recording.details import Detail
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.records import clock


class Wait(Detail):
    __slots__ = ("summed",)
    family = "sync"
    name = "cuda.synchronize"

    def __init__(self, summed: bool = False) -> None:
        self.summed = summed

    def attributes(self) -> dict[str, Any]:
        return {"dl.sync.op": "Tensor.item"}


class Compiled(Detail):
    __slots__ = ()
    name = "torch.compile"
    warm = True

    def attributes(self) -> dict[str, Any]:
        return {"dl.compile.name": "a function [0/0]", "dl.compile.recompiled": False}


def note(recorded: Recorded, detail: Detail) -> None:
    start = clock()
    recorded.run.note(detail, start, clock())


def train(recorded: Recorded, steps: int, within: dict[int, Detail], after: dict[int, Detail]) -> None:
    """Steps whose forward notes what `within` has for them, and that note `after`'s outside any phase."""
    seed()
    model = network()
    optimizer = sgd(model)
    number = 0

    def forward(module: Any, inputs: Any) -> None:
        if number in within:
            note(recorded, within[number])

    model[0].register_forward_pre_hook(forward)
    for number, batch in enumerate(DataLoader(Points(steps * 4), batch_size=4)):
        update(model, optimizer, *batch)
        if number in after:
            note(recorded, after[number])


def step(recorded: Recorded, number: int) -> Any:
    return next(span for span in recorded.named("train.step") if span.attributes["dl.step"] == number)


def of_step(recorded: Recorded, number: int, name: str) -> Any:
    trace_id = step(recorded, number).context.trace_id
    return next(span for span in recorded.named(name) if span.context.trace_id == trace_id)


def check(recorded: Recorded) -> None:
    assert validate([from_sdk(span) for span in recorded.spans], whole=False) == []


def test_a_detail_stands_under_the_phase_it_ran_in_and_else_under_the_step() -> None:
    with recording() as recorded:
        train(recorded, 3, {1: Wait()}, {2: Wait()})
    told = lines(recorded.spans, "train.step")
    assert "forward(cuda.synchronize)" in told[1]
    assert told[2].endswith(" cuda.synchronize")
    check(recorded)


def test_one_time_work_makes_its_phase_and_its_step_warm_up() -> None:
    with recording() as recorded:
        train(recorded, 4, {2: Compiled()}, {})
    assert [step(recorded, number).attributes["is_warmup"] for number in range(4)] == [True, False, True, False]
    assert of_step(recorded, 2, "forward").attributes["is_warmup"] is True
    assert of_step(recorded, 2, "torch.compile").attributes["is_warmup"] is True
    assert of_step(recorded, 2, "backward").attributes["is_warmup"] is False
    check(recorded)


def test_a_step_with_one_time_work_is_kept_for_it() -> None:
    with recording(NeverHead()) as recorded:
        train(recorded, 6, {2: Compiled(), 3: Wait()}, {4: Wait()})
    kept = {span.attributes["dl.step"]: span.attributes["dl.keep.reason"] for span in recorded.named("train.step")}
    assert kept == {0: "warmup", 2: "warmup"}


def test_what_is_too_small_is_summed_up_where_it_ran() -> None:
    with recording() as recorded:
        train(recorded, 3, {1: Wait(summed=True)}, {1: Wait(summed=True)})
    assert recorded.named("cuda.synchronize") == []
    for span in (step(recorded, 1), of_step(recorded, 1, "forward")):
        assert span.attributes["dl.sync.summed"] == 1
        assert span.attributes["dl.sync.summed_ms"] >= 0
    assert "dl.sync.summed" not in step(recorded, 2).attributes
    check(recorded)


def test_a_detail_does_not_change_which_batches_are_evaluation() -> None:
    seed()
    model = network()
    optimizer = sgd(model)
    with recording() as recorded:
        for batch in DataLoader(Points(8), batch_size=4):
            update(model, optimizer, *batch)
            note(recorded, Wait())
        model.eval()
        with torch.no_grad():
            for points, _ in DataLoader(Points(8), batch_size=4):
                model(points)
                note(recorded, Wait())
    assert len(recorded.named("train.step")) == 2
    (evaluated,) = lines(recorded.spans, "train.eval")
    assert evaluated == "next forward cuda.synchronize next forward cuda.synchronize"
    check(recorded)


def test_details_beyond_the_room_of_a_step_are_counted() -> None:
    with recording(step_records=16) as recorded:
        for batch in DataLoader(Points(4), batch_size=4):
            seed()
            model = network()
            for _ in range(100):
                note(recorded, Wait())
            update(model, sgd(model), *batch)
    assert step(recorded, 0).attributes["otel_dl.dropped"] > 80
