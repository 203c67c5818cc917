"""ns added to a convolution, beside the alternatives: a function mode, a dispatch mode, torch.profiler.

The convolution is one by one and on the CPU, where a stand-in says that cuDNN runs it: what is added is what would be
added on a device. Each case is a session of its own, made once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from _measure import Sample, added, interleaved, machine, timed
from support.convolving import OnTheCpu
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from otel_dl.patches import cudnn
from otel_dl.patches._patching import Patches
from otel_dl.patches.cudnn.calls import Device
from otel_dl.recording.keep import AdaptiveHead, Head, NeverHead
from otel_dl.recording.records import clock
from otel_dl.recording.run import Run
from otel_dl.settings import Settings

ROUNDS = 31
CALLS = 1_000

torch.set_num_threads(1)
x = torch.randn(1, 1, 1, 1)
weight = torch.nn.Parameter(torch.randn(1, 1, 1, 1))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def profiler() -> Iterator[None]:
    os.environ["KINETO_LOG_LEVEL"] = "99"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


@contextlib.contextmanager
def patched(device: Device, benchmark: bool, head: Head) -> Iterator[None]:
    run = Run(Settings(), head)
    patches = Patches("convolutions")
    lane = run.local.lane
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
        cudnn.install(run, patches, device)
        lane.step = run.open(clock(), batch=True, former=frozenset())
        try:
            call()  # so that its key is known
            lane.step.records.clear()
            yield
        finally:
            patches.restore()
            run.finish()


def call() -> None:
    F.conv2d(x, weight)


def trained() -> None:
    F.conv2d(x, weight).backward()


def case(around: Callable[[], Any], body: Callable[[], None], calls: int = CALLS) -> Callable[[], Sample]:
    def run() -> Sample:
        with torch.backends.mkldnn.flags(enabled=False), around():
            return timed(body, calls)

    return run


def without_grad(around: Callable[[], Any]) -> Callable[[], Any]:
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with torch.no_grad(), around():
            yield

    return both


if __name__ == "__main__":
    print(machine())
    cpu, stand_in = Device(), OnTheCpu()
    print("\nforward, without gradients")
    forwards: dict[str, Callable[[], Any]] = {
        "nothing": contextlib.nullcontext,
        "benchmark off": lambda: patched(cpu, False, NeverHead()),
        "benchmark on, CPU tensor": lambda: patched(cpu, True, NeverHead()),
        "benchmark on, known key": lambda: patched(stand_in, True, NeverHead()),
        "the same, in a kept step": lambda: patched(stand_in, True, AdaptiveHead()),
        "a TorchFunctionMode": FunctionMode,
        "a TorchDispatchMode": DispatchMode,
        "torch.profiler": profiler,
    }
    added(interleaved({name: case(without_grad(around), call) for name, around in forwards.items()}, ROUNDS), "nothing")
    print("\nforward and backward")
    added(
        interleaved({name: case(around, trained, 300) for name, around in forwards.items()}, ROUNDS),
        "nothing",
    )
