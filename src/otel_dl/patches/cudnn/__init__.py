"""cuDNN's autotuning: `torch.conv1d` … `torch.conv_transpose3d`, which `torch.nn.functional` and the modules call.

An object stands in the place of each. It is equal to torch's function and has its hash, is pickled by its name, is what
`__torch_function__` is handed, and is torch's function to `torch.jit.script` (torch/jit/_builtins.py) and to
dynamo (torch/_dynamo/variables/builder.py). Not seen, for they don't pass by Python: convolutions in code that was
scripted or compiled, in C++ (double backward), and `torch.ops.aten.convolution`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from otel_dl.log import logger
from otel_dl.patches.cudnn.calls import OPERATIONS, Device, Operation
from otel_dl.patches.cudnn.watch import Watch

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run

_functions: dict[Operation, Function] = {}
"""Made once a process: who has taken one from torch keeps it, and torch.jit knows it by its id."""


def install(run: Run, patches: Patches, device: Device | None = None) -> None:
    """`device` is where cuDNN runs, CUDA."""
    import torch
    from torch.jit import _builtins

    if os.environ.get("TORCH_CUDNN_V8_API_DISABLED") == "1":
        return  # the cache before it has other keys
    if getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0):
        # What was compiled is guarded by which object stands there (torch/_dynamo/guards.py), and would be again.
        logger.info("otel-dl: convolutions are not followed, as code was compiled before otel_dl.instrument().")
        return
    register: Callable[[object, str], None] = vars(_builtins)["_register_builtin"]
    watch = Watch(run, patches, device or Device())
    namespaces: tuple[Any, ...] = (torch, torch.nn.functional)
    for operation in OPERATIONS:
        function = _functions.get(operation)
        if function is None:
            function = _functions[operation] = Function(operation, getattr(torch, operation.name))
        # torch.jit makes its table of what it finds in torch when it is first asked for.
        for each in (function.original, function):
            register(each, f"aten::{operation.name}")
        function.watch = watch
        for namespace in namespaces:
            if namespace.__dict__.get(operation.name) == function.original:
                patches.replace(namespace, operation.name, function)

    # Of dynamo's modules the one that imports all that this needs, which import each other.
    patches.when_imported("torch._dynamo.convert_frame", lambda _: patches.guard(_known_to_dynamo))

    def restored(after_fault: bool) -> None:
        for function in _functions.values():
            if function.watch is watch:
                function.watch = None

    patches.when_restored(restored)


def _known_to_dynamo() -> None:
    """Dynamo takes each for torch's own, guarded by which object stands there: else it would trace through `__call__`,
    and guards and reasons to compile again would name a line of ours (the same in torch 2.4-2.15)."""
    builder: Any = getattr(sys.modules.get("torch._dynamo.variables.builder"), "VariableBuilder", None)
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    dispatch: Any = getattr(builder, "_id_dispatch", None)
    if dispatch is None or not hasattr(rules, "lookup") or not hasattr(rules, "lookup_callable"):
        return

    def as_torchs(building: Any, function: Function) -> Any:
        original = function.original
        # What the user allowed or disallowed in graphs comes first.
        rule = rules.lookup_callable(function) or rules.lookup_callable(original) or rules.lookup(original)
        return rule.create_with_source(original, source=building.source)

    # They stay in it as they stay with who has taken one.
    dispatch().update({id(function): as_torchs for function in _functions.values()})


class Function:
    """One of torch's, followed while cuDNN's benchmark is on."""

    def __init__(self, operation: Operation, original: Callable[..., Any]) -> None:
        import torch
        from torch.compiler import is_dynamo_compiling
        from torch.overrides import handle_torch_function, has_torch_function

        self.__name__ = operation.name
        self.__module__ = "torch"
        self.__doc__ = original.__doc__
        self.operation = operation
        self.original = original
        self.watch: Watch | None = None
        self._benchmark: Callable[[], bool] = vars(torch)["_C"]._get_cudnn_benchmark
        self._overridden: Callable[[tuple[Any, ...]], bool] = has_torch_function
        self._handle: Callable[..., Any] = handle_torch_function
        self._compiling: Callable[[], bool] = is_dynamo_compiling

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._compiling():
            return self.original(*args, **kwargs)
        watch = self.watch
        if watch is None:
            return self.original(*args, **kwargs)
        if self._overridden(args) or (kwargs and self._overridden((*kwargs.values(),))):
            # Whoever overrides it knows it by the name under which it is found in torch: this one.
            return self._handle(self, (*args, *kwargs.values()), *args, **kwargs)
        if self._benchmark() or watch.on:
            return watch.call(self.operation, self.original, args, kwargs)
        return self.original(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.original

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        import torch

        if torch.__dict__.get(self.operation.name) is self:
            return self.operation.name
        return self.original.__reduce_ex__(protocol)
