"""Collectives and transfers, as the recorder sees them: what was issued, what is known to be complete.

A `Collective` is written by the thread that issues it and, once, by whoever sees its end. It is never used again for
another one: an end that comes late, when its step is long exported, touches nothing but itself.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Final

from otel_dl.recording.failure import Failure
from otel_dl.recording.ranks import Group, Wait
from otel_dl.recording.records import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_dl.recording.run import Run

OUTSIDE: Final = 1_000
"""Collectives outside any step that wait for the builder at most."""
OUTSTANDING: Final = 1_024
"""Collectives that are not known to be complete, and are still of interest, at most."""

GROUPS: Final = 4_096
"""Groups of which it is remembered what was issued last, at most."""

HOOK: Final = "hook"
CALL: Final = "call"
FLIGHT_RECORDER: Final = "flight_recorder"
"""How collectives are known, `dl.collective.source`: from hooks of the groups, or where Python calls torch and, beside
it, what C++ issues from the Flight Recorder."""

ISSUED: Final = 1
WAITED_FOR: Final = 2
COMPLETE: Final = 3


class How:
    """How the end of a collective is known: `dl.collective.end`."""

    WAIT: Final = "wait"
    POLL: Final = "poll"
    CALLBACK: Final = "callback"
    PHASE: Final = "phase"


class Bucket:
    """A gradient bucket in the hands of a comm hook of the user's. It knows no collective: those know it."""

    __slots__ = ("compute", "index", "inside", "opened", "sent")

    def __init__(self, index: int) -> None:
        self.index = index
        self.compute = 0
        """ns that the hook and its callbacks ran, without the collectives that they waited for."""
        self.inside = 0
        """ns in collectives, since the hook or its callback was entered."""
        self.sent = 0
        """Bytes."""
        self.opened = False
        """Whether anything was issued for it."""


class Communicator:
    """A process group, as its collectives need it. `sequence` asks torch how many it has issued, transfers included
    where the backend counts them together (gloo); it raises where the backend does not count."""

    __slots__ = (
        "_sequence",
        "bucket_round",
        "buckets",
        "complete",
        "count",
        "ddp",
        "describe",
        "id",
        "monitored",
        "page",
        "size",
        "transfers",
        "was_monitored",
        "was_transfer",
    )  # fmt: skip

    def __init__(
        self, id: str, size: int, describe: Callable[[], Group], sequence: Callable[[], int], transfers: int = 0
    ) -> None:
        self.id = id
        self.size = size
        self.describe = describe
        self._sequence = sequence
        self.page = id.encode("utf-8", "replace")
        self.count = 0
        """What `sequence` said last."""
        self.transfers = transfers
        """How many of these were transfers: the Flight Recorder numbers those apart."""
        self.was_transfer = self.was_monitored = False
        self.monitored = 0
        """Monitored barriers so far."""
        self.ddp = False
        """Whether gradient buckets of DDP go through it."""
        self.buckets = 0
        self.bucket_round = 0
        self.complete = 0
        """When the latest of its collectives that is known to be complete was issued."""

    def number(self, transfer: bool, monitored: bool = False) -> int:
        """The number of the collective that is issued now, as the Flight Recorder's `collective_seq_id`; 0 of a
        transfer. Read in torch 2.15 and 2.4: gloo counts before it records, so a hook before sees one less.

        A monitored barrier is made of transfers, of so many on rank 0 and so many on the others; here it is one
        collective, for the Flight Recorder none.
        """
        try:
            count = self._sequence()
        except RuntimeError:  # a backend that does not count: one each
            count = self.count + (not self.was_transfer)
        if self.was_transfer:
            self.transfers += min(1, count - self.count)  # what else there is C++ has issued unseen
        elif self.was_monitored:
            self.transfers += count - self.count - 1
        self.was_monitored = monitored
        self.monitored += monitored
        self.count = count
        self.was_transfer = transfer
        return 0 if transfer else count + 1 - self.transfers

    def issued(self) -> int:
        """The number of the collective that was issued last, whoever did, as far as torch says it. For any thread."""
        try:
            count = self._sequence()
        except RuntimeError:
            return self.count - self.transfers if self.was_transfer else 0
        beyond = (
            min(1, count - self.count) if self.was_transfer else count - self.count - 1 if self.was_monitored else 0
        )
        return count - self.transfers - beyond


