"""A builtin of somebody else's that is followed from C, without Python: `Follow` of `recording/c/follow.c`."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from otel_dl.recording import native

pytestmark = pytest.mark.skipif(native.hooks is None, reason="nothing is compiled")

ONE = torch.ones(1)
ALPHA = {"alpha": 3}
follow: Callable[..., Any] = getattr(native.hooks, "Follow", None)


class Followed:
    """`torch.add`, and what was told of it."""

    def __init__(self) -> None:
        self.open = True
        self.told: list[Any] = []
        self.follow = follow(torch.add, lambda: self.open, self.begin)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        self.told.append((args, kwargs))
        return self.end

    def end(self, result: Any, error: BaseException | None) -> None:
        self.told.append((result, error))


@pytest.fixture
def followed() -> Iterator[Followed]:
    followed = Followed()
    yield followed
    followed.follow.restore()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: torch.add(ONE, 2), ((ONE, 2), None)),
        (lambda: torch.add(ONE, 2, alpha=3), ((ONE, 2), {"alpha": 3})),
        (lambda: torch.add(input=ONE, other=2), ((), {"input": ONE, "other": 2})),
        (lambda: torch.add(*(ONE, 2), **ALPHA), ((ONE, 2), {"alpha": 3})),
        (lambda: functools.partial(torch.add, ONE)(2), ((ONE, 2), None)),
        (lambda: next(map(torch.add, [ONE], [2])), ((ONE, 2), None)),
    ],
)
def test_every_way_to_call_it(call: Callable[[], Any], told: Any, followed: Followed) -> None:
    result = call()
    assert followed.told == [told, (result, None)]
    followed.follow.restore()
    assert call() == result
    assert len(followed.told) == 2


def test_it_stays_the_object_that_it_is_and_its_hash(followed: Followed) -> None:
    def shown() -> tuple[Any, ...]:
        function = torch.add
        return id(function), hash(function), repr(function), sorted(dir(function)), function.__reduce__()

    with_it = shown()
    followed.follow.restore()
    assert shown() == with_it


def test_the_gate_is_asked_unless_it_is_always_open(followed: Followed) -> None:
    followed.open = False
    torch.add(ONE, 1)
    assert followed.told == []
    followed.follow.always = True
    torch.add(ONE, 1)
    assert len(followed.told) == 2


def test_what_it_raises_is_told_and_raised(followed: Followed) -> None:
    with pytest.raises(TypeError, match="add") as caught:
        torch.add(ONE, bad=1)  # type: ignore[call-overload]
    assert followed.told[1] == (None, caught.value)
    assert caught.value.__context__ is None
    assert [entry.name for entry in caught.traceback] == ["test_what_it_raises_is_told_and_raised"]


class Interrupted(BaseException):
    """As of a signal handler."""


@pytest.mark.parametrize("where", ["gate", "begin", "end", "end after an exception"])
def test_what_is_raised_by_them_is_raised(where: str) -> None:
    def interrupted(*_: Any) -> Any:
        raise Interrupted

    begin = interrupted if where == "begin" else lambda *_: interrupted
    following = follow(torch.add, interrupted if where == "gate" else lambda: True, begin)
    try:
        with pytest.raises(Interrupted) as caught:
            torch.add(ONE, "x" if where == "end after an exception" else 1)  # type: ignore[arg-type]
    finally:
        following.restore()
    assert isinstance(caught.value.__context__, TypeError) == (where == "end after an exception")
    assert torch.add(ONE, 1) == 2


@pytest.mark.parametrize("kind", [RecursionError, MemoryError])
@pytest.mark.parametrize("where", ["gate", "begin", "end"])
def test_want_of_room_is_nobodys_fault(where: str, kind: type[Exception]) -> None:
    def full(*_: Any) -> Any:
        raise kind

    begin = full if where == "begin" else lambda *_: full
    following = follow(torch.add, full if where == "gate" else lambda: True, begin)
    try:
        assert torch.add(ONE, 1) == 2
        with pytest.raises(TypeError, match="add"):
            torch.add(ONE, "x")  # type: ignore[arg-type]
    finally:
        following.restore()


def test_restored_from_within_a_call_and_in_another_thread() -> None:
    seen: list[Any] = []

    def begin(*_: Any) -> Any:
        thread = threading.Thread(target=following.restore)
        thread.start()
        thread.join()
        seen.append(torch.add(ONE, 5))
        return lambda result, error: seen.append(result)

    following: Any = follow(torch.add, lambda: True, begin)
    assert torch.add(ONE, 1) == 2
    assert seen == [6, 2]


def test_it_is_followed_once_and_one_is_not_undone_by_the_other(followed: Followed) -> None:
    with pytest.raises(TypeError, match="followed already"):
        follow(torch.add, bool, print)
    first = followed.follow
    first.restore()
    second = Followed()
    first.restore()
    torch.add(ONE, 1)
    second.follow.restore()
    assert (len(followed.told), len(second.told)) == (0, 2)


@pytest.mark.parametrize("function", [len, print, "".join, torch.Tensor.add, lambda: None, torch.nn.Linear, None])
def test_what_is_called_in_another_way_is_refused(function: Any) -> None:
    with pytest.raises(TypeError):
        follow(function, bool, print)


def test_nothing_is_kept() -> None:
    def begin(args: Any, kwargs: Any) -> Any:
        return lambda result, error: None

    following = follow(torch.add, lambda: True, begin)
    given = torch.ones(1)
    before = sys.getrefcount(given), sys.getrefcount(torch.add)
    for _ in range(100):
        torch.add(given, given, alpha=1)
        with pytest.raises(TypeError):
            torch.add(given, bad=given)  # type: ignore[call-overload]
    assert (sys.getrefcount(given), sys.getrefcount(torch.add)) == before
    following.restore()
    kept = weakref.ref(begin)
    del begin, following
    assert kept() is None
