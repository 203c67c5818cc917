"""Which TracerProvider there is, and what follows from it: where spans leave, and who decides which."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opentelemetry import trace
from opentelemetry.environment_variables import OTEL_PYTHON_ID_GENERATOR, OTEL_TRACES_EXPORTER
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
    OTEL_SDK_DISABLED,
    OTEL_TRACES_SAMPLER,
)
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Sampler
from opentelemetry.trace import ProxyTracerProvider, SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from otel_dl import startup, threads
from otel_dl.export import sampling
from otel_dl.export.components import component, names
from otel_dl.export.exporter_sink import ExporterSink
from otel_dl.export.file import FileSpanExporter
from otel_dl.export.provider_sink import ProviderSink
from otel_dl.export.queue_sink import BATCH, DELAY
from otel_dl.export.sink import NoSink, Sink, Sinks
from otel_dl.export.user_spans import CurrentRun, UserSpanProcessor, UserSpanSampler
from otel_dl.log import logger
from otel_dl.recording.ids import SecretsIdGenerator
from otel_dl.recording.keep import AdaptiveHead, Head, NeverHead
from otel_dl.settings import FILES_FOLDER, Settings

if TYPE_CHECKING:
    from otel_dl.recording.run import Run


EXPORTERS: Final = "opentelemetry_traces_exporter"
ID_GENERATORS: Final = "opentelemetry_id_generator"
_OTLP_BY_PROTOCOL: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_OTLP_ENDPOINTS: Final = {"otlp_proto_grpc": "http://localhost:4317", "otlp_proto_http": "http://localhost:4318"}


class Connection(NamedTuple):
    """What `instrument()` found: `sink` takes finished spans, `head` decides, `resource` is the base of ours.

    `where` says to a person where spans go. `foreign`: the user's own spans go to a provider that is not ours.
    `remote`: the sender of TRACEPARENT. `limits`: the provider's, which hold for our spans as well. `outlives`: the
    sink takes the user's own spans when the run is over.
    """

    sink: Sink
    head: Head
    resource: Resource
    where: str
    foreign: bool = False
    remote: SpanContext | None = None
    limits: SpanLimits | None = None
    outlives: bool = False


class _Exporter(NamedTuple):
    """An exporter that OTEL_TRACES_EXPORTER names, with what makes it; nothing is imported before."""

    name: str
    where: str
    """Where it sends to, for a person."""
    make: Callable[[], SpanExporter]


class _Ours(NamedTuple):
    """The provider that otel-dl set up. The API takes one a process, so it serves every run."""

    provider: TracerProvider
    processor: UserSpanProcessor


_ours: _Ours | None = None
_current_run: CurrentRun = lambda: None  # noqa: E731

FILES: Final = "otel_dl_file"
"""The exporter of ours, by its entry point."""
NOWHERE: Final = "nowhere"
_UNKNOWN_SERVICE: Final = "unknown_service"
"""How the SDK begins the name of a service that nobody has named."""


def connect(settings: Settings, current_run: CurrentRun, *, set_up: bool) -> Connection:
    """Looks for a TracerProvider; where there is none and `set_up`, makes one from the standard OTEL_* variables.

    `current_run` answers with the run that is going on: its ids are what a sampler is asked about, and it holds the
    user's own spans. Starts no thread and makes no
    exporter: both come with the first span. Raises nothing for what a variable says; a wrong value is logged with what
    is allowed.
    """
    global _current_run
    _current_run = current_run
    remote = remote_parent()
    if _is(OTEL_SDK_DISABLED, "true") or _is(OTEL_TRACES_SAMPLER, "always_off"):
        return Connection(NoSink(), NeverHead(off=True), Resource.get_empty(), NOWHERE, remote=remote)
    provider: Any = trace.get_tracer_provider()
    if _ours is not None and provider is _ours.provider:
        return _own(_ours, settings, remote)
    if isinstance(provider, ProxyTracerProvider):
        if set_up:
            return _own(_set_up(settings), settings, remote)
        head = _head(sampling.from_environment(), remote)
        sink, where = _exporting(settings)
        return Connection(sink, head, Resource.create(), where, remote=remote, limits=_limits(None))
    return _foreign(provider, settings, remote)


def _own(ours: _Ours, settings: Settings, remote: SpanContext | None) -> Connection:
    former = ours.processor.sink
    sink, where = _exporting(settings)
    ours.processor.sink = sink
    ours.processor.held = settings.held_spans
    ours.processor.exit_delay = settings.exit_delay
    if not isinstance(former, NoSink):
        # An earlier run's, which was flushed when that run ended.
        deadline = monotonic() + settings.exit_delay
        threads.start("otel-dl-shutdown", former.close, deadline)
    configured = _chosen(ours.provider.sampler)
    head = _head(None if sampling.is_default(configured) and not _sampler_set() else configured, remote)
    provider = ours.provider
    return Connection(sink, head, provider.resource, where, remote=remote, limits=_limits(provider), outlives=True)


def _foreign(provider: Any, settings: Settings, remote: SpanContext | None) -> Connection:
    sampler = getattr(provider, "sampler", None)
    chosen = isinstance(sampler, Sampler) and (_sampler_set() or not sampling.is_default(sampler))
    head = _head(sampler if chosen else None, remote)
    resource = getattr(provider, "resource", None)
    resource = resource if isinstance(resource, Resource) else Resource.create()
    if callable(getattr(getattr(provider, "_active_span_processor", None), "on_end", None)):
        where = f"the exporter of the {type(provider).__qualname__} that was set up"
        sink = ProviderSink(provider, settings.queue_spans)
        return Connection(sink, head, resource, where, foreign=True, remote=remote, limits=_limits(provider))
    logger.warning(
        "otel-dl: the TracerProvider that was set up (%s) is not the OpenTelemetry SDK's, or one of a version that"
        " otel-dl does not know: traces of training are exported beside it, by what %s names.",
        type(provider).__qualname__,
        OTEL_TRACES_EXPORTER,
    )
    if not chosen:
        head = _head(sampling.from_environment(), remote)
    sink, where = _exporting(settings)
    return Connection(sink, head, resource, where, foreign=True, remote=remote, limits=_limits(None))


def _limits(provider: Any) -> SpanLimits:
    """The limits of `provider`, or those that the OTEL_* variables set."""
    limits = getattr(provider, "_span_limits", None)
    return limits if isinstance(limits, SpanLimits) else SpanLimits()


def _head(sampler: Sampler | None, remote: SpanContext | None) -> Head:
    unsampled = remote if remote is not None and not remote.trace_flags.sampled else None
    if sampler is not None:
        return sampling.SamplerHead(sampler, _trace_id_of_step, unsampled)
    return NeverHead() if unsampled is not None else AdaptiveHead()


def _trace_id_of_step(number: int) -> int:
    run = _current_run()
    return run.sampled_id(number) if run is not None else 0


def _is(variable: str, value: str) -> bool:
    return os.environ.get(variable, "").strip().lower() == value


def _sampler_set() -> bool:
    """Whether OTEL_TRACES_SAMPLER names a sampler that there is."""
    name = os.environ.get(OTEL_TRACES_SAMPLER, "").strip()
    return bool(name) and (component(sampling.GROUP, name) or component(sampling.GROUP, name.lower())) is not None


def _chosen(sampler: Sampler) -> Sampler:
    return sampler.configured if isinstance(sampler, UserSpanSampler) else sampler


def _set_up(settings: Settings) -> _Ours:
    global _ours

    def current_run() -> Run | None:
        return _current_run()

    sampler = UserSpanSampler(sampling.from_environment() or DEFAULT_ON, current_run)
    processor = UserSpanProcessor(NoSink(), current_run, settings.held_spans, settings.exit_delay)
    # Not shut down by itself: the end is otel-dl's, within its delay.
    provider = TracerProvider(
        sampler=sampler, resource=_resource(), id_generator=_id_generator(), shutdown_on_exit=False
    )
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    # A run that ends with the process has closed it by then; the user's spans may outlive the run.
    atexit.register(lambda: processor.sink.close(monotonic() + processor.exit_delay))
    os.register_at_fork(after_in_child=processor.after_fork)
    _ours = _Ours(provider, processor)
    return _ours


def _resource() -> Resource:
    """What the OTEL_* variables say; where they name no service, it is the script."""
    resource = Resource.create()
    script = startup.script_name()
    if not script or not str(resource.attributes.get(SERVICE_NAME, "")).startswith(_UNKNOWN_SERVICE):
        return resource
    return resource.merge(Resource({SERVICE_NAME: script}))


def _id_generator() -> IdGenerator:
    name = os.environ.get(OTEL_PYTHON_ID_GENERATOR, "").strip()
    if name in ("", "otel_dl"):
        return SecretsIdGenerator()
    found = component(ID_GENERATORS, name)
    try:
        generator: Any = found.load()() if found is not None else None
    except Exception as error:
        logger.warning("otel-dl: the id generator %r can't be made: %s: %s.", name, type(error).__name__, error)
        generator = None
    if isinstance(generator, IdGenerator):
        return generator
    logger.warning(
        "otel-dl: %s has the value %r; allowed: %s. otel_dl is used.",
        OTEL_PYTHON_ID_GENERATOR,
        name,
        ", ".join(names(ID_GENERATORS)),
    )
    return SecretsIdGenerator()


def remote_parent() -> SpanContext | None:
    """The sender of the environment's TRACEPARENT and TRACESTATE, None without a valid one."""
    carrier = {name.lower(): os.environ.get(name, "") for name in ("TRACEPARENT", "TRACESTATE")}
    context = trace.get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    return context if context.is_valid and context.is_remote else None


