"""How much of a copy between the CPU and the device was waiting for what was queued before, and how much copying.

Two CUDA events, one recorded before the call and one after it, on the stream that the copy goes through: the device's
current one, in both directions (ATen/native/cuda/Copy.cu: `copy_kernel_cuda`, 2.4-2.15, which copies there and waits
for that stream, unless it is told not to block: then there are no events). The first completes when the work that was
queued before is done, so the time between them is the copy's, with some 10 us in which the host returns.

- From the device: the copy; what makes the tensor contiguous before it, and what casts it on the CPU after it.
- To the device: from pageable memory CUDA reads into a buffer of its own, which goes over in the stream's order. What
  the host does first (a cast, reading a list) is the copy's as well where the device had nothing to do meanwhile, and
  else within the wait, which would have been as long without. A kernel that lays out the copy on the device (into a
  slice, or another memory format) may run on after the host has returned, and counts as copying.

Recording one is work that is queued, and no wait: nothing comes sooner or later than without, but for the record.
Waiting for the stream before the call would tell the same, and make the copy start later, by the time in which the host
hears of it. What computes as well (`nonzero`, a mask) is not split: the time between the events would be that of its
own kernels, too, of which the last is still at work when the host has returned.

They are read at a later call, in a thread that works with the device (a query from another one would invalidate a
graph that is captured meanwhile), where they are complete. In steps that the head sampler keeps.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from otel_dl.recording.waits import Wait

_PENDING: Final = 256
"""Pairs whose times have not been read, at most."""


class Split:
    """Marks are (event before, event after, stream)."""

    def __init__(self) -> None:
        self._free: dict[Any, list[tuple[Any, Any]]] = {}
        """By device: an event stays with the one it was first recorded on."""
        self._pending: deque[tuple[Any, Any, Any, Wait | None]] = deque()
        self._reads = threading.Lock()
        """Held by the thread that reads pairs and takes one; another one does not wait for it."""
        self._off = False

    def begin(self, device: Any) -> Any:
        """A mark before a call that waits for this `torch.device`'s current stream; None where it is not to be told: it
        is not known, or not CUDA's, or a stream is being captured, or another thread is in here."""
        if self._off or device is None or device.type != "cuda" or not self._reads.acquire(blocking=False):
            return None
        try:
            import torch

            cuda: Any = torch.cuda
            if cuda.is_current_stream_capturing():
                return None
            self._read()
            if len(self._pending) >= _PENDING:
                return None
            stream = cuda.current_stream(device)
            free = self._free.setdefault(stream.device, [])
            before, after = free.pop() if free else (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
            before.record(stream)
            return before, after, stream
        except Exception:
            self._off = True  # the device has failed, as the call that follows will say itself
            return None
        finally:
            self._reads.release()

    def end(self, mark: Any, wait: Wait | None) -> None:
        """The call is over; `wait` is told how much it copied, once that is known."""
        before, after, stream = mark
        try:
            after.record(stream)
            self._pending.append((before, after, stream.device, wait))
        except Exception:
            self._off = True

    def _read(self) -> None:
        pending = self._pending
        while pending and pending[0][1].query():
            before, after, device, wait = pending.popleft()
            if wait is not None:
                wait.copied = int(before.elapsed_time(after) * 1e6)
            self._free.setdefault(device, []).append((before, after))
