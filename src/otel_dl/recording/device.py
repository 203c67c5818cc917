"""The device's own time: events on its stream at boundaries of phases and steps, read when the device has passed them.

At a phase's ends in steps that the head keeps, at both ends of every other step (it may be kept late). Nothing waits
for the device: an event is asked whether it is ready, and is asked again later.

Who owns an event: the pool; from its recording on `_pending`; once it is read, `_last`, until the one after it is
read, for only pairs have a duration; then the pool again. All of that is the business of the thread that bounds steps,
and while none of its streams is being captured: a query from another thread breaks a capture that is under way (CUDA's
`cudaStreamCaptureModeGlobal`, pytorch#148594). The builder's thread gets numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from otel_dl.faults import from_signal_handler
from otel_dl.log import logger
from otel_dl.recording.records import NAMES, clock

if TYPE_CHECKING:
    from otel_dl.recording.run import Run

IN_FLIGHT: Final = 256
"""Events that the device has not passed yet at most; no more are recorded until it has."""
OF_A_STEP: Final = 128
"""Events at the phases of a step at most."""
READ_TOGETHER: Final = 4
"""Events read at a boundary at most: more than are recorded there, and few enough not to be felt."""
READINGS: Final = 16_384
"""Positions that are remembered for steps not built yet."""
LATE_NS: Final = 1_000_000
"""An event recorded so long after a boundary says nothing of it any more."""

_THROWN_IN: Final = ("builtins", "torch", "otel_dl")
"""Modules of the exceptions that a driver's failure may have."""

_of_a_parent: list[object] = []
"""Events of the process that this one was forked from: destroying them is that one's business."""


class DeviceEvent(Protocol):
    """As `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds, of two that are ready."""
        ...


class Memory(NamedTuple):
    """What the allocator of one device says, in bytes; None: it does not say."""

    allocated: int | None = None
    peak: int | None = None
    """The most that was given out since the user reset it last."""
    reserved: int | None = None
    retries: int | None = None
    free: int | None = None
    """Of the device, as its driver says."""


class DeviceEvents(Protocol):
    """A kind of device: `patches.device.TorchDevice`, or a test's stand-in."""

    type: str
    """`cuda`, as in `cuda:0`."""

    def is_on(self) -> bool:
        """Whether the process uses one already. Cheap, and never its first use."""
        ...

    def current(self) -> int:
        """Index of the device that is current in this thread."""
        ...

    def is_capturing(self) -> bool:
        """Whether the stream that is current in this thread is being captured into a graph."""
        ...

    def event(self) -> DeviceEvent: ...

    def memory(self, device: int) -> Memory:
        """Without `free`."""
        ...

    def free(self, device: int) -> int | None: ...


class _Mark(NamedTuple):
    """An event that was recorded at `instant`, a reading of `clock`."""

    instant: int
    event: DeviceEvent
    device: int


class _Position(NamedTuple):
    """Where the device was when it passed a mark. Two of one `chain` are `ms` apart."""

    device: int
    chain: int
    ms: float


