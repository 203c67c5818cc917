"""Which device a tensor is on, or an argument means: what the host can wait for."""

from __future__ import annotations

from typing import Any


def on_device(device: Any) -> bool:
    """Whether a `torch.device` is one that can be waited for."""
    return device is not None and device.type not in ("cpu", "meta")


def device_of(tensor: Any) -> Any:
    """The `torch.device` that holds what is in `tensor`; None: the CPU does, or nothing (it is fake, or no tensor).
    No `__torch_function__` is asked."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    if not isinstance(tensor, c.TensorBase) or type(tensor) is FakeTensor:
        return None
    try:
        with c.DisableTorchFunction():
            device = c.TensorBase.device.__get__(tensor)
    except Exception:
        return None  # a subclass may have a device of its own making
    return device if on_device(device) else None


def device_named(given: Any) -> Any:
    """The `torch.device` that is meant; None: there is none such, as torch will say itself."""
    import torch

    try:
        return torch.device(given)
    except Exception:
        return None


def crossed(source: Any, target: Any) -> Any:
    """Which of two, each as of `device_of`, is waited for when something is copied from one to the other: between the
    CPU and a device the host waits, between two of them, and on one, it does not."""
    return (source or target) if (source is None) != (target is None) else None
