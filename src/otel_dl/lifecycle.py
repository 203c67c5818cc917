"""The end of the process: what was kept leaves within a bounded delay, and the process ends as it would without us.

Return, exception, `sys.exit` and SIGINT (Python's KeyboardInterrupt) come here through `atexit`. SIGTERM with the
default action ends a process without it, and a Python handler runs only when the main thread is back in the
interpreter: a rank that waits in a collective would live on for minutes. So a thread learns of the signal by the wakeup
descriptor, which the interpreter's own C handler writes to at once, lets the run end, puts the default action back and
sends the signal again.

Where the user has a handler for SIGTERM, before or after us, Python calls it as ever and it alone decides the end; the
thread only flushes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import multiprocessing.process
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from multiprocessing import util as multiprocessing_util
from time import monotonic, sleep
from typing import Final
from weakref import WeakSet

from otel_dl import threads
from otel_dl.descriptors import Descriptor
from otel_dl.faults import from_signal_handler
from otel_dl.log import logger
from otel_dl.settings import Settings

_MARGIN: Final = 0.1
"""Seconds that an end which ignores its own delay gets beyond it."""
_FINALIZE_PRIORITY: Final = 100

_DEFAULT_ACTION: Final = 0
"""Written to the pipe by our handler: SIGTERM's default action is due. No signal has the numbers 0 and 255."""
_QUIT: Final = 255

_endings: WeakSet[Ending] = WeakSet()
_fork = threading.local()
_fork_hooks_registered = False


