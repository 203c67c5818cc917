"""What C++ issues unseen (DDP's gradient buckets, functional collectives), out of torch's Flight Recorder: a ring of
what each group has issued, with times.

The builder reads it, and only where a step that is kept may lack something. What that costs, all of it under the GIL
(torch 2.10): a dump 7 to 10 µs an entry, new or not, at one stretch; what is new in it 4 µs an entry more, in the
builder's short turns. So the ring is small, and a dump is taken for several steps at once.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from otel_dl.faults import from_signal_handler
from otel_dl.log import logger
from otel_dl.recording.collectives import FLIGHT_RECORDER, Collective, Communicator
from otel_dl.recording.records import Evaluation, Kind, Step, clock
from otel_dl.semconv import SpanName

if TYPE_CHECKING:
    from otel_dl.recording.run import Run

REST_NS: Final = 2_000_000_000
REST: Final = 499
"""Between two dumps so many times what the last one took, REST_NS at least, unless half of the ring is new."""
LEAST_REST: Final = 39
"""Between two dumps in any case, so many times what the last one took: where more is issued meanwhile than the ring
holds, it is not chased."""
REMEMBERED: Final = 4_096
"""Collectives that belong to no step yet, at most: another rank may ask for their step."""
OVERWRITTEN: Final = "steps of which the Flight Recorder had forgotten collectives (TORCH_FR_BUFFER_SIZE)"
"""The key in `Run.dropped`."""
_GENERATIONS: Final = 8
_GROUPS: Final = 256

_OPS: Final = {
    "all_reduce": SpanName.ALL_REDUCE,
    "sparse_all_reduce": SpanName.ALL_REDUCE,
    "all_gather": SpanName.ALL_GATHER,
    "all_to_all": SpanName.ALL_TO_ALL,
    "barrier": SpanName.BARRIER,
    "broadcast": SpanName.BROADCAST,
    "gather": SpanName.GATHER,
    "reduce": SpanName.REDUCE,
    "scatter": SpanName.SCATTER,
}
"""By what stands after `gloo:` (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, 2.10)."""

_BYTES: Final = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Int": 4, "Long": 8,
    "Half": 2, "BFloat16": 2, "Float": 4, "Double": 8, "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
"""Of one element (torch/headeronly/core/ScalarType.h)."""
_NO_GRADIENT: Final = frozenset({"Byte", "Char", "Bool", "Short", "Int", "Long"})

OTHER_FORM: Final = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What reading a dump raises that has another form than that of torch 2.8 to 2.15."""


class Dump(Protocol):
    """torch._C._distributed_c10d._dump_fr_trace_json."""

    def __call__(self, includeCollectives: bool, onlyActive: bool = False) -> bytes | str: ...


class Entry(NamedTuple):
    """One entry of the Flight Recorder's."""

    id: int
    """They are numbered through."""
    group: str
    op: str
    """`all_reduce`, without the backend that stands before it."""
    seq: int
    op_id: int
    """Its number among all that its group has issued, transfers included."""
    transfer: bool
    retired: bool
    """Whether gloo is done with it (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, 2.15)."""
    created: int
    """Epoch ns."""
    size: int
    """Bytes; -1: not known."""
    type: str
    """Of its first tensor; empty where there is none."""


def entries(dump: bytes | str, after: int = -1) -> Iterator[Entry]:
    """Those of a dump with a greater id than `after`, in order, each read when it is asked for. Raises OTHER_FORM."""
    text = dump.decode() if isinstance(dump, bytes) else dump
    decoder = json.JSONDecoder()
    place = text.find('"entries":[')
    if place < 0:
        if "entries" in json.loads(text):
            raise ValueError("its list of entries stands otherwise")
        return  # it has none yet
    place += len('"entries":[')
    known = text.find(f'"record_id":{after},', place) if after >= 0 else -1
    if known >= 0:
        # Keys are in alphabetical order, and no string can hold quotes that are not escaped.
        place = text.find('{"collective_seq_id":', known)
        if place < 0:
            return
    while text[place] != "]":
        found, place = decoder.raw_decode(text, place)
        entry = _entry(found)
        if entry.id > after:
            yield entry
        if text[place] == ",":
            place += 1


def _entry(found: dict[str, Any]) -> Entry:
    types: list[str] = found["input_dtypes"] or found["output_dtypes"]
    sizes: list[list[int]] = found["input_sizes"] or found["output_sizes"]
    return Entry(
        int(found["record_id"]),
        str(found["process_group"][0]),
        str(found["profiling_name"]).partition(":")[2].removeprefix("_"),
        int(found["collective_seq_id"]),
        int(found["op_id"]),
        bool(found["is_p2p"]),
        bool(found["retired"]),
        int(found["time_created_ns"]),
        sum(_bytes(size, type) for size, type in zip(sizes, types, strict=True)) if set(types) <= _BYTES.keys() else -1,
        types[0] if types else "",
    )