# What OTEL_TRACES_EXPORTER names.


def _exporting(settings: Settings) -> tuple[Sink, str]:
    """The sink in front of what OTEL_TRACES_EXPORTER names, and where that sends to."""
    batch = _positive(OTEL_BSP_MAX_EXPORT_BATCH_SIZE, BATCH)
    delay = _positive(OTEL_BSP_SCHEDULE_DELAY, round(DELAY * 1000)) / 1000
    chosen = exporters(settings)
    sinks = [ExporterSink(each.make, settings.queue_spans, each.name, batch=batch, delay=delay) for each in chosen]
    if not sinks:
        return NoSink(), NOWHERE
    # The gRPC exporter imports it, and it makes a Resource in a thread pool (1.45): that fails once the interpreter has
    # begun to end, which is where a short script's first export may be. 8 ms; the first export imports grpc itself.
    with contextlib.suppress(ImportError):
        importlib.import_module("opentelemetry.sdk._logs")
    return sinks[0] if len(sinks) == 1 else Sinks(sinks), ", ".join(each.where for each in chosen)


def exporters(settings: Settings) -> list[_Exporter]:
    """What OTEL_TRACES_EXPORTER names, `otlp` where it is not set."""
    value = os.environ.get(OTEL_TRACES_EXPORTER, "").strip() or "otlp"
    chosen: list[_Exporter] = []
    for name in dict.fromkeys(part.strip() for part in value.split(",")):
        known = _otlp() if name == "otlp" else name
        if not known or known.lower() == "none":
            continue
        found = component(EXPORTERS, known)
        if found is None:
            logger.warning(
                "otel-dl: %s has the value %r, and no exporter %r is installed; allowed: none, %s. Nothing is exported"
                " by it, training goes on.",
                OTEL_TRACES_EXPORTER,
                value,
                known,
                ", ".join(names(EXPORTERS)),
            )
        elif known == FILES:
            chosen.append(_Exporter(name, settings.directory or FILES_FOLDER, lambda: _files(settings)))
        else:
            chosen.append(_Exporter(name, _endpoint(known), lambda found=found: found.load()()))
    return chosen


