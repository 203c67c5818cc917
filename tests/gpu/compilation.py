"""Compilation, autotuning and graph capture where they are real: inductor and Triton on one NVIDIA GPU.

One of the parts of `device.py`. Imports, and needs nothing, without a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from support.inprocess import Recorded, recording
from torch import Tensor, nn

if TYPE_CHECKING:
    from table import Table

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

WIDTH = 1_024
ROWS = 256


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.gelu(self.norm(self.first(x)))).square().mean()


def train(model: Any, rows: list[int]) -> list[float]:
    """A step for each entry, a batch of so many rows; milliseconds that each took, the device's work included."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    took: list[float] = []
    for count in rows:
        x = torch.randn(count, WIDTH, device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - began) * 1e3)
    return took


def milliseconds(spans: list[Any]) -> float:
    return sum(span.end_time - span.start_time for span in spans) / 1e6


def in_step(recorded: Recorded, number: int, name: str) -> list[Any]:
    step = next(span for span in recorded.named("train.step") if span.attributes["dl.step"] == number)
    return [span for span in recorded.named(name) if span.context.trace_id == step.context.trace_id]


@contextmanager
def fresh() -> Iterator[None]:
    """Nothing is compiled, and no cache on disk is asked."""
    import torch._inductor.config

    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch.compiler.reset()


def compiles(table: Table) -> None:
    with fresh(), recording() as recorded:
        took = train(torch.compile(Net().cuda()), [ROWS, ROWS, ROWS, ROWS // 2, ROWS])
    cold, again = in_step(recorded, 0, "torch.compile"), in_step(recorded, 3, "torch.compile")
    backwards = [span for span in cold if span.attributes["dl.compile.name"].endswith(" backward")]
    table.add("inductor: compilations of the first step", len(cold), 2, len(cold) == 2)
    table.add("inductor: of these the backward's", len(backwards), 1, len(backwards) == 1)
    parents = {span.context.span_id: span.name for span in recorded.spans}
    under = sorted(parents.get(span.parent.span_id, "?") for span in cold)
    table.add("inductor: they stand under", under, "backward, forward", under == ["backward", "forward"])
    # The rest of the first step is that of the next ones, lazy initialisation and loading of kernels aside.
    share = milliseconds(cold) / (took[0] - took[2])
    table.add(
        "inductor: share of the first step's additional time", f"{share:.0%}", "70 to 101 %", 0.7 <= share <= 1.01
    )
    steady = len(in_step(recorded, 1, "torch.compile")) + len(in_step(recorded, 2, "torch.compile"))
    table.add("inductor: compilations of the next two steps", steady, 0, steady == 0)
    reasons = {span.attributes.get("dl.compile.reason", "") for span in again}
    ok = len(reasons) == 1 and "size mismatch" in reasons.pop()
    table.add("inductor: another batch size says why", ok, True, ok)


def autotunes_inductors(table: Table) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    counted: list[int] = []
    benchmark = CachingAutotuner.benchmark_all_configs
    compiling = torch._guards.CompileContext.try_get

    def benchmark_all_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling() is None:  # what is tuned within a compilation is a part of it
            counted.append(len(self.launchers))
        return benchmark(self, *args, **kwargs)

    CachingAutotuner.benchmark_all_configs = benchmark_all_configs
    try:
        with fresh(), recording() as recorded:
            train(torch.compile(Net().cuda(), mode="max-autotune-no-cudagraphs"), [ROWS] * 3)
    finally:
        CachingAutotuner.benchmark_all_configs = benchmark
    spans = recorded.named("triton.autotune")
    told = sorted(span.attributes["dl.autotune.configurations"] for span in spans)
    table.add("inductor: kernels tuned at their first launch", told, sorted(counted), told == sorted(counted) != [])
    late = in_step(recorded, 2, "triton.autotune")
    table.add("inductor: kernels tuned in the third step", len(late), 0, not late)


if triton is not None:

    @triton.autotune(
        configs=[triton.Config({"BLOCK": block}) for block in (128, 256, 512, 1024)], key=["size"]
    )  # fmt: skip
    @triton.jit
    def double(x, y, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < size) * 2, mask=at < size)


def autotunes_a_users_kernel(table: Table) -> None:
    if triton is None:
        table.add("a user's Triton kernel", "Triton is not installed", "it is", ok=False)
        return

    def run(size: int) -> bool:
        x = torch.randn(size, device="cuda")
        y = torch.empty_like(x)
        double[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](x, y, size)
        return torch.equal(y, x * 2)

    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    took: list[float] = []
    right = True
    with recording() as recorded:
        for size in (1 << 20, 1 << 20, 1 << 21):
            optimizer.zero_grad()
            began = time.perf_counter()
            right &= run(size)
            took.append((time.perf_counter() - began) * 1e3)
            model(torch.randn(4, 8, device="cuda")).sum().backward()
            optimizer.step()
    spans = recorded.named("triton.autotune")
    told = [(span.attributes["code.function.name"], span.attributes["dl.autotune.configurations"]) for span in spans]
    table.add("a user's Triton kernel, tuned for two sizes", told, [("double", 4)] * 2, told == [("double", 4)] * 2)
    table.add("… computes what it did", right, True, right)
    if spans:
        share = milliseconds(spans[:1]) / took[0]
        table.add("… share of its first call", f"{share:.0%}", "50 to 100 %", 0.5 <= share <= 1)


def captures(table: Table) -> None:
    model = nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    took = 0.0
    with recording() as recorded:
        for number in range(4):
            optimizer.zero_grad()
            if number == 2:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side), torch.no_grad():
                    model(x)
                torch.cuda.current_stream().wait_stream(side)
                began = time.perf_counter()
                with torch.cuda.graph(graph), torch.no_grad():
                    output = model(x)
                took = (time.perf_counter() - began) * 1e3
                graph.replay()
                same = torch.equal(output, model(x).detach())
            model(x).sum().backward()
            optimizer.step()
    spans = in_step(recorded, 2, "cuda.graph.capture")
    table.add("a capture is a span of its step", len(spans), 1, len(spans) == 1)
    table.within("how long it took", milliseconds(spans), took, 0.2)
    devices = [span.attributes.get("dl.device") for span in spans]
    table.add("its device", devices, ["cuda:0"], devices == ["cuda:0"])
    table.add("the graph replays to the same", same, True, same)


