"""One instrumented stretch of a process: run, patches, builder, sink and the end of the process, put together.

Here, and only here, the rooms meet. Until the first step (or the first loader with workers) begins nothing is
connected and no thread exists: helper processes that merely import torch stay as they were.
"""

from __future__ import annotations

import os
from time import monotonic, time_ns
from typing import Any, Final, Literal

import wrapt

from otel_dl import startup
from otel_dl.export.provider import Connection, connect
from otel_dl.forensics.folder import StatusFolder
from otel_dl.lifecycle import Ending
from otel_dl.log import logger, say
from otel_dl.patches import (
    collectives,
    compilation,
    cudnn,
    dali,
    device,
    process_groups,
    processes,
    profilers,
    synchronization,
    training,
)
from otel_dl.patches import dataloader as dataloader_patches
from otel_dl.patches._patching import Patches
from otel_dl.patches.workers import Watch
from otel_dl.ranks.job import JobRanks
from otel_dl.recording.builder import Builder
from otel_dl.recording.failure import Failure, qualified
from otel_dl.recording.keep import AdaptiveHead
from otel_dl.recording.run import Run
from otel_dl.recording.spans import SpanBuilder
from otel_dl.recording.status import Status
from otel_dl.settings import Settings, warn_of_unknown
from otel_dl.version import __version__
from otel_dl.workers import ring
from otel_dl.workers.relay import Relay

SetUp = Literal["now", "late", "never"]
"""Whether otel-dl sets up the SDK where nobody has: at once, when the first step begins, or not at all."""


FOR_RANKS: Final = 0.8
"""Share of the time at the end of a process in which other ranks are told, and asked, at most."""

_current: Session | None = None
_last_ended_ns = 0
"""Epoch ns: when the session before, if there was one in this process, had ended. What came before that was its."""


def current() -> Session | None:
    """The session that is on in this process, None where there is none."""
    return _current


def begin(*, set_up_sdk: SetUp, **keywords: Any) -> None:
    """Starts a session unless a setting says otherwise."""
    global _current
    settings = Settings.read(**keywords)
    if not settings.enabled or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    warn_of_unknown(os.environ)
    try:
        _current = Session(settings, keywords, set_up_sdk)
        _current.install()
    except Exception:
        # Most likely a value of OTEL_* that the SDK refuses.
        session, _current = _current, None
        if session is not None:
            session.abandon()
        logger.warning("otel-dl: tracing could not be switched on; training goes on without.", exc_info=True)


def end() -> None:
    """Ends the session: exports what is kept and takes every patch back."""
    global _current, _last_ended_ns
    session, _current = _current, None
    if session is not None:
        session.uninstall()
        _last_ended_ns = time_ns()


