"""ns that otel-dl adds to a call of what is compiled: a function, and a module, which is recorded as a forward.

Beside it torch.profiler, which is on for the same calls. The function's calls add nothing: nothing of otel-dl's is
called. A step is open, as it is in training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from _measure import Sample, added, interleaved, machine, timed
from torch import nn
from torch.profiler import ProfilerActivity, profile

from otel_dl.patches import compilation, training
from otel_dl.patches._patching import Patches
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.records import clock
from otel_dl.recording.run import Run
from otel_dl.settings import Settings

ROUNDS = 41
CALLS = 400

torch.set_num_threads(1)
x = torch.randn(8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


def function(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, x).relu()


def calls(compiled: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Sample]:
    def run() -> Sample:
        with torch.no_grad():
            compiled(x)
            return timed(lambda: compiled(x), CALLS)

    return run


def recorded(body: Callable[[], Sample], forward: bool) -> Callable[[], Sample]:
    """With the patches of the compiler, and with `forward` that of modules as well, in an open step."""
    run = Run(Settings(), NeverHead())

    def with_patches() -> Sample:
        lane = run.local.lane
        run.stepper = lane
        lane.step = step = run.open(clock(), batch=True, former=frozenset())
        step.settled = step.batch = True
        installers = dict(compilation.INSTALLERS)
        if forward:
            installers["forward"] = training.INSTALLERS["forward"]
        installed: list[Patches] = []
        for target, install in installers.items():
            patches = Patches(target)
            install(run, patches)
            installed.append(patches)
        try:
            return body()
        finally:
            run.finish()
            for patches in reversed(installed):
                patches.restore()

    return with_patches


def profiled(body: Callable[[], Sample]) -> Callable[[], Sample]:
    def run() -> Sample:
        with profile(activities=[ProfilerActivity.CPU]):
            return body()

    return run


if __name__ == "__main__":
    print(machine())
    a_function = calls(torch.compile(function, backend="eager"))
    a_function()
    added(
        interleaved(
            {
                "compiled function": a_function,
                "… again": a_function,
                "… otel-dl": recorded(a_function, forward=False),
                "… torch.profiler": profiled(a_function),
            },
            ROUNDS,
        ),
        "compiled function",
    )
    a_module = calls(torch.compile(Net(), backend="eager"))
    a_module()
    added(
        interleaved(
            {
                "compiled module": a_module,
                "… again": a_module,
                "… otel-dl, forward included": recorded(a_module, forward=True),
                "… torch.profiler": profiled(a_module),
            },
            ROUNDS,
        ),
        "compiled module",
    )
