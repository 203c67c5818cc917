"""`OTEL_DL_SYNC=deep`: every wait, also those of C++ that no Python function stands for, through torch's GPU trace.

torch calls back before each wait for a stream, a device or an event, with no word about when it is over
(`c10/cuda/CUDAFunctions.h`, `torch/cuda/_gpu_trace.py`, 2.4-2.15; it is what torch.cuda._sanitizer uses): such a span
has a line and no length. A wait within a call that is recorded is part of that one. The trace can't be switched off
again: our callbacks are taken out, what it costs torch to look for one stays until the process ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from otel_dl.patches.synchronization.waiting import Waiting

_WAITS: Final = {
    "StreamSynchronizationCallbacks": "cudaStreamSynchronize",
    "DeviceSynchronizationCallbacks": "cudaDeviceSynchronize",
    "EventSynchronizationCallbacks": "cudaEventSynchronize",
}


def install(waiting: Waiting) -> None:
    import torch
    from torch.cuda import _gpu_trace

    torch._C._activate_gpu_trace()  # pyright: ignore[reportPrivateUsage]
    for name, operation in _WAITS.items():
        callbacks: list[Any] = getattr(_gpu_trace, name).callback_list
        callback = _callback(waiting, operation)
        callbacks.append(callback)
        waiting.patches.when_restored(_take_out(callbacks, callback))


def _callback(waiting: Waiting, operation: str) -> Callable[..., None]:
    def callback(*handle: int) -> None:
        waiting.patches.guard(waiting.seen, operation)

    return callback


def _take_out(callbacks: list[Any], callback: Any) -> Callable[[bool], None]:
    def take_out(after_fault: bool) -> None:
        if callback in callbacks:
            callbacks[:] = [each for each in callbacks if each is not callback]

    return take_out