class Collective:
    """One collective or transfer on this rank. Instants are readings of `clock`."""

    __slots__ = ("asynchronous", "bucket", "bucket_index", "communicator", "end", "failure", "how", "issued", "name",
                 "opens_bucket", "page_op", "seq", "size", "source", "start", "state", "ticket", "variant", "waited",
                 "watched")  # fmt: skip

    def __init__(
        self, communicator: Communicator, name: str, page_op: int, variant: str, source: str, size: int, start: int,
        asynchronous: bool,
    ) -> None:  # fmt: skip
        self.communicator = communicator
        self.name = name
        """The span's: `dist.all_reduce`."""
        self.page_op = page_op
        self.variant = variant
        self.source = source
        self.size = size
        """Bytes that this rank gives into it, or receives where it gives none; -1: not known."""
        self.start = start
        self.asynchronous = asynchronous
        self.seq = 0
        self.ticket = -1
        """What the `Work` of it says that its number is."""
        self.issued = 0
        """When the call into the backend came back; 0: it has not."""
        self.end = 0
        """0: not known to be complete."""
        self.state = 0
        """What was said of it last: ISSUED, WAITED_FOR or COMPLETE; 0: nothing yet."""
        self.how = How.PHASE
        self.waited = 0
        """ns that Python waited for it."""
        self.watched = not asynchronous
        """Whether somebody will tell its end: what C++ issues and waits for (functional collectives) nobody does."""
        self.bucket_index = -1
        self.bucket: Bucket | None = None
        self.opens_bucket = False
        """Whether it is the first of `bucket`."""
        self.failure: Failure | None = None

    def wait(self) -> Wait:
        return Wait(self.name, self.communicator.describe(), self.seq, self.start, self.size)


