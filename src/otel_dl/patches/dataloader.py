"""DataLoader: the wait of the main process in `next()`, the reading of each batch, and where both belong.

The wait is `_BaseDataLoaderIter.__next__`. A batch that the main process reads itself is read within it: wait and fetch
are one. One that a worker reads is told by (nonce of the iterator, round, index): the worker's loop reports it under
that name (`otel_dl.workers`), and the iterator knows the index of what it returns. Nothing is read from the
workers here, and what a loader yields is untouched. Read in torch 2.15, torch/utils/data/dataloader.py.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from otel_dl.batches import Batches
from otel_dl.log import logger
from otel_dl.patches._patching import Patches
from otel_dl.patches.recorder import recorder
from otel_dl.patches.workers import INFO, Life, Watch, free_shm
from otel_dl.recording import native
from otel_dl.recording.lane import NEXT
from otel_dl.recording.native import SourceState
from otel_dl.recording.records import clock
from otel_dl.workers.carrier import Carrier
from otel_dl.workers.entry import Starting, WorkerLoop
from otel_dl.workers.loop import start_method

if TYPE_CHECKING:
    from otel_dl.recording.lane import Lane
    from otel_dl.recording.run import Run
    from otel_dl.workers.relay import Relay


_begun: list[weakref.ref[Any]] = []
"""Iterators that have an `Info`. Without callbacks: Python swallows what a signal handler raises in one."""


def _remember(iterator: Any) -> None:
    if len(_begun) >= 64:
        _begun[:] = [reference for reference in _begun if reference() is not None]
    _begun.append(weakref.ref(iterator))


def _forget_earlier_runs() -> None:
    """An iterator that began under an earlier run is older than this one: its loader's number was that run's, and
    nobody reads what its workers report."""
    for reference in _begun:
        iterator = reference()
        if iterator is not None:
            iterator.__dict__.pop(INFO, None)
    _begun.clear()


class Loaders:
    """Numbers for loaders in the order of first use, and their epochs, beside them: a loader may compare as it likes,
    be no key of a dict, and is not kept alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int, Callable[[], int]]] = {}
        self._count = itertools.count()

    def epoch(self, loader: Any) -> tuple[int, int]:
        """A new epoch of `loader` begins: (its number, the epoch), both counted from 0."""
        key = id(loader)
        known = self._known.get(key)
        if known is None or known[0]() is not loader:
            number = next(self._count)
            epochs = itertools.count().__next__
            try:
                gone = weakref.ref(loader, functools.partial(self._forget, key))
            except TypeError:
                return number, epochs()
            self._known[key] = known = (gone, number, epochs)
        return known[1], known[2]()

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        known = self._known.get(key)
        if known is not None and known[0] is gone:
            del self._known[key]


class Info(SourceState):
    """What is known of an iterator in its present epoch."""

    __slots__ = ("lives", "workers")

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.alone = False
        self.loader = self.epoch = 0
        self.round = 0
        self.fetched = 0
        self.last = 0
        self.in_order = True
        self.lives: list[Life] = []
        self.pids: tuple[int, ...] = ()
        self.method = ""
        self.workers: dict[int, int] = {}
        """Which worker reads a batch, where torch does not say it when the batch comes (before 2.8)."""
        self.batch = None


def install(run: Run, patches: Patches, relay: Relay, watch: Watch, loaders: Loaders | None = None) -> None:
    """Patches the loaders of torch; raises where this torch lacks what is needed. `loaders` counts them."""
    from torch.utils.data import dataloader
    from torch.utils.data._utils import worker

    _forget_earlier_runs()
    starting = Starting()
    several: Any = dataloader._MultiProcessingDataLoaderIter  # pyright: ignore[reportPrivateUsage]
    loaders = loaders or Loaders()
    _install_iterators(patches, dataloader, loaders, starting)
    _install_waits(run, patches, dataloader._BaseDataLoaderIter, watch)  # pyright: ignore[reportPrivateUsage]
    _install_batches(run, patches, loaders, watch)
    _install_workers(run, patches, relay, watch, several, (worker,), starting)
    watch.install(patches, dataloader)

    def torchdata(module: Any) -> None:
        try:
            _install_stateful(run, patches, relay, watch, module, starting)
        except Exception:
            # Not patches.restore(): what was patched of torch is whole.
            logger.warning(
                "otel-dl: torchdata lacks what the instrumentation of StatefulDataLoader needs: its batches have no"
                " worker's reading beside them.",
                exc_info=True,
            )

    patches.when_imported("torchdata.stateful_dataloader.stateful_dataloader", torchdata)


def _method(kind: Any, name: str) -> Any:
    return vars(kind)[name]  # pyright: ignore[reportUnknownVariableType]


