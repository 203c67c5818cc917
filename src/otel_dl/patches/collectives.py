"""Every collective and transfer of torch.distributed, as `dist.<op>`.

What is issued is seen at the process group, from one of two sources:

- `hook`: `ProcessGroup.register_pre_hook` and `register_post_hook` of every group (torch 2.15), which see DDP's buckets
  and functional collectives as well. They run under a lock of the group: nothing may be registered or taken back from
  within one (it would wait for ever), and what one raises reaches the user.
- `call`: before, the methods of `ProcessGroup` that c10d's functions call. What C++ issues (DDP's buckets, functional
  collectives) is not seen there.

What waits is seen in c10d's functions, through the cell `func` of `@_exception_logger`
(torch/distributed/c10d_logger.py, 2.4-2.15), which reaches aliases taken earlier, and in `Work.wait`. No `Work` and no
tensor is kept, but for the works of DDP's buckets, whose tensors DDP keeps, until the backward pass has ended.
`Work.get_future().add_done_callback` would tell each end, but a process that ends while one is due dies of it (SIGABRT
or SIGSEGV: gloo, torch 2.15).
"""

from __future__ import annotations

import atexit
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from otel_dl.forensics.layout import OPS
from otel_dl.log import logger
from otel_dl.patches._patching import Patches
from otel_dl.recording import context
from otel_dl.recording.collectives import WAITED_FOR, Bucket, Collective, Communicator, How
from otel_dl.recording.lane import is_failure
from otel_dl.recording.ranks import Group, Wait
from otel_dl.recording.records import clock
from otel_dl.semconv import SpanName

if TYPE_CHECKING:
    from otel_dl.recording.run import Run

HOOK: Final = "hook"
CALL: Final = "call"

_HOOK_ID: Final = 0x07E1D1
"""Ours among the hooks of a group."""

Op = tuple[str, str, int]
"""(span's name, variant, its place on the status page)."""


def _op(name: str, variant: str = "") -> Op:
    return name, variant, OPS.index(name)


_HOOKED: Final[dict[str, Op]] = {
    "SEND": _op(SpanName.SEND),
    "RECV": _op(SpanName.RECV),
    "BROADCAST": _op(SpanName.BROADCAST),
    "ALLREDUCE": _op(SpanName.ALL_REDUCE),
    "ALLREDUCE_COALESCED": _op(SpanName.ALL_REDUCE, "coalesced"),
    "REDUCE": _op(SpanName.REDUCE),
    "ALLGATHER": _op(SpanName.ALL_GATHER),
    "ALLGATHER_BASE": _op(SpanName.ALL_GATHER, "into_tensor"),
    "ALLGATHER_COALESCED": _op(SpanName.ALL_GATHER, "coalesced"),
    "ALLGATHER_INTO_TENSOR_COALESCED": _op(SpanName.ALL_GATHER, "into_tensor_coalesced"),
    "REDUCE_SCATTER": _op(SpanName.REDUCE_SCATTER),
    "REDUCE_SCATTER_BASE": _op(SpanName.REDUCE_SCATTER, "tensor"),
    "REDUCE_SCATTER_TENSOR_COALESCED": _op(SpanName.REDUCE_SCATTER, "tensor_coalesced"),
    "ALLTOALL": _op(SpanName.ALL_TO_ALL),
    "ALLTOALL_BASE": _op(SpanName.ALL_TO_ALL, "single"),
    "BARRIER": _op(SpanName.BARRIER),
    "SCATTER": _op(SpanName.SCATTER),
    "GATHER": _op(SpanName.GATHER),
}
"""By `HookOpName` (torch/csrc/distributed/c10d/Types.hpp, 2.15). SPLIT and NEW_WINDOW move nothing."""

