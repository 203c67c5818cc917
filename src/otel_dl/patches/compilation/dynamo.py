"""torch.compile: what was compiled, how long it took, why again, from which cache.

Two places of torch (the same in 2.4.1 and 2.15.0) see every compilation, and no call of what is compiled:

- `torch._dynamo.convert_frame._compile`: a frame is compiled, forward and, with most backends, nothing else.
- `track_graph_compiling`, of `torch._functorch._aot_autograd.runtime_wrappers`: there it stands around a backward that
  is compiled when it is first needed, in the thread that runs the backward.

torch's own callbacks (`torch._dynamo.callback`) say less: nothing of a backward before 2.8, one of several threads that
compile at a time, and none after `torch._dynamo.reset()`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_dl.log import logger
from otel_dl.patches.compilation.one_time import OneTime, Work, current
from otel_dl.patches.groups import ask
from otel_dl.places import code_attributes
from otel_dl.semconv import SpanName

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run

REASON: Final = 256
"""Characters of a reason at most."""
REMEMBERED: Final = 1_024
"""Compiled frames whose backward may be compiled later."""

_REASONS: Final = ("get_and_maybe_log_recompilation_reasons", "get_and_maybe_log_recompilation_reason")
"""What says why a frame is compiled again; the second name is of torch 2.4."""


class Function(NamedTuple):
    """What is compiled."""

    name: str
    path: str
    line: int
    compile_id: str
    """torch's number of it: the frame's, and how often that had been compiled before: `0/1`."""
    reason: str | None
    """Why it is compiled again; None where it is not."""


class Compilation(OneTime):
    """`torch.compile`: of a frame, or of its backward."""

    __slots__ = ("breaks", "cache", "function", "part")
    name = SpanName.COMPILE

    def __init__(self, function: Function, part: str, breaks: int | None, cache: str) -> None:
        self.function = function
        self.part = part
        self.breaks = breaks
        self.cache = cache

    def attributes(self) -> dict[str, Any]:
        function = self.function
        attributes: dict[str, Any] = {
            "dl.compile.name": f"{function.name} [{function.compile_id}]{self.part}",
            "dl.compile.recompiled": function.reason is not None,
        }
        attributes |= code_attributes(function.path, function.line, function.name)
        if function.reason:
            attributes["dl.compile.reason"] = function.reason
        if self.breaks is not None:
            attributes["dl.compile.graph_breaks"] = self.breaks
        if self.cache:
            attributes["dl.compile.cache"] = self.cache
        return attributes


def install(run: Run, patches: Patches) -> None:
    """Once torch's compiler is imported, which otel-dl never does: it takes seconds."""
    compiler = _Compiler(run, patches)
    patches.when_imported("torch._dynamo.convert_frame", compiler.patch_frames)
    patches.when_imported("torch._functorch._aot_autograd.runtime_wrappers", compiler.patch_backward)


class _Compiler:
    def __init__(self, run: Run, patches: Patches) -> None:
        self._run = run
        self._patches = patches
        self._known: dict[str, Function] = {}
        """By compile id, which torch gives out anew after `torch._dynamo.reset()`: the latest."""

    def patch_frames(self, convert_frame: Any) -> None:
        reasons = next((name for name in _REASONS if hasattr(convert_frame, name)), None)
        if reasons is None or not hasattr(convert_frame, "_compile"):
            logger.info("otel-dl: this torch compiles in another way; torch.compile is not recorded.")
            return
        self._patches.replace(convert_frame, "_compile", self._compile(convert_frame._compile))
        self._patches.replace(convert_frame, reasons, self._reasons(getattr(convert_frame, reasons)))

    def patch_backward(self, runtime_wrappers: Any) -> None:
        original = getattr(runtime_wrappers, "track_graph_compiling", None)
        if original is not None:
            self._patches.replace(runtime_wrappers, "track_graph_compiling", self._tracking(original))

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        guard = self._patches.guard

        @functools.wraps(original)
        def compile_frame(*args: Any, **kwargs: Any) -> Any:
            compiling = _Compiling(self._run, self._known)
            guard(compiling.begin_frame, args, kwargs)
            # torch's log of who called shows as many frames fewer as it is told of wrappers like this one.
            if "skip" in kwargs:
                kwargs["skip"] += 1
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                guard(compiling.over, error)
                raise
            guard(compiling.over)
            return result

        return compile_frame

    def _reasons(self, original: Callable[..., Any]) -> Callable[..., Any]:
        guard = self._patches.guard

        @functools.wraps(original)
        def reasons(*args: Any, **kwargs: Any) -> Any:
            guard(_told_again, None)
            found = original(*args, **kwargs)
            guard(_told_again, found)
            return found

        return reasons

    def _tracking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def track_graph_compiling(*args: Any, **kwargs: Any) -> Any:
            return _Tracked(self._patches, _Compiling(self._run, self._known), original(*args, **kwargs))

        return track_graph_compiling