def _install_iterators(patches: Patches, dataloader: Any, loaders: Loaders, starting: Starting) -> None:
    """Each epoch of each loader, as iterators begin and are begun again."""
    base: Any = dataloader._BaseDataLoaderIter
    watch_order = _watch_order(patches)

    def begin(iterator: Any, loader: Any) -> None:
        nonce = ""
        if loader.num_workers > 0:
            nonce, starting.nonce = starting.nonce, ""
        info = Info(nonce)
        info.in_order = getattr(loader, "in_order", True)  # absent in 2.4
        info.alone = loader.num_workers == 0
        if not (info.in_order or info.alone):
            watch_order(type(iterator))
        info.loader, info.epoch = loaders.epoch(loader)
        setattr(iterator, INFO, info)
        _remember(iterator)

    def begin_again(iterator: Any, loader: Any) -> None:
        info: Info | None = getattr(iterator, INFO)
        if info is None:
            begin(iterator, loader)
            know_workers(iterator)
            return
        info.loader, info.epoch = loaders.epoch(loader)
        info.round += 1
        info.fetched = 0
        info.workers.clear()

    original_init = _method(base, "__init__")

    @functools.wraps(original_init)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        patches.guard(begin, self, loader)
        original_init(self, loader, *args, **kwargs)

    original_reset = _method(base, "_reset")

    @functools.wraps(original_reset)
    def _reset(self: Any, loader: Any, first_iter: bool = False, *args: Any, **kwargs: Any) -> Any:
        result = original_reset(self, loader, first_iter, *args, **kwargs)
        # Only now: an epoch that could not begin is none to the workers either.
        if not first_iter:
            patches.guard(begin_again, self, loader)
        return result

    patches.replace(base, INFO, None)
    patches.replace(base, "__init__", __init__)
    patches.replace(base, "_reset", _reset)


def know_workers(iterator: Any) -> None:
    """Who reads for `iterator`, once its workers run."""
    info: Info | None = getattr(iterator, INFO, None)
    workers = getattr(iterator, "_workers", None)
    if info is not None and workers:
        info.pids = tuple(process.pid for process in workers)
        info.method = start_method(workers[0])


class Next:
    """`dataloader.next`. Where the main process reads, `dataloader.fetch` is what it does: the wait and it are one."""

    kind = NEXT

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def begin(self, lane: Lane, subject: Any) -> tuple[int, int] | None:
        info: Info | None = getattr(subject, INFO, None)
        if info is None:
            start = lane.begin_next(-1, 0)
        else:
            info.batch = None
            start = lane.begin_next(info.loader, info.epoch)
            if start and info.alone and lane.bounds:
                lane.run.status.batch(info.epoch, info.fetched, start)
        return (NEXT, start) if start else None

    def end(self, lane: Lane, kind: int, subject: Any, start: int) -> None:
        lane.end(NEXT, start, self._batch(subject))

    def fail(self, lane: Lane, kind: int, subject: Any, start: int, error: BaseException) -> None:
        if isinstance(error, StopIteration):
            lane.stop_next(start)
        else:
            info: Info | None = getattr(subject, INFO, None)
            if info is not None and not info.alone:
                self._watch.failed(subject, error, info.batch)
            lane.fail(NEXT, start, error, self._batch(subject))

    def _batch(self, iterator: Any) -> tuple[Any, ...] | None:
        info: Info | None = getattr(iterator, INFO, None)
        if info is None:
            return None
        if not info.alone:
            return info.batch
        info.fetched += 1
        return info.loader, info.epoch, info.fetched - 1, "", 0, None, 0, ""


def _install_batches(run: Run, patches: Patches, loaders: Loaders, watch: Watch) -> None:
    """What `otel_dl.loader` makes: as torch's iterator without workers."""
    original_init = Batches.__init__

    def begin(batches: Any, loader: Any) -> None:
        begin_epoch(batches, loader, loaders)

    @functools.wraps(original_init)
    def __init__(self: Any, loader: Any, iterator: Any) -> None:
        original_init(self, loader, iterator)
        patches.guard(begin, self, loader)

    patches.replace(Batches, INFO, None)
    patches.replace(Batches, "__init__", __init__)
    _install_waits(run, patches, Batches, watch)


def begin_epoch(batches: Any, loader: Any, loaders: Loaders) -> None:
    """`batches`, of an epoch of `loader`, is an iterator that the main process reads from."""
    info = Info("")
    info.alone = True
    info.loader, info.epoch = loaders.epoch(loader)
    setattr(batches, INFO, info)
    _remember(batches)


def _install_waits(run: Run, patches: Patches, base: Any, watch: Watch) -> None:
    patches.replace(base, "__next__", recorder(run, patches, Next(watch), _method(base, "__next__"), "Next"))


