"""Phases of training: forward, backward, optimizer, zero_grad, LR scheduler.

Recorders on the paths of Tensor and Module (see `recorder.py`; a wrapt proxy costs 0.5–1.7 µs a call there), and
closure cells for `Optimizer.step`, which reach an optimizer's class through every alias taken earlier. Whatever dynamo
can trace through is behind `torch.compiler.is_dynamo_compiling()`, which it takes for true: no graph break, no
recompilation. Calls of a module are not, for dynamo passes by them as by torch's own (`install_forward`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

from otel_dl.patches._patching import Patches
from otel_dl.patches.recorder import recorder
from otel_dl.recording.lane import (
    BACKWARD,
    EVAL_FORWARD,
    FORWARD,
    NEUTRAL_FORWARD,
    OPTIMIZER,
    SCHEDULER,
    ZERO_GRAD,
)

if TYPE_CHECKING:
    from otel_dl.recording.lane import Lane
    from otel_dl.recording.run import Run


class Phase:
    """A phase of this kind; one that is nested in another of the same kind is not recorded.

    `traced` is asked about those that are nested in any: a compiler's are none of training's.
    """

    def __init__(self, kind: int, traced: Callable[[], bool] = lambda: False) -> None:
        self.kind = kind
        self._traced = traced

    def begin(self, lane: Lane, subject: Any) -> tuple[int, int] | None:
        if lane.kinds and self._traced():
            return None
        start = lane.begin(self.kind)
        return (self.kind, start) if start else None

    def end(self, lane: Lane, kind: int, subject: Any, start: int) -> None:
        lane.end(kind, start)

    def fail(self, lane: Lane, kind: int, subject: Any, start: int, error: BaseException) -> None:
        lane.fail(kind, start, error)


class OptimizerStep(Phase):
    """`step()` of an optimizer, the outermost."""

    def __init__(self) -> None:
        super().__init__(OPTIMIZER)

    def begin(self, lane: Lane, subject: Any) -> tuple[int, int] | None:
        start = lane.begin_optimizer(id(subject))
        return (OPTIMIZER, start) if start else None

    def end(self, lane: Lane, kind: int, subject: Any, start: int) -> None:
        lane.end_optimizer(start, id(subject))


class Forward(Phase):
    """The outermost call of a module."""

    def __init__(self, is_grad_enabled: Callable[[], bool]) -> None:
        super().__init__(FORWARD)
        self._is_grad_enabled = is_grad_enabled

    def begin(self, lane: Lane, subject: Any) -> tuple[int, int] | None:
        # A module that was frozen (`torch.jit.freeze`) has no `training`, one without `super().__init__()` has nothing.
        if not (getattr(subject, "training", False) and self._is_grad_enabled()):
            kind = EVAL_FORWARD
        elif getattr(subject, "_modules", None) or getattr(subject, "_parameters", None):
            kind = FORWARD
        else:
            kind = NEUTRAL_FORWARD
        start = lane.begin(kind) if kind == FORWARD else lane.begin_untrained(kind)
        return (kind, start) if start else None


def traceable(run: Run, patches: Patches, event: Phase, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` as a phase, where dynamo may trace through it."""
    from torch.compiler import is_dynamo_compiling

    recorded = recorder(run, patches, event, original, "Phase", optimizes=event.kind == OPTIMIZER)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        return recorded(*args, **kwargs)

    return wrapper


