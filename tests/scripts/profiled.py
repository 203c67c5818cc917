"""A training loop under torch.profiler and otel-dl, with something planted in it; what it measured itself as JSON.

    profiled.py DIR [sleep] [compile] [slow] [stack]

Writes DIR/profile.json and DIR/truth.json; otel-dl's traces go where its variables say.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import otel_dl

STEPS, FIRST, ACTIVE = 24, 10, 8
SHAPES = {5: 64, 12: 96}
"""Steps with a batch of another size, which is compiled for."""
SLEEP_S = 0.010
"""Planted between backward and optimizer, and in a compilation."""
SLOWER_S = 0.2
"""Planted in each forward while a profiler runs."""


class Network(nn.Sequential):
    def __init__(self, slow: bool) -> None:
        super().__init__(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        self.slow = slow

    def forward(self, x: Tensor) -> Tensor:
        if self.slow and torch.autograd._profiler_enabled():
            time.sleep(SLOWER_S)
        return super().forward(x)


def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
    """A backend that compiles nothing, and takes its time for it."""
    time.sleep(SLEEP_S)
    truth["compiled"].append(step)
    return graph.forward


directory, planted = Path(sys.argv[1]), set(sys.argv[2:])
truth: dict[str, list] = {"compiled": [], "slept": [], "forward": []}
step = 0

otel_dl.instrument()
torch.manual_seed(0)
torch.set_num_threads(1)
model: nn.Module = Network("slow" in planted)
forward = torch.compile(model, backend=compiler, dynamic=False) if "compile" in planted else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of = nn.CrossEntropyLoss()
size = 128
loader = DataLoader(
    TensorDataset(torch.randn(STEPS * size, 64), torch.randint(0, 10, (STEPS * size,))), batch_size=size
)
schedule = torch.profiler.schedule(wait=FIRST - 1, warmup=1, active=ACTIVE, repeat=1)

with torch.profiler.profile(
    activities=[torch.profiler.ProfilerActivity.CPU],
    schedule=schedule,
    on_trace_ready=lambda profile: profile.export_chrome_trace(str(directory / "profile.json")),
    with_stack="stack" in planted,
    record_shapes="stack" in planted,
) as profile:
    for step, (x, y) in enumerate(loader):
        if "compile" in planted and step in SHAPES:
            x, y = x[: SHAPES[step]], y[: SHAPES[step]]
        optimizer.zero_grad()
        began = time.perf_counter_ns()
        out = forward(x)
        truth["forward"].append(time.perf_counter_ns() - began)
        loss_of(out, y).backward()
        if "sleep" in planted:
            began = time.perf_counter_ns()
            time.sleep(SLEEP_S)
            truth["slept"].append(time.perf_counter_ns() - began)
        optimizer.step()
        profile.step()

(directory / "truth.json").write_text(json.dumps(truth))