_CALLED: Final[dict[str, tuple[str, int]]] = {
    "send": ("SEND", 0),
    "recv": ("RECV", 0),
    "recv_anysource": ("RECV", 0),
    "broadcast": ("BROADCAST", 0),
    "allreduce": ("ALLREDUCE", 0),
    "allreduce_coalesced": ("ALLREDUCE_COALESCED", 0),
    "reduce": ("REDUCE", 0),
    "allgather": ("ALLGATHER", 1),
    "_allgather_base": ("ALLGATHER_BASE", 1),
    "allgather_coalesced": ("ALLGATHER_COALESCED", 1),
    "allgather_into_tensor_coalesced": ("ALLGATHER_INTO_TENSOR_COALESCED", 1),
    "reduce_scatter": ("REDUCE_SCATTER", 1),
    "_reduce_scatter_base": ("REDUCE_SCATTER_BASE", 1),
    "reduce_scatter_tensor_coalesced": ("REDUCE_SCATTER_TENSOR_COALESCED", 1),
    "alltoall": ("ALLTOALL", 1),
    "alltoall_base": ("ALLTOALL_BASE", 1),
    "barrier": ("BARRIER", -1),
    "scatter": ("SCATTER", 1),
    "gather": ("GATHER", 1),
}
"""Methods of `ProcessGroup`, and which argument holds what this rank gives (torch 2.4 to 2.14)."""

_OBJECTS: Final[dict[str, Op]] = {
    "all_gather_object": _op(SpanName.ALL_GATHER, "object"),
    "gather_object": _op(SpanName.GATHER, "object"),
    "broadcast_object_list": _op(SpanName.BROADCAST, "object_list"),
    "scatter_object_list": _op(SpanName.SCATTER, "object_list"),
    "send_object_list": _op(SpanName.SEND, "object_list"),
    "recv_object_list": _op(SpanName.RECV, "object_list"),
}
"""Each issues several collectives, which are one to the user: one span, its bytes their sum, its number the last's."""

_TRANSFERS: Final = frozenset({SpanName.SEND, SpanName.RECV})
_SYNCHRONOUS: Final = frozenset({"send", "recv"})
"""Public functions without `async_op`, that wait."""


class Thread(threading.local):
    """What a thread is in the middle of."""

    depth = 0
    """Public functions of c10d that it is in."""
    waits = False
    """Whether the innermost waits for what it issues."""
    issued: list[Collective] | None = None
    """What the innermost has issued."""
    op: Op | None = None
    """The object collective that it is in."""
    around: Collective | None = None
    """The span of that one, once it has issued something."""
    began = 0
    """When that one was called."""
    bucket: Bucket | None = None
    """The gradient bucket whose comm hook it runs."""
    last: Collective | None = None
    """What it is just issuing."""
    backwards = 0
    """Backward passes that it is in."""


class Works:
    """Which collective a `Work` of Python's is: by its identity while it lives, else by its number where that is
    unique. Nothing is kept alive."""

    MOST: Final = 1_024

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[int, tuple[weakref.ref[Any], Collective]] = {}

    def know(self, work: Any, collective: Collective) -> None:
        known = self._known
        if len(known) >= self.MOST:
            for key, (reference, _) in list(known.items()):
                if reference() is None:
                    known.pop(key, None)
            if len(known) >= self.MOST:
                known.pop(next(iter(known), 0), None)
        known[id(work)] = (weakref.ref(work), collective)
        collective.watched = True

    def take(self, work: Any) -> Collective | None:
        """The collective of `work`, which is waited for; None where it isn't known for certain."""
        entry = self._known.get(id(work))
        if entry is not None and entry[0]() is work:
            return entry[1]
        outstanding = self._run.collectives.outstanding
        if not outstanding:
            return None
        try:
            ticket = work._get_sequence_number()
        except (RuntimeError, AttributeError):  # a work that c10d makes up in Python, or of before 2.8
            return None
        found = [collective for collective in list(outstanding.values()) if collective.ticket == ticket]
        return found[0] if len(found) == 1 else None

    def forget(self, work: Any) -> None:
        self._known.pop(id(work), None)


