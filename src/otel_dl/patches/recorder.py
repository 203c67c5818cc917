"""A call as an event: what stands in the place of a function whose every call begins and ends something.

Two forms of the same: a hook of `recording/c/`, which records the ordinary event itself and hands any other to
the Python function below; and that function alone. torch's dynamo traces through a function and not through a hook:
where it can meet one, a function of two lines stands before it (`is_dynamo_compiling` is a constant to dynamo: no graph
break, no recompilation).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from otel_dl.recording import native

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.lane import Lane
    from otel_dl.recording.run import Run


class Event(Protocol):
    """How a lane is told of a call. `subject` is the call's first argument."""

    kind: int
    """Of the ordinary event."""

    def begin(self, lane: Lane, subject: Any) -> tuple[int, int] | None:
        """It begins: (its kind, its start); None where it is not recorded."""
        ...

    def end(self, lane: Lane, kind: int, subject: Any, start: int) -> None: ...

    def fail(self, lane: Lane, kind: int, subject: Any, start: int, error: BaseException) -> None: ...


def recorder(
    run: Run, patches: Patches, event: Event, original: Callable[..., Any], form: str, **options: Any
) -> Callable[..., Any]:
    """`original`, recorded as `event`; `form` and `options` of the hook as in `recording/c/hook.c`.

    What `original` raises passes; a fault of ours goes to `patches`.
    """

    # Who calls these two catches what they raise: a signal handler of the user's may run as they are entered.

    def ended(kind: int, subject: Any, start: int) -> None:
        event.end(run.local.lane, kind, subject, start)

    def failed(kind: int, subject: Any, start: int, error: BaseException) -> None:
        event.fail(run.local.lane, kind, subject, start, error)

    @functools.wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        subject = args[0] if args else None
        try:
            begun = event.begin(run.local.lane, subject)
        except BaseException as error:
            patches.fault(error)
            return original(*args, **kwargs)
        if begun is None:
            return original(*args, **kwargs)
        kind, start = begun
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            try:
                failed(kind, subject, start, error)
            except BaseException as fault:
                patches.fault(fault)
            raise
        try:
            ended(kind, subject, start)
        except BaseException as error:
            patches.fault(error)
        return result

    in_c = native.hook(form, run.settings.native)
    if in_c is None:
        return recorded
    hook = in_c(run.fast, event.kind, original, recorded, ended, failed, patches.fault, **options)
    return functools.update_wrapper(hook, original)
