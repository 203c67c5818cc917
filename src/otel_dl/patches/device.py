"""The accelerator that this torch was built for, as `recording.device` asks it: CUDA (ROCm is that to torch) or XPU.

Through the module `torch.cuda` or `torch.xpu`, which have the same names for it. MPS has neither `is_initialized` nor
an allocator that says as much, and stays without. Read in torch 2.4 to 2.15; has not run on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_dl.patches._patching import Patches
from otel_dl.recording.device import DeviceEvent, DeviceTime, Memory

if TYPE_CHECKING:
    from otel_dl.recording.run import Run

_NEEDED: Final = ("is_initialized", "current_device", "Event")


class TorchDevice:
    """`torch.cuda` or `torch.xpu`. Raises what torch raises."""

    def __init__(self, kind: str, module: Any) -> None:
        self.type = kind
        self._module = module
        self._is_capturing = getattr(module, "is_current_stream_capturing", None)

    def is_on(self) -> bool:
        return self._module.is_initialized()  # False in a forked child

    def current(self) -> int:
        return self._module.current_device()

    def is_capturing(self) -> bool:
        return self._is_capturing is not None and self._is_capturing()

    def event(self) -> DeviceEvent:
        return self._module.Event(enable_timing=True)

    def memory(self, device: int) -> Memory:
        # Not memory_stats(), which makes a flat, sorted copy of it each time.
        said = self._module.memory.memory_stats_as_nested_dict(device)
        allocated = said.get("allocated_bytes", {}).get("all", {})
        reserved = said.get("reserved_bytes", {}).get("all", {})
        return Memory(
            allocated.get("current"), allocated.get("peak"), reserved.get("current"), said.get("num_alloc_retries")
        )

    def free(self, device: int) -> int | None:
        mem_get_info = getattr(self._module, "mem_get_info", None)
        return mem_get_info(device)[0] if mem_get_info is not None else None


def built_for() -> TorchDevice | None:
    """The accelerator that this torch was built for, whether or not the machine has one. Touches no driver."""
    import torch

    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None:
        device = accelerator.current_accelerator()
        kind: str = device.type if device is not None else ""
    else:  # torch before 2.6
        kind = "cuda" if torch.backends.cuda.is_built() else ""
    if not kind:
        return None
    module: Any = torch.get_device_module(kind)
    return TorchDevice(kind, module) if all(hasattr(module, name) for name in _NEEDED) else None


def install(run: Run, patches: Patches) -> None:
    """Nothing is patched: the run's phases and steps are observed, once the process uses the device."""
    run.device = DeviceTime(run, built_for(), run.settings.device_events)
    patches.when_restored(lambda after_fault: run.device.stop())
