"""µs that otel-dl adds to a collective, as instrumented by `otel_dl.instrument()`, and to a step of DDP.

The first part runs on a gloo group of one rank, where a collective is nothing but its overhead: CPU time of the thread
that trains, and apart from it that of all other threads of Python's (those of otel-dl and the exporter; torch's own are
none). Each case is some processes of its own, all asked in turn; differences are those of one turn.

*Not kept*: a step is as ever, read by a loader and ended by the next batch, `OTEL_TRACES_SAMPLER_ARG` as good as 0.
*Kept*: `always_on`, every step built, encoded and thrown away. *Outside*: in no step at all. In a step, what a
collective costs is what the step costs more with MANY of them than without, divided by MANY; the first alone is what
one does, with what it does to the step around it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from _measure import machine, spread

ROUNDS = 15
PROCESSES = 3
"""Of each case: two processes with the same work differ, by where things lie in memory."""
STEPS = 100
MANY = 10
DDP_STEPS = 40
DDP_TURNS = 24

RARELY = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.0000001"}
ALWAYS = {"OTEL_TRACES_SAMPLER": "always_on"}


class Cost(NamedTuple):
    """µs of CPU time a collective."""

    training: float
    others: float


class Case(NamedTuple):
    where: str
    environment: dict[str, str]
    instrumented: bool
    steps: bool
    hooks: bool = False


CASES = [
    Case("in a step, without otel-dl", {}, False, True),
    Case("in a step, hooks that do nothing", {}, False, True, True),
    Case("in a step that is not kept", RARELY, True, True),
    Case("in a step that is kept", ALWAYS, True, True),
    Case("outside, without otel-dl", {}, False, False),
    Case("outside, hooks that do nothing", {}, False, False, True),
    Case("outside any step", RARELY, True, False),
]


def others_ns() -> int:
    """CPU time of Python's threads but this one."""
    total = 0
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            with contextlib.suppress(OSError):  # it has just ended
                total += time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident or 0))
    return total


@contextlib.contextmanager
def measured(into: list[tuple[int, int]]) -> Iterator[None]:
    others, own = others_ns(), time.thread_time_ns()
    yield
    own = time.thread_time_ns() - own
    into.append((own, others_ns() - others))


def job(connection: Connection, case: Case) -> None:
    """Answers each (asynchronous, collectives a step or at a stretch) with a `Cost`."""
    os.environ.update(case.environment)
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from opentelemetry import trace
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    if case.instrumented:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

        import otel_dl

        class Discard(SpanExporter):
            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                encode_spans(spans).SerializeToString()
                return SpanExportResult.SUCCESS

        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(Discard()))
        trace.set_tracer_provider(provider)
        otel_dl.instrument()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if case.hooks and hasattr(c10d.ProcessGroup, "register_pre_hook"):
        group: Any = c10d._get_default_group()

        def nothing(args: Any) -> None: ...

        group.register_pre_hook(1, nothing)
        group.register_post_hook(1, nothing)
    values = torch.ones(4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(STEPS, 4)), batch_size=1)

    def sync() -> None:
        dist.all_reduce(values)

    def asynchronous() -> None:
        dist.all_reduce(values, async_op=True).wait()

    def epoch(reduce: Callable[[], None], count: int) -> None:
        for (batch,) in loader:
            model(batch).sum().backward()
            for _ in range(count):
                reduce()
            optimizer.step()

    def sample(reduce: Callable[[], None], count: int) -> Cost:
        found: list[tuple[int, int]] = []
        with measured(found):
            if case.steps:
                epoch(reduce, count)
            else:
                for _ in range(STEPS * count):
                    reduce()
        if case.steps:
            with measured(found):
                epoch(reduce, 0)
        else:
            found.append((0, 0))
        return Cost(*((a - b) / 1e3 / (STEPS * count) for a, b in zip(*found, strict=True)))

    for _ in range(20):  # what is kept of the first 1,000 steps, and built of the first collectives outside, is past
        sample(sync, MANY)
    connection.send(None)
    with contextlib.suppress(EOFError):
        while True:
            is_async, count = connection.recv()
            connection.send(sample(asynchronous if is_async else sync, count))
    os._exit(0)


def start(case: Case) -> Connection:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=job, args=(theirs, case), daemon=True).start()
    ours.recv()
    return ours


def of_one_call() -> None:
    jobs = [(case, start(case)) for _ in range(PROCESSES) for case in CASES]
    kinds = {"sync": (False, MANY), "async, waited for": (True, MANY), "sync, the first alone": (False, 1)}
    samples: dict[tuple[str, str], list[Cost]] = {}
    for turn in range(ROUNDS):
        for kind, message in kinds.items():
            for case, connection in jobs if turn % 2 == 0 else jobs[::-1]:
                connection.send(message)
                samples.setdefault((kind, case.where), []).append(connection.recv())
    print(f"{'µs of CPU time a collective':62}{'the thread that trains':>28}{'other threads':>28}")
    for (kind, where), costs in samples.items():
        base = where.split(",")[0].replace(" that is not kept", "").replace(" that is kept", "")
        without = samples[kind, f"{base.removesuffix(' any step')}, without otel-dl"]
        if costs is without:
            print(f"{kind:24}{where:38}{shown([cost.training for cost in costs])}")
        else:
            pairs = list(zip(costs, without, strict=True))
            print(f"{kind:24}{where:38}{shown([a.training - b.training for a, b in pairs])}"
                  f"{shown([a.others - b.others for a, b in pairs])}")  # fmt: skip


def shown(values: list[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{f'{median:.1f}  [{low:.1f} … {high:.1f}]':>28}"


def rank_of_two(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from otel_dl.patches import collectives
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.keep import NeverHead
    from otel_dl.recording.records import clock
    from otel_dl.recording.run import Run
    from otel_dl.settings import Settings

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    batch = torch.randn(8, 256)

    def step() -> None:
        optimizer.zero_grad()
        parallel(batch).sum().backward()
        optimizer.step()

    run = Run(Settings(), NeverHead())
    patches = Patches("collectives")

    def stretch(on: bool) -> list[float]:
        if on:
            collectives.install(run, patches)
        dist.barrier()
        values: list[float] = []
        for _ in range(DDP_STEPS):
            if on:
                run.current = run.open(clock(), batch=True, former=frozenset())
            start = time.perf_counter_ns()
            step()
            values.append(time.perf_counter_ns() - start)
            if on and run.current is not None:
                run.close(run.current, clock())
        if on:
            patches.restore()
        return values

    stretch(False)
    off, on = [], []
    for _ in range(DDP_TURNS):
        off.append(statistics.median(stretch(False)))
        on.append(statistics.median(stretch(True)))
    if rank == 0:
        print(f"a step of DDP, 2 gloo ranks, µs: off {spread([v / 1e3 for v in off])}; on"
              f" {spread([v / 1e3 for v in on])}; added, pair by pair"
              f" {spread([(b - a) / 1e3 for a, b in zip(off, on, strict=True)])}")  # fmt: skip
    dist.destroy_process_group()


def of_ddp() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [multiprocessing.get_context("spawn").Process(target=rank_of_two, args=(r, folder)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(machine(), "load", " ".join(f"{load:.1f}" for load in os.getloadavg()))
    of_one_call()
    sys.stdout.flush()
    of_ddp()
