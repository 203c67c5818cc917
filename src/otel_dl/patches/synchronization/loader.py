"""Batches that `DataLoader.__next__` waits for because they are copied into pinned memory.

Without workers it copies itself. With workers a thread does, which hands the batch over: that is recorded where
`__next__` was waiting meanwhile, all the time. Either way the line is the user's that asked for the batch.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from otel_dl.places import Place, here, place_of
from otel_dl.recording.lane import NEXT
from otel_dl.recording.records import clock
from otel_dl.recording.waits import Wait

if TYPE_CHECKING:
    from otel_dl.patches.synchronization.waiting import Waiting
    from otel_dl.recording.lane import Lane

PINNING = "DataLoader.pin_memory"


class _Thread(threading.local):
    inside = False


def install(waiting: Waiting) -> None:
    from torch.utils.data._utils import pin_memory as module

    owner: Any = module
    original: Any = owner.pin_memory
    run, patches, thread = waiting.run, waiting.patches, _Thread()

    def who_waits() -> Lane | None:
        lane = run.stepper or run.main
        return lane if lane is not None and lane.kinds & NEXT else None

    def place(lane: Lane) -> Place | None:
        """Where it waits: None where it has gone on, and its line is another one already."""
        if lane.thread is threading.current_thread():
            return here()
        found = place_of(lane.thread)
        return found if who_waits() is lane else None

    def pinned(start: int) -> None:
        end = clock()
        if run.active and (lane := who_waits()) is not None:
            run.note(Wait(PINNING, "", place(lane), end - start), start, end)

    @functools.wraps(original)
    def pin_memory(data: Any, *args: Any, **kwargs: Any) -> Any:
        if thread.inside or who_waits() is None:  # it calls itself for each part of a batch
            return original(data, *args, **kwargs)
        start = clock()
        thread.inside = True
        try:
            result = original(data, *args, **kwargs)
        finally:
            thread.inside = False
        patches.guard(pinned, start)
        return result

    patches.replace(owner, "pin_memory", pin_memory)