def _install_workers(
    run: Run,
    patches: Patches,
    relay: Relay,
    watch: Watch,
    several: Any,
    modules: tuple[Any, ...],
    starting: Starting,
) -> None:
    """What a worker of the iterators `several` is given when it starts, and whose batch it is that comes back.

    `modules`: where their `_worker_loop` is looked up by name.
    """
    original_init = _method(several, "__init__")

    def give(workers: int) -> None:
        run.start()
        starting.nonce = nonce = os.urandom(16).hex()
        off = run.keep.head.off
        pages = () if off else watch.pages(nonce, workers)
        starting.carrier = Carrier.make(run, nonce, pages)
        starting.ends = [None] * workers if off else relay.open(nonce, workers, pages)
        starting.given = 0

    @functools.wraps(original_init)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        # A sampler may itself read from a loader with workers, while this one's start.
        former = starting.carrier, starting.nonce, starting.ends, starting.given
        starting.carrier, starting.nonce, starting.ends = None, "", ()
        began, room = clock(), free_shm()
        try:
            if run.active:
                patches.guard(give, loader.num_workers)
            original_init(self, loader, *args, **kwargs)
        finally:
            ends, carrier = starting.ends, starting.carrier
            starting.carrier, starting.nonce, starting.ends, starting.given = former
            patches.guard(relay.started, ends)
            if carrier is not None and not run.keep.head.off:
                patches.guard(watch.started, self, carrier.pages, began, room)
        patches.guard(know_workers, self)

    patches.replace(several, "__init__", __init__)
    loop = WorkerLoop(modules[0]._worker_loop, run, relay, starting)
    for module in modules:
        patches.replace(module, "_worker_loop", loop)
    watch.watch(patches, several)
    _install_returned(run, patches, several)


def _install_stateful(run: Run, patches: Patches, relay: Relay, watch: Watch, module: Any, starting: Starting) -> None:
    """torchdata's StatefulDataLoader: its iterators are of torch's base class, and a copy of torch's with workers.

    Read in torchdata 0.11, stateful_dataloader/stateful_dataloader.py.
    """
    import torchdata.stateful_dataloader.worker as worker

    several: Any = module._StatefulMultiProcessingDataLoaderIter
    _install_workers(run, patches, relay, watch, several, (worker, module), starting)
    for kind in (several, module._StatefulSingleProcessDataLoaderIter):
        _install_resumption(run, patches, kind)


def _install_resumption(run: Run, patches: Patches, kind: Any) -> None:
    """An iterator that resumes in the middle of an epoch may have to read up to there, while it is made."""
    original_init = _method(kind, "__init__")

    @functools.wraps(original_init)
    def __init__(self: Any, loader: Any, next_iter_state: Any = None) -> None:
        if next_iter_state is None:
            original_init(self, loader, next_iter_state)
            return
        lane = run.local.lane
        kinds = lane.kinds
        # As within a `next()`: what it reads there is given to nobody.
        lane.kinds = kinds | NEXT
        try:
            original_init(self, loader, next_iter_state)
        finally:
            lane.kinds = kinds

    patches.replace(kind, "__init__", __init__)


def _install_returned(run: Run, patches: Patches, several: Any) -> None:
    original_process = _method(several, "_process_data")
    original_put = _method(several, "_try_put_index")
    # Three forms between 2.4 and 2.15: it counts the next index itself; its caller has done so before; and it is given
    # the worker as well. torchdata's has the state of the worker's dataset behind that.
    told = any(name.startswith("worker") for name in inspect.signature(original_process).parameters)
    ahead = 0 if "_rcvd_idx" in inspect.unwrap(original_process).__code__.co_names else 1

    @functools.wraps(original_process)
    def _process_data(self: Any, data: Any, *worker: Any) -> Any:
        info: Info | None = getattr(self, INFO, None)
        if info is not None and info.pids:
            try:
                index = self._rcvd_idx - ahead if info.in_order else info.last
                number = worker[0] if told else info.workers.pop(index, 0)
                read_by = number, info.pids[number], info.method
                info.batch = (info.loader, info.epoch, index, info.nonce, info.round, *read_by)
            except BaseException as error:
                patches.fault(error)
        return original_process(self, data, *worker)

    @functools.wraps(original_put)
    def _try_put_index(self: Any) -> Any:
        before = self._send_idx
        result = original_put(self)
        info: Info | None = getattr(self, INFO, None)
        if info is not None and self._send_idx != before:
            info.workers[before] = self._task_info[before][0]
        return result

    form = native.hook("Returned", run.settings.native) if told and ahead else None
    if form is not None:
        hook = form(run.fast, NEXT, original_process, original_process, None, None, patches.fault)
        patches.replace(several, "_process_data", functools.update_wrapper(hook, original_process))
        return
    patches.replace(several, "_process_data", _process_data)
    if not told:
        patches.replace(several, "_try_put_index", _try_put_index)


def _watch_order(patches: Patches) -> Callable[[Any], None]:
    """What notes the index of each answer, for iterators that return batches as they come: a class is patched with the
    first one, others go without its microsecond."""
    watching: set[Any] = set()

    def watch(several: Any) -> None:
        if several in watching:
            return
        watching.add(several)
        original = several._get_data

        @functools.wraps(original)
        def _get_data(self: Any) -> Any:
            answer = original(self)
            info: Info | None = getattr(self, INFO, None)
            if info is not None and type(answer[0]) is int:  # else a worker's answer to a new epoch
                info.last = answer[0]
            return answer

        patches.replace(several, "_get_data", _get_data)

    return watch
