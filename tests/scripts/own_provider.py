"""A job that sets up the SDK itself, at the top level of the script: `own_provider.py METHOD FILE [in_worker]`.

Its exporter appends `name index pid-where-exported` to FILE. With `in_worker` the worker's init function sets up one of
its own instead.
"""

from __future__ import annotations

import os
import sys

import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from torch.utils.data import DataLoader, Dataset

METHOD, FILE = sys.argv[1:3]
IN_WORKER = "in_worker" in sys.argv


class Appending(SpanExporter):
    def export(self, spans):
        lines = "".join(
            f"{s.name} {s.attributes.get('index', '-')} {os.getpid()} {s.context.trace_id:032x}"
            f" {s.resource.attributes.get('dl.worker.id', '-')}\n"
            for s in spans
        )
        with open(FILE, "a") as file:
            file.write(lines)
        return SpanExportResult.SUCCESS


if not IN_WORKER:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Appending()))
    trace.set_tracer_provider(provider)
tracer = trace.get_tracer("user")


def init(worker: int) -> None:
    if IN_WORKER:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(Appending()))
        trace.set_tracer_provider(provider)
    with tracer.start_as_current_span("init", attributes={"index": worker}):
        pass


class Items(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        with tracer.start_as_current_span("decode", attributes={"index": index}):
            return torch.tensor(index)


def main() -> None:
    import otel_dl

    otel_dl.instrument()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in DataLoader(Items(), batch_size=2, num_workers=2, multiprocessing_context=METHOD, worker_init_fn=init):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    print(os.getpid())


if __name__ == "__main__":
    main()
