"""cuDNN's autotuning: `torch.conv1d` … `torch.conv_transpose3d`, which `torch.nn.functional` and the modules call, and
`aten::convolution` with its backward, which code calls that inductor compiled.

Nothing is put in their place: what is called when torch's own objects are called is changed, which takes C
(`recording/c/follow.c`). To Python, `torch.jit`, `torch.fx` and `torch.compile` they are what they were.
Not seen, for they don't pass by Python: convolutions in C++ (double backward), in code that was scripted or traced
(`torch.jit`), and in a CUDA graph that is replayed, which tunes nothing. A dispatch mode around a scripted module would
show them, and change what runs (2.4 to 2.15): a constant of a traced graph comes out of it as a number, which
`aten::equal` and `aten::item` then refuse; what a signal handler raises, `sys.exit` or Ctrl-C, becomes the
interpreter's RuntimeError, and so does a NotImplementedError.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from otel_dl.log import logger
from otel_dl.patches.cudnn.calls import OPERATIONS, Device
from otel_dl.patches.cudnn.watch import Watch
from otel_dl.recording import native

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run


def install(run: Run, patches: Patches, device: Device | None = None) -> None:
    """`device` is where cuDNN runs, CUDA."""
    import torch

    if os.environ.get("TORCH_CUDNN_V8_API_DISABLED") == "1":
        return  # the cache before it has other keys
    follow = native.hook("Follow", run.settings.native)
    if follow is None:
        logger.info(
            "otel-dl: convolutions are not followed: that takes otel-dl's part in C, which %s.",
            "this Python has not got" if run.settings.native else "OTEL_DL_NATIVE=false switches off",
        )
        return
    device = device or Device()
    watch = Watch(run, patches, device)

    def restored(after_fault: bool) -> None:
        for followed in watch.followed:
            followed.restore()

    patches.when_restored(restored)
    for operation in OPERATIONS:
        followed = follow(getattr(torch, operation.name), device.benchmark, partial(watch.begin, operation))
        watch.followed.append(followed)
    aten: Any = torch.ops.aten
    for general in (torch.convolution, aten.convolution.default._op, aten._convolution.default._op):
        watch.followed.append(follow(general, device.benchmark, watch.begin_general))
    watch.followed.append(follow(aten.convolution_backward.default._op, device.benchmark, watch.begin_backward))
