"""Every setting of otel-dl: one frozen dataclass, read from `OTEL_DL_*` variables and keywords of `instrument()`.

Standard settings are OpenTelemetry's own (`OTEL_*`) and are read by its SDK. A keyword goes before its variable, the
variable before the default. A wrong value never stops training: it is named, and the default is used.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from multiprocessing import parent_process
from typing import Any, NamedTuple

from otel_dl.log import logger

_PREFIX = "OTEL_DL_"

FILES_FOLDER = "otel-dl-traces"
"""Where files of traces go that were given no folder, in the one that the job runs in."""

_said: set[tuple[object, ...]] = set()


def say_once(*warning: object) -> None:
    """Once a process, and not again in those that it starts."""
    if warning not in _said and parent_process() is None:
        _said.add(warning)
        logger.warning(*warning)


class _Kind(NamedTuple):
    """How the text of a variable becomes a value; `allowed` says it to a person."""

    allowed: str
    parse: Callable[[str], Any]


def _boolean(text: str) -> bool:
    value = text.strip().lower()
    if value in ("true", "1", "yes", "on"):
        return True
    if value in ("false", "0", "no", "off"):
        return False
    raise ValueError(text)


def _number(low: float, high: float) -> _Kind:
    def parse(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(text)
        return value

    return _Kind(f"a number from {low:g} to {high:g}", parse)


def _integer(low: int, high: int) -> _Kind:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return _Kind(f"a whole number from {low} to {high}", parse)


def _url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#]\S*", text):
        raise ValueError(text)
    return text


def _choice(*words: str) -> _Kind:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in words:
            raise ValueError(text)
        return value

    return _Kind(" or ".join(filter(None, (", ".join(f"`{word}`" for word in words[:-1]), f"`{words[-1]}`"))), parse)


BOOLEAN = _Kind("true or false", _boolean)
TEXT = _Kind("text", str)
URL = _Kind("an address like http://localhost:16686", _url)


def _setting(default: Any, variable: str, kind: _Kind, doc: str) -> Any:
    return dataclasses.field(default=default, metadata={"variable": variable, "kind": kind, "doc": doc})


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings; the table in the README is made from the fields' metadata."""

    enabled: bool = _setting(True, "OTEL_DL_ENABLED", BOOLEAN, "false: nothing is patched, nothing is exported")
    directory: str = _setting(
        "",
        "OTEL_DL_DIR",
        TEXT,
        f"folder of status pages and of the files that `otel_dl_file` writes; not set: files in {FILES_FOLDER}, pages"
        " in a private one under the system's temporary folder",
    )
    jaeger_url: str = _setting("", "OTEL_DL_JAEGER_URL", URL, "makes trace ids in messages and summaries links")
    exit_delay: float = _setting(
        5.0, "OTEL_DL_EXIT_DELAY", _number(0, 3600), "seconds that the end of the process waits for the export at most"
    )
    term_delay: float = _setting(
        0.5, "OTEL_DL_TERM_DELAY", _number(0, 3600), "the same after SIGTERM, where SIGTERM ends the process"
    )
    restore_env: bool = _setting(
        True,
        "OTEL_DL_RESTORE_ENV",
        BOOLEAN,
        "put OTEL_*, TRACEPARENT, TRACESTATE, BAGGAGE back where what runs in a worker removed them",
    )
    step_records: int = _setting(
        1024, "OTEL_DL_STEP_RECORDS", _integer(16, 10_000), "records of one step at most; more are counted and dropped"
    )
    held_spans: int = _setting(
        256, "OTEL_DL_HELD_SPANS", _integer(0, 100_000), "the user's own spans held for an undecided step at most"
    )
    held_records: int = _setting(
        65_536,
        "OTEL_DL_HELD_RECORDS",
        _integer(0, 10_000_000),
        "records of undecided steps that a rank holds (300 bytes each) at most, for 5 s, in case another rank keeps"
        " the step; 0: none",
    )
    queue_spans: int = _setting(
        16_384, "OTEL_DL_QUEUE_SPANS", _integer(512, 10_000_000), "spans that wait for the exporter at most"
    )
    file_max_bytes: int = _setting(
        256 * 2**20, "OTEL_DL_FILE_MAX_BYTES", _integer(65_536, 2**50), "size at which a file of traces is rotated"
    )
    file_max_files: int = _setting(
        4, "OTEL_DL_FILE_MAX_FILES", _integer(1, 10_000), "rotated files kept for a process; the oldest goes first"
    )

    pg_timeout: float = _setting(
        600.0,
        "OTEL_DL_PG_TIMEOUT",
        _number(0, 31_536_000),
        "seconds that a process group waits at most whose creator gave no timeout; 0: torch's own default",
    )
    pg_timeout_max: float = _setting(
        0.0,
        "OTEL_DL_PG_TIMEOUT_MAX",
        _number(0, 31_536_000),
        "seconds that a process group waits at most whatever its creator gave; 0: no cap",
    )
    stall_after: float = _setting(
        60.0,
        "OTEL_DL_STALL_AFTER",
        _number(0.1, 31_536_000),
        "seconds in a collective, or in setting up a process group, after which a stall is reported; at half the time"
        " limit in force it is in any case",
    )
    trace_ranks: int = _setting(
        64,
        "OTEL_DL_TRACE_RANKS",
        _integer(1, 100_000),
        "ranks that share a trace a step; with more it is one trace a rank",
    )
    conv_spans: int = _setting(
        64,
        "OTEL_DL_CONV_SPANS",
        _integer(0, 10_000),
        "convolutions that found cuDNN's plan and become spans, of a step that the sampler keeps; the rest are summed",
    )
    sync: str = _setting(
        "on",
        "OTEL_DL_SYNC",
        _choice("on", "off", "deep"),
        "waits of the host for the device as spans; `deep`: also those that only C++ sees, without a duration, until"
        " the process ends",
    )
    sync_min_ms: float = _setting(
        0.05, "OTEL_DL_SYNC_MIN_MS", _number(0, 3_600_000), "waits for the device that are shorter are only summed up"
    )
    device_events: bool = _setting(
        True,
        "OTEL_DL_DEVICE_EVENTS",
        BOOLEAN,
        "false: no events are recorded on a GPU's stream, and `dl.device.duration_ms` and `dl.memory.*` are absent",
    )
    nvtx: bool = _setting(
        False,
        "OTEL_DL_NVTX",
        BOOLEAN,
        "true: steps and phases are NVTX ranges too, for Nsight Systems (a CUDA build of torch)",
    )
    native: bool = _setting(
        True,
        "OTEL_DL_NATIVE",
        BOOLEAN,
        "false: ordinary events are recorded in Python, not in C; convolutions, and waits in torch's functions, are not"
        " seen",
    )

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None, **keywords: Any) -> Settings:
        """The settings from `keywords`, then `environ` (default: the process's), then the defaults.

        A keyword of None counts as not given. Wrong values are logged with variable, value and what is allowed.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            kind: _Kind = field.metadata["kind"]
            variable: str = field.metadata["variable"]
            for source, raw in ((f"{field.name}=", keywords.get(field.name)), (variable, environ.get(variable))):
                if raw is None or (raw == "" and kind is not TEXT):
                    continue
                try:
                    values[field.name] = kind.parse(str(raw))
                    break
                except (ValueError, OverflowError):
                    say_once(
                        "otel-dl: %s has the value %r; allowed: %s. The default %r is used.",
                        source,
                        raw,
                        kind.allowed,
                        field.default,
                    )
        for unknown in keywords.keys() - {field.name for field in dataclasses.fields(cls)}:
            logger.warning("otel-dl: instrument() has no setting %r; it is ignored.", unknown)
        return cls(**values)


def warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Names variables that look like settings and are none: most likely misspelt."""
    known = [row.variable for row in described()]
    for name in sorted(environ.keys() - set(known)):
        if name.startswith(_PREFIX):
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            say_once("otel-dl: there is no setting %s; it is ignored. The nearest is %s.", name, nearest)


class Described(NamedTuple):
    variable: str
    keyword: str
    default: Any
    allowed: str
    doc: str


def described() -> list[Described]:
    """One row a setting, for tables in the docs and flags of `opentelemetry-instrument`."""
    return [
        Described(f.metadata["variable"], f.name, f.default, f.metadata["kind"].allowed, f.metadata["doc"])
        for f in dataclasses.fields(Settings)
    ]
