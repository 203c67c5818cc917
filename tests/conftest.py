"""Fixtures that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.receiver import Receiver, receiving


@pytest.fixture(params=[True, False], ids=["C", "Python"])
def in_c(request: pytest.FixtureRequest) -> bool:
    """Whether ordinary events are recorded in C, where there is C."""
    return request.param


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An OTLP receiver of its own, that answers well."""
    with receiving() as running:
        yield running