class Tracker:
    """Turns what hooks and calls say into `Collective`s."""

    def __init__(self, run: Run, patches: Patches, source: str) -> None:
        self.run = run
        self.patches = patches
        self.source = source
        self.thread = Thread()
        self.works = Works(run)
        self.rounds = 0
        """Backward passes so far."""
        self._communicators: dict[str, tuple[weakref.ref[Any], Communicator]] = {}
        self._buckets: list[tuple[Any, Collective]] = []
        """Works of DDP's buckets in this backward pass that are not known to be complete."""

    # Groups.

    def communicator(self, group: Any) -> Communicator:
        """Of a `ProcessGroup`, which is not kept alive."""
        name: str = group.group_name
        known = self._communicators.get(name)
        if known is not None and known[0]() is group:
            return known[1]
        for key, (reference, _) in list(self._communicators.items()):
            if reference() is None:
                self._communicators.pop(key, None)
        reference = weakref.ref(group)

        def sequence() -> int:
            alive = reference()
            if alive is None:
                raise RuntimeError("the group is gone")
            return alive._get_sequence_number_for_group()

        size: int = group.size()
        made = Communicator(name, size, lambda: describe(reference(), name, size), sequence, transfers_before(group))
        self._communicators[name] = (reference, made)
        return made

    def known(self, group: Any) -> Communicator | None:
        """That of a group whose collectives are seen."""
        for reference, communicator in self._communicators.values():
            if reference() is group:
                return communicator
        return None

    # What is issued.

    def issue(self, communicator: Communicator, op: Op, tensors: Any, asynchronous: bool, root: Any = None) -> None:
        thread = self.thread
        thread.last = None
        if not self.run.active or context.suppressed():
            return
        start = clock()
        name, variant, place = op
        size = 0
        for tensor in tensors or ():
            size += tensor.numel() * tensor.element_size()
        transfer = name in _TRANSFERS
        seq = communicator.number(transfer)
        collectives = self.run.collectives
        if thread.op is not None:
            around = thread.around
            if around is not None:
                around.size += size
                around.seq, around.ticket = seq, communicator.count + 1
                thread.last = around
                return
            name, variant, place = thread.op
            start = thread.began
            asynchronous = False
        elif transfer or self.source == CALL:
            asynchronous = not thread.waits
        collective = Collective(communicator, name, place, variant, self.source, size, start, asynchronous)
        collective.seq, collective.ticket = seq, communicator.count + 1
        bucket = thread.bucket
        if bucket is not None:
            collective.bucket, collective.bucket_index = bucket, bucket.index
            bucket.sent += size
            bucket.first = bucket.first or collective
            bucket.last = collective
        elif (
            communicator.ddp and not thread.depth and self._in_backward and asynchronous
            and name == SpanName.ALL_REDUCE and tensors and _is_gradient(tensors[0])
        ):  # fmt: skip
            # DDP launches its buckets in the order of their indices (torch/csrc/distributed/c10d/reducer.cpp::
            # mark_bucket_ready); beside them it reduces a map of the parameters that were used, of integers.
            if communicator.bucket_round != self.rounds:
                communicator.bucket_round, communicator.buckets = self.rounds, 0
            collective.bucket_index, collective.watched = communicator.buckets, True
            communicator.buckets += 1
        collectives.issue(collective)
        thread.last = collective
        if thread.op is not None:
            thread.around = collective
        elif thread.issued is not None:
            thread.issued.append(collective)
        if self._buckets:
            self.poll()

    def issued(self, work: Callable[[], Any]) -> None:
        """The call into the backend has come back, with this `Work`, or None where it has waited itself."""
        collective, self.thread.last = self.thread.last, None
        if collective is None:
            return
        now = collective.issued = clock()
        bucket = collective.bucket
        if bucket is not None:
            bucket.inside += now - collective.start
        if collective.bucket_index >= 0 and bucket is None and len(self._buckets) < Works.MOST:
            self._buckets.append((work(), collective))

    def poll(self) -> None:
        """Looks which of DDP's buckets are complete."""
        left = [(work, collective) for work, collective in self._buckets if not self._is_complete(work, collective)]
        self._buckets = left

    def _is_complete(self, work: Any, collective: Collective) -> bool:
        if work is None:
            return True
        if not work.is_completed():
            return False
        self.run.collectives.complete(collective, How.POLL)
        return True

    # What is called.

    def enter(self, waits: bool) -> tuple[bool, list[Collective] | None]:
        thread = self.thread
        state = (thread.waits, thread.issued)
        thread.depth += 1
        thread.waits, thread.issued = waits, []
        return state

    def leave(self, state: tuple[bool, list[Collective] | None]) -> list[Collective]:
        thread = self.thread
        thread.depth -= 1
        issued = thread.issued or []
        thread.waits, thread.issued = state
        return issued

    def returned(self, issued: list[Collective], result: Any) -> None:
        """A public function has returned `result`: what it waited for is complete."""
        now = 0
        for collective in issued:
            if collective.asynchronous:
                if result is not None and len(issued) == 1 and hasattr(type(result), "get_future"):
                    self.works.know(result, collective)
                continue
            now = now or clock()
            self._waited(collective, collective.issued or now, now)

    def _waited(self, collective: Collective, since: int, now: int) -> None:
        collective.waited += now - since
        if collective.bucket is not None:
            collective.bucket.inside += now - since
        self.run.collectives.complete(collective, How.WAIT, now)

    def raised(self, error: BaseException, issued: list[Collective]) -> None:
        if issued and is_failure(error):
            self.run.collectives.fail(error, issued[-1])

    # Backward passes.

    @property
    def _in_backward(self) -> bool:
        return self._backwards > 0

    _backwards = 0

    def begin_backward(self) -> None:
        if not self._backwards:
            self.rounds += 1
        self._backwards += 1

    def end_backward(self) -> None:
        self._backwards = max(0, self._backwards - 1)
        if self._buckets and not self._backwards:
            self._buckets = []
            self.run.collectives.phase_over()

    def fail_backward(self, error: BaseException, start: int) -> None:
        if not is_failure(error):
            return

        def wait() -> Wait | None:
            """Where the buckets are not seen: the last that was issued in DDP's group."""
            for reference, communicator in list(self._communicators.values()):
                if communicator.ddp and reference() is not None:
                    communicator.number(True)
                    seq = communicator.count - communicator.transfers
                    return Wait(SpanName.ALL_REDUCE, communicator.describe(), seq, start)
            return None

        self.run.collectives.fail_backward(error, start, wait)


