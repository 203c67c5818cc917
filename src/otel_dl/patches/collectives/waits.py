"""Where it is seen that a collective is waited for: c10d's functions, and `Work.wait`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from otel_dl.patches.collectives.ops import OBJECTS, SYNCHRONOUS, Op, op
from otel_dl.patches.collectives.tracker import Tracker
from otel_dl.recording.collectives import Collective
from otel_dl.recording.records import clock
from otel_dl.semconv import SpanName


def install_functions(tracker: Tracker, c10d: Any) -> None:
    names = set(OBJECTS) | SYNCHRONOUS
    public: dict[str, Any] = c10d.__dict__.copy()
    for name, function in public.items():
        # Not isinstance: `reduce_op` warns when it is asked for its class.
        if type(function) is not FunctionType or "func" not in function.__code__.co_freevars:
            continue
        if function.__code__.co_filename != c10d._exception_logger.__code__.co_filename:
            continue  # a context manager's helper
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index("func")]
        func = cell.cell_contents
        parameters = list(inspect.signature(func).parameters)
        if name in names:
            waits: int | None = -1
        elif "async_op" in parameters:
            waits = parameters.index("async_op")
        elif "async_ops" in parameters:
            waits = parameters.index("async_ops")
        else:
            continue  # it makes or ends a group
        tracker.patches.replace_cell(cell, _function(tracker, func, waits, OBJECTS.get(name)))


def _function(tracker: Tracker, func: Callable[..., Any], position: int, op: Op | None) -> Callable[..., Any]:
    """`func`, whose argument at `position` is `async_op` (-1: it has none and waits)."""
    from torch.compiler import is_dynamo_compiling

    patches, threads = tracker.patches, tracker.threads

    @functools.wraps(func)
    def called(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return func(*args, **kwargs)
        asynchronous = position >= 0 and (args[position] if position < len(args) else kwargs.get("async_op", False))
        thread = threads.own
        issued: list[Collective] = []
        waits, outer = thread.waits, thread.issued
        try:
            thread.waits, thread.issued = not asynchronous, issued
            result = func(*args, **kwargs)
        except BaseException as error:
            thread.waits, thread.issued = waits, outer
            try:
                tracker.raised(error, issued)
            except BaseException as fault:
                patches.fault(fault)
            raise
        thread.waits, thread.issued = waits, outer
        if issued:
            try:
                tracker.returned(issued, result)
            except BaseException as error:
                patches.fault(error)
        return result

    if op is None:
        return called

    @functools.wraps(func)
    def objects(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return func(*args, **kwargs)
        thread = threads.own
        if thread.op is not None:
            return func(*args, **kwargs)
        thread.began, thread.around, thread.op = clock(), None, op
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            around, thread.around, thread.op = thread.around, None, None
            try:
                tracker.raised(error, [around] if around is not None else [])
            except BaseException as fault:
                patches.fault(fault)
            raise
        around, thread.around, thread.op = thread.around, None, None
        if around is not None:
            patches.guard(tracker.returned, [around], None)
        return result

    return objects


def install_monitored_barrier(tracker: Tracker, c10d: Any, dist: Any) -> None:
    """It passes by every hook: it is made of transfers within the backend (gloo)."""
    original = c10d.monitored_barrier
    kind = op(SpanName.MONITORED_BARRIER)

    def begin(group: Any) -> None:
        group = group or c10d._get_default_group()
        if isinstance(group, c10d.ProcessGroup):
            tracker.issue(tracker.communicator(group), kind, (), False)
            tracker.issued()

    @functools.wraps(original)
    def around(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not c10d.is_initialized() or c10d._rank_not_in_group(group):
            return original(group, *args, **kwargs)
        return waiting(group, *args, **kwargs)

    def wait(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        tracker.patches.guard(begin, group)
        return original(group, *args, **kwargs)

    waiting = _function(tracker, wait, -1, None)
    for owner in (c10d, dist):
        if owner.__dict__.get("monitored_barrier") is original:
            tracker.patches.replace(owner, "monitored_barrier", around)


def install_wait(tracker: Tracker, work_class: Any) -> None:
    """`Work.wait`, as Python calls it. Its first argument and its name are what pybind11 looks at (see `_method`)."""
    from torch.compiler import is_dynamo_compiling

    patches, threads, works = tracker.patches, tracker.threads, tracker.works
    original = work_class.__dict__["wait"]

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(self, *args, **kwargs)
        thread = threads.own
        if thread.issued is not None or thread.op is not None:
            return original(self, *args, **kwargs)
        collective, start = None, 0
        try:
            collective = works.take(self)
            if collective is not None:
                tracker.run.collectives.wait(collective)
            start = clock()
        except BaseException as error:
            patches.fault(error)
        if collective is None:
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            try:
                tracker.raised(error, [collective])
            except BaseException as fault:
                patches.fault(fault)
            raise
        try:
            tracker.waited(collective, start, clock())
        except BaseException as error:
            patches.fault(error)
        return result

    functools.update_wrapper(wait, original)
    patches.replace(work_class, "wait", wait)
