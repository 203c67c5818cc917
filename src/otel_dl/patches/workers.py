"""The lives of DataLoader workers, as their parent sees them: when they start, and how each of them ended.

How one ended follows from its exit status and its status page (`otel_dl.forensics.ends`). The exit status is looked at
so that the child stays to be waited for: torch's handler of SIGCHLD must find what it would find without us. An
exception of torch's that says that a worker died, or does not answer, gets what is known of it as a note, as the step
gets it that fails of it. Where a worker dies while its batch is taken over, that is the EOFError or OSError of
multiprocessing's connection (torch/multiprocessing/reductions.py, 2.15), some instants before it can be waited for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Sequence
from multiprocessing import process as processes
from typing import TYPE_CHECKING, Any, Final

from otel_dl.forensics import ends, reader
from otel_dl.forensics.ends import How
from otel_dl.forensics.processes import status_of_exiting
from otel_dl.log import logger
from otel_dl.recording.failure import Failure, qualified
from otel_dl.recording.records import Batch, WorkerLife, WorkersStarted, clock
from otel_dl.workers.loop import start_method

if TYPE_CHECKING:
    from otel_dl.forensics.folder import StatusFolder
    from otel_dl.forensics.reader import Page
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run
    from otel_dl.workers.relay import Relay

INFO: Final = "_otel_dl"
"""Attribute of an iterator, which cannot be pickled or copied; the class has None for those that are older than us."""
NAMED: Final = 4
"""Workers in one note at most."""
_PID: Final = re.compile(r"\(pid (\d+)\)")


class Life:
    """A worker that was started."""

    def __init__(self, number: int, process: Any, path: str, loader: int, start: int) -> None:
        self.number = number
        self.process = process
        self.pid: int = process.pid
        self.method = start_method(process)
        self.path = path
        """Of its status page, "" where there is none."""
        self.loader = loader
        self.start = start
        self.terminated = False
        """Whether the parent called `terminate()` or `kill()`."""
        self.raised = ""
        """The exception of its dataset that left `next()` last, and for which batch."""
        self.raised_for: Any = None
        self.step: int | None = None
        self.told = False

    def status(self) -> int | None:
        """Its exit code, negative for a signal; None where it runs, or that is not known."""
        popen = self.process._popen
        if popen is not None and popen.returncode is None and self.method != "forkserver":
            with contextlib.suppress(ChildProcessError):  # somebody has waited for it already
                found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None:
                    return status_of_exiting(self.pid)
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        status: int | None = self.process.exitcode
        return status if status is not None else status_of_exiting(self.pid)

    def page(self) -> Page | None:
        return reader.read(self.path) if self.path else None

    def ended(self, status: int | None, page: Page | None) -> ends.WorkerEnded:
        return ends.ended(status, page, self.terminated, self.raised)


def free_shm() -> int | None:
    """Bytes of room in /dev/shm, through which workers hand over tensors; None where there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _lives(iterator: Any) -> list[Life]:
    info: Any = getattr(iterator, INFO, None)
    return info.lives if info is not None else []


Said = tuple[Life, str]
"""A worker, and what an exception is told of it."""


