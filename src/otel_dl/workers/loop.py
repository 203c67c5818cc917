"""Inside a worker: torch's own loop between two proxies of its queues, which see each fetch begin and end."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from multiprocessing import process
from typing import TYPE_CHECKING, Any, Final, cast

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from otel_dl.faults import is_ours
from otel_dl.forensics.writer import StatusPage, all_ranges
from otel_dl.log import logger
from otel_dl.recording import context, ids, native
from otel_dl.recording.context import DerivedSpan
from otel_dl.recording.failure import Failure, qualified
from otel_dl.recording.keep import batch_sampled
from otel_dl.recording.native import WorkerState
from otel_dl.recording.records import clock
from otel_dl.workers import carrier as carriers
from otel_dl.workers import ring, spans, wire
from otel_dl.workers.carrier import Carrier
from otel_dl.workers.environment import Environment, initialiser, reader, unpickling
from otel_dl.workers.ring import RingWriter
from otel_dl.workers.writer import Writer

if TYPE_CHECKING:
    from opentelemetry.context import Context


SLOW: Final = 4
"""A fetch that takes so many times the mean says which samples it read,"""
WARM: Final = 16
"""once there were so many."""


class BatchSpan(DerivedSpan):
    """Stands for the reading of a batch in the context. Its ids and its flag are settled by the first question; while
    nobody has asked, it stands for one fetch after the other."""

    def __init__(self, worker: Worker, outer: Context) -> None:
        super().__init__(False, outer)
        self._worker = worker

    @property
    def open(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        worker = self._worker
        return worker.fetching and worker.span is self

    def ids(self) -> tuple[int, int]:
        worker = self._worker
        worker.asked = True
        self.sampled = worker.sampled((worker.round, worker.index))
        return ids.batch_ids(worker.carrier.nonce, worker.round, worker.index)


class Worker(WorkerState):
    """What a worker knows of itself. Fetches begin and end in its main thread."""

    def __init__(
        self,
        carrier: Carrier,
        number: int,
        writer: Writer,
        page: StatusPage | None = None,
        stateful: bool = False,
    ) -> None:
        self.carrier = carrier
        self.number = number
        self.writer = writer
        self.page = page
        self.stateful = stateful
        """Whether the loop is torchdata's, which hands over (batch, worker, state) in the place of the batch."""
        self.span_limit = carrier.span_limit
        self.environment: Environment | None = None
        """Where OTEL_DL_RESTORE_ENV says so."""
        self.init_failed = False
        """Whether the user's worker_init_fn raised."""
        self.reader = ""
        """What reads the batches, for a warning."""
        self._ring = RingWriter(page.tail) if page is not None else None
        self._pid = os.getpid()
        # torchdata's answers have another form: Python looks at them.
        if page is not None and context.variable is not None and not stateful:
            self.map_page(context.variable, page.address, page.began)

    @property
    def batch(self) -> tuple[int, int] | None:
        """(round, index) of the fetch that is open."""
        return (self.round, self.index) if self.fetching else None

    def warn(self, message: str) -> None:
        """Has the parent say it, once for all workers."""
        if not self.writer.write(wire.WARNING, message.encode()):
            logger.warning("%s", message)

    def look_after(self, environment: Environment) -> None:
        """What a fetch changes in the environment is put right from now on."""
        self.environment = environment
        self.entries, self.entries_count = environment.entries, environment.count

    def room(self) -> bool:
        """Whether one more span of the user's belongs to this fetch; one that does not is counted."""
        if self.free:
            self.free -= 1
            return True
        self.dropped += 1
        return False

    def sampled(self, batch: tuple[int, int]) -> bool:
        """The sampler's answer for the trace of this batch; no where the sampler could not come along."""
        head = self.carrier.head
        return head is not None and not isinstance(head, bytes) and batch_sampled(head, self.carrier.nonce, *batch)

    # `Get` and `Put` of `recording/c/queues.c` do the same for the ordinary fetch; here is what holds in any case.

    def received(self, message: Any) -> None:
        """torch's loop was given `message`: (index, what to read), a resumption, or the end."""
        if os.getpid() != self._pid:
            return  # a dataset forked, and this process goes on as the worker: whose page and ring these are
        start = clock()
        if self.fetching:
            self._leave()  # it was passed over: the iteration had ended
            if self.page is not None:
                self.page.end(0, start)
        if type(message) is tuple:
            self.start = start
            self.index, self.samples = cast("tuple[int, Any]", message)
            if self.page is not None:
                self.page.fetching(self.round, self.index, start, self.samples)
            self._enter()
        elif type(message).__name__ == "_ResumeIteration":
            # Once a worker and epoch: torch/utils/data/dataloader.py::_reset, 2.15.
            self.round += 1

    def answers(self, message: Any) -> None:
        """torch's loop is about to hand `message` over: (index, batch) ends the fetch.

        It is written before the batch is, so it has arrived when the parent has the batch.
        """
        if not self.fetching or type(message) is not tuple or os.getpid() != self._pid:
            return
        index, data = cast("tuple[Any, Any]", message)
        if index != self.index:
            return
        end = clock()
        if self.page is not None:
            self.page.fetched(self.round, index, self.start, end)
        if self.environment is not None and self.environment.changed():
            self.environment.restore(self.reader)
            self.entries_count = self.environment.count
        self._leave()
        if self.stateful:
            data = data[0]
        read, error, samples = True, None, ""
        kind = type(data).__name__
        if kind == "ExceptionWrapper":
            error = _failure(data)
        elif kind == "_IterableDatasetStopIteration":
            read = False
        duration = end - self.start
        if self.init_failed:
            samples = ""  # torch hands over what its init function raised in the place of the first batch
        elif error or (self.fetches >= WARM and duration > SLOW * self.mean):
            samples = all_ranges(self.samples)
        self.fetches += 1
        self.mean += (duration - self.mean) // min(self.fetches, WARM)
        plain = read and not error and not samples and not self.dropped and self.free == self.span_limit
        if plain and self._ring is not None and self._ring.write(self.round, index, self.start, end):
            return
        body = wire.encode_fetch(
            self.number, self._pid, self.round, index, self.start, end, self.dropped, read, error, samples
        )
        self.writer.write(wire.FETCH, body)

    def ended(self, error: BaseException | None) -> None:
        """torch's loop was left, by `error` where it did not end as it was told to."""
        try:
            # `sys.exit` says nothing beyond the exit status.
            if self.page is not None and not isinstance(error, SystemExit):
                self.page.ended(qualified(type(error)) if error is not None else "")
            self.writer.flush()
        except Exception as fault:
            _fault(fault)

    def _enter(self) -> None:
        self.fetching = True
        self.free = self.span_limit
        self.dropped = 0
        if self.span is not None and context.get_current() is self.attached and not self.asked:
            return
        self.span, self.asked = None, False
        outer, current = context.current()
        if current.is_recording():
            return
        adaptive = getattr(self.carrier.head, "adaptive", True)
        if self.carrier.foreign_sdk and adaptive and not self.sampled((self.round, self.index)):
            # A flag of 00 that nobody asked for would take the user's own spans away there.
            return
        self.span = BatchSpan(self, outer)
        context.attach(self.span)
        self.attached = context.get_current()

    def _leave(self) -> None:
        self.fetching = False
        span = self.span
        if span is not None and (self.asked or context.get_current() is not self.attached):
            self.span = None
            context.uncover()