class _Tracked:
    """torch's context around a backward that is compiled."""

    def __init__(self, patches: Patches, compiling: _Compiling, inner: Any) -> None:
        self._patches = patches
        self._compiling = compiling
        self._inner = inner

    def __enter__(self) -> Any:
        self._patches.guard(self._compiling.begin_backward)
        try:
            return self._inner.__enter__()
        except BaseException:
            self._patches.guard(self._compiling.drop)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> Any:
        self._patches.guard(self._compiling.over, error)
        return self._inner.__exit__(kind, error, traceback)


class _Compiling(Work):
    """A compilation, from its begin on."""

    __slots__ = ("_before", "_function", "_known", "_part", "_reason")

    def __init__(self, run: Run, known: dict[str, Function]) -> None:
        super().__init__(run)
        self._known = known
        self._function: Function | None = None
        self._part = ""
        self._reason: str | None = None
        self._before = _Counts(0, 0, 0, 0)

    def begin_frame(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        code = args[0] if args else kwargs.get("code")
        if isinstance(code, CodeType):
            # Without the file, a name like `forward` says little.
            name = getattr(code, "co_qualname", code.co_name)  # of Python 3.11
            compile_id = ask(lambda: str(kwargs["compile_id"]), "?")
            self._function = Function(name, code.co_filename, code.co_firstlineno, compile_id, None)
            self._before = _counts()
            self.begin()

    def begin_backward(self) -> None:
        compile_id = ask(lambda: str(sys.modules["torch._guards"].CompileContext.current_compile_id()), "?")
        self._function = self._known.get(compile_id) or Function("?", "", 0, compile_id, None)
        self._reason = self._function.reason
        self._part = " backward"
        self._before = _counts()
        self.begin()

    def again(self, reason: str) -> None:
        """torch compiles this frame again, and says why."""
        self._reason = reason

    def over(self, error: BaseException | None = None) -> None:
        try:
            if self._function is not None and self.outermost:
                function = self._function._replace(reason=self._reason)
                since = _counts().since(self._before)
                self.end(Compilation(function, self._part, None if self._part else since.breaks, since.cache), error)
                if not self._part:
                    self._remember(function)
        finally:
            self.drop()

    def _remember(self, function: Function) -> None:
        if len(self._known) >= REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[function.compile_id] = function


def _told_again(reasons: Any) -> None:
    """torch asked why the frame in hand has to be compiled again: these reasons, the latest compilation's first."""
    compiling = current()
    if isinstance(compiling, _Compiling):
        first = next(iter(reasons), "") if reasons is not None else ""
        # Below the first line stands where in the user's code the condition comes from.
        compiling.again(" ".join(str(first).partition("\n")[0].split())[:REASON])


class _Counts(NamedTuple):
    """What torch counts in `torch._dynamo.utils.counters`, for the whole process."""

    breaks: int
    hits: int
    misses: int
    bypasses: int
    """Of inductor's cache of compiled graphs."""

    def since(self, before: _Counts) -> _Counts:
        return _Counts(*(max(0, now - then) for now, then in zip(self, before, strict=True)))

    @property
    def cache(self) -> str:
        return "miss" if self.misses else "bypass" if self.bypasses else "hit" if self.hits else ""


def _counts() -> _Counts:
    counters = sys.modules["torch._dynamo.utils"].counters
    inductor = counters.get("inductor", {})  # as an item it would be there from now on
    return _Counts(
        sum(counters.get("graph_break", {}).values()),
        inductor.get("fxgraph_cache_hit", 0),
        inductor.get("fxgraph_cache_miss", 0),
        inductor.get("fxgraph_cache_bypass", 0),
    )
