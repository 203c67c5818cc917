"""The line between a fault of ours and an exception of somebody else's."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, MethodType, TracebackType
from typing import Any, Final

import opentelemetry


def _folders(*paths: str) -> tuple[str, ...]:
    return tuple(os.path.join(os.path.realpath(path), "") for path in paths)


_OURS: Final = _folders(os.path.dirname(__file__), *opentelemetry.__path__)
_MODULES: Final = {"otel_dl", "opentelemetry", *sys.stdlib_module_names}
"""Whose exception classes a fault of ours may have."""
_STDLIB: Final = _folders(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


def is_ours(error: BaseException) -> bool:
    """Whether every frame of the traceback is otel-dl's, OpenTelemetry's or the standard library's, and none is that
    of a signal handler. A handler without a frame, written in C, can't be told from us: then it counts as its own."""
    if type(error).__module__.partition(".")[0] not in _MODULES:
        return False  # a class of somebody else's: thrown into this thread by PyThreadState_SetAsyncExc, perhaps
    if not isinstance(error, Exception) or any(_is_in_c(handler) for handler in _handlers()):
        return False
    return not from_signal_handler(error) and all(map(_is_known, _frames(error)))


def from_signal_handler(error: BaseException) -> bool:
    """Whether a Python signal handler raised it, which happened to run inside what was called."""
    handlers = {code for code in map(_code, _handlers()) if code is not None}
    return any(code in handlers for code in _frames(error))


def _frames(error: BaseException) -> Iterator[CodeType]:
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


def _is_known(code: CodeType) -> bool:
    return _is_known_file(code.co_filename)


@functools.lru_cache(4096)  # a path costs 10 us, and a stack has dozens
def _is_known_file(name: str) -> bool:
    if name.startswith("<frozen "):
        return True
    path = os.path.realpath(name)
    return path.startswith(_OURS) or (path.startswith(_STDLIB) and "site-packages" not in path)


def is_users(code: CodeType) -> bool:
    """Whether it is code of the user's own: neither ours nor of an installed package, the standard library or what an
    extension module has made up."""
    path = code.co_filename
    return not (_is_known(code) or path.startswith(_MADE_UP) or any(folder in path for folder in _PACKAGES))


_MADE_UP: Final = ("<internal>", "<frozen ")
_PACKAGES: Final = ("/site-packages/", "/dist-packages/")


def _handlers() -> Iterator[Any]:
    """What Python calls for a signal, without partial and method around it."""
    for number in signal.valid_signals():
        with contextlib.suppress(ValueError, OSError):
            handler: Any = signal.getsignal(number)
            while isinstance(handler, (functools.partial, MethodType)):
                handler = handler.func if isinstance(handler, functools.partial) else handler.__func__
            if callable(handler):
                yield handler


def _code(handler: Any) -> CodeType | None:
    code = getattr(handler, "__code__", None)
    if code is None:
        method: Any = type(handler).__call__
        code = getattr(method, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_in_c(handler: Any) -> bool:
    return _code(handler) is None and handler is not signal.default_int_handler
