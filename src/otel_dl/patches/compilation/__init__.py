"""One-time work of torch's compiler and of CUDA graphs, and torch.compile kept away from our own code.

Nothing here is called by what is compiled already: a compiled call costs what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from otel_dl.patches.compilation import autotuning, dynamo, graphs, leave_alone

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run


def _compiler(run: Run, patches: Patches) -> None:
    leave_alone.install()
    dynamo.install(run, patches)


INSTALLERS: Final[Mapping[str, Callable[[Run, Patches], None]]] = {
    "compilation": _compiler,
    "autotuning": autotuning.install,
    "graph capture": graphs.install,
}
