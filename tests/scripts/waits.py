"""Waits for a stand-in device in every way there is, one a step, and says what it did: operation, line, and when."""

from __future__ import annotations

import json
import operator
import sys
import threading
from typing import Any
from unittest import mock

import torch
from support import accelerator as device
from support.inprocess import recording
from support.validate import from_sdk, validate
from torch import nn
from torch.cuda import _gpu_trace

import otel_dl
from otel_dl.patches.synchronization import split
from otel_dl.recording.records import to_epoch_ns

KERNEL_S = 0.002

device.register()
on_device = torch.device(device.NAME)
x = device.put(torch.arange(4.0) + 1)
one = device.put(torch.tensor(1))
flag = device.put(torch.tensor(True))
mask = device.put(torch.tensor([True, False, True, False]))
two = device.put(torch.ones(2))
repeats = device.put(torch.tensor([1, 0, 1, 2]))
square = device.put(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
host = torch.zeros(4)


parameter = nn.Parameter(device.put(torch.ones(4)))
parameter.grad = device.put(torch.ones(4))


optimizer = torch.optim.SGD([parameter], 0.1)
scaler = torch.amp.GradScaler(device.NAME, init_scale=1.0)
scaler.scale(two)


class Before(torch.Tensor):
    """A subclass that was there before anything was patched."""


# Each on a line of its own: that is the line that its span must have.
WAITS: list[tuple[str, Any]] = [
    ("Tensor.item", lambda: one.item()),
    ("Tensor.__int__", lambda: int(one)),
    ("Tensor.__float__", lambda: float(one)),
    ("Tensor.__complex__", lambda: complex(one)),
    ("Tensor.__bool__", lambda: 1 if flag else 0),
    ("Tensor.__index__", lambda: [1, 2, 3][one]),
    ("Tensor.tolist", lambda: x.tolist()),
    ("Tensor.cpu", lambda: x.cpu()),
    ("Tensor.to", lambda: x.to("cpu")),
    ("Tensor.to", lambda: x.to(device=torch.device("cpu"), dtype=torch.float64)),
    ("Tensor.to", lambda: x.to(host)),
    ("Tensor.to", lambda: host.to(on_device)),
    ("Tensor.to", lambda: host.to(x)),
    ("Tensor.copy_", lambda: host.copy_(x)),
    ("Tensor.copy_", lambda: x.copy_(host)),
    ("Tensor.nonzero", lambda: x.nonzero()),
    ("Tensor.masked_select", lambda: x.masked_select(mask)),
    ("Tensor.unique", lambda: x.unique()),
    ("Tensor.equal", lambda: x.equal(x)),
    ("Tensor.is_nonzero", lambda: one.is_nonzero()),
    ("Tensor.inverse", lambda: square.inverse()),
    ("Tensor.repeat_interleave", lambda: x.repeat_interleave(repeats)),
    ("Tensor.new_tensor", lambda: x.new_tensor([1.0, 2.0])),
    ("Tensor.__format__", lambda: f"{one}"),
    ("Tensor.item", lambda: sum(v.item() for v in [one])),
]

# Here it is a file of torch's that waits.
IN_TORCH: list[tuple[str, Any]] = [
    ("Tensor.__bool__", lambda: nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)),
    ("Tensor.item", lambda: (scaler.step(optimizer), scaler.update())),
    ("Tensor.item", lambda: scaler.get_scale()),
]

