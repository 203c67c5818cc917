"""Autotuning of Triton kernels: the user's own (`triton.autotune`) and inductor's, each time one is tuned.

`run` of either is called at each launch of a kernel and is left alone; what is replaced is called to tune only:

- `triton.runtime.autotuner.Autotuner`: `prune_configs` once, then `_bench` for each configuration (Triton 3.0.0 and
  3.9.0).
- `torch._inductor.runtime.triton_heuristics.CachingAutotuner`: `autotune_to_one_config` (torch 2.4.1 and 2.15.0), and
  `_coordinate_descent_tuning` (2.15.0; before, what it was part of is called at each launch of some kernels).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from otel_dl.patches.compilation.one_time import OneTime, Stretch, Work
from otel_dl.places import code_attributes
from otel_dl.semconv import SpanName

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run


class Autotuning(OneTime):
    """`triton.autotune`: a kernel's configurations were tried."""

    __slots__ = ("configurations", "kernel", "line", "path")
    name = SpanName.AUTOTUNE

    def __init__(self, kernel: str, path: str, line: int, configurations: int) -> None:
        self.kernel = kernel
        self.path = path
        self.line = line
        self.configurations = configurations

    @classmethod
    def of(cls, tuner: Any, configurations: int) -> Autotuning:
        """`tuner` has the kernel, perhaps within other wrappers of Triton's, as `fn`."""
        function: Any = getattr(tuner, "fn", None)
        while not isinstance(function, FunctionType) and getattr(function, "fn", None) is not None:
            function = function.fn
        code = getattr(function, "__code__", None)
        return cls(
            str(getattr(function, "__name__", "?")),
            code.co_filename if code is not None else "",
            code.co_firstlineno if code is not None else 0,
            configurations,
        )

    def attributes(self) -> dict[str, Any]:
        attributes = {"code.function.name": self.kernel, "dl.autotune.configurations": self.configurations}
        return attributes | code_attributes(self.path, self.line, self.kernel)


def install(run: Run, patches: Patches) -> None:
    """Once they are imported, which otel-dl never does."""

    patches.when_imported("triton.runtime.autotuner", lambda module: _patch_triton(run, patches, module.Autotuner))
    patches.when_imported(
        "torch._inductor.runtime.triton_heuristics",
        lambda module: _patch_inductor(run, patches, module.CachingAutotuner),
    )


def _patch_inductor(run: Run, patches: Patches, tuner: Any) -> None:
    for name in ("autotune_to_one_config", "_coordinate_descent_tuning"):
        if hasattr(tuner, name):
            patches.replace(tuner, name, _tuned(run, patches, getattr(tuner, name)))


def _tuned(run: Run, patches: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that tries the configurations, all of them."""

    @functools.wraps(original)
    def tune(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = _Tuning(run, self)
        patches.guard(work.begin)
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            patches.guard(work.over, error)
            raise
        patches.guard(work.over)
        return result

    return tune


class _Tuning(Work):
    __slots__ = ("_configurations", "_tuner")

    def __init__(self, run: Run, tuner: Any) -> None:
        super().__init__(run)
        self._tuner = tuner
        self._configurations = len(getattr(tuner, "launchers", ()))

    def over(self, error: BaseException | None = None) -> None:
        try:
            self.end(Autotuning.of(self._tuner, self._configurations), error)
        finally:
            self.drop()


class _Tried(Stretch):
    """How much of a user's kernel is tuned."""

    configurations = 0
    tried = 0


def _patch_triton(run: Run, patches: Patches, tuner: Any) -> None:
    prune, bench = tuner.prune_configs, tuner._bench
    tried = _Tried(run)

    def pruned(found: Any) -> None:
        tried.configurations, tried.tried = len(found), 0

    def benched(self: Any, error: BaseException | None = None) -> None:
        tried.tried += 1
        if error is not None or tried.tried == tried.configurations:
            tried.end(self, lambda: Autotuning.of(self, tried.tried), error)

    @functools.wraps(prune)
    def prune_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        patches.guard(tried.begin, self)
        found = prune(self, *args, **kwargs)
        patches.guard(pruned, found)
        return found

    @functools.wraps(bench)
    def _bench(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = bench(self, *args, **kwargs)
        except BaseException as error:
            patches.guard(benched, self, error)
            raise
        patches.guard(benched, self)
        return result

    patches.replace(tuner, "prune_configs", prune_configs)
    patches.replace(tuner, "_bench", _bench)