def _after_fork_in_child() -> None:
    if _current is not None:
        _current.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Session:
    """What `instrument()` starts and `uninstrument()` ends."""

    def __init__(self, settings: Settings, keywords: dict[str, Any], set_up_sdk: SetUp) -> None:
        self.settings = settings
        self.keywords = keywords
        self.set_up_sdk = set_up_sdk
        self.run = Run(settings, AdaptiveHead())
        self.relay = Relay(self.run)
        self.folder = StatusFolder(settings.directory, ring.SIZE)
        self.watch = Watch(self.run, self.relay, self.folder)
        self.ranks = self.run.ranks = JobRanks(self.run, self.flush)
        self._connection: Connection | None = None
        self._builder: Builder | None = None
        self._patches: list[Patches] = []
        self.faults = Patches("otel_dl.step and otel_dl.span", self.run.recover)
        """Nothing is patched for them; their faults are told in the same way."""
        self._ending = Ending(self._end, settings, self.flush)
        self._error: BaseException | None = None
        self._installed = False
        self.run.on_start = self._start

    # Patches.

    def install(self) -> None:
        if self.set_up_sdk == "now":
            self._connect()
        startup.import_torch.install()
        wrapt.register_post_import_hook(self._torch_imported, "torch")

    def _torch_imported(self, torch: Any) -> None:
        startup.import_torch.uninstall()
        if not self.run.active:
            return

        loaders = dataloader_patches.Loaders()

        def dataloader(run: Run, patches: Patches) -> None:
            dataloader_patches.install(run, patches, self.relay, self.watch, loaders)

        def dali_iterators(run: Run, patches: Patches) -> None:
            dali.install(run, patches, self.watch, loaders)

        def ranks(run: Run, patches: Patches) -> None:
            processes.install(run, patches, self.keywords, self.set_up_sdk)

        installers = {
            "collectives": collectives.install,  # within the phases, to which it says why they failed
            **training.INSTALLERS,
            "synchronization": synchronization.install,
            **compilation.INSTALLERS,
            "convolutions": cudnn.install,
            "device time": device.install,
            "dataloader": dataloader,
            "DALI": dali_iterators,
            "processes": ranks,
            "profilers": profilers.install,
            "process groups": process_groups.install,
        }
        for target, install in installers.items():
            patches = Patches(target, self.run.recover)
            try:
                install(self.run, patches)
            except Exception:
                patches.restore()
                logger.warning(
                    "otel-dl: torch %s lacks what the instrumentation of %s needs; that part is off.",
                    getattr(torch, "__version__", "?"),
                    target,
                    exc_info=True,
                )
                continue
            self._patches.append(patches)

    # The run.

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = connection = connect(self.settings, lambda: self.run, set_up=self.set_up_sdk != "never")
            self.run.keep.head = connection.head
            self.run.foreign_provider = connection.foreign
            self.run.remote = connection.remote
        return self._connection

    def _start(self) -> None:
        """The first step, loader with workers or `init_process_group` begins."""
        connection = self._connect()
        self.run.identity = self.run.identity.by_now(self.run.member)
        if self.run.keep.head.off:
            return
        if not self._installed:
            self._ending.install()
            self._installed = True
        self._show(self.folder.open(self.run.identity))
        connection.sink.open()
        if self._builder is None:
            builder = Builder(self.run, connection.sink, self.relay, connection.resource, connection.limits)
            builder.start(self._startup)
            self._builder = builder
        if self.run.identity.rank == 0:
            self._start_line(connection)

    def _start_line(self, connection: Connection) -> None:
        where = connection.where
        if self.settings.jaeger_url:
            where += f", {self.settings.jaeger_url.rstrip('/')}/trace/{self.run.run_ids()[0]:032x}"
        say(
            f"otel-dl {__version__}: run {self.run.identity.run}, traces to {where};"
            " OTEL_DL_ENABLED=false switches it off"
        )

    def _startup(self, spans: SpanBuilder) -> list[Any]:
        ended = self._error if self.run.first_step_end is None else None
        since, parts = startup.process_start_ns(), startup.parts()
        if _last_ended_ns:
            since = max(since, _last_ended_ns)
            parts = {name: times for name, times in parts.items() if times[0] >= since}
        return spans.startup(since, parts, Failure.of(ended) if ended else None)

    def flush(self, timeout: float) -> bool:
        """Exports what is kept so far within `timeout` seconds; whether everything left."""
        deadline = monotonic() + timeout
        built = self._builder is None or self._builder.drain(deadline)
        return (self._connection is None or self._connection.sink.flush(deadline)) and built

    def _end(self, delay: float, error: BaseException | None) -> None:
        """The process ends: what is kept leaves within `delay` seconds."""
        deadline = monotonic() + delay
        terminated = self._ending.dying
        name = qualified(type(error)) if error is not None else ""
        self.run.status.ended(name, terminated)
        self._finish(deadline, error, "SIGTERM" if terminated else name or "finished")
        if self._connection is not None:
            self._connection.sink.close(deadline)
        self.folder.close()

    def _show(self, status: Status) -> None:
        """The recorder says what it does in `status` from now on."""
        self.run.status = status
        self.run.fast.map_page(status.address)

    def _finish(self, deadline: float, error: BaseException | None, how: str) -> None:
        self._error = error
        self.run.finish(error, how == "SIGTERM")
        self.ranks.ending(how)
        self.watch.finish()
        if self._builder is not None:
            self._builder.drain(deadline)  # first: a store that does not answer takes the time that is left
        self.ranks.end(monotonic() + FOR_RANKS * (deadline - monotonic()))
        if self._builder is not None:
            self._builder.drain(deadline, final=True)
        lost = self.run.dropped + self.relay.dropped
        if lost:
            logger.warning("otel-dl: dropped in this run: %s.", ", ".join(f"{n} ({what})" for what, n in lost.items()))

    def abandon(self) -> None:
        """It could not be installed: no patch stays."""
        self.run.active = False
        for patches in reversed(self._patches):
            patches.restore()
        startup.import_torch.uninstall()

    def uninstall(self) -> None:
        deadline = monotonic() + self.settings.exit_delay
        for patches in reversed(self._patches):
            patches.restore()
        startup.import_torch.uninstall()
        self._finish(deadline, None, "finished")
        if self._builder is not None:
            self._builder.join(deadline)
        self.ranks.close()
        self.run.active = False
        self._show(Status())
        self.folder.close(unmap=True)
        self.relay.close()
        self._ending.uninstall()
        connection = self._connection
        if connection is not None:
            (connection.sink.flush if connection.outlives else connection.sink.close)(deadline)

    def after_fork(self) -> None:
        """In a forked child: a run of its own, none of the parent's threads, records, spans, pipes or signals."""
        self._ending.after_fork()
        startup.process_start_ns.cache_clear()
        self.run.restart()
        self.relay.after_fork()
        self.watch.after_fork()
        self.ranks.after_fork()
        self.folder.after_fork()
        self._builder = None
        self._installed = False
        if self._connection is not None:
            self._connection.sink.after_fork()