class Ending:
    """Calls `end(delay, error)` when the process ends, `error` being the exception that ends it, and `flush(delay)`
    when a handler of the user's will decide whether it does. Delays are in seconds; both must keep to them.

    `install()` is for the moment when the first step begins: processes in which none does keep their signals, and what
    registered with `atexit` before runs after us. Each of the two functions may be called from another thread.
    """

    def __init__(
        self,
        end: Callable[[float, BaseException | None], None],
        settings: Settings,
        flush: Callable[[float], object] | None = None,
    ) -> None:
        self._end = end
        self._flush = flush
        self._settings = settings
        self._handler = self._handle  # one object, so that it is recognized
        self._reset()

    def _reset(self) -> None:
        self._installed = False
        self._previous: object = None
        """What SIGTERM did before our handler; None where ours was not set."""
        self._pipe: tuple[Descriptor, Descriptor] | None = None
        self._wakeup = False
        """Whether the wakeup descriptor is ours."""
        self._watcher: threading.Thread | None = None
        self._finalizer: multiprocessing_util.Finalize | None = None
        self._began_to_end = threading.Lock()
        self._ended = threading.Event()
        self.dying = False
        """Whether SIGTERM ends the process, by its default action."""
        self._seen_error = 0

    def install(self) -> None:
        """From any thread; signals can be watched only where it is the main one of the main interpreter."""
        if self._installed:
            return
        self._installed = True
        self._seen_error = id(_last_error())
        _register_fork_hooks()
        _endings.add(self)
        atexit.register(self._at_exit)
        if multiprocessing.process.parent_process() is not None:
            # A child that was forked leaves by os._exit, without atexit; multiprocessing's own finalizers run.
            self._finalizer = multiprocessing_util.Finalize(
                None, self._at_process_exit, exitpriority=_FINALIZE_PRIORITY
            )
        try:
            self._watch_sigterm()
        except (ValueError, OSError, RuntimeError) as error:
            # Python: "signal only works in main thread of the main interpreter"; no descriptor or no thread to be had.
            logger.debug("otel-dl: SIGTERM ends the process unflushed: %s.", error)

    def uninstall(self) -> None:
        """Puts back exactly what was there, except what somebody changed since."""
        if not self._installed:
            return
        atexit.unregister(self._at_exit)
        if self._finalizer is not None:
            self._finalizer.cancel()
        restored = self._restore_signals()
        watcher, pipe = self._watcher, self._pipe
        if restored and pipe is not None and watcher is not None and watcher is not threading.current_thread():
            _write(pipe[1], _QUIT)
            watcher.join(1.0)
            if not watcher.is_alive():
                _close(pipe)
        self._reset()
        _endings.discard(self)

    def after_fork(self) -> None:
        """In a forked child, before anything else: the action and the wakeup descriptor it would have without us."""
        if not self._installed:
            return
        atexit.unregister(self._at_exit)
        self._restore_signals()
        if self._pipe is not None:
            _close(self._pipe)
        self._reset()

    # The end by return, exception, sys.exit, SIGINT.

    def _at_exit(self) -> None:
        self._finish(_new_error(self._seen_error))

    def _at_process_exit(self) -> None:
        # Up to 3.12 multiprocessing calls its finalizers while the exception is on its way out of the process; later it
        # is gone by then.
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            # torch.multiprocessing hands a rank's exception to its parent, then calls sys.exit(1).
            error = error.__context__ if error.code else None
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        if not self._installed:
            return
        if self._began_to_end.acquire(blocking=False):
            try:
                with _held(signal.SIGCHLD):
                    self._call_end(self._settings.exit_delay, error)
            finally:
                self._ended.set()
            if type(error) is KeyboardInterrupt:
                _stay_interrupted()
        if self.dying:
            self._wait_for_death()
        # What is left of the interpreter's end runs no handler in time: SIGTERM has to work as ever.
        self.uninstall()

    def _call_end(self, delay: float, error: BaseException | None) -> None:
        left, deadline = delay, monotonic() + delay
        while True:
            try:
                self._end(left, error)
                return
            except Exception as raised:
                if not from_signal_handler(raised):
                    logger.warning(
                        "otel-dl: a fault of ours at the end of the process. Please report it.", exc_info=True
                    )
                    return
                # What is left to do is done all the same.
                logger.debug("otel-dl: the end of the process was interrupted", exc_info=True)
                left = deadline - monotonic()
                if left < 0:
                    return

    # SIGTERM.

    def _watch_sigterm(self) -> None:
        action = signal.getsignal(signal.SIGTERM)
        if action is None or action == signal.SIG_IGN:
            return
        if action == signal.SIG_DFL and os.getpid() == 1:
            # The kernel spares the first process of a container: without us nothing would happen either.
            return
        self._pipe = reading, writing = _high(os.pipe())
        os.set_blocking(writing.number, False)
        try:
            if action == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._handler)
                self._previous = action
            taken = signal.set_wakeup_fd(writing.number, warn_on_full_buffer=False)
        except ValueError:
            _close(self._pipe)
            self._pipe = None
            raise
        self._wakeup = True
        if taken != -1:
            # Somebody else's (asyncio). Without it our handler waits for the interpreter, as any Python handler does.
            signal.set_wakeup_fd(taken)
            self._wakeup = False
        self._watcher = threads.start("otel-dl-sigterm", self._watch, reading)

    def _restore_signals(self) -> bool:
        """Whether nothing of ours is left; else the pipe has to stay, since the wakeup descriptor still is its end."""
        if self._pipe is None:
            return True
        try:
            if self._previous is not None and signal.getsignal(signal.SIGTERM) is self._handler:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._wakeup:
                self._give_up_wakeup()
        except ValueError:
            # Not in the main thread. Our handler stays and is the default action from now on.
            logger.debug("otel-dl: uninstalled outside the main thread; SIGTERM's handler stays, and does as before.")
            return False
        return True

    def _give_up_wakeup(self) -> None:
        """In the main thread: puts back that there is no wakeup descriptor, unless somebody has set one since."""
        number = self._pipe[1].number if self._pipe is not None else -1
        current = signal.set_wakeup_fd(-1)
        if current not in (number, -1):
            signal.set_wakeup_fd(current)

    def _closed_by_others(self) -> None:
        """The pipe was: its number may soon be a file of somebody's, and Python is to write no signals into that."""
        if self._wakeup:
            self._wakeup = False

            def give_up(_: object) -> int:
                self._give_up_wakeup()
                return 0

            # `signal.set_wakeup_fd` works in the main thread only.
            self._pending_call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(give_up)
            ctypes.pythonapi.Py_AddPendingCall(self._pending_call, None)

    def _watch(self, reading: Descriptor) -> None:
        while True:
            try:
                heard = os.read(reading.number, 512) if reading.ours else b""
            except OSError:
                heard = b""
            if not heard:
                self._closed_by_others()
                return
            if _QUIT in heard:
                return
            if _DEFAULT_ACTION in heard:
                self._die()
            elif signal.SIGTERM in heard:
                action = signal.getsignal(signal.SIGTERM)
                if action is self._handler:
                    self._die()
                elif callable(action) and self._flush is not None:
                    try:
                        self._flush(self._settings.term_delay)
                    except Exception:
                        logger.warning("otel-dl: a fault of ours after SIGTERM. Please report it.", exc_info=True)

    def _die(self) -> None:
        self.dying = True
        delay = self._settings.term_delay
        if self._began_to_end.acquire(blocking=False):
            # In a thread of its own: the main thread may hold a lock that the end needs, and is stopped in our handler.
            # RuntimeError: the interpreter is ending, or there may be no more threads.
            with contextlib.suppress(RuntimeError):
                threads.start("otel-dl-end", self._call_end, delay, None).join(delay + _MARGIN)
        else:
            self._ended.wait(delay)
        _default_sigterm()

    def _handle(self, signum: int, frame: object) -> None:
        """Called by Python: the default action. Or by a handler of the user's that found ours in the place of the
        default action, which cannot be called: that one decides the end, and our thread has flushed."""
        if signal.getsignal(signal.SIGTERM) is not self._handler:
            return
        pipe, watcher = self._pipe, self._watcher
        if pipe is not None and watcher is not None:
            if not (pipe[1].ours and watcher.is_alive()):
                self._die()  # as the thread would have done
            self.dying = True
            _write(pipe[1], _DEFAULT_ACTION)
            self._wait_for_death()
        _default_sigterm()

    def _wait_for_death(self) -> None:
        end = monotonic() + self._settings.term_delay + 2 * _MARGIN
        while monotonic() < end:
            sleep(_MARGIN)