def captures_of_inductors(table: Table) -> None:
    counted: list[int] = []
    begin = torch.cuda.CUDAGraph.capture_begin

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted.append(1)
        return begin(self, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = capture_begin
    try:
        with fresh(), recording() as recorded:
            train(torch.compile(Net().cuda(), mode="reduce-overhead"), [ROWS] * 6)
    finally:
        torch.cuda.CUDAGraph.capture_begin = begin
    found = len(recorded.named("cuda.graph.capture"))
    table.add("reduce-overhead: captures", found, len(counted), found == len(counted) > 0)
    late = in_step(recorded, 5, "cuda.graph.capture")
    table.add("reduce-overhead: captures in the sixth step", len(late), 0, not late)


def costs_nothing(table: Table) -> None:
    """A call of a compiled function, outside of phases."""

    def compute(x: Tensor) -> Tensor:
        return (x * x).relu()

    with fresh():
        compiled: Callable[[Tensor], Tensor] = torch.compile(compute)
        x = torch.randn(256, device="cuda")
        compiled(x)

        def wall() -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(2_000):
                compiled(x)
            return (time.perf_counter() - began) / 2_000 * 1e9

        wall()
        added: list[float] = []
        for turn in range(20):
            if turn % 2:
                alone = wall()
            with recording():
                ours = wall()
            if not turn % 2:
                alone = wall()
            added.append(ours - alone)
    table.at_most("added to a compiled call (median of 20 pairs)", statistics.median(added), 200, "ns")


CHECKS = (
    compiles,
    autotunes_inductors,
    autotunes_a_users_kernel,
    captures,
    captures_of_inductors,
    costs_nothing,
)


if __name__ == "__main__":
    raise SystemExit("One of the parts of device.py, which runs it.")
