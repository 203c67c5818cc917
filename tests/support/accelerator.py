"""A device that torch takes for an accelerator, on a machine without one: torch's own registration of a backend that is
written in Python (`torch.utils.backend_registration`, 2.10 and later; permanent, so for a process of its own).

Its tensors are plain `torch.Tensor`s whose `is_cpu` is false. Their values lie on the CPU, and are there once the work
that was queued is done: whoever needs them waits, and the wait is written down. That is the truth of the tests.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"

_held: dict[int, tuple[torch.Tensor, Any]] = {}
"""By storage, which what is detached shares: the values, on the CPU. For ever."""
_READS = frozenset(
    {
        "aten::_local_scalar_dense", "aten::equal", "aten::masked_select", "aten::nonzero", "aten::_unique2",
        "aten::_index_put_impl_", "aten::bincount", "aten::repeat_interleave.Tensor", "aten::unique_dim",
        "aten::unique_consecutive", "aten::linalg_eig", "aten::_linalg_eigvals", "aten::_linalg_eigh.eigenvalues",
        "aten::_linalg_svd.U",
    }
)  # fmt: skip
"""Operations whose own CUDA kernels wait; those that are made of others do where these do."""

waits: list[tuple[int, int]] = []
"""Every wait: (start, end), readings of time.perf_counter_ns."""
on_wait: list[Any] = []
"""Called before each, as torch's GPU trace is."""
fails: list[BaseException] = []
"""What the next wait raises."""
_busy_until = 0.0


def launch(seconds: float) -> None:
    """Queues work that takes so long."""
    global _busy_until
    _busy_until = max(_busy_until, time.perf_counter()) + seconds


def synchronize() -> None:
    for callback in on_wait:
        callback()
    if fails:
        raise fails.pop()
    start = time.perf_counter_ns()
    while (left := _busy_until - time.perf_counter()) > 0:
        time.sleep(left)
    waits.append((start, time.perf_counter_ns()))


def put(held: torch.Tensor) -> torch.Tensor:
    """A tensor on the device with these values."""
    held = held.contiguous()
    tensor = torch._C._acc.create_empty_tensor(list(held.shape), held.dtype)
    storage = tensor.untyped_storage()
    _held[storage._cdata] = held, storage
    return tensor


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != NAME:
        return value
    return _held[value.untyped_storage()._cdata][0]


def _any(func: Any, *args: Any, **kwargs: Any) -> Any:
    if func.name() in _READS or kwargs.get("check_errors"):
        synchronize()
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    given = tree_map(_on_cpu, (args, kwargs))
    result = func(*given[0], **given[1])
    ours, theirs = (*args, *kwargs.values()), (*given[0], *given[1].values())
    same = {id(one): other for one, other in zip(theirs, ours, strict=True)}

    def as_ours(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return same[id(value)] if id(value) in same else put(value)

    return tree_map(as_ours, result)


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not non_blocking and source.device != target.device:
        synchronize()
    _on_cpu(target).copy_(_on_cpu(source))
    return target


def _empty(size: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    return put(torch.empty(size, dtype=dtype or torch.float32))


class _Module:
    """What `torch.<name>` is."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


_libraries: list[Any] = []


def register() -> None:
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_any, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty, "PrivateUse1")
    aten.impl("_copy_from", _copy, "PrivateUse1")
    for function in (torch.ops.aten.abs.default, torch.ops.aten.logical_or.default):
        # torch would make the result empty and resize it, which such a tensor can't be.
        aten.impl(function.name(), functools.partial(_any, function), "PrivateUse1")
    _libraries.extend((everything, aten))
