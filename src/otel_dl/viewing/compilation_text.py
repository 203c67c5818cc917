"""What was compiled, autotuned and captured, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from otel_dl.viewing.compilations import Compilations, Function
from otel_dl.viewing.words import duration, plural

_FUNCTIONS_SHOWN: Final = 4
_REASONS_SHOWN: Final = 4


def rows(compilations: Compilations) -> Iterator[tuple[str, str]]:
    """(label, text)."""
    compiled, autotuned, captured = compilations.compiled, compilations.autotuned, compilations.captured
    if compiled.spans:
        more = [f"{compilations.recompilations:,} of them again", _breaks(compilations.graph_breaks)]
        if compilations.cache:
            cached = ", ".join(f"{count:,} {what}" for what, count in compilations.cache.items())
            more.append(f"inductor's cache: {cached}")
        yield (
            "Compilation",
            f"{compiled.spans:,} by torch.compile, {duration(compiled.time_ns)} in all ({'; '.join(more)})",
        )
    for function in compilations.functions[:_FUNCTIONS_SHOWN]:
        yield "Compiled", _function(function)
    if len(compilations.functions) > _FUNCTIONS_SHOWN:
        rest = len(compilations.functions) - _FUNCTIONS_SHOWN
        yield "Compiled", f"and {rest:,} more function{plural(rest)}"
    if autotuned.spans:
        kernels = f"{autotuned.spans:,} Triton kernel{plural(autotuned.spans)}"
        yield "Autotuning", f"{kernels}, {duration(autotuned.time_ns)} in all"
    if captured.spans:
        graphs = f"{captured.spans:,} CUDA graph{plural(captured.spans)}"
        yield "Capture", f"{graphs}, {duration(captured.time_ns)} in all"


def _function(function: Function) -> str:
    file = f" ({function.file})" if function.file else ""
    words = f"{function.name or '?'}{file}: {function.count:,}, {duration(function.total_ns)}"
    if function.graph_breaks:
        words += f", {_breaks(function.graph_breaks)}"
    if function.failed:
        words += f", {function.failed:,} failed"
    if function.recompilations:
        words += f", {function.recompilations:,} again"
        reasons = function.reasons.most_common()
        for reason, count in reasons[:_REASONS_SHOWN]:
            words += f", {'because' if count == function.recompilations else f'{count:,} because'}: {reason}"
        if len(reasons) > _REASONS_SHOWN:
            rest = len(reasons) - _REASONS_SHOWN
            words += f", and for {rest:,} more reason{plural(rest)}"
    return words


def _breaks(count: int) -> str:
    return f"{count:,} graph break{plural(count)}"