class IndexQueue:
    """torch's index queue; what comes out of it is noticed."""

    def __init__(self, queue: Any, worker: Worker) -> None:
        self._queue = queue
        get, received = queue.get, _guarded(worker.received)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            message = get(*args, **kwargs)
            received(message)
            return message

        hook = native.hook("Get", worker.carrier.native)
        self.get = recorded if hook is None else hook(worker, get, received)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class DataQueue:
    """torch's data queue; what goes into it is noticed."""

    def __init__(self, queue: Any, worker: Worker) -> None:
        self._queue = queue
        put, answers = queue.put, _guarded(worker.answers)

        def recorded(message: Any, *args: Any, **kwargs: Any) -> Any:
            answers(message)
            return put(message, *args, **kwargs)

        hook = native.hook("Put", worker.carrier.native)
        self.put = recorded if hook is None else hook(worker, put, answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def _guarded(notice: Callable[[Any], None]) -> Callable[[Any], None]:
    def noticed(message: Any) -> None:
        try:
            notice(message)
        except Exception as error:
            _fault(error)

    return noticed


def run(carrier: Carrier, descriptor: int | None, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs `original`, torch's worker loop, with `args`, and reports each fetch. Returns and raises what it would."""
    worker: Worker | None = None
    try:
        worker, args = _prepare(carrier.unpacked(), descriptor, original, args)
    except Exception:
        logger.warning("otel-dl: a fault of ours in a DataLoader worker; it is not recorded.", exc_info=True)
    try:
        result = original(*args)
    except BaseException as error:
        if worker is not None:
            worker.ended(error)
        raise
    if worker is not None:
        worker.ended(None)
    return result


def _prepare(
    carrier: Carrier, descriptor: int | None, original: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Worker, tuple[Any, ...]]:
    # By name: 2.15 calls the second one `dataset_holder`, torchdata's loop has one more at the end.
    place = {name: at for at, name in enumerate(inspect.signature(original).parameters)}
    wrapped = list(args)
    number = args[place["worker_id"]]
    worker = Worker(carrier, number, Writer(descriptor), _page(carrier, number), "worker_state" in place)
    if start_method() == "forkserver":
        # It was forked from a server that knows the environment of the time when it began.
        carriers.replace(os.environ, carrier.environment)
    os.environ[carriers.TRACEPARENT] = carrier.environment[carriers.TRACEPARENT]
    spans.route(worker)
    _enter_run(carrier)
    wrapped[place["index_queue"]] = IndexQueue(args[place["index_queue"]], worker)
    wrapped[place["data_queue"]] = DataQueue(args[place["data_queue"]], worker)
    if carrier.restore_env:
        # Before 2.15 the dataset itself, later a list with it.
        dataset = args[1][0] if "dataset_holder" in place else args[1]
        worker.reader = reader(dataset, args[place["collate_fn"]])
        environment = Environment(carrier.environment, worker.warn)
        environment.restore(unpickling(dataset))
        worker.look_after(environment)
        init = args[place["init_fn"]]
        if init is not None:
            wrapped[place["init_fn"]] = _restoring(worker, environment, init)
    return worker, tuple(wrapped)


def _page(carrier: Carrier, number: int) -> StatusPage | None:
    path = carrier.pages[number] if number < len(carrier.pages) else ""
    try:
        return StatusPage(path, ring.SIZE) if path else None
    except OSError:  # the parent is gone, and its folder with it; or a filesystem that has no shared mappings
        return None


def _restoring(worker: Worker, environment: Environment, init: Callable[[int], Any]) -> Callable[[int], Any]:
    """The user's init function; entries that it removed are put back behind it."""

    def initialise(number: int) -> Any:
        try:
            return init(number)
        except BaseException:
            worker.init_failed = True
            raise
        finally:
            try:
                environment.restore(initialiser(init))
                worker.look_after(environment)
            except Exception as error:
                _fault(error)

    return initialise


def _enter_run(carrier: Carrier) -> None:
    """Outside a fetch the context is the run's; a span of the user's that fork inherited stays where it is."""
    outer: Context = context_api.get_current()
    span = trace.get_current_span(outer)
    while isinstance(span, DerivedSpan):
        outer = span.outer
        span = trace.get_current_span(outer)
    if not span.is_recording():
        flags = TraceFlags(TraceFlags.SAMPLED if carrier.sampled else TraceFlags.DEFAULT)
        sender = SpanContext(carrier.trace_id, carrier.span_id, is_remote=True, trace_flags=flags)
        outer = trace.set_span_in_context(NonRecordingSpan(sender), outer)
    context_api.attach(outer)


def start_method(of: Any = None) -> str:
    """How a process was started: `of`, by default this one."""
    import multiprocessing

    started: Any = process.current_process() if of is None else of
    return getattr(started, "_start_method", None) or multiprocessing.get_start_method()


_faulty = False


def _fault(error: Exception) -> None:
    if not is_ours(error):
        raise error
    global _faulty
    if not _faulty:
        _faulty = True
        logger.warning(
            "otel-dl: a fault of ours in a DataLoader worker, which goes on; batches may be missing.", exc_info=error
        )


def _failure(wrapper: Any) -> Failure:
    """torch hands an exception over as its class and the text of its traceback, which ends in name and message
    (torch/_utils.py `ExceptionWrapper`, 2.15)."""
    kind: type[BaseException] = wrapper.exc_type
    name = qualified(kind).removeprefix("__main__.")
    _, said, message = f"\n{wrapper.exc_msg}".rpartition(f"\n{name}: ")
    return Failure.told(kind, message.rstrip("\n") if said else "")