def install_forward(run: Run, patches: Patches) -> None:
    """The outermost call of a module: its own forward, not those of its submodules."""
    import torch
    from torch.compiler import is_dynamo_compiling

    module: Any = torch.nn.Module
    original = module.__dict__["__call__"]
    is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
    own = original is module.__dict__.get("_wrapped_call_impl")
    outermost = recorder(
        run, patches, Forward(is_grad_enabled), original, "Forward", own=own, is_grad_enabled=is_grad_enabled
    )

    @functools.wraps(original)
    def in_python(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(self, *args, **kwargs)
        # A submodule's call is the hot one (hundreds a step). Where torch's own function stands, its two lines are done
        # here: one Python frame less than calling it, which halves what we add (torch/nn/modules/module.py 2.4-2.15).
        if run.local.lane.kinds & FORWARD:
            if own and self._compiled_call_impl is None:
                return self._call_impl(*args, **kwargs)
            return original(self, *args, **kwargs)
        return outermost(self, *args, **kwargs)

    # Dynamo never traces through a call of a module that it takes for torch's own, as it does ours (see below).
    __call__: Any = in_python if isinstance(outermost, FunctionType) else outermost
    if not isinstance(outermost, FunctionType) and hasattr(original, "__code__"):
        # torch.compile of a user's module asks for it, and compiles this (torch/_dynamo/eval_frame.py).
        __call__.__code__ = original.__code__
    __call__.__qualname__ = "Module.__call__"  # torch's own has another place as well: by this one it is pickled
    if not isinstance(__call__, FunctionType):
        # torch's profiler tells calls of modules in a stack by this code, and ends the process by SIGSEGV where there
        # is none (torch/csrc/autograd/profiler_python.cpp::nnModuleCode, 2.4-2.15). This one runs in each call of ours.
        __call__.__code__ = module._call_impl.__code__
        # With these inspect.getfullargspec, of the function or a module, takes it for a function.
        for name in ("__defaults__", "__kwdefaults__"):
            setattr(__call__, name, getattr(original, name, None))
    patches.replace(module, "__call__", __call__)

    # Modules of torch that keep what `Module.__call__` is when they are imported.

    def fx_imported(symbolic_trace: Any) -> None:
        if getattr(symbolic_trace, "_orig_module_call", None) is __call__:
            symbolic_trace._orig_module_call = original

    def dynamo_imported(nn_module: Any) -> None:
        # torch.compile passes by a call of a module where it is torch's own, which ours is to it: it takes the same
        # way as without us (torch/_dynamo/variables/nn_module.py).
        if own and module.__dict__["__call__"] is __call__:
            owners: tuple[Any, ...] = (sys.modules.get("torch._dynamo.utils"), nn_module)
            for owner in owners:
                if hasattr(owner, "unpatched_nn_module_call"):
                    owner.unpatched_nn_module_call = original
                    patches.replace(owner, "unpatched_nn_module_call", __call__)

    patches.when_imported("torch.fx._symbolic_trace", fx_imported)
    patches.when_imported("torch._dynamo.variables.nn_module", dynamo_imported)


def install_backward(run: Run, patches: Patches) -> None:
    """Every entry into the autograd engine from Python: `Tensor.backward`, `autograd.backward`, `autograd.grad`."""
    import torch.autograd
    from torch._guards import TracingContext

    def traced() -> bool:
        # AOTAutograd runs a backward while it compiles, within the first forward.
        return TracingContext.try_get() is not None

    target: Any = torch.autograd
    patches.replace(
        target, "_engine_run_backward", traceable(run, patches, Phase(BACKWARD, traced), target._engine_run_backward)
    )


def install_zero_grad(run: Run, patches: Patches) -> None:
    import torch

    owner: Any
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        patches.replace(owner, "zero_grad", traceable(run, patches, Phase(ZERO_GRAD), owner.__dict__["zero_grad"]))


def _subclasses(root: type[Any]) -> Iterator[type[Any]]:
    yield root
    for child in root.__subclasses__():
        yield from _subclasses(child)


def install_scheduler(run: Run, patches: Patches) -> None:
    """`step` of each LR scheduler class that has its own, those defined later when their first object is made."""
    import torch

    base: Any = torch.optim.lr_scheduler.LRScheduler
    seen: set[type] = set()

    def cover(kind: type) -> None:
        if kind not in seen:
            seen.add(kind)
            step = kind.__dict__.get("step")
            if isinstance(step, FunctionType):
                patches.replace(kind, "step", traceable(run, patches, Phase(SCHEDULER), step))

    for kind in _subclasses(base):
        cover(kind)
    # ReduceLROnPlateau was no LRScheduler before torch 2.2; all that we support are.
    original = base.__dict__["__init__"]

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if run.active:
            for kind in type(self).__mro__:
                if issubclass(kind, base):
                    cover(kind)
        original(self, *args, **kwargs)

    patches.replace(base, "__init__", __init__)


def install_optimizer(run: Run, patches: Patches) -> None:
    """`step()` of every optimizer, through the closure of `Optimizer.profile_hook_step`'s wrapper.

    torch wraps each class's `step` when its first object is made and marks it `hooked`
    (torch/optim/optimizer.py::_patch_step_function, 2.4-2.15). What the wrapper calls is the cell `func`: setting it
    sees exceptions too, which torch's own hooks do not, and leaves `cls.step` the object it was.
    """
    import torch

    base: Any = torch.optim.Optimizer
    covered: dict[int, CellType] = {}

    def cover(kind: type) -> None:
        step: Any = getattr(kind, "step", None)
        if not getattr(step, "hooked", False):
            return
        # torch.compile puts a wrapper of its own around some (torch/_dynamo/eval_frame.py::TorchPatcher: LBFGS).
        while isinstance(step, FunctionType) and "func" not in step.__code__.co_freevars:
            step = getattr(step, "__wrapped__", None)
        if not isinstance(step, FunctionType) or step.__closure__ is None:
            return
        cell: CellType = step.__closure__[step.__code__.co_freevars.index("func")]
        if id(cell) not in covered:
            covered[id(cell)] = cell
            patches.replace_cell(cell, traceable(run, patches, OptimizerStep(), cell.cell_contents))

    for kind in _subclasses(base):
        cover(kind)
    original = base.__dict__["_patch_step_function"]

    @functools.wraps(original)
    def _patch_step_function(self: Any) -> None:
        original(self)
        if run.active:
            cover(self.__class__)

    patches.replace(base, "_patch_step_function", _patch_step_function)


def install_scaler(run: Run, patches: Patches) -> None:
    """`GradScaler.step`: where it finds an inf no optimizer steps, and the step ends all the same."""
    import torch

    scaler: Any = torch.amp.GradScaler
    original = scaler.__dict__["step"]

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            lane = run.local.lane
            lane.stepping(id(optimizer))
        except BaseException as error:
            patches.fault(error)
            return original(self, optimizer, *args, **kwargs)
        result = original(self, optimizer, *args, **kwargs)
        patches.guard(lane.stepped, id(optimizer))
        return result

    patches.replace(scaler, "step", step)


INSTALLERS: dict[str, Callable[[Run, Patches], None]] = {
    "forward": install_forward,
    "backward": install_backward,
    "zero_grad": install_zero_grad,
    "lr_scheduler": install_scheduler,
    "optimizer": install_optimizer,
    "grad_scaler": install_scaler,
}
"""One target each: a fault in one switches that one off."""
