"""A comparison as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from otel_dl.forensics.samples import ranges
from otel_dl.semconv import SpanName
from otel_dl.viewing.comparing.causes import REST, Comparison, Row
from otel_dl.viewing.comparing.pairing import Pairing
from otel_dl.viewing.comparing.steps import Step
from otel_dl.viewing.words import percent, plural

_SHOWN: Final = 0.005
"""Causes of a smaller share of the step are summed up."""
_GAPS_SHOWN: Final = 3
_WARM_SHOWN: Final = 3
_LABEL: Final = 15


def render(comparison: Comparison, profile: str) -> str:
    """Some lines of text; `profile` is what the profile is called."""
    return "\n".join(_lines(comparison, profile))


def _lines(comparison: Comparison, name: str) -> Iterator[str]:
    pairing = comparison.pairing
    former = ""
    for label, text in (*_basis(comparison, name), *_clocks(pairing)):
        yield f"{label if label != former else '':<{_LABEL}}{text}"
        former = label
    yield ""
    device = "device" if comparison.on_device else "profile"
    width = max(len(row.name) for row in (*comparison.rows, comparison.total))
    yield f"{'a step, mean':<{width}}{'otel-dl':>11}{device:>11}{'difference':>13}   where it comes from"
    for row in (comparison.total, *comparison.rows):
        causes = _causes(row, comparison.step_ns)
        yield (
            f"{row.name:<{width}}{_ms(row.trace):>11}{_ms(row.profile):>11}{_signed(row.difference):>13}   {causes}"
        ).rstrip()
    yield ""
    for label, text in _notes(comparison):
        yield f"{label:<{_LABEL}}{text}"


def _basis(comparison: Comparison, name: str) -> Iterator[tuple[str, str]]:
    pairing, process = comparison.pairing, comparison.pairing.process
    yield (
        "Trace",
        f"rank {process.rank}, process {process.pid} of run {process.run}: {_count(pairing)}",
    )
    yield "Profile", f"{name}: {pairing.profile.tool}, {pairing.profile.events:,} events, {_steps(pairing.steps)}"
    by_torch = f", {pairing.by_torch:,} with one of torch's own" if pairing.by_torch else ""
    neither = pairing.spans - pairing.by_name - pairing.by_torch
    without = f", {neither:,} with the operations in them" if neither else ""
    yield (
        "Paired",
        f"of {pairing.spans:,} phases {pairing.by_name:,} with a range of the same name{by_torch}{without}",
    )


def _clocks(pairing: Pairing) -> Iterator[tuple[str, str]]:
    apart = f"; ranges begin {pairing.apart / 1000:,.0f} µs after their spans (median)" if pairing.apart else ""
    if pairing.offset is None:
        yield "Clocks", f"by the profile's own anchor{apart}"
    else:
        anchor = ", beside the profile's own anchor" if pairing.profile.anchored else ""
        yield "Clocks", f"put together by the paired ranges: {pairing.offset / 1e9:+,.6f} s{anchor}{apart}"


def _count(pairing: Pairing) -> str:
    inside, touched = len(pairing.steps), len(pairing.touched)
    return (
        f"{len(pairing.process.steps):,} kept steps, {inside:,} in the profile, {len(pairing.others):,} outside"
        + (f", {touched:,} in which it begins or ends" if touched else "")
    )  # fmt: skip


def _steps(steps: list[Step]) -> str:
    return f"step{plural(len(steps))} {ranges([step.number for step in steps])}"


def _causes(row: Row, step: float) -> str:
    shown = {cause: ns for cause, ns in row.causes.items() if cause != REST and abs(ns) >= _SHOWN * step}
    texts = [f"{cause} {_signed(ns)}" for cause, ns in sorted(shown.items(), key=lambda item: -abs(item[1]))]
    small = sum(ns for cause, ns in row.causes.items() if cause != REST and cause not in shown)
    if shown and abs(small) >= _SHOWN * step:
        texts.append(f"smaller ones {_signed(small)}")
    if abs(row.rest) >= _SHOWN * step or row.name == SpanName.STEP:
        texts.append(f"unexplained {_signed(row.rest)}")
    return ", ".join(texts)


def _notes(comparison: Comparison) -> Iterator[tuple[str, str]]:
    pairing = comparison.pairing
    total = comparison.total
    yield "Unexplained", f"{percent(abs(total.rest) / comparison.step_ns)} of the step"
    if comparison.overhead is None:
        yield "Overhead", "what the profiler adds is not known: no step of the trace is outside of the profile"
    else:
        added = comparison.overhead
        words = (
            f"{_signed(added.ns)} a profiled step ({added.ns / comparison.step_ns:+.0%}), the longer one in"
            f" {added.longer:.0%} of pairs with a step outside of the profile"
        )
        yield "Overhead", words + ("" if added.sure else ": no more than steps differ anyway")
    longest = sorted(comparison.one_time.items(), key=lambda item: -item[1])
    for number, ns in longest[:_WARM_SHOWN]:
        yield "Warm-up", f"{_ms(ns)} of one-time work in step {number}"
    if len(longest) > _WARM_SHOWN:
        rest = longest[_WARM_SHOWN:]
        yield "Warm-up", f"{_ms(sum(ns for _, ns in rest))} in {len(rest):,} more steps"
    for gap, ns in comparison.gaps[:_GAPS_SHOWN]:
        if ns >= _SHOWN * comparison.step_ns:
            where = f"after {gap.after}" if gap.after else "at the beginning of the step"
            what = f"in {gap.function}" if gap.function else "which Python function is not known from this profile"
            yield "No operation", f"{_ms(ns)} a step {where}: {what}"
    if pairing.profile.kernels.unlaunched:
        yield (
            "Not known",
            f"which phase launched {pairing.profile.kernels.unlaunched:,} of {len(pairing.profile.kernels):,} kernels",
        )
    if not comparison.on_device:
        yield "Device", "no work of a device in this profile: queueing and launch gaps are not known from it"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.2f} ms"


def _signed(ns: float) -> str:
    return f"{ns / 1e6:+,.2f} ms".replace("-", "−")
