"""One rank of a job in which something goes wrong: `rank_ends.py SCENARIO AT CULPRIT LIMIT DIARY [SPAWN]`.

Each rank trains five steps with a collective in each; in the third the culprit does what SCENARIO says. AT is where the
collective is: `plain`, `async` (a wait on the work), `ddp` (in `backward()`). With SPAWN this process starts so many
ranks by `torch.multiprocessing.spawn`. What really happened, and what each rank's exception said, is written to DIARY.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

STEPS, AT_STEP = 5, 2


def main(rank: int, scenario: str, at: str, culprit: int, limit: float, diary: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    os.environ["RANK"] = str(rank)
    guilty = rank == culprit
    note(diary, rank, "pid", pid=os.getpid())
    watch_torch(diary, rank)

    if guilty and scenario == "never":
        time.sleep(limit * 3)
        return
    if guilty and scenario == "starts late":
        time.sleep(limit * 0.6)
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=limit), rank=rank, world_size=world)
        train(torch, dist, rank, scenario, at, guilty, limit, diary)
    except BaseException as error:
        note(
            diary, rank, "error", type=f"{type(error).__module__}.{type(error).__name__}", text=str(error)[-300:],
            notes=getattr(error, "__notes__", []),
        )  # fmt: skip
        raise
    note(diary, rank, "done")


def train(torch: Any, dist: Any, rank: int, scenario: str, at: str, guilty: bool, limit: float, diary: str) -> None:
    model: Any = torch.nn.Linear(4, 4)
    if at == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    steps = AT_STEP if guilty and scenario == "uneven" else STEPS
    for step in range(steps):
        value = torch.ones(4)
        loss = model(torch.ones(1, 4)).sum()
        if step == AT_STEP and guilty:
            misbehave(torch, dist, scenario, limit, diary, rank)
        loss.backward()
        if at == "plain":
            dist.all_reduce(value)
        elif at == "async":
            dist.all_reduce(value, async_op=True).wait()
        optimizer.step()
        optimizer.zero_grad()
    if scenario == "uneven":
        note(diary, rank, "event")
        if guilty:
            time.sleep(limit + 3)


def misbehave(torch: Any, dist: Any, scenario: str, limit: float, diary: str, rank: int) -> None:
    note(diary, rank, "event")
    if scenario == "store goes":
        os.kill(int(os.environ["STORE_PID"]), signal.SIGKILL)
    if scenario in ("sleeps", "store goes"):
        time.sleep(limit + 3)
    elif scenario == "late":
        time.sleep(limit * 0.6)
    elif scenario == "stopped before":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif scenario == "stopped inside":
        dist.all_reduce(torch.ones(4), async_op=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif scenario == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif scenario == "crashes":
        ctypes.string_at(0)
    elif scenario == "raises":
        raise ValueError("the user's own")
    elif scenario == "mismatch":
        dist.all_reduce(torch.ones(9))


def watch_torch(diary: str, rank: int) -> None:
    """Notes when torch's own exception comes, below anything that otel-dl does."""
    import torch.distributed as dist

    original = dist.Work.wait

    def wait(*args: Any, **keywords: Any) -> Any:
        try:
            return original(*args, **keywords)
        except BaseException:
            note(diary, rank, "torch")
            raise

    dist.Work.wait = wait


def note(diary: str, rank: int, what: str, **more: Any) -> None:
    with open(Path(diary) / f"{rank}.jsonl", "a") as file:
        file.write(json.dumps({"what": what, "rank": rank, "at": time.time(), **more}) + "\n")


def spawned(rank: int, *arguments: Any) -> None:
    main(rank, *arguments)


if __name__ == "__main__":
    arguments = (sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
    if os.environ.get("WITHOUT_OTEL_DL") is None:
        import otel_dl
        from otel_dl.ranks import statuses

        if os.environ.get("OWN_HOSTS") is not None:
            statuses.neighbourhood = lambda: f"host of rank {os.environ['RANK']}"
        otel_dl.instrument()
    if len(sys.argv) > 6:
        import torch.multiprocessing

        os.environ["WORLD_SIZE"] = sys.argv[6]
        torch.multiprocessing.spawn(spawned, arguments, int(sys.argv[6]))
    else:
        main(int(os.environ["RANK"]), *arguments)
