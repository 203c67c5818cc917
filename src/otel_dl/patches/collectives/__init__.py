"""Every collective and transfer of torch.distributed, as `dist.<op>`.

What is issued is seen at the process group, from one of two sources:

- `hook`: `ProcessGroup.register_pre_hook` and `register_post_hook` of every group (torch 2.15), which see DDP's buckets
  and functional collectives as well. They run under a lock of the group: nothing may be registered or taken back from
  within one (it would wait for ever), and what one raises reaches the user.
- `call`: before, the methods of `ProcessGroup` that c10d's functions call. What C++ issues (DDP's buckets, functional
  collectives) is not seen there: from torch 2.8 on the Flight Recorder tells of it, which the builder reads.

What waits is seen in c10d's functions, through the cell `func` of `@_exception_logger`
(torch/distributed/c10d_logger.py, 2.4-2.15), which reaches aliases taken earlier, and in `Work.wait`. No `Work` and no
tensor is kept, but for the works of DDP's buckets, whose tensors DDP keeps, until the backward pass has ended.
`Work.get_future().add_done_callback` would tell each end, but a process that ends while one is due dies of it (SIGABRT
or SIGSEGV: gloo, torch 2.15).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_dl.patches._patching import Patches
from otel_dl.patches.collectives import ddp, flight_recorder, join, sources, waits
from otel_dl.patches.collectives.tracker import Tracker
from otel_dl.recording.collectives import CALL, HOOK

if TYPE_CHECKING:
    from otel_dl.recording.run import Run


def install(run: Run, patches: Patches) -> None:
    """Patches torch.distributed; raises where this torch lacks what is needed."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    group_class: Any = c10d.ProcessGroup
    hooked = hasattr(group_class, "register_pre_hook") and hasattr(group_class, "register_post_hook")
    tracker = Tracker(run, patches, HOOK if hooked else CALL)
    if hooked:
        sources.install_hooks(tracker, c10d)
    else:
        sources.install_methods(tracker, group_class)
        flight_recorder.install(tracker)
    waits.install_functions(tracker, c10d)
    waits.install_monitored_barrier(tracker, c10d, dist)
    waits.install_wait(tracker, c10d.Work)
    ddp.install_ddp(tracker, c10d)
    ddp.install_comm_hooks(tracker, dist)
    ddp.install_backward(tracker)
    join.install_join(run, patches)
