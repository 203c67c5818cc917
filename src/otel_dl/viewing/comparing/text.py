"""A comparison as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from otel_dl.forensics.samples import ranges
from otel_dl.semconv import SpanName
from otel_dl.viewing.comparing.causes import REST, Comparison, Overhead, Row
from otel_dl.viewing.comparing.device import DeviceRow
from otel_dl.viewing.comparing.meanings import MEANINGS
from otel_dl.viewing.comparing.pairing import Pairing
from otel_dl.viewing.comparing.steps import Step
from otel_dl.viewing.words import Scale, duration, labelled, percent, plural, scale

_SHOWN: Final = 0.005
"""Causes of a smaller share of the step are summed up."""
_GAPS_SHOWN: Final = 3
_WARM_SHOWN: Final = 3


def render(comparison: Comparison, profile: str) -> str:
    """Some lines of text; `profile` is what the profile is called."""
    return "\n".join(_lines(comparison, profile))


def _lines(comparison: Comparison, name: str) -> Iterator[str]:
    yield from labelled((*_basis(comparison, name), *_clocks(comparison.pairing)))
    yield ""
    device = "device" if comparison.on_device else "profile"
    rows = (comparison.total, *comparison.rows)
    width = max(len(row.name) for row in rows)
    unit = scale(max(comparison.step_ns, comparison.total.profile))
    yield f"{'a step, mean':<{width}}{'otel-dl':>11}{device:>11}{'difference':>13}   where it comes from"
    told: dict[str, None] = {}
    for row in rows:
        causes = _shown(row, comparison.step_ns)
        told |= dict.fromkeys(causes)
        yield (
            f"{row.name:<{width}}{unit.duration(row.trace):>11}{unit.duration(row.profile):>11}"
            f"{unit.signed(row.difference):>13}   {_causes(row, causes, comparison.step_ns, unit)}"
        ).rstrip()
    if comparison.on_device and comparison.device:
        yield ""
        yield from _device(comparison.device)
    yield ""
    yield from labelled(_notes(comparison))
    known = [cause for cause in MEANINGS if cause in told]
    if known:
        yield ""
        yield "What is meant (+: otel-dl's time has it and the profile's has not; −: the other way round)"
        indent = max(len(cause) for cause in known) + 2
        for cause in known:
            yield f"  {cause:<{indent}}{MEANINGS[cause]}"


def _device(rows: list[DeviceRow]) -> Iterator[str]:
    unit = scale(max(max(row.trace, row.kernels) for row in rows))
    width = max(len("on the device"), *(len(row.name) for row in rows))
    yield f"{'on the device':<{width}}{'otel-dl':>11}{'kernels':>11}{'difference':>13}   mean of the profiled steps"
    for row in rows:
        yield (
            f"{row.name:<{width}}{unit.duration(row.trace):>11}{unit.duration(row.kernels):>11}"
            f"{unit.signed(row.trace - row.kernels):>13}   of {row.steps:,}"
        )
    yield "otel-dl: dl.device.duration_ms, between the two moments at which the phase's stream comes to its ends;"
    yield "kernels: how long ran what the phase launched. +: the device idled; −: it ran on other streams as well"


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
    apart = f"; ranges begin {duration(pairing.apart)} after their spans (median)" if pairing.apart else ""
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


def _shown(row: Row, step: float) -> Mapping[str, float]:
    return {cause: ns for cause, ns in row.causes.items() if cause != REST and abs(ns) >= _SHOWN * step}


def _causes(row: Row, shown: Mapping[str, float], step: float, unit: Scale) -> str:
    texts = [f"{cause} {unit.signed(ns)}" for cause, ns in sorted(shown.items(), key=lambda item: -abs(item[1]))]
    small = sum(ns for cause, ns in row.causes.items() if cause != REST and cause not in shown)
    if shown and abs(small) >= _SHOWN * step:
        texts.append(f"smaller ones {unit.signed(small)}")
    if abs(row.rest) >= _SHOWN * step or row.name == SpanName.STEP:
        texts.append(f"unexplained {unit.signed(row.rest)}")
    return ", ".join(texts)


def _notes(comparison: Comparison) -> Iterator[tuple[str, str]]:
    pairing = comparison.pairing
    total = comparison.total
    yield "Unexplained", f"{percent(abs(total.rest) / comparison.step_ns)} of the step"
    if comparison.overhead is None:
        yield "Overhead", "what the profiler adds is not known: no step of the trace is outside of the profile"
    else:
        yield "Overhead", _overhead(comparison.overhead, comparison.step_ns)
    longest = sorted(comparison.one_time.items(), key=lambda item: -item[1])
    for number, ns in longest[:_WARM_SHOWN]:
        yield "Warm-up", f"{duration(ns)} of one-time work in step {number}"
    if len(longest) > _WARM_SHOWN:
        rest = longest[_WARM_SHOWN:]
        yield "Warm-up", f"{duration(sum(ns for _, ns in rest))} in {len(rest):,} more steps"
    for gap, ns in comparison.gaps[:_GAPS_SHOWN]:
        if ns >= _SHOWN * comparison.step_ns:
            where = f"after {gap.after}" if gap.after else "at the beginning of the step"
            what = f"in {gap.function}" if gap.function else "which Python function is not known from this profile"
            yield "No operation", f"{duration(ns)} a step {where}: {what}"
    if pairing.profile.kernels.unlaunched:
        yield (
            "Not known",
            f"which phase launched {pairing.profile.kernels.unlaunched:,} of {len(pairing.profile.kernels):,} kernels",
        )
    if not comparison.on_device:
        yield "Device", "no work of a device in this profile: queueing and launch gaps are not known from it"
        for row in comparison.device[:1]:
            yield (
                "Device",
                f"the trace has the device's time ({duration(row.trace)} of a {row.name}); to see kernels beside it,"
                " profile the device as well (ProfilerActivity.CUDA)",
            )


def _overhead(added: Overhead, step: float) -> str:
    of_pairs = f"of one of each, it is the longer in {added.longer:.0%} of pairs"
    if added.sure:
        return f"a profiled step is {duration(added.ns)} ({added.ns / step:.0%}) longer than others ({of_pairs})"
    longer = "longer" if added.ns >= 0 else "shorter"
    return (
        f"whether the profiler slows steps down can't be told from these: a profiled one is {duration(abs(added.ns))}"
        f" {longer} than others, and by so much they differ anyway ({of_pairs})"
    )