# Where there is no C, they are not seen.
IN_C: list[tuple[str, Any]] = [
    ("torch.nonzero", lambda: torch.nonzero(x)),
    ("torch.nonzero", lambda: torch.nonzero(input=x, as_tuple=True)),
    ("torch.nonzero", lambda: torch.nonzero(x.as_subclass(Before))),
    ("torch.nonzero", lambda: list(map(torch.nonzero, [x]))),
    ("torch.argwhere", lambda: torch.argwhere(x)),
    ("torch.where", lambda: torch.where(mask)),
    ("torch.where", lambda: torch.where(condition=mask)),
    ("torch.masked_select", lambda: torch.masked_select(x, mask)),
    ("torch.equal", lambda: torch.equal(x, x)),
    ("torch.allclose", lambda: torch.allclose(x, x)),
    ("torch.is_nonzero", lambda: torch.is_nonzero(one)),
    ("torch.bincount", lambda: torch.bincount(repeats)),
    ("torch.repeat_interleave", lambda: torch.repeat_interleave(repeats)),
    ("torch.repeat_interleave", lambda: torch.repeat_interleave(x, repeats=repeats, dim=0)),
    ("torch.unique", lambda: torch.unique(x)),
    ("torch.unique", lambda: torch.unique(square, return_counts=True, dim=0)),
    ("torch.unique_consecutive", lambda: torch.unique_consecutive(x)),
    ("torch.nn.functional.one_hot", lambda: nn.functional.one_hot(repeats)),
    ("torch.inverse", lambda: torch.inverse(square)),
    ("torch.pinverse", lambda: torch.pinverse(square)),
    ("torch.svd", lambda: torch.svd(square)),
    ("torch.linalg.cholesky", lambda: torch.linalg.cholesky(square)),
    ("torch.linalg.eig", lambda: torch.linalg.eig(square)),
    ("torch.linalg.eigh", lambda: torch.linalg.eigh(square)),
    ("torch.linalg.eigvals", lambda: torch.linalg.eigvals(square)),
    ("torch.linalg.eigvalsh", lambda: torch.linalg.eigvalsh(square)),
    ("torch.linalg.inv", lambda: torch.linalg.inv(square)),
    ("torch.linalg.ldl_factor", lambda: torch.linalg.ldl_factor(square)),
    ("torch.linalg.lu_factor", lambda: torch.linalg.lu_factor(square)),
    ("torch.linalg.matrix_rank", lambda: torch.linalg.matrix_rank(square)),
    ("torch.linalg.pinv", lambda: torch.linalg.pinv(square)),
    ("torch.linalg.svd", lambda: torch.linalg.svd(square)),
    ("torch.linalg.svdvals", lambda: torch.linalg.svdvals(square)),
    ("torch.linalg.solve", lambda: torch.linalg.solve(square, two)),
    ("torch.linalg.tensorsolve", lambda: torch.linalg.tensorsolve(square, two)),
    ("torch.linalg.tensorinv", lambda: torch.linalg.tensorinv(square, ind=1)),
    ("torch.linalg.inv_ex", lambda: torch.linalg.inv_ex(square, check_errors=True)),
    ("torch.linalg.cholesky_ex", lambda: torch.linalg.cholesky_ex(square, check_errors=True)),
    ("torch.tensor", lambda: torch.tensor([1.0, 2.0], device=on_device)),
    ("torch.tensor", lambda: torch.tensor(1.0, device=device.NAME)),
    ("torch.tensor", lambda: torch.tensor([[one, one]])),
    ("torch.as_tensor", lambda: torch.as_tensor([1.0], device=on_device)),
    ("torch.as_tensor", lambda: torch.as_tensor(host, device=on_device)),
    ("torch.as_tensor", lambda: torch.as_tensor(x, device="cpu")),
    ("torch.asarray", lambda: torch.asarray([1.0], device=on_device)),
    ("Tensor.__getitem__", lambda: x[mask]),
    ("Tensor.__getitem__", lambda: x[mask,]),
    ("Tensor.__getitem__", lambda: x.__getitem__(mask)),
    ("Tensor.__getitem__", lambda: torch.Tensor.__getitem__(x, mask)),
    ("Tensor.__getitem__", lambda: parameter[mask]),
    ("Tensor.__getitem__", lambda: x.as_subclass(Before)[mask]),
    ("Tensor.__getitem__", lambda: x.as_subclass(type("Now", (torch.Tensor,), {}))[mask]),
    ("Tensor.__getitem__", lambda: x.as_subclass(type("Now", (Before,), {}))[mask]),
    ("Tensor.__setitem__", lambda: operator.setitem(x, mask, two)),
    ("Tensor.__setitem__", lambda: x.__setitem__(mask, two)),
]

QUIET: list[tuple[str, Any]] = [
    ("on the device", lambda: x + x),
    ("a cast", lambda: x.to(torch.float64)),
    ("an index", lambda: x[0]),
    ("a slice", lambda: x[1:3]),
    ("an element that is set", lambda: operator.setitem(x, 0, 1.0)),
    ("a mask that is filled", lambda: operator.setitem(x, mask, 1.0)),
    ("a copy on the device", lambda: x.copy_(x + 1)),
    ("a choice", lambda: torch.where(mask, x, x)),
    ("as often as is known", lambda: (torch.repeat_interleave(x, 2), x.repeat_interleave(repeats, output_size=4))),
    ("as many classes as are known", lambda: nn.functional.one_hot(repeats, 3)),
    ("an inverse that may be none", lambda: torch.linalg.inv_ex(square)),
    ("a tensor that is there already", lambda: (torch.as_tensor(x), torch.as_tensor(x, device=on_device))),
    ("nothing but made there", lambda: torch.zeros(2, device=on_device)),
    ("a copy that is not waited for", lambda: host.to(on_device, non_blocking=True)),
    ("functions on the CPU", lambda: (torch.nonzero(host), torch.unique(host), torch.tensor([1], device="cpu"))),
    ("on the CPU", lambda: (host.tolist(), host[host > 0], host.to(torch.float64), host[0].item(), host.cpu())),
]


