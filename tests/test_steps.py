"""As many steps as the script says, each with the phases it had, and evaluation in none of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from support.inprocess import recording
from support.loops import FORMS, LONG, Diary, train
from support.phases import lines

from otel_dl.semconv import ONE_TIME

_forms = [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in FORMS]


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Printed at the end, with `pytest -s`."""
    rows: list[str] = []
    yield rows
    print(f"\n\n  {'form':<52}{'steps: script':>16}{'recorded':>10}{'evaluations':>13}{'errors':>8}")
    print("\n".join(rows))


@pytest.mark.parametrize("native", [True, False], ids=["C", "Python"])
@pytest.mark.parametrize("name", _forms)
def test_steps_are_those_of_the_script(name: str, native: bool, table: list[str]) -> None:
    with recording(native=native) as recorded:
        diary, _ = train(FORMS[name])
    steps = recorded.named("train.step")
    errors = sum(not step.status.is_unset for step in steps)
    evaluations = lines(recorded.spans, "train.eval")
    table.append(
        f"  {name + (' (in Python)' if not native else ''):<52}{len(diary.steps):>16}{len(steps):>10}"
        f"{f'{len(diary.evaluations)}, {len(evaluations)}':>13}{f'{diary.errors}, {errors}':>8}"
    )
    phases = [span for span in recorded.spans if span.name not in ONE_TIME]  # the script knows of no compilation
    assert _without_nexts_elsewhere(lines(phases, "train.step"), diary) == diary.steps
    assert evaluations == diary.evaluations
    assert errors == diary.errors
    assert [step.attributes["dl.step"] for step in steps] == list(range(len(diary.steps)))
    nexts, fetches = recorded.named("dataloader.next"), recorded.named("dataloader.fetch")
    assert sorted(fetch.parent.span_id for fetch in fetches) == sorted(span.context.span_id for span in nexts)
    assert recorded.run.dropped.total() == 0


def _without_nexts_elsewhere(steps: list[str], diary: Diary) -> list[str]:
    if not diary.nexts_elsewhere:
        return steps
    assert sum(step.count("next") for step in steps) == diary.nexts_elsewhere
    return [re.sub(r"\bnext ?", "", step).strip() for step in steps]


@pytest.mark.parametrize("name", ["plain", "no_loader_gan", "evaluation_in_the_middle_of_an_epoch", "explicit_steps"])
def test_inside_a_span_of_the_users_steps_are_the_same_and_linked_to_it(name: str) -> None:
    tracer = TracerProvider().get_tracer("a script")
    with recording() as recorded, tracer.start_as_current_span("the whole training") as around:
        diary, _ = train(FORMS[name])
        recorded.run.finish()
    assert lines(recorded.spans, "train.step") == diary.steps
    assert lines(recorded.spans, "train.eval") == diary.evaluations
    for step in recorded.named("train.step"):
        assert around.get_span_context() in [link.context for link in step.links]


def test_the_users_own_number_of_a_step_is_on_it() -> None:
    with recording() as recorded:
        train(FORMS["explicit_steps"])
    numbers = [step.attributes["dl.global_step"] for step in recorded.named("train.step")]
    assert numbers == [100, 101, 102, 103]


def test_an_exception_that_ends_the_process_marks_the_open_step() -> None:
    with recording() as recorded:
        train(FORMS["no_loader"])
        recorded.run.finish(KeyboardInterrupt())
    *whole, last = recorded.named("train.step")
    assert {step.status.is_unset for step in whole} == {True}
    assert last.attributes["error.type"] == "KeyboardInterrupt"


def test_a_batch_knows_its_epoch_loader_and_place() -> None:
    with recording() as recorded:
        train(FORMS["evaluation_between_epochs"])
    batches = [
        (span.attributes["dl.loader.id"], span.attributes["dl.batch.index"])
        for span in sorted(recorded.named("dataloader.next"), key=lambda span: span.start_time)
    ]
    held_out, training = [(0, i) for i in range(3)], [(1, i) for i in range(4)]
    assert batches == held_out + training + held_out + training + held_out
    assert [step.attributes["dl.epoch"] for step in recorded.named("train.step")] == [0] * 4 + [1] * 4


def test_no_context_of_ours_is_left_behind() -> None:
    before = trace.get_current_span()
    for name in ("plain", "no_loader", "explicit_steps", "forward_that_raises_and_is_caught"):
        with recording():
            train(FORMS[name])
        assert trace.get_current_span() is before
