"""`FileSpanExporter`: traces as files that a person can read, without a collector.

Each export batch becomes one line (a very large one several), an `ExportTraceServiceRequest` in OTLP's JSON encoding:
what the OpenTelemetry Collector's file exporter writes and Jaeger's upload takes. A process has a file of its own, so
nobody waits for anybody and a killed process spoils no other's file.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_dl.descriptors import Descriptor
from otel_dl.export.otlp_json import encode
from otel_dl.log import logger
from otel_dl.settings import FILES_FOLDER, Settings

_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space or raise the quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or lower OTEL_DL_FILE_MAX_BYTES",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EROFS: "set OTEL_DL_DIR to a folder that can be written to",
}
_DEFAULT_REMEDY = "make the folder writable or set OTEL_DL_DIR to one that is"


class _FullFile(NamedTuple):
    path: Path
    spans: int


class FileSpanExporter(SpanExporter):
    """Appends OTLP JSON lines to `<directory>/spans-<host>-<pid>-<token>.jsonl`.

    Arguments that are None come from the environment: `directory` from OTEL_DL_DIR, `max_bytes` from
    OTEL_DL_FILE_MAX_BYTES, `max_files` from OTEL_DL_FILE_MAX_FILES.

    The file is made at the first export, so a process that exports nothing leaves none; a forked child gets its own.
    A line is handed to the kernel whole before `export` returns: it survives the process, whatever ends it. When the
    next line would carry the file beyond `max_bytes`, a new one is begun (`….2.jsonl`, `….3.jsonl`, …); of the full
    ones the newest `max_files` stay. A batch that is larger than a file may be becomes several lines; only a single
    span may be larger.

    Nothing is raised when the folder cannot be written to or the disk is full: `export` returns FAILURE, a warning is
    logged once a cause, no torn line stays in the file, and the next export tries again.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | None = None,
        max_files: int | None = None,
    ) -> None:
        settings = Settings.read(
            directory=None if directory is None else os.fspath(directory),
            file_max_bytes=max_bytes,
            file_max_files=max_files,
        )
        # Absolute, because a training script may change its working directory.
        self.directory = Path(settings.directory or FILES_FOLDER).absolute()
        self.removed_spans = 0
        """Spans that were written and went again with the oldest rotated files."""
        self._max_bytes = settings.file_max_bytes
        self._max_files = settings.file_max_files
        self._reset()

        reset = weakref.WeakMethod(self._after_fork)

        def after_fork() -> None:
            method = reset()
            if method is not None:
                method()

        os.register_at_fork(after_in_child=after_fork)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: Descriptor | None = None
        self._path = self.directory
        self._size = 0
        self._spans = 0
        self._full: deque[_FullFile] = deque()
        # A pid alone does not name a process: every container has a pid 1, and hosts use pids again.
        self._name = (
            f"spans-{re.sub(r'[^A-Za-z0-9_.-]', '_', socket.gethostname())}-{os.getpid()}-{os.urandom(4).hex()}"
        )
        self._opened = 0
        self._reported: set[int | None] = set()
        self._closed = False

    def _after_fork(self) -> None:
        """The parent's file stays the parent's: the child closes its copy of the descriptor and begins anew."""
        if self._descriptor is not None:
            self._descriptor.close()
        closed = self._closed
        self._reset()
        self._closed = closed
        self.removed_spans = 0

    @property
    def path(self) -> Path | None:
        """The file written to now; None before the first export."""
        return None if self._descriptor is None else self._path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes `spans`, as one line where that fits into a file; FAILURE means that nothing of them is in any."""
        if not spans:
            return SpanExportResult.SUCCESS
        lines = self._lines(spans)
        with self._lock:
            if self._closed:
                return SpanExportResult.FAILURE
            try:
                if len(lines) == 1:
                    self._write(*lines[0])
                else:
                    self._write_all(lines)
            except OSError as error:
                self._report(error)
                return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def _lines(self, spans: Sequence[ReadableSpan]) -> list[tuple[bytes, int]]:
        """Lines that a file has room for, a span being larger by itself excepted; and how many spans each holds."""
        line = encode(spans) + b"\n"
        if len(line) <= self._max_bytes or len(spans) == 1:
            return [(line, len(spans))]
        half = len(spans) // 2
        return [*self._lines(spans[:half]), *self._lines(spans[half:])]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """True: what was exported is with the kernel already."""
        return True

    def shutdown(self) -> None:
        """Closes the file; later exports fail."""
        with self._lock:
            self._closed = True
            self._close()

    def _write_all(self, lines: list[tuple[bytes, int]]) -> None:
        """All of them or none: they have files of their own, which go again where one cannot be written."""
        if self._descriptor is not None:
            self._rotate()
        before = self._opened
        try:
            for line, spans in lines:
                self._write(line, spans)
        except OSError:
            self._close()
            begun = [self._path_of(number) for number in range(before + 1, self._opened + 1)]
            self._full = deque(full for full in self._full if full.path not in begun)
            for path in begun:
                path.unlink(missing_ok=True)
            raise

    def _write(self, line: bytes, spans: int) -> None:
        descriptor = self._descriptor
        if descriptor is not None and not descriptor.ours:
            self._descriptor = descriptor = None
        elif descriptor is not None and os.fstat(descriptor.number).st_nlink == 0:
            self._close()  # somebody removed the file: what is written to it would be lost
            descriptor = None
        if descriptor is not None and self._size + len(line) > self._max_bytes:
            self._rotate()
            descriptor = None
        if descriptor is None:
            descriptor = self._open()
        try:
            written = os.write(descriptor.number, line)
            while written < len(line):  # the disk is nearly full: the next write says so, or the rest finds room
                written += os.write(descriptor.number, line[written:])
        except OSError:
            self._cut_back(descriptor)
            raise
        self._size += len(line)
        self._spans += spans

    def _path_of(self, number: int) -> Path:
        return self.directory / (f"{self._name}.jsonl" if number == 1 else f"{self._name}.{number}.jsonl")

    def _open(self) -> Descriptor:
        self.directory.mkdir(parents=True, exist_ok=True)
        number = self._opened + 1
        path = self._path_of(number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = Descriptor(os.open(path, flags, 0o600))
        self._opened, self._path, self._size, self._spans = number, path, 0, 0
        return self._descriptor

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            descriptor.close()

    def _cut_back(self, descriptor: Descriptor) -> None:
        """Takes a torn line away again; where that fails the file is left, so that the tear is its last line."""
        try:
            os.ftruncate(descriptor.number, self._size)
        except OSError:
            self._close()

    def _rotate(self) -> None:
        self._close()
        self._full.append(_FullFile(self._path, self._spans))
        while len(self._full) > self._max_files:
            self._remove(self._full.popleft())

    def _remove(self, oldest: _FullFile) -> None:
        oldest.path.unlink(missing_ok=True)
        if not self.removed_spans:
            logger.warning(
                "otel-dl: %s is full (%d files of %d bytes), so the oldest file %s was removed with %d spans, and later"
                " ones will be. Raise OTEL_DL_FILE_MAX_FILES or OTEL_DL_FILE_MAX_BYTES to keep more.",
                self.directory,
                self._max_files + 1,
                self._max_bytes,
                oldest.path.name,
                oldest.spans,
            )
        self.removed_spans += oldest.spans

    def _report(self, error: OSError) -> None:
        if error.errno in self._reported:
            return
        self._reported.add(error.errno)
        logger.warning(
            "otel-dl: traces cannot be written to %s: %s. To have them, %s; the job goes on, and writing is tried again"
            " with every batch of spans.",
            self.directory if self._descriptor is None else self._path,
            error.strerror,
            _REMEDIES.get(error.errno or 0, _DEFAULT_REMEDY),
        )