def run(work: list[tuple[str, Any]], kernel: float, **settings: Any) -> dict[str, Any]:
    truth: list[dict[str, Any]] = []
    with recording(**settings) as recorded:
        for name, operation in work:
            before = len(device.waits)
            with otel_dl.step():
                device.launch(kernel)
                operation()
            waited = device.waits[before:]
            code = operation.__code__
            truth.append(
                {"op": name, "line": code.co_firstlineno, "waits": [[to_epoch_ns(t) for t in each] for each in waited]}
            )
    spans = [from_sdk(span) for span in recorded.spans]
    return {
        "truth": truth,
        "problems": validate(spans, whole=False),
        "steps": steps(recorded),
    }


def steps(recorded: Any) -> list[dict[str, Any]]:
    return [
        {
            "sums": {k: v for k, v in dict(step.attributes).items() if k.startswith("dl.sync")},
            "waits": [
                {"start": s.start_time, "end": s.end_time, "ok": s.status.is_unset, **dict(s.attributes)}
                for s in recorded.named("cuda.synchronize")
                if s.context.trace_id == step.context.trace_id
            ],
        }
        for step in sorted(recorded.named("train.step"), key=lambda step: step.start_time)
    ]


def marks(work: list[tuple[str, Any]], **settings: Any) -> dict[str, list[str]]:
    """By line, the devices whose streams were asked to tell how much of a call is copying."""
    asked: dict[str, list[str]] = {}
    now: list[str] = []

    def begin(self: split.Split, given: Any) -> None:
        if given is not None:
            now.append(given.type)

    with mock.patch.object(split.Split, "begin", begin), recording(**settings):
        for _, operation in work:
            now.clear()
            with otel_dl.step():
                operation()
            asked[str(operation.__code__.co_firstlineno)] = now.copy()
    return asked


def failed(**settings: Any) -> dict[str, Any]:
    raised: list[str] = []
    gone = RuntimeError("the device is gone")
    with recording(**settings) as recorded, otel_dl.step():
        device.fails.append(gone)
        try:
            one.item()
        except RuntimeError as error:
            raised = [f"{type(error).__name__}: {error}", str(error is gone)]
    return {"raised": raised, "steps": steps(recorded)}


def printed(**settings: Any) -> dict[str, Any]:
    before = len(device.waits)
    with recording(**settings) as recorded, otel_dl.step():
        device.launch(KERNEL_S)
        repr(device.put(torch.tensor(1.5)))
        str(one)
    return {"waits": len(device.waits) - before, "steps": steps(recorded)}


def subclass(**settings: Any) -> dict[str, Any]:
    functions: list[str] = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            functions.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    mine = one.as_subclass(Mine)
    functions.clear()
    with recording(**settings) as recorded, otel_dl.step():
        device.launch(KERNEL_S)
        mine.item()
    return {"functions": functions, "steps": steps(recorded)}


def deep(**settings: Any) -> dict[str, Any]:
    """torch's GPU trace calls back before each wait, as its CUDA part would."""
    callbacks = _gpu_trace.StreamSynchronizationCallbacks
    device.on_wait.append(lambda: callbacks.fire_callbacks(1))
    with recording(**{**settings, "sync": "deep"}) as recorded:
        with otel_dl.step():
            device.launch(KERNEL_S)
            torch.ops.aten.nonzero(x)
        with otel_dl.step():
            device.launch(KERNEL_S)
            one.item()
    device.on_wait.clear()
    return {"steps": steps(recorded)}


def elsewhere(**settings: Any) -> dict[str, Any]:
    def work() -> None:
        device.launch(KERNEL_S)
        one.item()

    with recording(**settings) as recorded, otel_dl.step():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    return {"steps": steps(recorded)}


if __name__ == "__main__":
    native = sys.argv[1] == "c"
    # A machine that is busy may come to wait only when the kernel is done: with no least time that is a span as well.
    # In Python the hot methods are recorded in the deep mode only.
    form: dict[str, Any] = {"native": native, "sync": "on" if native else "deep"}
    if native:
        WAITS += IN_C
    result = {
        "long": run(WAITS, KERNEL_S, sync_min_ms=0, **form),
        "short": run(WAITS, 0.0, sync_min_ms=60_000, **form),
        "in torch": run(IN_TORCH, KERNEL_S, sync_min_ms=0, **form),
        "marks": marks(WAITS + QUIET, **form),
        "quiet": run(QUIET, KERNEL_S, sync_min_ms=60_000, **form),
        "off": run(WAITS, KERNEL_S, sync="off"),
        "failed": failed(**form),
        "printed": printed(sync_min_ms=0, **form),
        "subclass": subclass(sync_min_ms=0, **form),
        "deep": deep(sync_min_ms=0, **form),
        "elsewhere": elsewhere(sync_min_ms=0, **form),
    }
    print(json.dumps(result))
