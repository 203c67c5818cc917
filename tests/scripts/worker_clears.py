"""One worker whose environment is cleared by one way: `worker_clears.py METHOD WAY`. Prints what each item saw.

WAY: `unpickling` (the dataset's `__setstate__`), `init`, `getitem`, `collate`, `iter`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from torch.utils.data import DataLoader, Dataset, IterableDataset


def kinds() -> dict[str, str]:
    names = ("TRACEPARENT", "TRACESTATE", "BAGGAGE", "USER_SETTING")
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_") or name in names}


class Clearing(Dataset):
    def __init__(self, way: str) -> None:
        self.way = way

    def __setstate__(self, state: dict) -> None:
        self.__dict__ = state
        if self.way == "unpickling":
            os.environ.clear()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, str]:
        seen = kinds()
        if self.way == "getitem":
            os.environ.clear()
        return seen


class ClearingStream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, str]]:
        for _ in range(3):
            seen = kinds()
            os.environ.clear()
            yield seen


def init(worker: int) -> None:
    os.environ.clear()


def first(items: list) -> dict[str, str]:
    return items[0]


def clear_and_first(items: list) -> dict[str, str]:
    os.environ.clear()
    return items[0]


def main() -> None:
    import otel_dl

    otel_dl.instrument()
    method, way = sys.argv[1:]
    loader = DataLoader(
        ClearingStream() if way == "iter" else Clearing(way),
        batch_size=1,
        num_workers=1,
        multiprocessing_context=method,
        worker_init_fn=init if way == "init" else None,
        collate_fn=clear_and_first if way == "collate" else first,
    )
    for _ in range(2):
        for seen in loader:
            print(json.dumps(seen))


if __name__ == "__main__":
    main()
