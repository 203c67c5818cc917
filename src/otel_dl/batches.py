"""`otel_dl.loader`: iterables that are no DataLoader.

Nothing is recorded here: `patches/dataloader.py` patches `Batches` as it does torch's iterators, and takes the patch
back. Without it these classes pass everything through.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Iterator, Sized
from typing import Any

import wrapt

_RECORDED = "_otel_dl"
"""Attribute of the classes of iterators that are recorded themselves."""


class _Proxy(wrapt.ObjectProxy):  # pyright: ignore[reportMissingTypeArgument]
    """Everything but the iteration is what it stands for, which is also what is pickled and copied with it."""

    __wrapped__: Any

    def __length_hint__(self) -> int:
        return operator.length_hint(self.__wrapped__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return wrap, (self.__wrapped__,)

    def __copy__(self) -> Any:
        return wrap(copy.copy(self.__wrapped__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return wrap(copy.deepcopy(self.__wrapped__, memo))


class Batches(_Proxy):
    """The iterator of one epoch, whose `next()` is `dataloader.next`."""

    def __init__(self, loader: Any, iterator: Iterator[Any]) -> None:
        super().__init__(iterator)  # pyright: ignore[reportUnknownMemberType]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.__wrapped__)


class Loader(_Proxy):
    """An iterable, whose epochs are recorded."""

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.__wrapped__)
        # One of a DataLoader's knows more about its batches than could be seen from here.
        return iterator if hasattr(type(iterator), _RECORDED) else Batches(_counted(self), iterator)  # pyright: ignore


class UnsizedLoader(Loader):
    """One without a length."""

    __len__: Any = None


class OwnIterator(_Proxy):
    """One that is its own iterator: a generator, a prefetcher. It may begin again with each `iter()`."""

    __len__: Any = None

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__(iterator)  # pyright: ignore[reportUnknownMemberType]
        self._self_epoch: Batches | None = None

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.__wrapped__)
        return self if iterator is self.__wrapped__ else wrap(iterator)

    def __next__(self) -> Any:
        epoch = self._self_epoch
        if epoch is None:
            self._self_epoch = epoch = Batches(_counted(self), self.__wrapped__)
        try:
            return next(epoch)
        except StopIteration:
            self._self_epoch = None
            raise


class SizedOwnIterator(OwnIterator):
    def __len__(self) -> int:
        return len(self.__wrapped__)


def _counted(proxy: _Proxy) -> Any:
    """Whose epochs are counted: the iterable's, which may be wrapped anew for each, where it can be told again."""
    try:
        weakref.ref(proxy.__wrapped__)
    except TypeError:
        return proxy
    return proxy.__wrapped__


def wrap(iterable: Any) -> Any:
    """See `otel_dl.loader`."""
    if hasattr(type(iterable), _RECORDED):  # pyright: ignore
        return iterable
    if isinstance(iterable, Iterator):
        return (SizedOwnIterator if isinstance(iterable, Sized) else OwnIterator)(iterable)  # pyright: ignore
    return (Loader if isinstance(iterable, Sized) else UnsizedLoader)(iterable)
