"""`otel_dl.loader`: iterables that are no DataLoader.

Nothing is recorded here: `patches/dataloader.py` patches `Batches` as it does torch's iterators, and takes the patch
back. Without it these classes pass everything through.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sized
from typing import Any

_RECORDED = "_otel_dl"
"""Attribute of the classes of iterators that are recorded themselves."""


class Batches:
    """The iterator of one epoch: `iterator`, whose `next()` is `dataloader.next`."""

    def __init__(self, loader: Any, iterator: Iterator[Any]) -> None:
        self._loader = loader
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        # `close()` and `send()` of a generator, the state of an iterator that can be resumed.
        if name == "_iterator" or name.startswith("__"):  # asked of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._iterator, name)


class Loader:
    """`iterable`, whose epochs are recorded."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._iterable)
        # One of a DataLoader's knows more about its batches than could be seen from here.
        return iterator if hasattr(type(iterator), _RECORDED) else Batches(self._counted(), iterator)

    def _counted(self) -> Any:
        """Whose epochs are counted: the iterable's, which may be wrapped anew for each, where it can be told again."""
        try:
            weakref.ref(self._iterable)
        except TypeError:
            return self
        return self._iterable

    def __getattr__(self, name: str) -> Any:
        if name == "_iterable" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._iterable, name)


class SizedLoader(Loader):
    """One that has a length."""

    _iterable: Any

    def __len__(self) -> int:
        return len(self._iterable)


def wrap(iterable: Any) -> Any:
    """See `otel_dl.loader`."""
    if isinstance(iterable, Iterator):
        return iterable if hasattr(type(iterable), _RECORDED) else Batches(iterable, iterable)  # pyright: ignore
    return SizedLoader(iterable) if isinstance(iterable, Sized) else Loader(iterable)  # pyright: ignore