def _bytes(size: list[int], type: str) -> int:
    count = _BYTES[type]
    for length in size:
        count *= length
    return count


class _Claim(NamedTuple):
    """Python was about to call a collective."""

    communicator: Communicator
    op_id: int
    seq: int
    is_recorded: bool


class FlightRecorder:
    """The collectives that nothing else of ours sees, for the builder. `dump` is torch's, `ring` how many entries it
    keeps; `groups` knows those that there are, also those that none of Python's calls has touched, by id."""

    def __init__(self, run: Run, dump: Dump, ring: int, groups: Callable[[], dict[str, Communicator]]) -> None:
        self._run = run
        self._dump = dump
        self._ring = ring
        self._groups = groups
        self._others: dict[str, Communicator] = {}
        self._ended: deque[tuple[int, dict[str, Communicator]]] = deque(maxlen=_GENERATIONS)
        """Groups that were ended together, and when: the next ones have the same names."""
        self._began = time_ns()
        self.on = True
        self.busy = False
        """Whether a dump is being read, and nobody has to rest before more of it is."""
        self._called: deque[_Claim] = deque(maxlen=2 * ring)
        self._calls = 0
        self._claims: dict[Communicator, deque[_Claim]] = {}
        self._ahead: dict[Communicator, int] = {}
        """How far the Flight Recorder's number is before ours: it counts what a monitored barrier is made of (2.10)."""
        self._unseen: deque[tuple[Collective, bool]] = deque(maxlen=REMEMBERED)
        """Collectives that C++ has issued, by their start, and whether each can be of gradients."""
        self._reading: Iterator[Entry] | None = None
        self._taken = self._shift = 0
        """When the latest dump was taken, and how far torch's clock is before ours."""
        self._known = 0
        """What was issued before is known."""
        self._rested = -REST_NS
        self._took = 0
        """When the latest dump was there, and how long it took."""
        self._last = -1
        """Id of the last entry that was read."""
        self._gap = (0, 0)
        """What was issued between these two had been overwritten before the latest dump was taken."""
        self._former = (-1, 0)
        """Number and end of the latest step that was taken."""
        self._counts = (0, 0)
        """What `_count` said when nothing was unseen."""

    # In the threads that train.

    def called(self, communicator: Communicator, op_id: int, seq: int, is_recorded: bool) -> None:
        """Python is about to call this collective: it has a span. In steps that nobody keeps this is all there is."""
        self._called.append(_Claim(communicator, op_id, seq, is_recorded))
        self._calls += 1

    def groups_ended(self, known: dict[str, Communicator]) -> None:
        """All groups are about to be forgotten; `known` are those that Python's calls have touched."""
        self._ended.append((clock(), {**self._groups(), **self._others, **known}))
        self._others = {}

    # In the builder's.

    def has(self, trace: Step | Evaluation, until: float, at_once: bool) -> bool:
        """Whether what was issued in `trace`, which is closed, is known. Reads on until `until` (`perf_counter`); with
        `at_once` it does not rest, nor stop."""
        return self._has(_end(trace), until, at_once)

    def finish(self) -> None:
        """The run ends, and no step is open."""
        number, end = self._former
        if self._run.number == number + 1 and self._has(clock(), 0.0, True):
            self._leave_between(end, clock())

    def _has(self, end: int, until: float, at_once: bool) -> bool:
        self.busy = False
        try:
            return not self.on or self._read(end, until, at_once)
        except Exception as error:
            if from_signal_handler(error):
                raise
            self._give_up(error)
            return True

    def _read(self, end: int, until: float, at_once: bool) -> bool:
        if end <= self._known:
            return True
        if self._reading is None:
            now = clock()
            counts = self._count()
            new = counts[0] - self._counts[0]
            if new == counts[1] - self._counts[1]:
                self._counts, self._known = counts, now
                return True
            # It is negative where groups have ended.
            rest = max(REST_NS, REST * self._took) if 0 <= 2 * new < self._ring else LEAST_REST * self._took
            if not at_once and now < self._rested + rest:
                return False
            self._counts = counts
            self._take_dump(now)
        assert self._reading is not None
        for entry in self._reading:
            self._add(entry)
            if not at_once and perf_counter() > until:
                self.busy = True
                return False
        self._reading, self._known = None, self._taken
        return end <= self._known or (at_once and self._read(end, until, at_once))

    def _count(self) -> tuple[int, int]:
        """(collectives that torch counts in all groups, calls of Python's so far): 10 µs."""
        status: dict[str, dict[str, Any]] = json.loads(self._dump(includeCollectives=False))["pg_status"] or {}
        return sum(max(0, int(group["last_enqueued_collective"])) for group in status.values()), self._calls

    def _take_dump(self, now: int) -> None:
        before, self._taken = self._taken, now
        dump = self._dump(includeCollectives=True)
        after = clock()
        self._rested, self._took = after, after - now
        self._shift = time_ns() - clock()
        # Whatever the dump has of Python's calls was said before it was taken.
        while self._called:
            claim = self._called.popleft()
            claims = self._claims.get(claim.communicator)
            if claims is None:
                claims = self._claims[claim.communicator] = deque(maxlen=2 * self._ring)
                while len(self._claims) > _GROUPS:
                    del self._claims[next(iter(self._claims))]
            claims.append(claim)
        self._reading = entries(dump, self._last)
        self._gap = before, self._gap[1]

    def _add(self, entry: Entry) -> None:
        start = entry.created - self._shift
        if entry.id > self._last + 1:
            self._gap = self._gap[0], start
        self._last = entry.id
        name = _OPS.get(entry.op)
        if entry.transfer or name is None or entry.created < self._began:
            return
        communicator = self._communicator(entry.group, start)
        if communicator is None:
            return  # its group is gone, and nobody has seen it
        if self._is_pythons(entry, communicator):
            return
        collective = Collective(communicator, name, 0, "", FLIGHT_RECORDER, entry.size, start, True)
        collective.seq, collective.issued = entry.seq - self._ahead.get(communicator, 0), start
        self._unseen.append((collective, bool(entry.type) and entry.type not in _NO_GRADIENT))

    def _is_pythons(self, entry: Entry, communicator: Communicator) -> bool:
        claims = self._claims.get(communicator, ())
        while claims and claims[0].op_id <= entry.op_id:
            claim = claims.popleft()
            if claim.op_id == entry.op_id:
                self._ahead[communicator] = entry.seq - claim.seq
                return True
            if not claim.is_recorded:  # a monitored barrier: the next entry is of what follows it
                self._ahead[communicator] = entry.seq - claim.seq - 1
        return False

    def _communicator(self, group: str, at: int) -> Communicator | None:
        for end, known in list(self._ended):
            if at <= end:
                return known.get(group)
        found = self._run.collectives.communicator(group) or self._others.get(group)
        if found is None:
            self._others = self._groups()
            found = self._others.get(group)
        return found

    def take(self, trace: Step | Evaluation) -> list[Collective]:
        """Those in `trace` that nothing else has seen, by their start, each with the index of the bucket that it is."""
        start, end = _start(trace), _end(trace)
        found = self._between(start, end)
        if isinstance(trace, Step):
            if trace.number == self._former[0] + 1:
                self._leave_between(self._former[1], start)
            self._former = trace.number, end
        if start < self._gap[1] and self._gap[0] < end:
            self._run.dropped[OVERWRITTEN] += 1
        _number_buckets(trace, found)
        return [collective for collective, _ in found]

    def _between(self, start: int, end: int) -> list[tuple[Collective, bool]]:
        found = [one for one in self._unseen if start <= one[0].start <= end]
        if found:
            others = [one for one in self._unseen if not start <= one[0].start <= end]
            self._unseen = deque(others, maxlen=REMEMBERED)
        return found

    def _leave_between(self, start: int, end: int) -> None:
        """There was no step between these."""
        for collective, _ in self._between(start, end):
            self._run.collectives.leave(collective)

    def _give_up(self, error: Exception) -> None:
        self.on, self._reading = False, None
        self._unseen.clear()
        logger.warning(
            "otel-dl: torch's Flight Recorder says what is not understood (%s: %s): what C++ issues (the gradient"
            " buckets of DistributedDataParallel, functional collectives) is not in the trace from here on.",
            type(error).__name__,
            error,
        )


def _start(trace: Step | Evaluation) -> int:
    return trace.start if isinstance(trace, Step) else min((record[1] for record in trace.records), default=0)


def _end(trace: Step | Evaluation) -> int:
    return trace.end if isinstance(trace, Step) else max((record[2] for record in trace.records), default=0)


def _number_buckets(trace: Step | Evaluation, found: list[tuple[Collective, bool]]) -> None:
    """DDP launches its buckets in the order of their indices, in each backward pass
    (torch/csrc/distributed/c10d/reducer.cpp::mark_bucket_ready)."""
    for record in trace.records:
        kind, start, end = record[0], record[1], record[2]
        if not isinstance(kind, int) or not kind & Kind.BACKWARD:
            continue
        counts: dict[str, int] = {}
        for collective, of_gradients in found:
            group = collective.communicator
            if (
                group.ddp
                and of_gradients
                and collective.name == SpanName.ALL_REDUCE
                and start <= collective.start <= end
            ):
                collective.bucket_index = counts.get(group.id, 0)
                counts[group.id] = collective.bucket_index + 1