def _is_gradient(tensor: Any) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def describe(group: Any, name: str, size: int) -> Group:
    """The group for a report; what torch does not say any more is left out."""
    import torch.distributed as dist

    ranks, backend, limit = tuple(range(size)), "", 0.0
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
        backend = str(dist.get_backend(group))
        limits = [group._get_backend(device).options._timeout.total_seconds() for device in group._device_types]
        limit = max(limits, default=0.0)
    except Exception:
        logger.debug("otel-dl: group %s can't be described", name, exc_info=True)
    return Group(name, ranks, backend, limit)


def transfers_before(group: Any) -> int:
    """Of a group that was there before us: how many of what it has counted were transfers, as far as the Flight
    Recorder (2.8+) can tell."""
    import json

    import torch

    try:
        count: int = group._get_sequence_number_for_group()
    except RuntimeError:
        return 0
    c10d: Any = torch._C._distributed_c10d  # pyright: ignore[reportPrivateUsage]
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if not count or dump is None:
        return 0
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    except (RuntimeError, ValueError):
        return 0
    seqs = [entry["collective_seq_id"] for entry in entries if entry.get("process_group", [""])[0] == group.group_name]
    return count - max(seqs) if seqs else 0


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
        _install_hooks(tracker, c10d)
    else:
        _install_methods(tracker, group_class)
    _install_functions(tracker, c10d)
    _install_monitored_barrier(tracker, c10d, dist)
    _install_wait(tracker, c10d.Work)
    _install_ddp(tracker, c10d)
    _install_comm_hooks(tracker, dist)
    _install_backward(tracker)


# Sources.


