"""What is issued and waited for, as the sources and the waits say it, turned into `Collective`s.

No `Work` and no tensor is kept, but for the works of DDP's buckets, whose tensors DDP keeps, until the backward pass
has ended. `Work.get_future().add_done_callback` would tell each end, but a process that ends while one is due dies of
it (SIGABRT or SIGSEGV: gloo, torch 2.15).
"""

from __future__ import annotations

import importlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from otel_dl.faults import from_signal_handler
from otel_dl.patches._patching import Patches
from otel_dl.patches.collectives.ops import TRANSFERS, Op
from otel_dl.patches.groups import ask, group_of
from otel_dl.recording.collectives import CALL, Bucket, Collective, Communicator, How
from otel_dl.recording.context import SUPPRESSED, get_current
from otel_dl.recording.flight_recorder import OTHER_FORM, entries
from otel_dl.recording.lane import is_failure
from otel_dl.recording.ranks import Group, Wait
from otel_dl.recording.records import clock
from otel_dl.semconv import SpanName

if TYPE_CHECKING:
    from otel_dl.recording.run import Run


class Thread:
    """What a thread is in the middle of."""

    __slots__ = ("around", "began", "bucket", "issued", "last", "op", "sent", "waits")

    def __init__(self) -> None:
        self.issued: list[Collective] | None = None
        """What the innermost public function of c10d that it is in has issued; None: it is in none."""
        self.waits = False
        """Whether that one waits for what it issues."""
        self.op: Op | None = None
        """The object collective that it is in."""
        self.around: Collective | None = None
        """The span of that one, once it has issued something."""
        self.began = 0
        """When that one was called."""
        self.bucket: Bucket | None = None
        """The gradient bucket whose comm hook it runs."""
        self.sent: Collective | None = None
        """What that hook, or the callback that runs, has issued last."""
        self.last: Collective | None = None
        """What it is just issuing."""


class Threads(threading.local):
    """`threads.own`: the calling thread's. (Each attribute of a local costs as much as a call.)"""

    def __init__(self) -> None:
        self.own = Thread()


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
        # None: a work that c10d or somebody else makes up in Python, or of before 2.8.
        ticket = ask(work._get_sequence_number, None) if hasattr(work, "_get_sequence_number") else None
        found = [collective for collective in list(outstanding.values()) if collective.ticket == ticket]
        if len(found) != 1:
            return None
        self.know(work, found[0])  # waited for again, it must not be taken for another group's of that number
        return found[0]