class Collectives:
    """Those of one run, from all its threads."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.latest: dict[str, Collective] = {}
        """By id of the group: the one that was issued last. Any thread may read it, and of each `seq`, `name`, `size`,
        `start`, `end` (0: not known to be complete; where it is not `watched`, it stays so). A group's stays when it is
        destroyed, for others may still wait in it; of the latest GROUPS."""
        self._communicators: dict[str, Communicator] = {}
        """By id of the group; as many as in `latest`."""
        self.outside: deque[Collective] = deque()
        """Those outside any step, until the builder takes them."""
        self.outstanding: OrderedDict[int, Collective] = OrderedDict()
        """Not known to be complete, in the order of their issue, by `id`. Any thread changes it, in one call at a time
        that the GIL makes whole."""

    def issue(self, collective: Collective) -> None:
        """It is about to be issued."""
        run = self._run
        self.latest[collective.communicator.id] = collective
        outstanding = self.outstanding
        if len(outstanding) >= OUTSTANDING:
            with contextlib.suppress(KeyError):  # another thread has emptied it
                outstanding.popitem(last=False)
        outstanding[id(collective)] = collective
        self.show(collective, ISSUED if collective.asynchronous else WAITED_FOR)
        step = run.current
        if step is None or step.ended:
            self.leave(collective)
            return
        if len(step.collectives) < run.settings.step_records:
            step.collectives.append(collective)
        else:
            step.dropped += 1

    def leave(self, collective: Collective) -> None:
        """It belongs to no step."""
        if self._run.keep.head.off:
            return  # nobody builds spans, nor takes it from here
        if len(self.outside) < OUTSIDE:
            self.outside.append(collective)
        else:
            self._run.dropped["collectives outside steps"] += 1

    def complete(self, collective: Collective, how: str, end: int = 0) -> None:
        """It is known to be complete since `end`."""
        self.outstanding.pop(id(collective), None)
        if not collective.end:
            collective.how = how
            collective.end = end or clock()
            communicator = collective.communicator
            if collective.start > communicator.complete:
                communicator.complete = collective.start
            self.show(collective, COMPLETE)

    def wait(self, collective: Collective) -> None:
        """Python is about to wait for it, perhaps once more, after a wait whose exception it caught."""
        if collective.failure is not None:
            collective.end = 0
            self.outstanding[id(collective)] = collective
        if not collective.end:
            self.show(collective, WAITED_FOR)

    def waited(self, collective: Collective, end: int) -> None:
        """A wait for it has returned, at `end`: it is complete, whatever an earlier wait has raised."""
        failure = collective.failure
        if failure is not None:
            collective.failure = None
            self._run.ranks.recovered(collective.communicator.id)
            step = self._run.current
            if step is not None and step.error is failure:
                step.error = None
        self.complete(collective, How.WAIT, end)

    def show(self, collective: Collective, state: int) -> None:
        collective.state = state
        self._run.status.collective(
            state, collective.page_op, collective.seq, collective.size, collective.start, collective.communicator.page
        )

    def add(self, communicator: Communicator) -> None:
        """A group is seen from now on."""
        known = self._communicators
        while len(known) >= GROUPS:
            oldest = next(iter(known))
            del known[oldest]
            self.latest.pop(oldest, None)
        known[communicator.id] = communicator

    def communicator(self, group: str) -> Communicator | None:
        return self._communicators.get(group)

    def issued(self, group: str) -> tuple[int, str, int]:
        """(number, name, bytes) of the collective that was issued last in `group`; (0, "", -1) where there is none.

        Name and bytes are not known ("", -1) of one that C++ has issued unseen (DDP's buckets before torch 2.15), and
        where a transfer came after it.
        """
        latest, communicator = self.latest.get(group), self._communicators.get(group)
        if latest is not None and latest.seq and latest.source == HOOK:  # which sees all
            return latest.seq, latest.name, latest.size
        number = communicator.issued() if communicator is not None else 0
        if latest is not None and latest.seq >= number > 0:
            return latest.seq, latest.name, latest.size
        return max(number, latest.seq if latest is not None else 0), "", -1

    def groups_ended(self) -> None:
        """There are no groups any more. The next ones have the same names, and count from 1: what was issued in these
        would be taken for having come to what it never came to."""
        recorder = self._run.flight_recorder
        if recorder is not None:
            recorder.groups_ended(self._communicators)
        self.latest.clear()
        self._communicators.clear()
        self.outstanding.clear()
        self._run.status.collective(0, 0, 0, 0, 0, b"")

    @property
    def waits(self) -> bool:
        """Whether a thread waits for one in Python."""
        return any(each.state == WAITED_FOR and not each.end for each in list(self.outstanding.values()))

    def phase_over(self) -> None:
        """A backward pass, which waits for all of DDP's buckets, has ended."""
        now = clock()
        for collective in list(self.outstanding.values()):
            if collective.bucket_index >= 0:
                self.complete(collective, How.PHASE, now)

    def oldest(self, since: int = 0) -> Collective | None:
        """The first that was issued since then and is not known to be complete; where a later one of its group is, it
        is as well, as far as other ranks are concerned: all have issued it."""
        for collective in list(self.outstanding.values()):
            if collective.start >= max(since, collective.communicator.complete):
                return collective
        return None

    def fail(self, error: BaseException, collective: Collective) -> None:
        """`error` left the call that issued it, or a wait for it. Adds a note where other ranks are the cause, which
        takes 1 s at most, and marks the step that is open. A wait that is tried again and fails as before is explained
        once."""
        self.outstanding.pop(id(collective), None)
        former, failure, explained = collective.failure, Failure.of(error), None
        if former is not None and former.message == failure.message:
            failure = former
        elif could_be_of_ranks(error, collective):
            explained = self._run.ranks.explain(error, collective.wait())
            failure = Failure.of(error, explained)
        collective.failure = failure
        if not collective.end:
            collective.end = clock()
            collective.how = How.WAIT
            self.show(collective, COMPLETE)  # nobody waits for it any more
        step = self._run.current
        if explained is not None and step is not None and (step.error is None or step.error is former):
            step.error = failure
            step.plain = False

    def fail_backward(self, error: BaseException, start: int, wait: Callable[[], Wait | None]) -> None:
        """`error` left a backward pass that began at `start`; `wait` says what it waited for where no collective of it
        is known to be open."""
        collective = self.oldest(start)
        if collective is not None:
            if could_be_of_ranks(error, collective):
                self.fail(error, collective)
        elif is_of_backend(error):
            waited = wait()
            if waited is not None:
                self._run.ranks.explain(error, waited)

    def take_since(self, start: int) -> list[Collective]:
        """Those outside any step that were issued since `start`."""
        taken: list[Collective] = []
        with contextlib.suppress(IndexError):
            while self.outside[-1].start >= start:
                taken.append(self.outside.pop())
        taken.reverse()
        return taken


_WORDS: Final = (
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "broken pipe",
    "gloo/transport",
    "nccl error",
    "ncclremoteerror",
    "ncclsystemerror",
    "ncclinternalerror",
    "watchdog",
)
"""What gloo (third_party/gloo/gloo/transport/tcp/pair.cc) and NCCL say when another rank is the cause. Not their names:
"Backend gloo does not support alltoall" is no other rank's business."""


def is_of_backend(error: BaseException) -> bool:
    """Whether `error` looks like one of torch.distributed's: of its classes, or with a backend's words."""
    if any(kind.__name__ == "DistError" and kind.__module__.startswith("torch") for kind in type(error).__mro__):
        return True
    if type(error) is not RuntimeError:
        return False
    text = str(error).lower()
    return any(word in text for word in _WORDS)


def could_be_of_ranks(error: BaseException, collective: Collective) -> bool:
    """Whether other ranks can be the cause: never of a wrong argument, nor of what a signal handler raised."""
    if is_of_backend(error):
        return True
    if type(error) is not RuntimeError:
        return False
    limit = collective.communicator.describe().limit_s
    return 0 < limit <= (clock() - collective.start) / 1e9


def attributes(collective: Collective) -> dict[str, Any]:
    """Of its span."""
    communicator = collective.communicator
    found: dict[str, Any] = {
        "dl.group.id": communicator.id,
        "dl.group.size": communicator.size,
        "dl.collective.async": collective.asynchronous,
        "dl.collective.source": collective.source,
        "dl.collective.end": collective.how,
    }
    if collective.seq:
        found["dl.collective.seq"] = collective.seq
    if collective.size >= 0:
        found["dl.collective.bytes"] = collective.size
    if collective.variant:
        found["dl.collective.variant"] = collective.variant
    if collective.waited:
        found["dl.collective.wait_ms"] = collective.waited / 1e6
    if collective.bucket_index >= 0:
        found["dl.bucket.index"] = collective.bucket_index
    bucket = collective.bucket
    if bucket is not None and collective.opens_bucket:
        found["dl.hook.compute_ms"] = bucket.compute / 1e6
        found["dl.hook.sent_bytes"] = bucket.sent
    return found