def _install_hooks(tracker: Tracker, c10d: Any) -> None:
    patches = tracker.patches
    names = _hook_names()
    numbers = {int(getattr(names, name)): op for name, op in _HOOKED.items()}
    hooked: list[weakref.ref[Any]] = []
    on = [True]

    def cover(group: Any) -> None:
        """Registers hooks with `group`, which has just been made, or was there before us."""
        communicator = tracker.communicator(group)

        def before(args: Any) -> None:
            if on:
                try:
                    op = numbers.get(int(args.name))
                    if op is not None:
                        tracker.issue(communicator, op, args.input_tensors or args.output_tensors, args.async_op)
                except BaseException as error:
                    patches.fault(error)

        def after(args: Any) -> None:
            if on:
                try:
                    tracker.issued(lambda: args.work)
                except BaseException as error:
                    patches.fault(error)

        group.register_pre_hook(_HOOK_ID, before)
        group.register_post_hook(_HOOK_ID, after)
        hooked.append(weakref.ref(group))

    def uncover(after_fault: bool) -> None:
        on.clear()
        if after_fault:  # perhaps within a hook, which holds the group's lock: they stay, and do nothing
            return
        while hooked:
            group = hooked.pop()()
            if group is not None:
                group.unregister_pre_hook(_HOOK_ID)
                group.unregister_post_hook(_HOOK_ID)

    def at_exit() -> None:
        # torch ends the groups that nobody destroyed after the interpreter, and a hook that is there then is SIGSEGV
        # (torch 2.15: ~GroupRegistry in torch/csrc/distributed/c10d/GroupRegistry.cpp).
        uncover(after_fault=False)

    def restored(after_fault: bool) -> None:
        if not after_fault:
            atexit.unregister(at_exit)
        uncover(after_fault)

    atexit.register(at_exit)
    patches.when_restored(restored)
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


def _hook_names() -> Any:
    import torch

    c10d: Any = torch._C._distributed_c10d  # pyright: ignore[reportPrivateUsage]
    return c10d.HookOpName


def _install_methods(tracker: Tracker, group_class: Any) -> None:
    for name, (hook_name, given) in _CALLED.items():
        original = group_class.__dict__.get(name)
        if original is not None:
            tracker.patches.replace(group_class, name, _method(tracker, name, original, _HOOKED[hook_name], given))


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
            collective = tracker.thread.last
            tracker.issued(lambda: work)
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


# What waits.


def _install_functions(tracker: Tracker, c10d: Any) -> None:
    names = set(_OBJECTS) | _SYNCHRONOUS
    for name, function in list(vars(c10d).items()):
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
        tracker.patches.replace_cell(cell, _function(tracker, func, waits, _OBJECTS.get(name)))


