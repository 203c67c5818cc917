"""As many steps as the script says, each with the phases it had, and evaluation in none of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support.inprocess import Recorded, recording
from support.loops import FORMS, LONG, Diary, train
from support.phases import lines

_forms = [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in FORMS]


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Printed at the end, with `pytest -s`."""
    rows: list[str] = []
    yield rows
    print(
        "\n\n  form                                                said by the script  recorded   evaluations  errors"
    )
    print("\n".join(rows))


@pytest.mark.parametrize("name", _forms)
def test_steps_are_those_of_the_script(name: str, table: list[str]) -> None:
    with recording() as recorded:
        diary, _ = train(FORMS[name])
    steps = lines(recorded.spans, "train.step")
    evaluations = lines(recorded.spans, "train.eval")
    errors = sum(not span.status.is_unset for span in recorded.named("train.step"))
    table.append(
        f"  {name:<52}{len(diary.steps):>18}{len(steps):>10}"
        f"{f'{len(diary.evaluations)}/{len(evaluations)}':>14}{f'{diary.errors}/{errors}':>8}"
    )
    if diary.nexts_elsewhere:
        assert sum(step.count("next") for step in steps) == diary.nexts_elsewhere
        steps = [re.sub(r"\bnext ?", "", step).strip() for step in steps]
    assert steps == diary.steps
    assert evaluations == diary.evaluations
    assert errors == diary.errors
    assert recorded.run.dropped.total() == 0
