"""What a trace says, as one line: `next zero_grad forward backward(forward) optimizer`, in the order of the starts.

A phase that ran inside another stands in its parentheses, one that an exception left has a `!`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SHORT = {
    "dataloader.next": "next",
    "dataloader.fetch": "fetch",
    "optimizer.step": "optimizer",
    "optimizer.zero_grad": "zero_grad",
    "lr_scheduler.step": "scheduler",
}


def lines(spans: Iterable[Any], root: str) -> list[str]:
    """One line for each trace whose first span has the name `root`, in their order."""
    children: dict[int, list[Any]] = {}
    roots: list[Any] = []
    for span in spans:
        if span.name == root:
            roots.append(span)
        elif span.parent is not None:
            children.setdefault(span.parent.span_id, []).append(span)
    return [_below(span, children) for span in sorted(roots, key=lambda span: span.start_time)]


def _below(span: Any, children: dict[int, list[Any]]) -> str:
    return " ".join(_phase(child, children) for child in sorted(children.get(span.context.span_id, ()), key=_order))


def _order(span: Any) -> int:
    return span.start_time


def _phase(span: Any, children: dict[int, list[Any]]) -> str:
    text = SHORT.get(span.name, span.name)
    if not span.status.is_unset:
        text += "!"
    below = _below(span, children)
    # Who read the batch says nothing about the step.
    return text if below in ("", "fetch", "fetch!") else f"{text}({below})"
