"""CPU time a second of the thread that talks to the job's store, of 2 gloo ranks: while they train, and while one waits
in a collective for the other."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable

from _measure import machine

SECONDS = 15.0
THREAD = "otel-dl-ranks"


def cpu_of(name: str) -> float:
    """Seconds of the thread of this name."""
    thread = next(thread for thread in threading.enumerate() if thread.name == name)
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def rank_of_two(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import otel_dl

    otel_dl.instrument(directory=folder, stall_after=3_600.0)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(8, 64)

    def train() -> None:
        until = time.monotonic() + SECONDS
        again = torch.ones(1)
        while again.item():
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            time.sleep(0.02)
            again.fill_(time.monotonic() < until)
            dist.broadcast(again, 0)

    def wait() -> None:
        if rank == 1:
            time.sleep(SECONDS)
        dist.barrier()

    train()  # until it has found everything
    parts: dict[str, Callable[[], None]] = {"trains (step of 20 ms)": train, "waits": wait}
    for what, part in parts.items():
        dist.barrier()
        before, start = cpu_of(THREAD), time.monotonic()
        part()
        if rank == 0:
            took = time.monotonic() - start
            print(f"{what:24} {1e3 * (cpu_of(THREAD) - before) / took:6.2f} ms of CPU a second", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OTEL_TRACES_EXPORTER", "otel_dl_file")
    # torch's server asks the name service for the name of each client, and waits 5 s for each answer that is lost.
    os.environ.setdefault("RES_OPTIONS", "use-vc timeout:1 attempts:1")
    print(machine(), "load", " ".join(f"{load:.1f}" for load in os.getloadavg()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        ranks = [spawn.Process(target=rank_of_two, args=(rank, port, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
