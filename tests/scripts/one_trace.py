"""One rank of a job that trains over gloo, and says how long that took: `one_trace.py STEPS [name=value …]`.

`pause=S` in each step; `slow=STEP:RANK:S`: that rank sleeps so long in that step; `late=RANK:STEP`: it switches otel-dl
on only then;
`prepare=S`: after a collective it takes so long before its first step;
`store=PATH`: a FileStore; `init=2`: joins twice; `before=N`: trains so many steps before it joins; `die=STEP:RANK`:
exits with 1 in the first attempt; `fail=STEP:RANK`: an exception that the script catches; `absent=STEP:RANK:S`: the
process group's limit is S seconds, and that rank does not come to that step's collective in time, which ends the job;
`uneven=RANK:BATCHES:EVERY`: DDP under `Join`, where that rank has only so many batches, and of EVERY batches all but
the last are under `no_sync`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import otel_dl

if not any(argument.startswith("late=") for argument in sys.argv):
    otel_dl.instrument()

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, TensorDataset

steps = int(sys.argv[1])
options = dict(argument.split("=", 1) for argument in sys.argv[2:])
rank = int(os.environ["RANK"])
world = int(os.environ["WORLD_SIZE"])
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def option(name: str) -> list[float]:
    return [float(part) for part in options[name].split(":")] if name in options else [-1.0, -1.0, 0.0]


slow_step, slow_rank, slow_s = option("slow")
fail_step, fail_rank = option("fail")[:2]
die_step, die_rank = option("die")[:2]
absent_step, absent_rank, limit = option("absent")
began = time.monotonic()
late_rank, late_step = option("late")[:2]
pause = float(options.get("pause", 0))


def train(count: int, together: bool) -> None:
    for number, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(count, 4)), batch_size=1)):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        if together:
            if (number, rank) == (late_step, late_rank):
                otel_dl.instrument()
            time.sleep(pause)
            if (number, rank) == (slow_step, slow_rank):
                time.sleep(slow_s)
            if (number, rank) == (die_step, die_rank) and attempt == 0:
                sys.exit(1)
            if (number, rank) == (fail_step, fail_rank):
                with contextlib.suppress(RuntimeError):
                    model(torch.randn(1, 5))
            if (number, rank) == (absent_step, absent_rank):
                time.sleep(limit + 2)
            dist.all_reduce(model.weight.grad)
        optimizer.step()


def train_unevenly(short: int, batches: int, every: int) -> None:
    """Each optimizer step is `every` batches; where its batches end earlier, a rank takes none."""
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    count = batches if rank == short else steps * every
    with Join([parallel]):
        for number, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(count, 4)), batch_size=1)):
            last = number % every == every - 1
            with contextlib.nullcontext() if last else parallel.no_sync():
                parallel(x).sum().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()


def of_attempt() -> dict[str, Any]:
    """After a restart, keys of its own. torchrun's store lives on, and gloo may read the address that a rank of the
    attempt before has left there, where that rank comes late: torch 2.15 no longer puts the attempt before the keys
    (torch/distributed/rendezvous.py, `_create_c10d_store`)."""
    if not attempt:
        return {}
    served = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return {"store": dist.PrefixStore(f"/worker/attempt_{attempt}", served), "rank": rank, "world_size": world}


def join() -> None:
    if "store" in options:
        dist.init_process_group("gloo", store=dist.FileStore(options["store"], world), rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=limit) if limit else None, **of_attempt())


if late_step >= 0 and rank != late_rank:
    otel_dl.instrument()
train(int(options.get("before", 0)), together=False)
for _ in range(int(options.get("init", 1)) - 1):
    join()
    train(5, together=True)
    dist.destroy_process_group()
join()
if "prepare" in options:
    dist.barrier()
    time.sleep(float(options["prepare"]))
try:
    if "uneven" in options:
        train_unevenly(*map(int, option("uneven")))
    else:
        train(steps, together=True)
    dist.barrier()
    dist.destroy_process_group()
except RuntimeError as error:
    print("\n".join((str(error), *getattr(error, "__notes__", ()))), file=sys.stderr)
print(json.dumps({"rank": rank, "attempt": attempt, "seconds": time.monotonic() - began}), flush=True)