class DeviceTime:
    """Of one run. Without `events` (no such device, or switched off) it says nothing and costs nothing."""

    def __init__(self, run: Run, driver: DeviceEvents | None = None, events: bool = True) -> None:
        self._run = run
        self._driver = driver
        self.awaited = driver is not None and events
        """Whether the process may come to use the device, which `look_for_it` finds out."""
        self.late_ns = LATE_NS
        self._on = False
        """Whether boundaries are observed."""
        self._detailed = False
        """Whether phases of the open step are marked: the head keeps it."""
        self._room = 0
        self._thread = 0
        self._latest = 0
        self._chain = 0
        self._pool: dict[int, list[DeviceEvent]] = {}
        """By device: an event stays where it was recorded first."""
        self._pending: deque[_Mark] = deque()
        self._last: tuple[_Mark, _Position] | None = None
        self._read: dict[int, _Position] = {}
        """By the mark's instant. The builder's thread looks things up in it."""
        self._memory: dict[int, tuple[int, Memory]] = {}
        """By the boundary of a step: device and what its allocator said."""
        self._out_of_memory = (0, "")
        """`id` of the exception that is on its way out of nested phases, and what is said of it."""

    # In the thread that bounds steps.

    def look_for_it(self) -> None:
        """Begins where the process uses the device by now. Called when a step is opened."""
        try:
            if self._driver is None or not self._driver.is_on():
                return
        except Exception as error:
            self._switch_off(error)
            return
        self.awaited, self._on = False, True
        self._run.observers.of_steps(self._at_step)

    def _at_step(self, kind: int, begins: bool, instant: int) -> None:
        step = self._run.current if begins else None
        if begins:
            detailed = step is not None and (step.head or not step.number)
            if detailed or self._run.fast.on_phase is not None:
                self._run.observers.of_phases(self._at_phase, detailed)
            self._detailed, self._room = detailed, OF_A_STEP
        # The first one's beginning is late because the run began with it.
        if clock() - instant <= self.late_ns or (step is not None and not step.number):
            self._mark(instant)
            if self._detailed and instant not in self._memory:
                self._note_memory(instant)

    def _at_phase(self, kind: int, begins: bool, instant: int) -> None:
        if not self._detailed:
            self.look(READ_TOGETHER)
        elif self._room:
            self._room -= 1
            self._mark(instant)

    def _mark(self, instant: int) -> None:
        driver, pending = self._driver, self._pending
        if driver is None or instant <= self._latest:  # two boundaries at one time are one mark
            return
        try:
            if driver.is_capturing():
                return
            self._thread = threading.get_ident()
            self._read_ready(READ_TOGETHER)
            if len(pending) >= IN_FLIGHT:
                return
            device = driver.current()
            pool = self._pool.setdefault(device, [])
            event = pool.pop() if pool else driver.event()
            event.record()
            pending.append(_Mark(instant, event, device))
            self._latest = instant
        except Exception as error:
            self._switch_off(error)

    def look(self, most: int = IN_FLIGHT) -> None:
        """Reads what the device has passed meanwhile. In any other thread it does nothing."""
        if self._pending and self._driver is not None and self._thread == threading.get_ident():
            try:
                if not self._driver.is_capturing():
                    self._read_ready(most)
            except Exception as error:
                self._switch_off(error)

    def _read_ready(self, most: int) -> None:
        pending = self._pending
        for _ in range(most):
            if not pending or not pending[0].event.query():
                return
            mark, last = pending[0], self._last
            if last is not None and last[0].device == mark.device:
                ms = last[1].ms + last[0].event.elapsed_time(mark.event)
            else:
                self._chain, ms = self._chain + 1, 0.0
            position = _Position(mark.device, self._chain, ms)
            self._read[mark.instant] = position
            if len(self._read) > READINGS:
                del self._read[next(iter(self._read))]
            pending.popleft()  # only now it is read, to whoever asks `is_read`
            self._last = mark, position
            if last is not None:
                self._pool[last[0].device].append(last[0].event)

    def _note_memory(self, instant: int) -> None:
        if self._driver is None:
            return
        try:
            device = self._driver.current()
            self._memory[instant] = device, self._driver.memory(device)
            if len(self._memory) > READINGS:
                del self._memory[next(iter(self._memory))]
        except Exception as error:
            self._switch_off(error)

    def out_of_memory(self, error: BaseException, kind: int, outermost: bool) -> str:
        """What the allocator says while `error` leaves a phase of this kind; of nested ones the innermost counts."""
        known, words = self._out_of_memory
        if known != id(error):
            words = self._words_of_memory(kind)
        self._out_of_memory = (0, "") if outermost else (id(error), words)
        return words

    def _words_of_memory(self, kind: int) -> str:
        driver = self._driver
        try:
            if driver is None or not kind or not driver.is_on():
                return ""
            device = driver.current()
            memory = driver.memory(device)._replace(free=driver.free(device))
        except Exception as error:
            if _is_somebodys(error):
                raise
            return ""
        sizes = [
            f"{size / 2**30:.2f} GiB {name}"
            for name, size in (("allocated", memory.allocated), ("reserved", memory.reserved), ("free", memory.free))
            if size is not None
        ]
        return f"in {NAMES[kind]} on {driver.type}:{device}" + (f", {', '.join(sizes)}" if sizes else "")

    def _switch_off(self, error: Exception) -> None:
        """After what the driver raised (its failure is told to the user by the next thing they ask of it)."""
        if _is_somebodys(error):
            raise error
        self.stop()
        self._driver = None
        self._pending.clear()
        logger.warning(
            "otel-dl: no more events can be recorded on the device (%s: %s): spans have no dl.device.duration_ms and no"
            " dl.memory.* from now on. Training goes on.",
            type(error).__name__,
            error,
        )

    def stop(self) -> None:
        """No more is recorded; what was is still read."""
        self.awaited = self._on = self._detailed = False
        self._run.observers.of_steps(self._at_step, False)
        self._run.observers.of_phases(self._at_phase, False)

    def forked(self) -> None:
        """In a forked child, before it is let go."""
        self.stop()
        _of_a_parent.extend((self._pool, self._pending, self._last))

    # In any thread.

    def is_read(self, instant: int) -> bool:
        """Whether the device has passed what was recorded up to `instant`, as far as it is known. Where it has not, the
        phases of the open step are the occasion to look again."""
        try:
            read = self._pending[0].instant > instant
        except IndexError:
            return True
        if not read and self._on:
            self._run.observers.of_phases(self._at_phase)
        return read

    def between(self, start: int, end: int) -> dict[str, Any]:
        """The attributes of a phase between these readings of `clock`; none where it has no two marks."""
        first, last = self._read.get(start), self._read.get(end)
        if self._driver is None or first is None or last is None or first.chain != last.chain or last.ms < first.ms:
            return {}
        return {"dl.device": f"{self._driver.type}:{first.device}", "dl.device.duration_ms": last.ms - first.ms}

    def of_step(self, start: int, end: int) -> dict[str, Any]:
        """The attributes of a step.

        `dl.memory.peak_bytes` is the allocator's own peak, where it has risen within the step: then it was reached
        there. It is the user's to reset, so that of a step that stays below an earlier one is not known.
        """
        attributes = self.between(start, end)
        first, last = self._memory.get(start), self._memory.get(end)
        if first is None or last is None or first[0] != last[0]:
            return attributes
        before, after = first[1], last[1]
        if before.peak is not None and after.peak is not None and after.peak > before.peak:
            attributes["dl.memory.peak_bytes"] = after.peak
        if before.retries is not None and after.retries is not None and after.retries >= before.retries:
            attributes["dl.memory.alloc_retries"] = after.retries - before.retries
        return attributes


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device is full: `torch.OutOfMemoryError`, without importing torch."""
    return type(error).__name__ == "OutOfMemoryError"


def _is_somebodys(error: Exception) -> bool:
    """Whether it came from outside into what the driver was asked: from a signal handler, or thrown into the thread."""
    return type(error).__module__.partition(".")[0] not in _THROWN_IN or from_signal_handler(error)
