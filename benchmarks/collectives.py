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
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from _measure import machine, spread

ROUNDS = 9
PROCESSES = 2
"""Of each case: two processes with the same work differ, by where things lie in memory."""
STEPS = 40
STRETCHES = 5
"""Of so many steps each, of which the least counts: what else runs on the machine only adds, and cold caches most."""
MANY = 10
DDP_STEPS = 40
DDP_TURNS = 24

RARELY = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.0000001"}
ALWAYS = {"OTEL_TRACES_SAMPLER": "always_on"}


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


def job(connection: Connection, case: Case) -> None:
    """Answers each (asynchronous, collectives a step) with ns of CPU time: of this thread for STEPS steps, of the
    others for STRETCHES times as many."""
    os.environ.update(case.environment)
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from opentelemetry import trace
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    flush: Callable[[], object] = lambda: None  # noqa: E731
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
        provider.add_span_processor(BatchSpanProcessor(Discard(), schedule_delay_millis=100))
        trace.set_tracer_provider(provider)
        otel_dl.instrument()
        flush = otel_dl.flush
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

    def stretch(reduce: Callable[[], None], count: int) -> int:
        start = time.thread_time_ns()
        if case.steps:
            epoch(reduce, count)
        else:
            for _ in range(STEPS * count):
                reduce()
        return time.thread_time_ns() - start

    def sample(reduce: Callable[[], None], count: int) -> int:
        return min(stretch(reduce, count) for _ in range(STRETCHES))

    for _ in range(2):  # past what is built of the first collectives outside
        sample(sync, MANY)
    connection.send(None)
    with contextlib.suppress(EOFError):
        while True:
            is_async, count = connection.recv()
            before = others_ns()
            own = sample(asynchronous if is_async else sync, count)
            start = time.thread_time_ns()
            flush()  # builds what is left in this thread, in the place of otel-dl's
            connection.send((own, others_ns() - before + time.thread_time_ns() - start))
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
    own: dict[tuple[str, str], list[float]] = defaultdict(list)
    others: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(ROUNDS):
        for case, connection in jobs if turn % 2 == 0 else jobs[::-1]:
            without = ask(connection, False, 0)
            for kind, (is_async, count) in kinds.items():
                found = ask(connection, is_async, count)
                own[kind, case.where].append((found[0] - without[0]) / count)
                others[kind, case.where].append((found[1] - without[1]) / count)
    print(f"{'added, µs of CPU time a collective':62}{'the thread that trains':>28}{'other threads':>28}")
    for kind in kinds:
        for case in CASES:
            base = kind, ("in a step" if case.steps else "outside") + ", without otel-dl"
            key = kind, case.where
            if key == base:
                print(f"{kind:24}{case.where:38}{shown(own[base])}")
            else:
                print(f"{kind:24}{case.where:38}{shown(differences(own, key, base))}"
                      f"{shown(differences(others, key, base))}")  # fmt: skip


def ask(connection: Connection, is_async: bool, count: int) -> tuple[float, float]:
    """µs a step: of the thread that trains; of others."""
    connection.send((is_async, count))
    own, others = connection.recv()
    return own / 1e3 / STEPS, others / 1e3 / STEPS / STRETCHES


def differences(of: dict[tuple[str, str], list[float]], key: tuple[str, str], base: tuple[str, str]) -> list[float]:
    return [one - other for one, other in zip(of[key], of[base], strict=True)]


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