class Tracker:
    """Turns what hooks and calls say into `Collective`s."""

    def __init__(self, run: Run, patches: Patches, source: str) -> None:
        self.run = run
        self.patches = patches
        self.source = source
        self.threads = Threads()
        self.works = Works(run)
        self.rounds = 0
        """Backward passes so far."""
        self.communicators: dict[str, tuple[weakref.ref[Any], Communicator]] = {}
        self._buckets: list[tuple[Any, Collective]] = []
        """Works of DDP's buckets in this backward pass that are not known to be complete."""
        self._backwards = 0
        """Backward passes that are under way, of any thread."""

    # Groups.

    def communicator(self, group: Any) -> Communicator:
        """Of a `ProcessGroup`, which is not kept alive."""
        name: str = group.group_name
        known = self.communicators.get(name)
        if known is not None and known[0]() is group:
            return known[1]
        for key, (reference, _) in list(self.communicators.items()):
            if reference() is None:
                self.communicators.pop(key, None)
        reference = weakref.ref(group)

        def sequence() -> int:
            alive = reference()
            if alive is None:
                raise RuntimeError("the group is gone")
            return alive._get_sequence_number_for_group()

        size: int = group.size()

        def describe() -> Group:
            alive = reference()
            found = group_of(alive) if alive is not None else None
            return found or Group(name, tuple(range(size)), "", 0.0)  # torch knows it no more

        made = Communicator(name, size, describe, sequence, transfers_before(group))
        self.communicators[name] = (reference, made)
        self.run.collectives.add(made)
        return made

    # What is issued.

    def issue(self, communicator: Communicator, op: Op, tensors: Any, asynchronous: bool, root: Any = None) -> None:
        thread = self.threads.own
        thread.last = None
        if not self.run.active or get_current().get(SUPPRESSED):
            return
        start = clock()
        name, variant, place = op
        size = _bytes(tensors) if tensors else 0
        transfer = name in TRANSFERS
        seq = communicator.number(transfer, name == SpanName.MONITORED_BARRIER)
        recorder = self.run.flight_recorder
        if recorder is not None and not transfer:
            recorder.called(communicator, communicator.count + 1, seq, name != SpanName.MONITORED_BARRIER)
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
            collective.opens_bucket, bucket.opened = not bucket.opened, True
            bucket.sent += size
            thread.sent = collective
        elif (
            communicator.ddp and thread.issued is None and self._backwards and asynchronous
            and name == SpanName.ALL_REDUCE and tensors and _is_gradient(tensors[0])
        ):  # fmt: skip
            # DDP launches its buckets in the order of their indices (torch/csrc/distributed/c10d/reducer.cpp::
            # mark_bucket_ready); beside them it reduces a map of the parameters that were used, of integers.
            if communicator.bucket_round != self.rounds:
                communicator.bucket_round, communicator.buckets = self.rounds, 0
            collective.bucket_index, collective.watched = communicator.buckets, True
            communicator.buckets += 1
        self.run.collectives.issue(collective)
        thread.last = collective
        if thread.op is not None:
            thread.around = collective
        elif thread.issued is not None:
            thread.issued.append(collective)
        if self._buckets:
            self.poll()

    def issued(self) -> Collective | None:
        """The call into the backend has come back. Returns the collective where it is a bucket of DDP's, whose `Work`
        is wanted: see `watch`."""
        thread = self.threads.own
        collective, thread.last = thread.last, None
        if collective is None:
            return None
        now = collective.issued = clock()
        if collective.bucket_index < 0:
            return None
        bucket = collective.bucket
        if bucket is not None:
            bucket.inside += now - collective.start
            return None
        return collective if len(self._buckets) < Works.MOST else None

    def watch(self, bucket: Collective, work: Any) -> None:
        """`bucket` of DDP's is complete when `work` is; None: it is already."""
        self._buckets.append((work, bucket))

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

    def returned(self, issued: list[Collective], result: Any) -> None:
        """A public function has returned `result`: what it waited for is complete."""
        now = clock()
        for collective in issued:
            if not collective.asynchronous:
                self.waited(collective, collective.issued or now, now)
            elif result is not None and len(issued) == 1 and hasattr(result, "get_future"):
                self.works.know(result, collective)

    def waited(self, collective: Collective, since: int, now: int) -> None:
        collective.waited += now - since
        if collective.bucket is not None:
            collective.bucket.inside += now - since
        self.run.collectives.waited(collective, now)

    def raised(self, error: BaseException, issued: list[Collective]) -> None:
        if issued and is_failure(error):
            self.run.collectives.fail(error, issued[-1])

    # Backward passes.

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
            for reference, communicator in list(self.communicators.values()):
                if communicator.ddp and reference() is not None:
                    communicator.number(True)
                    seq = communicator.count - communicator.transfers
                    return Wait(SpanName.ALL_REDUCE, communicator.describe(), seq, start)
            return None

        self.run.collectives.fail_backward(error, start, wait)


def _bytes(tensors: Any) -> int:
    """0 where they are none: torch is about to refuse them."""
    size = 0
    try:
        for tensor in tensors:
            size += tensor.numel() * tensor.element_size()
    except Exception as error:
        if from_signal_handler(error):
            raise
        return 0
    return size


def _is_gradient(tensor: Any) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def native_c10d() -> Any:
    return importlib.import_module("torch._C._distributed_c10d")


def transfers_before(group: Any) -> int:
    """Of a group that was there before us: how many of what it has counted were transfers, as far as the Flight
    Recorder (2.8+) can tell."""
    try:
        count: int = group._get_sequence_number_for_group()
    except RuntimeError:
        return 0
    dump = getattr(native_c10d(), "_dump_fr_trace_json", None)
    if not count or dump is None:
        return 0
    try:
        seqs = [entry.seq for entry in entries(dump(includeCollectives=True)) if entry.group == group.group_name]
    except (RuntimeError, *OTHER_FORM):
        return 0
    # The last one's, not the greatest: a group that was destroyed may have had the same name.
    return max(0, count - seqs[-1]) if seqs else 0
