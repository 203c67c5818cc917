"""The environment of a worker: the entries that are OpenTelemetry's stay, whatever the user's code clears."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from otel_dl.settings import described
from otel_dl.workers import carrier as carriers

_VARIABLE = next(row.variable for row in described() if row.keyword == "restore_env")


class Environment:
    """Puts back what of the four kinds is removed from `os.environ`; `warn` is told who removed it."""

    def __init__(self, wanted: Mapping[str, str], warn: Callable[[str], None]) -> None:
        self._wanted = dict(wanted)
        self._warn = warn
        self._warned = False
        # The dict behind it: its length costs 10 ns, that of os.environ 80, and every fetch asks.
        self.entries: Any = getattr(os.environ, "_data", os.environ)
        self.count = len(self.entries)

    def changed(self) -> bool:
        """Whether the number of entries is another one than after the last `restore`."""
        return len(self.entries) != self.count

    def restore(self, who: str) -> None:
        """Puts back what is missing. `who`: which function of the user's ran, in the words of the warning."""
        missing = carriers.put_back(os.environ, self._wanted)
        self.count = len(self.entries)
        if missing and not self._warned:
            self._warned = True
            self._warn(
                f"otel-dl: {who} removed {', '.join(sorted(missing))} from the environment of a DataLoader worker; they"
                f" were put back, and nothing else. Where they are to stay away, set {_VARIABLE}=false."
            )


def initialiser(function: Any) -> str:
    """What a warning calls the worker_init_fn."""
    return f"the worker_init_fn {_name(function)}"


def unpickling(dataset: Any) -> str:
    """What a warning calls what ran before anything else in a spawned worker."""
    return f"the unpickling of the worker, with its dataset {_name(cast('type[Any]', type(dataset)))},"


def reader(dataset: Any, collate: Any) -> str:
    """What a warning calls that which reads a batch of `dataset`."""
    from torch.utils.data import IterableDataset

    kind = cast("type[Any]", type(dataset))
    if isinstance(dataset, IterableDataset):
        method = "__iter__"
    else:
        # As torch/utils/data/_utils/fetch.py chooses.
        method = "__getitems__" if hasattr(kind, "__getitems__") else "__getitem__"
    who = f"{_name(kind)}.{method}"
    if collate is not None and not getattr(collate, "__module__", "").startswith("torch.utils.data."):
        who += f" or the collate_fn {_name(collate)}"
    return who


def _name(of: Any) -> str:
    while isinstance(of, functools.partial):
        of = cast("functools.partial[Any]", of).func
    where: str = getattr(of, "__module__", None) or type(of).__module__
    return f"{where}.{getattr(of, '__qualname__', type(of).__qualname__)}"
