"""Where it is seen that a collective is issued: hooks of process groups (torch 2.15), or their methods."""

from __future__ import annotations

import atexit
import functools
import weakref
from typing import Any, Final

from otel_dl.patches.collectives.ops import CALLED, HOOKED, Op
from otel_dl.patches.collectives.tracker import Tracker, native_c10d

_HOOK_ID: Final = 0x07E1D1
"""Ours among the hooks of a group."""


def install_hooks(tracker: Tracker, c10d: Any) -> None:
    patches = tracker.patches
    names = native_c10d().HookOpName
    numbers = {getattr(names, name).value: op for name, op in HOOKED.items()}
    hooked: list[weakref.ref[Any]] = []
    on = [True]

    def cover(group: Any) -> None:
        """Registers hooks with `group`, which has just been made, or was there before us."""
        communicator = tracker.communicator(group)

        def before(args: Any) -> None:
            if on:
                try:
                    op = numbers.get(args.name.value)
                    if op is not None:
                        tracker.issue(communicator, op, args.input_tensors or args.output_tensors, args.async_op)
                except BaseException as error:
                    patches.fault(error)

        def after(args: Any) -> None:
            if on:
                try:
                    bucket = tracker.issued()
                    if bucket is not None:
                        tracker.watch(bucket, args.work)
                except BaseException as error:
                    patches.fault(error)

        if not hooked:
            # A group that nobody destroyed outlives the interpreter; freeing a hook of Python's then is SIGSEGV.
            atexit.register(uncover)
        group.register_pre_hook(_HOOK_ID, before)
        group.register_post_hook(_HOOK_ID, after)
        hooked[:] = [reference for reference in hooked if reference() is not None]
        hooked.append(weakref.ref(group))

    def uncover(after_fault: bool = False) -> None:
        on.clear()
        if after_fault:  # perhaps within a hook, which holds the group's lock: they stay, and do nothing
            return
        atexit.unregister(uncover)
        while hooked:
            group = hooked.pop()()
            if group is not None:
                group.unregister_pre_hook(_HOOK_ID)
                group.unregister_post_hook(_HOOK_ID)

    patches.when_restored(uncover)
    # Looked up in the module at each call; every group comes by, those of `split_group` too (torch 2.15,
    # torch/distributed/distributed_c10d.py).
    original = c10d._register_pg_in_world

    @functools.wraps(original)
    def _register_pg_in_world(group: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(group, *args, **kwargs)
        if on and tracker.run.active:
            patches.guard(cover, group)
        return result

    patches.replace(c10d, "_register_pg_in_world", _register_pg_in_world)
    for group in list(c10d._world.pg_map):
        cover(group)
        tracker.communicator(group).ddp = True  # a DDP that is older than us may use it


def install_methods(tracker: Tracker, group_class: Any) -> None:
    for name, (hook_name, given) in CALLED.items():
        original = group_class.__dict__.get(name)
        if original is not None:
            tracker.patches.replace(group_class, name, _method(tracker, name, original, HOOKED[hook_name], given))


def _method(tracker: Tracker, name: str, original: Any, op: Op, given: int) -> Any:
    patches = tracker.patches

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            tensors = _flat(args[given]) if 0 <= given < len(args) else ()
            tracker.issue(tracker.communicator(self), op, tensors, True)
        except BaseException as error:
            patches.fault(error)
        work = original(self, *args, **kwargs)
        try:
            collective = tracker.threads.own.last
            bucket = tracker.issued()
            if bucket is not None:
                tracker.watch(bucket, work)
            if collective is not None and collective.asynchronous and work is not None:
                tracker.works.know(work, collective)
        except BaseException as error:
            patches.fault(error)
        return work

    functools.update_wrapper(method, original)
    # pybind11 takes a Python function for what a subclass overrides, unless the frame that calls it has its name.
    method.__code__ = method.__code__.replace(co_name=name)
    return method


def _flat(tensors: Any) -> list[Any]:
    if not isinstance(tensors, (list, tuple)):
        return [tensors]
    found: list[Any] = []
    for tensor in tensors:  # pyright: ignore[reportUnknownVariableType]
        found.extend(_flat(tensor))
    return found
