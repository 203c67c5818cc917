"""Where the status pages of a process and of its workers lie, from the start of a run to its end.

In the folder that OTEL_DL_DIR (or `directory=`) names; where none is named, in a folder of the run's own, which only
its user can read, under the system's one for temporary files: `<tmp>/otel-dl-<uid>/<pid>-<end of the run's id>`.
At the end of the run, however it is reached, nothing of it is left. What a process leaves that was killed stays for
`otel-dl status`; of such folders the latest `KEPT` under <tmp>.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from otel_dl.forensics import reader, writer
from otel_dl.forensics.writer import StatusPage
from otel_dl.log import logger
from otel_dl.recording.identity import Identity
from otel_dl.recording.status import Status

KEPT: Final = 32
_RUN_DIGITS: Final = 12
"""Of the end of `dl.run.id`, which is random, in names."""


def temporary() -> Path:
    """Where the folders of runs lie that were given none."""
    return Path(tempfile.gettempdir()) / f"otel-dl-{os.getuid()}"


class StatusFolder:
    """Makes and removes pages. `configured` is the folder that the user named, "" where there is none; behind each
    worker's page there are `tail` bytes for others.

    A page that can't be made is said once; from then on the run goes on without pages.
    """

    def __init__(self, configured: str = "", tail: int = 0) -> None:
        self._configured = configured
        self._tail = tail
        self._begin()

    def _begin(self) -> None:
        self._path = ""
        self._made = False
        """Whether this process has made the folder, and so removes it."""
        self._pages: set[str] = set()
        self._own: StatusPage | None = None
        self._identity: Identity | None = None
        self._off = False

    def open(self, identity: Identity) -> Status:
        """The calling process's own page, which it writes from now on."""
        self._identity = identity
        path = self._create("", {})
        if not path:
            return Status()
        try:
            self._own = StatusPage(path)
        except OSError as error:
            self.remove(path)
            self._switch_off(error)
            return Status()
        return self._own

    def worker(self, nonce: str, number: int) -> str:
        """The path of a page for a worker that is about to start, "" where there is none."""
        return self._create(f"-{nonce[:_RUN_DIGITS]}-{number}", {"worker": number, "nonce": nonce, "tail": self._tail})

    def _create(self, name: str, more: dict[str, int | str]) -> str:
        identity = self._identity
        if self._off or identity is None:
            return ""
        pid = os.getpid()
        try:
            path = os.path.join(self._folder(identity), f"{pid}-{identity.run[-_RUN_DIGITS:]}{name}{reader.SUFFIX}")
            parent = pid if more else 0
            writer.create(path, identity=identity, parent=parent, **more)  # pyright: ignore[reportArgumentType]
        except OSError as error:
            self._switch_off(error)
            return ""
        self._pages.add(path)
        return path

    def _folder(self, identity: Identity) -> str:
        if not self._path:
            if self._configured:
                path = Path(self._configured).absolute()
            else:
                path = _private(temporary()) / f"{os.getpid()}-{identity.run[-_RUN_DIGITS:]}"
            self._made = not path.exists()
            path.mkdir(0o777 if self._configured else 0o700, parents=True, exist_ok=True)
            self._path = str(path)
        return self._path

    def _switch_off(self, error: OSError) -> None:
        self._off = True
        where = self._path or self._configured or str(temporary())
        logger.warning(
            "otel-dl: no status page can be made in %s (%s): what a process has in hand that is killed won't be known."
            " Training and tracing go on. Set OTEL_DL_DIR to a folder that can be written. Said once.",
            where,
            error.strerror or error,
        )

    def remove(self, path: str) -> None:
        """The process of this page has ended, and what it says was read."""
        if path in self._pages:
            self._pages.discard(path)
            with contextlib.suppress(OSError):
                os.unlink(path)

    def close(self, unmap: bool = False) -> None:
        """The run has ended: no page is left. With `unmap` nobody writes to this process's own any more."""
        for path in list(self._pages):
            self.remove(path)
        if self._made:
            with contextlib.suppress(OSError):
                os.rmdir(self._path)
        own = self._own
        self._begin()
        if own is not None:
            if unmap:
                own.close()
            else:
                self._own = own

    def after_fork(self) -> None:
        """In a forked child: the pages are the parent's."""
        self._begin()


def _private(base: Path) -> Path:
    """`base`, or another one where somebody else has made it; the oldest that dead processes left there go."""
    with contextlib.suppress(FileExistsError):
        base.mkdir(0o700)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="otel-dl-"))
    with contextlib.suppress(OSError):  # another process removes its own, or does the same
        runs = sorted(os.scandir(base), key=lambda entry: entry.stat().st_mtime)
        for entry in runs[:-KEPT]:
            if not any(page.alive() for page in reader.read_all(Path(entry.path))):
                shutil.rmtree(entry.path, ignore_errors=True)
    return base
