"""Ranks that `torch.multiprocessing.spawn` and `start_processes` start are instrumented as their parent is.

torch gives each process the function `_wrap` as its target (torch/multiprocessing/spawn.py, 2.15). A forked
child has inherited everything, and a run of its own since the fork; a fresh interpreter is instrumented before the
user's function begins.
"""

from __future__ import annotations

import functools
import importlib
import pickle
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from otel_dl.autoload import switch_on

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run


_MODULE = "torch.multiprocessing.spawn"  # `torch.multiprocessing.spawn` itself is the function


def install(run: Run, patches: Patches, keywords: Mapping[str, Any], set_up_sdk: str) -> None:
    """Passes `keywords` of `instrument()` and `set_up_sdk` on to ranks."""
    module = importlib.import_module(_MODULE)
    patches.replace(module, "_wrap", Rank(module._wrap, {**keywords, "set_up_sdk": set_up_sdk}))


class Rank:
    """Stands where torch's `_wrap` did. Pickled as what a fresh interpreter needs: see `workers.entry.WorkerLoop`."""

    def __init__(self, original: Callable[..., None], keywords: dict[str, Any]) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._keywords = keywords

    def __call__(self, *args: Any) -> None:
        return self._original(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        keywords = {name: value for name, value in self._keywords.items() if _can_be_pickled(value)}
        return FreshRank, (keywords,)


class FreshRank:
    """The same in the fresh interpreter."""

    def __init__(self, keywords: dict[str, Any]) -> None:
        self._keywords = keywords

    def __call__(self, *args: Any) -> None:
        switch_on(**self._keywords)
        importlib.import_module(_MODULE)._wrap(*args)


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
