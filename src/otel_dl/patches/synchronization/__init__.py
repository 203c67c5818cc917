"""Implicit synchronisation: where the host waits for the device, on which line of the user's, and for how long.

`waiting.py` is what is done around a call that waits, the others are the calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_dl.patches.synchronization import deep, device, functions, loader, tensor
from otel_dl.patches.synchronization.waiting import Waiting

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run


def install(run: Run, patches: Patches) -> None:
    if run.settings.sync == "off":
        return
    waiting = Waiting(run, patches)
    tensor.install(waiting)
    functions.install(waiting)
    device.install(waiting)
    loader.install(waiting)
    if run.settings.sync == "deep":
        deep.install(waiting)
