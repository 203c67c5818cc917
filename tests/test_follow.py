"""A builtin of somebody else's that is followed from C, without Python: `Follow` of `recording/c/follow.c`."""

from __future__ import annotations

import functools
import io
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
    """A builtin, `torch.add` if no other, and what was told of it."""

    def __init__(self, function: Callable[..., Any] = torch.add) -> None:
        self.open = True
        self.told: list[Any] = []
        self.follow = follow(function, lambda: self.open, self.begin)

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


META = torch.ones(1, device="meta")
PLACE = (
    torch._C._has_torch_function_unary,  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
    torch._C.TensorBase.__dict__["is_cpu"],  # pyright: ignore[reportPrivateUsage]
    torch.device("cpu"),
)


class Own(torch.Tensor):
    """It may have overridden anything."""


@pytest.mark.parametrize(
    ("function", "call", "looked_at"),
    [
        (torch.add, lambda: torch.add(ONE, 1), False),
        (torch.add, lambda: torch.add(META, 1), True),
        (torch.add, lambda: torch.add(input=META, other=1), True),
        (torch.add, lambda: torch.add(1, META), True),  # type: ignore[call-overload]
        (torch.add, lambda: torch.add(ONE.as_subclass(Own), 1), True),
        (torch.cat, lambda: torch.cat([ONE, ONE]), False),
        (torch.cat, lambda: torch.cat((META, META)), True),
        (torch.tensor, lambda: torch.tensor([[1.0, 2.0]]), False),
        (torch.tensor, lambda: torch.tensor([]), False),
        (torch.tensor, lambda: torch.tensor([1], device="cpu"), False),
        (torch.tensor, lambda: torch.tensor([1], device=torch.device("cpu")), False),
        (torch.tensor, lambda: torch.tensor([1], device=None), False),
        (torch.tensor, lambda: torch.tensor([1], device="meta"), True),
        (torch.tensor, lambda: torch.tensor([1], device=torch.device("meta")), True),
        (torch.as_tensor, lambda: torch.as_tensor(ONE, device="meta"), True),
    ],
)
def test_a_place_as_gate_is_open_where_another_one_than_the_cpu_is_spoken_of(
    function: Any, call: Callable[[], Any], looked_at: bool
) -> None:
    begun: list[Any] = []
    following = follow(function, PLACE, lambda *given: begun.append(given))
    try:
        call()
    finally:
        following.restore()
    assert len(begun) == looked_at


def test_a_place_as_gate_may_say_how_many_arguments_at_most() -> None:
    begun: list[Any] = []
    following = follow(torch.add, (*PLACE, 2), lambda *given: begun.append(given))
    try:
        torch.add(META, 1), torch.add(input=META, other=1), torch.add(META, 1, alpha=2)
    finally:
        following.restore()
    assert len(begun) == 2


@pytest.mark.parametrize("gate", [(), PLACE[:2], (*PLACE[:1], "no getter", *PLACE[2:])])
def test_a_place_that_is_none_is_refused(gate: Any) -> None:
    with pytest.raises(TypeError):
        follow(torch.add, gate, print)


def test_many_are_told_apart_and_put_back_one_by_one() -> None:
    functions: Any = torch._C._VariableFunctions  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
    names = [name for name in dir(functions) if not name.startswith("_")]
    told: list[str] = []
    following: dict[str, Any] = {}
    for name in names:
        try:
            following[name] = follow(getattr(functions, name), lambda: True, lambda *_, name=name: told.append(name))
        except TypeError:
            continue  # it is called in another way
        except ValueError:
            break  # no more can be
    try:
        assert len(following) == 64
        each = {name: getattr(functions, name) for name in following}
        for name, function in each.items():
            for _ in range(2):
                with pytest.raises(TypeError):
                    function(nothing=1)
            assert told == [name] * 2
            following.pop(name).restore()
            with pytest.raises(TypeError):
                function(nothing=1)
            assert told == [name] * 2
            told.clear()
    finally:
        for each_follow in following.values():
            each_follow.restore()


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


@pytest.mark.parametrize("function", [len, "".join, torch.Tensor.add, lambda: None, torch.nn.Linear, None])
def test_what_is_called_in_another_way_is_refused(function: Any) -> None:
    with pytest.raises(TypeError):
        follow(function, bool, print)


def test_a_builtin_that_takes_an_array_has_its_own_vectorcall_again() -> None:
    """pybind11 3 makes such ones; `print` is one."""
    followed = Followed(print)
    try:
        print("a", end="", file=io.StringIO())
        with pytest.raises(TypeError, match="'nothing' is an invalid keyword"):
            print(nothing=1)
    finally:
        followed.follow.restore()
    print("b", end="", file=io.StringIO())
    begun, ended, failed, (result, error) = followed.told
    assert (begun[0], ended, failed) == (("a",), (None, None), ((), {"nothing": 1}))
    assert (result, type(error)) == (None, TypeError)


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
