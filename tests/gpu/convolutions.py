"""cuDNN's autotuning on a real GPU: the calls that otel-dl predicts to tune against the time that they took.

A fixed list of calls is run, each with the device idle before and after: every call that is
predicted to tune is slow, and no other is. The times are the script's own. One of the parts of `device.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from support.inprocess import recording
from table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import otel_dl

SLOW = 5.0
"""A call that tunes takes so many times the median of those that are not predicted to (it runs every plan that there
is)."""

T = TypeVar("T")


class Timed(NamedTuple):
    name: str
    forward_ms: float
    backward_ms: float
    forward_warm: bool
    backward_warm: bool


def calls() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """What runs, in this order. Names that end in `again` repeat a key."""
    cuda = torch.device("cuda", 0)

    def of(*sizes: int, last: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
        made = torch.randn(sizes, device=cuda, dtype=dtype)
        made = made.to(memory_format=torch.channels_last) if last else made
        return made.requires_grad_()

    layer = nn.Conv2d(64, 64, 3, padding=1, device=cuda)
    up = nn.ConvTranspose2d(64, 32, 4, stride=2, device=cuda)
    line = nn.Conv1d(64, 64, 5, device=cuda)
    space = nn.Conv3d(16, 16, 3, device=cuda)
    half = nn.Conv2d(64, 64, 3, padding=1, device=cuda, dtype=torch.float16)
    deep = nn.Conv2d(512, 512, 3, padding=1, groups=512, device=cuda, dtype=torch.float16)
    block = nn.Sequential(nn.Conv2d(64, 48, 3, device=cuda), nn.ReLU())

    def cast() -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return layer(of(64, 64, 56, 56))

    def deterministic() -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
            return layer(of(64, 64, 56, 56))

    def heuristic() -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False):
            return layer(of(48, 64, 56, 56))

    for name, call in (
        ("batch 64", lambda: layer(of(64, 64, 56, 56))),
        ("batch 128", lambda: layer(of(128, 64, 56, 56))),
        ("ragged last batch", lambda: layer(of(20, 64, 56, 56))),
        ("channels_last", lambda: layer(of(64, 64, 56, 56, last=True))),
        ("autocast", cast),
        ("half", lambda: half(of(64, 64, 56, 56, dtype=torch.float16))),
        ("deterministic", deterministic),
        ("transposed", lambda: up(of(32, 64, 28, 28))),
        ("1d", lambda: line(of(64, 64, 1024))),
        ("2d that is that 1d", lambda: F.conv2d(of(64, 64, 1, 1024), line.weight.unsqueeze(2), line.bias)),
        ("3d", lambda: space(of(8, 16, 16, 32, 32))),
        ("depthwise in half", lambda: deep(of(32, 512, 28, 28, dtype=torch.float16))),
        ("checkpointed", lambda: checkpoint(block, of(64, 64, 56, 56), use_reentrant=False)),  # type: ignore[list-item]
        ("benchmark off", heuristic),
        ("benchmark on after it was off", lambda: layer(of(48, 64, 56, 56))),
    ):
        yield name, call
        yield f"{name} again", call
        yield f"{name} again", call


def run() -> list[Timed]:
    """Each call with its times, and what otel-dl says of it."""
    times: dict[str, tuple[float, float]] = {}
    with torch.backends.cudnn.flags(enabled=True, benchmark=True), recording() as recorded:
        torch.randn(64, 64, device="cuda").mm(torch.randn(64, 64, device="cuda")).sum().item()  # the device is set up
        for index, (name, call) in enumerate(calls()):
            with otel_dl.step(), otel_dl.span(f"{index} {name}"):
                with otel_dl.span(f"{index} forward"):
                    result, forward = timed(call)
                with otel_dl.span(f"{index} backward"):
                    _, backward = timed(lambda result=result: result.backward(torch.ones_like(result)))
            times[f"{index} {name}"] = forward, backward
        recorded.finish()
        spans = list(recorded.spans)
    found: list[Timed] = []
    for named, (forward_ms, backward_ms) in times.items():
        index, _, name = named.partition(" ")
        warm = [
            any(
                span.name.startswith("cudnn::")
                and (span.attributes or {}).get("is_warmup")
                and outer.start_time <= span.start_time <= outer.end_time  # type: ignore[operator]
                for span in spans
            )
            for outer in (
                next(span for span in spans if span.name == f"{index} {phase}") for phase in ("forward", "backward")
            )
        ]
        found.append(Timed(name, forward_ms, backward_ms, *warm))
    return found


def timed(call: Callable[[], T]) -> tuple[T, float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, (time.perf_counter() - start) * 1e3


def what_is_predicted_to_tune_is_slow(table: Table) -> None:
    found = run()
    for name in dict.fromkeys(each.name.removesuffix(" again") for each in found):
        of_name = [each for each in found if each.name.removesuffix(" again") == name]
        for phase in ("forward", "backward"):
            steady = min(getattr(each, f"{phase}_ms") for each in of_name[1:])
            for each in of_name:
                took, warm = getattr(each, f"{phase}_ms"), getattr(each, f"{phase}_warm")
                table.add(
                    f"cuDNN tunes: {each.name}, {phase}: {'yes' if warm else 'no'}",
                    f"{took:.2f} ms, {took / steady:.1f} times the steady one",
                    f"{'more' if warm else 'less'} than {SLOW:g} times",
                    warm == (took > SLOW * steady),
                )


CHECKS = (what_is_predicted_to_tune_is_slow,)


if __name__ == "__main__":
    raise SystemExit("One of the parts of device.py, which runs it.")
