"""Threads of otel-dl's: daemons that no signal of the process is delivered to."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


def start(name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
    """A running daemon thread; raises RuntimeError where the process may have no more of them.

    It blocks every signal: a signal that the user blocks in the main thread is to wait there, and would else be
    delivered to a thread of ours, with all that it does to the process.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    return thread
