"""Four workers whose init function treats the environment each in its own way: `worker_environment.py METHOD`.

Prints one JSON line a worker: what it had before, what its init function left, and what its dataset then saw.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from torch.utils.data import DataLoader, Dataset, get_worker_info

WAYS = ("untouched", "cleared", "filtered", "changed")
seen: dict[str, dict[str, str]] = {}


def init(worker: int) -> None:
    seen["before"] = dict(os.environ)
    if WAYS[worker] == "cleared":
        os.environ.clear()
    elif WAYS[worker] == "filtered":
        for name in [name for name in os.environ if name.startswith("OTEL_") or name == "USER_SETTING"]:
            del os.environ[name]
    elif WAYS[worker] == "changed":
        os.environ["OTEL_SERVICE_NAME"] = "chosen-in-the-worker"
        os.environ["ADDED"] = "yes"
    seen["left"] = dict(os.environ)


class Environments(Dataset):
    def __len__(self) -> int:
        return len(WAYS)

    def __getitem__(self, index: int) -> dict:
        # A program that the dataset starts sees what is really in the environment, not only Python's copy.
        program = subprocess.run(["/usr/bin/env", "-0"], stdout=subprocess.PIPE, text=True, check=True).stdout
        return {
            "way": WAYS[get_worker_info().id],
            **seen,
            "after": dict(os.environ),
            "program": dict(entry.split("=", 1) for entry in program.split("\0") if entry),
        }


def first(items: list) -> dict:
    return items[0]


def main() -> None:
    import otel_dl

    method = sys.argv[1]
    if method == "forkserver":
        # Its server is started with the environment of now.
        import multiprocessing

        os.environ["OTEL_OLD"] = "stale"
        process = multiprocessing.get_context(method).Process(target=int)
        process.start()
        process.join()
        del os.environ["OTEL_OLD"]
    otel_dl.instrument()
    os.environ["OTEL_LATE"] = "set after the start"
    loader = DataLoader(
        Environments(),
        batch_size=1,
        num_workers=len(WAYS),
        multiprocessing_context=method,
        worker_init_fn=init,
        collate_fn=first,
    )
    for answer in loader:
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
