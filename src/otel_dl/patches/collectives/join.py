"""Uneven inputs: a rank that has run out of data takes part in the collectives of the others' steps, which it would
not know of (`torch.distributed.algorithms.Join`, `DistributedDataParallel.join`). Each is a step of this rank as well,
with the number that it has on the others: or rank 0's, which is the root of their trace, would not be there."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from otel_dl.patches.groups import ask

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run


def install_join(run: Run, patches: Patches) -> None:
    from torch.distributed.algorithms.join import Join

    # Asked before each step of the others, and once after the last (join.py::Join.__exit__, 2.4-2.15).
    join: Any = Join
    original, original_exit = join._get_num_nonjoined_procs, join.__exit__

    @functools.wraps(original)
    def _get_num_nonjoined_procs(self: Any) -> Any:
        if run.active:
            patches.guard(lambda: run.local.lane.begin_joined(_accumulates(self)))
        others = original(self)
        if not others:
            patches.guard(lambda: run.local.lane.none_joined())
        return others

    @functools.wraps(original_exit)
    def __exit__(self: Any, *args: Any) -> Any:
        try:
            return original_exit(self, *args)
        except BaseException as error:
            failure = error
            patches.guard(lambda: run.local.lane.end_joined(failure))
            raise

    patches.replace(join, "_get_num_nonjoined_procs", _get_num_nonjoined_procs)
    patches.replace(join, "__exit__", __exit__)


def _accumulates(join: Any) -> bool:
    """Whether the others have only added to their gradients since the last time (`no_sync`): their step goes on."""
    models = ask(lambda: [hook.ddp for hook in join._join_hooks if hasattr(hook, "ddp")], [])
    return ask(lambda: bool(models) and not any(model.require_forward_param_sync for model in models), False)