@contextlib.contextmanager
def _held(number: int) -> Generator[None]:
    """A Python handler of this signal runs behind what is done here. That of SIGCHLD is torch's, which raises for a
    worker that has died, wherever the main thread is; the process ends of it already."""
    came: list[int] = []
    handler = signal.getsignal(number)
    held = callable(handler) and threading.current_thread() is threading.main_thread()
    if held:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        if held:
            signal.signal(number, handler)
        if came and callable(handler):
            with contextlib.suppress(Exception):
                handler(number, None)


def _high(pipe: tuple[int, int]) -> tuple[Descriptor, Descriptor]:
    """The same pipe under numbers that a script does not come by: one that closes what it does not know and opens files
    of its own would else find signal numbers in them."""
    try:
        high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _HIGH) for end in pipe)
    except OSError:  # the process may have few descriptors
        return Descriptor(pipe[0]), Descriptor(pipe[1])
    for end in pipe:
        os.close(end)
    return Descriptor(high[0]), Descriptor(high[1])


_HIGH = 500


def _default_sigterm() -> None:
    """Ends the process as SIGTERM does by default, from any thread (`signal.signal` works in the main one only)."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGTERM, None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)


def _last_error() -> BaseException | None:
    """What reached the top of the main thread: the interpreter sets it before `atexit` (last_exc since 3.12)."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _new_error(seen: int) -> BaseException | None:
    error = _last_error()
    return None if error is None or id(error) == seen else error


def _stay_interrupted() -> None:
    """Lets the interpreter end by SIGINT, as it does after a KeyboardInterrupt, whatever was run since.

    It notes the exception when a top-level run ends with it, and forgets it at the next `exec` or `eval` of a text
    (3.10 to 3.14: pythonrun.c `run_eval_code_obj`). An import at the end, such as grpc's, holds some.
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def _write(descriptor: Descriptor, byte: int) -> None:
    try:
        if descriptor.ours:
            os.write(descriptor.number, bytes((byte,)))
    except OSError:
        logger.debug("otel-dl: the pipe to the watching thread is full")


def _close(pipe: tuple[Descriptor, Descriptor]) -> None:
    for descriptor in pipe:
        descriptor.close()


# A child that is forked inherits handler and wakeup descriptor: until it has its own action back, a SIGTERM meant for
# it would be written to the parent's pipe and end the parent. So SIGTERM waits meanwhile.


def _register_fork_hooks() -> None:
    global _fork_hooks_registered
    if not _fork_hooks_registered:
        _fork_hooks_registered = True
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)


def _before_fork() -> None:
    if _endings:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork_in_parent() -> None:
    mask = _fork.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork() -> None:
    for ending in list(_endings):
        ending.after_fork()
    _endings.clear()
    _after_fork_in_parent()
