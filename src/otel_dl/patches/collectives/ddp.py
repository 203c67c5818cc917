"""Gradient buckets: which groups are DDP's, comm hooks of the user's, and the backward pass that waits for them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from otel_dl.log import logger
from otel_dl.patches.collectives import flight_recorder
from otel_dl.patches.collectives.tracker import Thread, Tracker
from otel_dl.recording.collectives import CALL, Bucket, How
from otel_dl.recording.records import clock


def install_ddp(tracker: Tracker, c10d: Any) -> None:
    from torch.nn.parallel import DistributedDataParallel

    ddp: Any = DistributedDataParallel
    original = ddp.__dict__["__init__"]
    said: list[bool] = []

    def mark(model: Any) -> None:
        group = model.__dict__.get("process_group")
        if group is not None and isinstance(group, c10d.ProcessGroup):
            tracker.communicator(group).ddp = True
            if tracker.source == CALL and tracker.run.flight_recorder is None and not said:
                said.append(True)
                logger.info(
                    "otel-dl: the gradient buckets of DistributedDataParallel are not in the trace (%s).",
                    flight_recorder.remedy(),
                )

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        patches.guard(mark, self)

    patches = tracker.patches
    patches.replace(ddp, "__init__", __init__)


def install_comm_hooks(tracker: Tracker, dist: Any) -> None:
    """What DDP hands a comm hook of the user's to C++ by: the hook that it gets is the user's within ours, and nothing
    else sees ours (torch/nn/parallel/distributed.py::register_comm_hook, 2.4-2.15)."""
    patches, threads = tracker.patches, tracker.threads
    original = dist._register_comm_hook
    futures: list[bool] = []

    @functools.wraps(original)
    def _register_comm_hook(reducer: Any, state: Any, hook: Any) -> Any:
        if not futures and tracker.run.active:
            futures.append(True)
            patches.guard(_install_then, tracker)

        @functools.wraps(hook)
        def within(state: Any, bucket: Any) -> Any:
            ours = None
            try:
                ours = Bucket(bucket.index()) if tracker.run.active else None
            except BaseException as error:
                patches.fault(error)
            return _in_bucket(threads.own, ours, hook, state, bucket)

        return original(reducer, state, within)

    patches.replace(dist, "_register_comm_hook", _register_comm_hook)


def _in_bucket(thread: Thread, bucket: Bucket | None, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function`, which is of `bucket`, in `thread`, the calling one."""
    former = thread.bucket, thread.sent
    start = clock()
    inside = bucket.inside if bucket is not None else 0
    try:
        thread.bucket, thread.sent = bucket, None
        return function(*args)
    finally:
        thread.bucket, thread.sent = former
        if bucket is not None:
            bucket.compute += max(0, clock() - start - (bucket.inside - inside))


def _install_then(tracker: Tracker) -> None:
    """Callbacks that a comm hook adds to a future are in its bucket."""
    future: Any = importlib.import_module("torch._C").Future
    original = future.__dict__["then"]
    threads, patches = tracker.threads, tracker.patches

    def then(self: Any, callback: Any) -> Any:
        thread = threads.own
        bucket, sent = thread.bucket, thread.sent
        if bucket is None or not callable(callback):
            return original(self, callback)

        @functools.wraps(callback)
        def within(done: Any) -> Any:
            if sent is not None:
                patches.guard(tracker.run.collectives.complete, sent, How.CALLBACK)
            return _in_bucket(threads.own, bucket, callback, done)

        return original(self, within)

    functools.update_wrapper(then, original)
    patches.replace(future, "then", then)


def install_backward(tracker: Tracker) -> None:
    """The engine's run, within what records the phase: what fails there is told of other ranks before the phase is."""
    import torch.autograd
    from torch.compiler import is_dynamo_compiling

    target: Any = torch.autograd
    original = target._engine_run_backward
    patches, known = tracker.patches, tracker.communicators

    @functools.wraps(original)
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not known:
            return original(*args, **kwargs)
        start = clock()
        patches.guard(tracker.begin_backward)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            try:
                tracker.fail_backward(error, start)
            except BaseException as fault:
                patches.fault(fault)
            raise
        finally:
            patches.guard(tracker.end_backward)

    patches.replace(target, "_engine_run_backward", _engine_run_backward)
