"""The capture of CUDA graphs: `torch.cuda.graph`, `torch.cuda.make_graphed_callables`, inductor's graph trees
(`mode="reduce-overhead"`) and `CUDAGraph.capture_begin` itself. A replay is left alone.

All come through `torch.cuda.CUDAGraph` (torch/cuda/graphs.py, 2.4.1 and 2.15.0).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from otel_dl.patches.compilation.one_time import OneTime, Stretch
from otel_dl.patches.groups import ask
from otel_dl.semconv import SpanName

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run


class Capture(OneTime):
    """`cuda.graph.capture`: work was recorded instead of being run, after the wait and the cleaning before it."""

    __slots__ = ("device",)
    name = SpanName.CAPTURE

    def __init__(self, device: str) -> None:
        self.device = device

    def attributes(self) -> dict[str, Any]:
        return {"dl.device": self.device} if self.device else {}


def install(run: Run, patches: Patches) -> None:
    patches.when_imported("torch.cuda.graphs", lambda module: _patch(run, patches, module))


def _patch(run: Run, patches: Patches, graphs: Any) -> None:
    capturing = Stretch(run)

    def begin_in(context: Any) -> None:
        capturing.begin(context.cuda_graph)

    def begin_alone(graph: Any) -> None:
        if not capturing.has_begun(graph):
            capturing.begin(graph)

    def beginning(original: Callable[..., Any], begins: Callable[[Any], None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            patches.guard(begins, self)
            try:
                return original(self, *args, **kwargs)
            except BaseException:
                patches.guard(capturing.drop)
                raise

        return begin

    def ending(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(self, *args, **kwargs)
            except BaseException as error:
                patches.guard(capturing.end, self, _here, error)
                raise
            patches.guard(capturing.end, self, _here)
            return result

        return capture_end

    graph, context = graphs.CUDAGraph, graphs.graph
    patches.replace(graph, "capture_begin", beginning(graph.capture_begin, begin_alone))
    patches.replace(graph, "capture_end", ending(graph.capture_end))
    patches.replace(context, "__enter__", beginning(context.__enter__, begin_in))


def _here() -> Capture:
    import torch

    # Where CUDA is not initialised, asking for the device would do that.
    here = torch.cuda.is_initialized()
    return Capture(ask(lambda: f"cuda:{torch.cuda.current_device()}", "") if here else "")
