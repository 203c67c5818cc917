"""The sink where otel-dl set up the SDK, or has to export by itself: a queue in front of one `SpanExporter`."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_dl.export.queue_sink import BATCH, DELAY, LOADING_S, QueueSink, logger

_abandoned: list[object] = []
"""Exporters of a parent process: their destructors would speak on its connections."""

_loading = threading.RLock()
"""Held while an exporter is imported. A fork waits for it, LOADING_S at most: the child would inherit the locks of half
imported modules from a thread that it does not have, and wait for ever where it imports one of them."""


_patient = True
"""Whether forks still wait; no longer, once one has waited in vain."""


def _before_fork() -> None:
    global _patient
    _patient = _loading.acquire(timeout=LOADING_S if _patient else 0)


def _after_fork_in_parent() -> None:
    with contextlib.suppress(RuntimeError):  # It was not had in time.
        _loading.release()


def _after_fork_in_child() -> None:
    global _loading
    _loading = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


class ExporterSink(QueueSink):
    """Calls `factory` in its own thread at the first span, and reads what `export` returned.

    Importing and creating a gRPC exporter takes 0.3 s and 31 MiB, so neither happens on the training thread nor in a
    process that exports nothing. `name` is what a person knows the exporter by (`otlp`).
    """

    def __init__(
        self,
        factory: Callable[[], SpanExporter],
        capacity: int,
        name: str,
        *,
        batch: int = BATCH,
        delay: float = DELAY,
    ) -> None:
        self._factory = factory
        self._name = name
        super().__init__(capacity, batch, delay)

    def _begin(self) -> None:
        super()._begin()
        self._exporter: SpanExporter | None = None
        self._overheard: _Overheard | None = None
        self._away = False
        self._shutting = False

    def after_fork(self) -> None:
        if self._overheard is not None:
            self._overheard.stop()
        _abandoned.append(self._exporter)
        super().after_fork()

    def _open(self) -> None:
        with _loading:
            exporter = self._factory()
        self._exporter = exporter
        keep_random_apart()
        _leave_retries_to_us(exporter)
        self._overheard = _Overheard(exporter)

    def _deliver(self, spans: Sequence[ReadableSpan]) -> bool:
        assert self._exporter is not None
        taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        if not taken:
            self._failed_with(self._overheard.last if self._overheard is not None else "")
        elif self._away:
            self._away = False
            logger.warning("otel-dl: spans are exported to %s again; those held are sent now.", self._target())
        return taken

    def _settle(self) -> bool:
        assert self._exporter is not None
        # Documented to answer; the interface's own stub returns None.
        return self._exporter.force_flush() is not False

    def _shut(self) -> None:
        exporter = self._exporter
        if exporter is None or self._shutting:
            return
        self._shutting = True
        exporter.shutdown()
        if self._overheard is not None:
            self._overheard.stop()

    def _target(self) -> str:
        endpoint = getattr(self._exporter, "_endpoint", None)
        return f"{self._name} ({endpoint})" if endpoint else self._name

    def _failed_with(self, message: str) -> None:
        # Once until it works again. otel-dl's own exporter says by itself what is the matter.
        if self._away or self._ended or type(self._exporter).__module__.startswith("otel_dl."):
            return
        self._away = True
        logger.warning(
            "otel-dl: spans can't be exported to %s: %s. Up to %d spans are held and sent when it answers again."
            " OTEL_EXPORTER_OTLP_ENDPOINT names the receiver; OTEL_TRACES_EXPORTER=otel_dl_file writes files instead.",
            self._target(),
            message or "the exporter does not say why",
            self._capacity,
        )


class _Overheard(logging.Filter):
    """Keeps the exporter's log lines of our thread back: it logs each failed attempt. The last one says why."""

    def __init__(self, exporter: SpanExporter) -> None:
        super().__init__()
        self.last = ""
        self._thread = threading.get_ident()
        modules = {cls.__module__ for cls in type(exporter).__mro__} - {"abc", "builtins", "typing"}
        self._loggers = [logging.getLogger(name) for name in modules if name != logger.name]
        for heard in self._loggers:
            heard.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        if "Shutdown in progress" not in record.msg:
            self.last = re.sub(r",? retrying in [\d.]+s", "", record.getMessage()).rstrip(". ")
        return False

    def stop(self) -> None:
        for heard in self._loggers:
            heard.removeFilter(self)


class _NoPause(threading.Event):
    """In place of an exporter's shutdown event: a pause before a retry ends at once, and with it the retries."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


def _leave_retries_to_us(exporter: Any) -> None:
    """Makes an OTLP exporter try once: inside `export` it would retry with pauses that no deadline of ours reaches.

    Both exporters wait for their shutdown event between attempts (1.45: otlp/proto/grpc/exporter.py `_export`,
    otlp/common/http.py `_OTLPHTTPClient.export`). Where it is missing, in other versions, their retries stay, and end
    with their timeout.
    """
    for owner, name in (
        (exporter, "_shutdown_in_progress"),
        (exporter, "_shutdown_is_occuring"),
        (exporter, "_shutdown_event"),
        (getattr(exporter, "_client", None), "_shutdown_event"),
    ):
        if isinstance(getattr(owner, name, None), threading.Event):
            setattr(owner, name, _NoPause())


_DRAWING_MODULES: Final = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk.metrics._internal.exemplar.exemplar_reservoir",
)


def keep_random_apart() -> None:
    """Gives OpenTelemetry's modules a generator of their own in place of the global `random`, which is the user's.

    The OTLP exporters draw from it for their pauses, the HTTP one (1.45: otlp/common/http.py `_compute_backoff`) at
    every export, also a successful one: each would change what a training script draws next. So would the exemplars of
    the user's metrics, which are taken in sampled contexts only.
    """
    for name in _DRAWING_MODULES:
        module = sys.modules.get(name)
        if not isinstance(module, ModuleType):
            continue
        if getattr(module, "random", None) is random:
            vars(module)["random"] = random.Random()
        if getattr(module, "randrange", None) == random.randrange:
            vars(module)["randrange"] = random.Random().randrange
