"""One rank of a job in which something takes long: `stalls.py CASE`; OTEL_DL_STALL_AFTER is 1 s."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import threading
import time

import otel_dl
from otel_dl import session


def main() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    case, rank = sys.argv[1], int(os.environ["RANK"])
    limit = datetime.timedelta(seconds=4 if case == "computes" else 60)
    dist.init_process_group("gloo", timeout=limit)
    value = torch.ones(4)
    dist.all_reduce(value)
    if case == "staggered":  # one after the other comes to the second all_reduce
        time.sleep((0, 5, 10)[rank])
    elif case == "monitored":  # which is made of another number of transfers on rank 0
        for _ in range(3):
            dist.monitored_barrier()
        time.sleep(4 * (rank == 1))
    elif case == "computes":  # and has issued something before that it does not wait for
        if rank == 0:
            dist.all_reduce(value, async_op=True)
        until = time.monotonic() + 6
        while time.monotonic() < until:
            sum(range(1_000))
        otel_dl.flush(10)
        os._exit(0)  # a gloo group that has something under way hangs at the end, with and without otel-dl
    elif case == "beside a thread":  # that is busy in another group
        group = dist.new_group()

        def beside() -> None:
            for _ in range(30):
                dist.all_reduce(torch.ones(4), group=group)
                time.sleep(0.1)

        thread = threading.Thread(target=beside)
        thread.start()
        time.sleep(5 * (rank == 1))
        dist.all_reduce(value)
        thread.join()
        return
    elif case == "stopped":  # in the collective, in which the other one has to wait for it then
        meet()
        if rank == 1:
            subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {os.getpid()}; sleep 4; kill -CONT {os.getpid()}"])
        else:
            time.sleep(0.6)
    elif case == "bereft":  # NCCL would wait in the same way: nothing of gloo's tells that a rank has died meanwhile
        meet()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.new_group()
        return
    dist.all_reduce(value)


def meet() -> None:
    """All ranks can read one another's pages: of one that is dead or stopped before it was found nothing is known."""
    import torch
    import torch.distributed as dist

    current = session.current()
    assert current is not None
    while not current.ranks._statuses.has_found_all:
        time.sleep(0.01)
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    otel_dl.instrument()
    main()
