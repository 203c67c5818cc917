"""ns that watching for waits adds to calls on CPU tensors, which never wait, beside the other ways to see them.

Everything in one process and in turn: the patches, torch's own function mode and dispatch mode, which see every call,
and torch.profiler. What is patched is put back after each turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _measure import Sample, added, interleaved, machine, timed
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from otel_dl.patches import synchronization
from otel_dl.patches._patching import Patches
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.run import Run
from otel_dl.settings import Settings

ROUNDS = 31
CALLS = 3_000

torch.set_num_threads(1)
scalar, matrix = torch.ones(()), torch.ones(8, 8)
mask, device = matrix > 0, torch.device("cpu")
CASES: dict[str, Callable[[], object]] = {
    ".item()": lambda: scalar.item(),
    ".cpu()": lambda: matrix.cpu(),
    ".to(dtype)": lambda: matrix.to(torch.float64),
    ".to(device)": lambda: matrix.to(device),
    ".copy_(x)": lambda: matrix.copy_(matrix),
    "x[0]": lambda: matrix[0],
    "x[mask]": lambda: matrix[mask],
    "torch.nonzero(x)": lambda: torch.nonzero(matrix),
    "torch.where(mask, x, x)": lambda: torch.where(mask, matrix, matrix),
    "torch.tensor([1.0])": lambda: torch.tensor([1.0]),
    "a + b": lambda: matrix + matrix,
}


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def patched(native: bool, sync: str = "on") -> Iterator[None]:
    patches = Patches("synchronization")
    synchronization.install(Run(Settings(native=native, sync=sync), NeverHead()), patches)
    try:
        yield
    finally:
        patches.restore()


def within(context: Callable[[], Any], call: Callable[[], object]) -> Callable[[], Sample]:
    def run() -> Sample:
        with context():
            return timed(call, CALLS)  # pyright: ignore[reportArgumentType]

    return run


if __name__ == "__main__":
    print(machine())
    for name, call in CASES.items():
        print(f"\n{name}")
        ways: dict[str, Callable[[], Any]] = {
            "nothing": contextlib.nullcontext,
            "otel-dl": lambda: patched(True),
            "otel-dl in Python": lambda: patched(False),
            "TorchFunctionMode": Functions,
            "TorchDispatchMode": Operations,
            "torch.profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
        }
        # What a profile takes to start and to read its events is not within what is timed.
        samples = interleaved({way: within(context, call) for way, context in ways.items()}, ROUNDS)
        added(samples, "nothing")