class Watch:
    """All workers of a process. Called by the threads that read from loaders, and by torch's handler of SIGCHLD in any
    place of the main thread: nothing here waits for a lock."""

    def __init__(self, run: Run, relay: Relay, folder: StatusFolder) -> None:
        self._run = run
        self._relay = relay
        self._folder = folder
        self._lives: dict[int, Life] = {}
        """By pid, of those whose end was not told."""

    def install(self, patches: Patches, dataloader: Any) -> None:
        """What tells of any worker. `dataloader`: the module torch.utils.data.dataloader."""
        signals = dataloader._utils.signal_handling
        original_check: Callable[[], None] = signals._error_if_any_worker_fails

        @functools.wraps(original_check)
        def _error_if_any_worker_fails() -> None:
            try:
                original_check()
            except RuntimeError as error:
                patches.guard(self.reported, error)
                raise

        patches.replace(signals, "_error_if_any_worker_fails", _error_if_any_worker_fails)
        for name in ("terminate", "kill"):
            patches.replace(processes.BaseProcess, name, self._noting(patches, name))

    def watch(self, patches: Patches, several: Any) -> None:
        """What tells of the workers of iterators of the class `several`."""
        own: dict[str, Any] = dict(vars(several))  # pyright: ignore[reportUnknownArgumentType]
        original_reset, original_shutdown = own["_reset"], own["_shutdown_workers"]
        guard = patches.guard

        @functools.wraps(original_reset)
        def _reset(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original_reset(iterator, *args, **kwargs)
            except BaseException as error:
                guard(self.failed, iterator, error, None)
                raise

        @functools.wraps(original_shutdown)
        def _shutdown_workers(iterator: Any) -> Any:
            try:
                return original_shutdown(iterator)
            finally:
                guard(self.over, iterator)

        patches.replace(several, "_reset", _reset)
        patches.replace(several, "_shutdown_workers", _shutdown_workers)

    def _noting(self, patches: Patches, name: str) -> Callable[..., Any]:
        original = vars(processes.BaseProcess)[name]

        @functools.wraps(original)
        def end(process: Any) -> Any:
            guard(self.terminating, process)
            return original(process)

        guard = patches.guard
        return end

    # Starts.

    def pages(self, nonce: str, workers: int) -> tuple[str, ...]:
        """A page for each of the workers that are about to start."""
        return tuple(self._folder.worker(nonce, number) for number in range(workers))

    def started(self, iterator: Any, pages: Sequence[str], start: int, free_shm: int | None) -> None:
        """The iterator has begun at `start`, or could not: its workers run, or not all of them."""
        end = clock()
        info = getattr(iterator, INFO, None)
        loader: int = info.loader if info is not None else -1
        running: list[Any] = list(getattr(iterator, "_workers", ()))
        lives = [
            Life(number, process, pages[number] if number < len(pages) else "", loader, start)
            for number, process in enumerate(running)
        ]
        for path in pages[len(lives) :]:
            self._folder.remove(path)
        for life in lives:
            self._lives[life.pid] = life
        if info is not None:
            info.lives = lives
        if lives:
            self._run.tell(WorkersStarted(loader, lives[0].method, len(lives), start, end, free_shm))

    def terminating(self, process: Any) -> None:
        # Asked without `pid`, which raises where the process was closed: that is for `terminate()` to say.
        popen = getattr(process, "_popen", None)
        life = self._lives.get(popen.pid) if popen is not None else None
        if life is not None and life.status() is None:
            life.terminated = True

    # Ends.

    def over(self, iterator: Any) -> None:
        """torch has joined the workers of `iterator`."""
        for life in _lives(iterator):
            if life.raised and getattr(iterator, INFO).batch is not life.raised_for:
                life.raised = ""  # the user went on after it
            self._tell(life)

    def failed(self, iterator: Any, error: BaseException, batch: Any) -> None:
        """`error` left the iterator's `next()` or `iter()`; `batch`, where one was in hand, is a `records.Batch`."""
        lives = _lives(iterator)
        if not lives:
            return
        said = self._raised(lives, error, batch)
        if not said and isinstance(error, (RuntimeError, EOFError, OSError)):
            said = self._died(lives) or (self._awaited(iterator, lives) if "timed out" in str(error) else [])
        self._note(error, said)

    def reported(self, error: RuntimeError) -> None:
        """torch's handler of SIGCHLD found a worker that has died."""
        pid = _PID.search(str(error))
        life = self._lives.get(int(pid[1])) if pid is not None else None
        if life is not None:
            self._note(error, self._died([life]))

    def finish(self) -> None:
        """The run ends: of workers that still run no end is known."""
        for life in list(self._lives.values()):
            self._tell(life)

    def after_fork(self) -> None:
        """In a forked child: the workers are the parent's."""
        self._lives.clear()

    def _raised(self, lives: Sequence[Life], error: BaseException, batch: Any) -> list[Said]:
        """Where the dataset raised `error`."""
        if batch is None:
            return []
        _, _, place, nonce, round, number, *_ = Batch._make(batch)
        fetch = self._relay.peek((nonce, round, place))
        if fetch is None or fetch.error is None or number is None:
            return []
        life: Life = lives[number]
        life.raised, life.raised_for = qualified(type(error)), batch
        where = f"batch {place}{ends.said(fetch.samples)}"
        return [(life, f"{ends.named(number, life.pid)} raised {fetch.error.type} in dataloader.fetch of {where}")]

    def _died(self, lives: Sequence[Life]) -> list[Said]:
        said: list[Said] = []
        for life in lives:
            status = life.status()
            if status is None:
                continue
            page = life.page()
            end = life.ended(status, page)
            if end.how is not How.FINISHED:
                said.append((life, ends.words(life.number, life.pid, end, page)))
        return said

    def _awaited(self, iterator: Any, lives: Sequence[Life]) -> list[Said]:
        """Of the workers that the iterator waits for: in order of the one that reads the next batch."""
        asked: Any = iterator._task_info.get(iterator._rcvd_idx) if getattr(iterator, "_in_order", True) else None
        said: list[Said] = []
        number: int | None = asked[0] if asked else None
        for life in lives if number is None else lives[number : number + 1]:
            page = life.page()
            since = f"{(clock() - page.last()) / 1e9:.1f} s " if page is not None and page.pid else ""
            said.append((life, f"{ends.named(life.number, life.pid)} is alive, {since}{ends.doing(page)}"))
        return said

    def _note(self, error: BaseException, said: list[Said]) -> None:
        if not said:
            return
        text = "; ".join(words for _, words in said[:NAMED])
        text += f"; and {len(said) - NAMED} more" if len(said) > NAMED else ""
        step = self._run.tell_step(text)
        for life, _ in said:
            life.step = step
        if f"otel-dl: {text}" in getattr(error, "__notes__", ()):
            return  # torch's handler of SIGCHLD raised it, and now it has left `next()`
        add_note: Callable[[str], None] | None = getattr(error, "add_note", None)
        if add_note is None:  # Python 3.10
            logger.error("otel-dl: %s.", text)
        else:
            add_note(f"otel-dl: {text}")

    def _tell(self, life: Life) -> None:
        if life.told:
            return
        life.told = True
        if self._lives.get(life.pid) is life:
            del self._lives[life.pid]
        status, page = life.status(), life.page()
        end = life.ended(status, page)
        died = end.how not in (How.FINISHED, How.UNKNOWN)
        done = page.done if page is not None else None
        self._run.tell(
            WorkerLife(
                worker=life.number,
                pid=life.pid,
                start_method=life.method,
                loader=life.loader,
                start=page.began if page is not None and page.began else life.start,
                end=clock(),
                how=end.how.value,
                signal=end.signal,
                exit_code=end.exit_code,
                samples=ends.in_hand(page) if died and page is not None and page.fetching else "",
                words=ends.words(life.number, life.pid, end, page) if died else "",
                error=Failure(end.error_type, "") if end.error_type else None,
                step=life.step if died else None,
                fetches=done.fetches if done is not None else None,
                busy=done.busy if done is not None else 0,
                idle=done.idle if done is not None else 0,
            )
        )
        self._folder.remove(life.path)
