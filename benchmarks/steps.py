"""µs that otel-dl adds to a whole training step, as instrumented by `otel_dl.instrument()`.

A small network on one thread, data read in the main process. *Not kept*: no sampler, a run past its first 1,000 steps
(one step in 64 is kept, built and exported). *In Python*: the same without the compiled recorder. *Held for peers*:
what is not kept is held, as where ranks share a run. *Kept*: `OTEL_TRACES_SAMPLER=always_on`, every step built and
exported, to an exporter that encodes OTLP and throws it away.
Wall time is what the training thread waits; CPU time is all threads'.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from _measure import Sample, machine, spread, timed

ROUNDS = 11
STEPS = 2_000
PROCESSES = 5
"""Of each case: two processes with the same work differ by several µs a step, by where things lie in memory."""


def job(connection: Connection, environment: dict[str, str], instrumented: bool, held: bool) -> None:
    """Answers each message with a sample of STEPS steps."""
    os.environ.update(environment)
    import torch
    from opentelemetry import trace
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    if instrumented:
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
        if held:
            from otel_dl import session
            from otel_dl.recording.held import Held

            current = session.current()
            assert current is not None
            current.run.held = Held(current.run, current.settings.held_records)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(STEPS + 1, 8)), batch_size=1)

    def sample() -> Sample:
        batches = iter(loader)
        next(batches)

        def body() -> None:
            batch = next(batches)[0]
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

        return timed(body, STEPS)

    sample()
    connection.send(None)
    with contextlib.suppress(EOFError):
        while connection.recv():
            connection.send(sample())
    os._exit(0)


def start(environment: dict[str, str], instrumented: bool, held: bool = False) -> Callable[[], Sample]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    multiprocessing.get_context("spawn").Process(
        target=job, args=(theirs, environment, instrumented, held), daemon=True
    ).start()
    ours.recv()

    def sample() -> Sample:
        ours.send(True)
        return ours.recv()

    return sample


def main() -> None:
    print(machine())
    cases: dict[str, tuple[dict[str, str], bool] | tuple[dict[str, str], bool, bool]] = {
        "without": ({}, False),
        "not kept": ({}, True),
        "in Python": ({"OTEL_DL_NATIVE": "false"}, True),
        "held for peers": ({}, True, True),
        "held in Python": ({"OTEL_DL_NATIVE": "false"}, True, True),
        "kept": ({"OTEL_TRACES_SAMPLER": "always_on"}, True),
        "ratio of 0": ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, True),
    }
    jobs = [(name, start(*case)) for _ in range(PROCESSES) for name, case in cases.items()]
    samples: dict[str, list[Sample]] = {name: [] for name in cases}
    for turn in range(ROUNDS):
        for name, sample in jobs if turn % 2 == 0 else jobs[::-1]:
            samples[name].append(sample())
    print(f"a step without: {statistics.median(s.wall for s in samples['without']) / 1e3:.1f} µs")
    for name in list(cases)[1:]:
        pairs = list(zip(samples[name], samples["without"], strict=True))
        wall = spread([(one.wall - other.wall) / 1e3 for one, other in pairs])
        cpu = spread([(one.cpu - other.cpu) / 1e3 for one, other in pairs])
        print(f"added to a step, {name:14} wall µs {wall.median:6.1f} [{wall.low:.1f} … {wall.high:.1f}]"
              f"   CPU µs {cpu.median:6.1f} [{cpu.low:.1f} … {cpu.high:.1f}]")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
