"""One rank that trains for a while: prints each store operation of otel-dl's, as (time, thread, query), and when
training began and ended."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import otel_dl


def main() -> None:
    import torch
    import torch.distributed as dist

    from otel_dl.ranks.store import JobStore

    operations: list[tuple[float, str, int]] = []
    original = JobStore._send

    def send(self: Any, query: int, *parts: bytes) -> None:
        operations.append((time.monotonic(), threading.current_thread().name, query))
        original(self, query, *parts)

    JobStore._send = send
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    began = time.monotonic()
    together = torch.ones(1)
    step = 0
    while together.item():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0:
            otel_dl.keep()  # asks the others
        together.fill_(float(time.monotonic() - began < 8))
        dist.broadcast(together, 0)
    ended = time.monotonic()
    dist.destroy_process_group()
    print(json.dumps({"began": began, "ended": ended, "operations": operations}), flush=True)


if __name__ == "__main__":
    otel_dl.instrument()
    main()
