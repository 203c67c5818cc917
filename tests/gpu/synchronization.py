"""Waits for the device where it is real: each kind of wait behind a kernel of known length, on one NVIDIA GPU.

One of the parts of `device.py`. Imports, and needs nothing, without a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from support.inprocess import recording
from torch import nn

import otel_dl

if TYPE_CHECKING:
    from table import Table

KERNEL_MS = 50.0
OFF_MS = 3.0
"""How far off a wait may be: the launch, the copy, and what the host takes to return."""

Case = tuple[str, Callable[[], object], bool]


def _cycles() -> int:
    """Of `torch.cuda._sleep`, so that it lasts KERNEL_MS."""
    lengths: list[float] = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
        lengths.append(begin.elapsed_time(end))
    return int(20_000_000 * KERNEL_MS / statistics.median(lengths))


def _cases() -> list[Case]:
    """(operation, call, whether it is told how much of it was copying); a line for each, which is the truth.

    Small, so that the 50 ms are the wait: `a_copy_is_told_from_waiting` looks at the other side."""
    x = torch.arange(8.0, device="cuda")
    one, flag = torch.tensor(1, device="cuda"), torch.tensor(True, device="cuda")
    mask, host, pinned = x > 3, torch.zeros(8), torch.zeros(8, pin_memory=True)
    repeats, square = torch.ones(8, dtype=torch.long, device="cuda"), torch.eye(4, device="cuda")
    parameter = nn.Parameter(torch.ones(8, device="cuda"))
    parameter.grad = torch.ones(8, device="cuda")
    optimizer = torch.optim.SGD([parameter], 0.1)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(x)
    event, stream = torch.cuda.Event(), torch.cuda.current_stream()
    return [
        ("Tensor.item", lambda: one.item(), True),
        ("Tensor.__bool__", lambda: bool(flag), True),
        ("Tensor.__int__", lambda: int(one), True),
        ("Tensor.__float__", lambda: float(one), True),
        ("Tensor.__index__", lambda: [1, 2][one], True),
        ("Tensor.__complex__", lambda: complex(one), True),
        ("Tensor.tolist", lambda: x.tolist(), True),
        ("Tensor.cpu", lambda: x.cpu(), True),
        ("Tensor.numpy", lambda: x.numpy(force=True), True),
        ("Tensor.to", lambda: x.to("cpu"), True),
        ("Tensor.to", lambda: x.to("cpu", torch.float64), True),
        ("Tensor.to", lambda: x[::2].to("cpu"), True),
        ("Tensor.to", lambda: host.to("cuda"), True),
        ("Tensor.to", lambda: host.to("cuda", torch.float16), True),
        ("Tensor.to", lambda: pinned.to("cuda"), True),
        ("Tensor.cuda", lambda: host.cuda(), True),
        ("Tensor.copy_", lambda: host.copy_(x), True),
        ("Tensor.copy_", lambda: x.copy_(host), True),
        ("Tensor.copy_", lambda: x[::2].copy_(host[::2]), True),
        ("Tensor.new_tensor", lambda: x.new_tensor([1.0, 2.0]), True),
        ("Tensor.nonzero", lambda: x.nonzero(), False),
        ("Tensor.masked_select", lambda: x.masked_select(mask), False),
        ("Tensor.unique", lambda: x.unique(), False),
        ("Tensor.equal", lambda: x.equal(x), False),
        ("Tensor.__getitem__", lambda: x[mask], False),
        ("Tensor.__repr__", lambda: repr(x), False),
        ("torch.nonzero", lambda: torch.nonzero(x), False),
        ("torch.where", lambda: torch.where(mask), False),
        ("torch.argwhere", lambda: torch.argwhere(x), False),
        ("torch.masked_select", lambda: torch.masked_select(x, mask), False),
        ("torch.equal", lambda: torch.equal(x, x + 0), False),
        ("torch.allclose", lambda: torch.allclose(x, x), False),
        ("torch.is_nonzero", lambda: torch.is_nonzero(one), True),
        ("torch.bincount", lambda: torch.bincount(repeats), False),
        ("torch.repeat_interleave", lambda: torch.repeat_interleave(x, repeats), False),
        ("torch.unique", lambda: torch.unique(x), False),
        ("torch.unique", lambda: torch.unique(square, dim=0), False),
        ("torch.unique_consecutive", lambda: torch.unique_consecutive(x), False),
        ("torch.nn.functional.one_hot", lambda: nn.functional.one_hot(repeats), False),
        ("torch.linalg.inv", lambda: torch.linalg.inv(square), False),
        ("torch.linalg.cholesky", lambda: torch.linalg.cholesky(square), False),
        ("torch.linalg.solve", lambda: torch.linalg.solve(square, square), False),
        ("torch.linalg.lu_factor", lambda: torch.linalg.lu_factor(square), False),
        ("torch.linalg.ldl_factor", lambda: torch.linalg.ldl_factor(square), False),
        ("torch.linalg.eigh", lambda: torch.linalg.eigh(square), False),
        ("torch.linalg.svd", lambda: torch.linalg.svd(square), False),
        ("torch.linalg.pinv", lambda: torch.linalg.pinv(square), False),
        ("torch.linalg.inv_ex", lambda: torch.linalg.inv_ex(square, check_errors=True), False),
        ("torch.tensor", lambda: torch.tensor([1.0, 2.0], device="cuda"), True),
        ("torch.tensor", lambda: torch.tensor([one, one]), True),
        ("torch.as_tensor", lambda: torch.as_tensor(host, device="cuda"), True),
        ("Tensor.item", lambda: scaler.step(optimizer) or scaler.update(), True),
        ("Tensor.__bool__", lambda: nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True), True),
        ("torch.cuda.synchronize", lambda: torch.cuda.synchronize(), True),
        ("torch.cuda.Stream.synchronize", lambda: stream.synchronize(), True),
        ("torch.cuda.Event.synchronize", lambda: (event.record(), event.synchronize()), True),
    ]


def each_waits_for_what_is_queued(table: Table) -> None:
    cycles, cases = _cycles(), _cases()
    for _, call, _ in cases:
        call()
    truth: list[float] = []
    one = torch.tensor(1, device="cuda")
    with recording() as recorded:
        for _, call, _ in cases:
            torch.cuda.synchronize()
            with otel_dl.step():
                torch.cuda._sleep(cycles)
                began = time.perf_counter()
                call()
                truth.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
        with otel_dl.step():
            one.item()  # the events of the last split are read here
    steps = sorted(recorded.named("train.step"), key=lambda step: step.attributes["dl.step"])
    for (operation, call, split), took, step in zip(cases, truth, steps, strict=False):
        line = call.__code__.co_firstlineno
        waits = [
            each.attributes | {"ms": (each.end_time - each.start_time) / 1e6}
            for each in recorded.named("cuda.synchronize")
            if each.context.trace_id == step.context.trace_id
        ]
        told = [(wait["dl.sync.op"], wait.get("code.line.number"), wait.get("dl.device")) for wait in waits]
        table.add(f"{operation} is one span, of line {line}", told, (operation, line, "cuda:0"),
                  told == [(operation, line, "cuda:0")])  # fmt: skip
        if len(waits) != 1:
            continue
        table.add(f"{operation} waits for the kernel", f"{waits[0]['ms']:.2f} ms", f"{took:.2f} ms, over {KERNEL_MS}",
                  abs(waits[0]["ms"] - took) < 1 and waits[0]["ms"] > KERNEL_MS - OFF_MS)  # fmt: skip
        if split:
            wait, copy = waits[0].get("dl.sync.wait_ms", 0.0), waits[0].get("dl.sync.copy_ms", 0.0)
            ok = abs(wait - KERNEL_MS) < OFF_MS and copy < OFF_MS
            table.add(f"{operation}: waiting and copying", f"{wait:.2f} and {copy:.2f} ms",
                      f"{KERNEL_MS:g} and 0, ± {OFF_MS:g}", ok)  # fmt: skip


def a_copy_is_told_from_waiting(table: Table) -> None:
    """The other way around: nothing is queued, and there is much to copy, out of pageable memory or into it."""
    large, one = torch.ones(256 * 2**20, dtype=torch.uint8, device="cuda"), torch.tensor(1, device="cuda")
    host = large.cpu()
    copies: dict[str, Callable[[], object]] = {
        "cpu()": lambda: large.cpu(),
        'to("cpu")': lambda: large.to("cpu"),
        'to("cuda")': lambda: host.to("cuda"),
        "copy_(host)": lambda: large.copy_(host),
    }
    for name, copy in copies.items():
        copy()
        torch.cuda.synchronize()
        with recording() as recorded:
            with otel_dl.step():
                copy()
            torch.cuda.synchronize()
            with otel_dl.step():
                one.item()
        wait = max(recorded.named("cuda.synchronize"), key=lambda each: each.end_time - each.start_time)
        ms, said = (wait.end_time - wait.start_time) / 1e6, wait.attributes
        table.add(f"256 MiB.{name} with nothing queued is copying", f"{said.get('dl.sync.copy_ms', 0.0):.2f} ms",
                  f"most of {ms:.2f} ms", said.get("dl.sync.copy_ms", 0.0) > 0.8 * ms)  # fmt: skip


def nothing_is_waited_for_on_top(table: Table) -> None:
    """What needs no wait takes no longer, and what does, no longer than the device needs."""
    cycles = _cycles()
    x, host = torch.ones(8, device="cuda"), torch.zeros(8, pin_memory=True)
    with recording():
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        began = time.perf_counter()
        for _ in range(100):
            host.to("cuda", non_blocking=True)
            x[0], x.to(torch.float64), x[x.long()], torch.where(x > 0, x, x), torch.repeat_interleave(x, 2)
        queued = (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
    table.at_most("100 times what is not waited for, behind the kernel", queued, KERNEL_MS / 2)

    def loop() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(2_000):
            with otel_dl.step():
                (x + 1).sum().item()
        return (time.perf_counter() - began) / 2_000 * 1e6

    added: list[float] = []
    loop()
    for turn in range(10):
        took: dict[str, float] = {}
        for mode in ("off", "on") if turn % 2 else ("on", "off"):
            with recording(sync=mode):
                took[mode] = loop()
        added.append(took["on"] - took["off"])
    table.at_most("added to a kept step's .item() (median of 10 pairs)", statistics.median(added), 30, "us")


def deep(table: Table) -> None:
    """Last: torch's GPU trace stays on until the process ends."""
    x = torch.arange(8.0, device="cuda")
    with recording(sync="deep") as recorded:
        with otel_dl.step():
            torch.ops.aten.nonzero(x)
        with otel_dl.step():
            torch.isin(x, x.repeat(100))
        with otel_dl.step():
            x.sum().item()
    told: dict[int, list[Any]] = {}
    for each in recorded.named("cuda.synchronize"):
        told.setdefault(each.context.trace_id, []).append(each.attributes["dl.sync.op"])
    steps = [step.context.trace_id for step in recorded.named("train.step")]
    for name, trace in zip(("torch.ops.aten.nonzero", "torch.isin"), steps, strict=False):
        table.add(f"deep sees {name}", told.get(trace), "cudaStreamSynchronize",
                  "cudaStreamSynchronize" in told.get(trace, []))  # fmt: skip
    table.add("deep tells a wait within .item() once", told.get(steps[2], []), "Tensor.item at most",
              set(told.get(steps[2], [])) <= {"Tensor.item"})  # fmt: skip


CHECKS = (
    each_waits_for_what_is_queued,
    a_copy_is_told_from_waiting,
    nothing_is_waited_for_on_top,
    deep,
)


if __name__ == "__main__":
    raise SystemExit("One of the parts of device.py, which runs it.")