def _files(settings: Settings) -> SpanExporter:
    # Its settings may be keywords of `instrument()`, which the entry point knows nothing of.
    return FileSpanExporter(settings.directory, max_bytes=settings.file_max_bytes, max_files=settings.file_max_files)


def _otlp() -> str | None:
    """The exporter that `otlp` stands for; None where a variable asks for one that there is not."""
    for variable in (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL):
        value = os.environ.get(variable, "").strip()
        if value in _OTLP_BY_PROTOCOL:
            return _OTLP_BY_PROTOCOL[value]
        if value:
            logger.warning(
                "otel-dl: %s has the value %r; allowed: %s. Nothing is exported over OTLP, training goes on.",
                variable,
                value,
                ", ".join(_OTLP_BY_PROTOCOL),
            )
            return None
    return _OTLP_BY_PROTOCOL["grpc"]


def _endpoint(exporter: str) -> str:
    """Where an OTLP exporter sends to; the name of any other."""
    default = _OTLP_ENDPOINTS.get(exporter)
    if default is None:
        return exporter
    variables = (OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_ENDPOINT)
    return next((os.environ[each] for each in variables if os.environ.get(each)), default)


def _positive(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip()
    try:
        value = int(text) if text else default
        if value < 1:
            raise ValueError(text)
    except ValueError:
        logger.warning(
            "otel-dl: %s has the value %r; allowed: a whole number from 1. The default %d is used.",
            variable,
            text,
            default,
        )
        return default
    return value