def _function(tracker: Tracker, func: Callable[..., Any], position: int, op: Op | None) -> Callable[..., Any]:
    """`func`, whose argument at `position` is `async_op` (-1: it has none and waits)."""
    from torch.compiler import is_dynamo_compiling

    patches, thread = tracker.patches, tracker.thread

    @functools.wraps(func)
    def called(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return func(*args, **kwargs)
        asynchronous = position >= 0 and (args[position] if position < len(args) else kwargs.get("async_op", False))
        try:
            state = tracker.enter(not asynchronous)
        except BaseException as error:
            patches.fault(error)
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            try:
                tracker.raised(error, tracker.leave(state))
            except BaseException as fault:
                patches.fault(fault)
            raise
        try:
            issued = tracker.leave(state)
            if issued:
                tracker.returned(issued, result)
        except BaseException as error:
            patches.fault(error)
        return result

    if op is None:
        return called

    @functools.wraps(func)
    def objects(*args: Any, **kwargs: Any) -> Any:
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


def _install_monitored_barrier(tracker: Tracker, c10d: Any, dist: Any) -> None:
    """It passes by every hook: it is made of transfers within the backend (gloo)."""
    original = c10d.monitored_barrier
    op = _op(SpanName.MONITORED_BARRIER)

    def begin(group: Any) -> None:
        group = group or c10d._get_default_group()
        tracker.issue(tracker.communicator(group), op, (), False)
        tracker.issued(lambda: None)

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


def _install_wait(tracker: Tracker, work_class: Any) -> None:
    """`Work.wait`, as Python calls it. Its first argument and its name are what pybind11 looks at (see `_method`)."""
    from torch.compiler import is_dynamo_compiling

    patches, thread, works = tracker.patches, tracker.thread, tracker.works

    def install(owner: Any) -> None:
        original = owner.__dict__["wait"]

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            if thread.depth or thread.op is not None or is_dynamo_compiling():
                return original(self, *args, **kwargs)
            collective, start = None, 0
            try:
                collective = works.take(self)
                if collective is not None and not collective.end:
                    tracker.run.collectives.show(collective, WAITED_FOR)
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
                tracker._waited(collective, start, clock())  # pyright: ignore[reportPrivateUsage]
                works.forget(self)
            except BaseException as error:
                patches.fault(error)
            return result

        functools.update_wrapper(wait, original)
        patches.replace(owner, "wait", wait)

    install(work_class)


# DDP.


def _install_ddp(tracker: Tracker, c10d: Any) -> None:
    from torch.nn.parallel import DistributedDataParallel

    ddp: Any = DistributedDataParallel
    original = ddp.__dict__["__init__"]

    def mark(model: Any) -> None:
        group = model.__dict__.get("process_group")
        if group is not None and isinstance(group, c10d.ProcessGroup):
            tracker.communicator(group).ddp = True
            if tracker.source == CALL:
                logger.info(
                    "otel-dl: this torch does not show the gradient buckets of DistributedDataParallel; their"
                    " collectives are not in the trace (torch 2.15 and newer: they are)."
                )

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        patches.guard(mark, self)

    patches = tracker.patches
    patches.replace(ddp, "__init__", __init__)


def _install_comm_hooks(tracker: Tracker, dist: Any) -> None:
    """What DDP hands a comm hook of the user's to C++ by: the hook that it gets is the user's within ours, and nothing
    else sees ours (torch/nn/parallel/distributed.py::register_comm_hook, 2.4-2.15)."""
    patches, thread = tracker.patches, tracker.thread
    original = dist._register_comm_hook
    futures: list[bool] = []

    @functools.wraps(original)
    def _register_comm_hook(reducer: Any, state: Any, hook: Any) -> Any:
        if not futures:
            futures.append(True)
            patches.guard(_install_then, tracker)

        @functools.wraps(hook)
        def within(state: Any, bucket: Any) -> Any:
            former = thread.bucket
            try:
                thread.bucket = Bucket(bucket.index()) if tracker.run.active else None
            except BaseException as error:
                patches.fault(error)
            return _in_bucket(tracker, former, hook, state, bucket)

        return original(reducer, state, within)

    patches.replace(dist, "_register_comm_hook", _register_comm_hook)


def _in_bucket(tracker: Tracker, former: Bucket | None, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function` in the bucket that the thread is in, and leaves the thread in the `former` one."""
    thread = tracker.thread
    bucket = thread.bucket
    start = clock()
    inside = bucket.inside if bucket is not None else 0
    try:
        return function(*args)
    finally:
        thread.bucket = former
        if bucket is not None:
            bucket.compute += max(0, clock() - start - (bucket.inside - inside))


def _install_then(tracker: Tracker) -> None:
    """Callbacks that a comm hook adds to a future are in its bucket."""
    import torch

    future: Any = torch._C.Future
    original = future.__dict__["then"]
    thread, patches = tracker.thread, tracker.patches

    def then(self: Any, callback: Any) -> Any:
        bucket = thread.bucket
        if bucket is None or not callable(callback):
            return original(self, callback)
        last = bucket.last

        @functools.wraps(callback)
        def within(done: Any) -> Any:
            former, thread.bucket = thread.bucket, bucket
            if last is not None:
                patches.guard(tracker.run.collectives.complete, last, How.CALLBACK)
            return _in_bucket(tracker, former, callback, done)

        return original(self, within)

    functools.update_wrapper(then, original)
    patches.replace(future, "then", then)


def _install_backward(tracker: Tracker) -> None:
    """The engine's run, within what records the phase: what fails there is told of other ranks before the phase is."""
    import torch.autograd
    from torch.compiler import is_dynamo_compiling

    target: Any = torch.autograd
    original = target._engine_run_backward
    patches, known = tracker.patches, tracker._communicators  # pyright: ignore[reportPrivateUsage]

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
