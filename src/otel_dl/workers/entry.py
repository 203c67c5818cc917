"""The first thing that a worker runs: what torch's `Process` gets as its target, and how it is pickled."""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from otel_dl.workers.carrier import Carrier

if TYPE_CHECKING:
    from otel_dl.recording.run import Run
    from otel_dl.workers.relay import Relay


class Starting(threading.local):
    """The workers that this thread is starting."""

    carrier: Carrier | None = None
    nonce = ""
    ends: Sequence[int | None] = ()
    given = 0


_in_worker = False


class WorkerLoop:
    """Stands where torch's worker loop did, and is what a worker process runs.

    An object that says itself how it is pickled: a wrapper made of a function is pickled by its name, under spawn and
    forkserver, and would be torch's own function again there; a wrapt proxy is not pickled at all.
    """

    def __init__(self, original: Callable[..., Any], run: Run, relay: Relay, starting: Starting) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.run = run
        self._relay = relay
        self._starting = starting

    def __reduce__(self) -> tuple[Any, ...]:
        """Evaluated in the parent, inside `Process.start()`."""
        from multiprocessing import context, reduction  # pyright: ignore

        spawning: Callable[[], Any] = context.get_spawning_popen  # pyright: ignore

        starting = self._starting
        where = (self.__module__, getattr(self, "__qualname__", "_worker_loop"))
        if starting.carrier is None or spawning() is None or starting.given >= len(starting.ends):
            return Started, (*where, None, None)
        descriptor = starting.ends[starting.given]
        starting.given += 1
        end: Any = reduction.DupFd(descriptor) if descriptor is not None else None
        return Started, (*where, starting.carrier.packed(), end)

    def __call__(self, *args: Any) -> Any:
        """In a worker that was forked (the thread that forked it was starting it), or called by `Started`."""
        global _in_worker
        self.run.active = False
        carrier = self._starting.carrier
        if _in_worker or carrier is None:
            return self.original(*args)
        _in_worker = True
        number: int = args[list(inspect.signature(self.original).parameters).index("worker_id")]
        descriptor = self._starting.ends[number]
        self._relay.only(descriptor)
        from otel_dl.workers import loop

        return loop.run(carrier, descriptor, self.original, args)


class Started:
    """What the pickled `WorkerLoop` is in a worker that was spawned."""

    def __init__(self, module: str, name: str, carrier: Carrier | None, end: Any) -> None:
        self._target = module, name
        self._carrier = carrier
        self._descriptor: int | None = end.detach() if end is not None else None

    def __call__(self, *args: Any) -> Any:
        global _in_worker
        module, name = self._target
        original: Any = getattr(importlib.import_module(module), name)
        if self._carrier is None:
            return original(*args)
        _in_worker = True
        if isinstance(original, WorkerLoop):
            # The main module instrumented this process when it was imported again. A worker records by its carrier.
            original.run.active = False
            original = original.original
        from otel_dl.workers import loop

        return loop.run(self._carrier, self._descriptor, original, args)
