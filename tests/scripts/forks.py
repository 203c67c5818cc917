"""Forks while everything is busy: `forks.py COUNT`. A child looks at what it inherited, logs, makes a span, and ends.

Prints what a child found wrong, and at the end how many came back.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import signal
import sys
import threading

import torch
from opentelemetry import trace

import otel_dl
from otel_dl import session

logger = logging.getLogger("user")
tracer = trace.get_tracer("user")
LIMIT_S = 20


def busy(stop: threading.Event) -> None:
    while not stop.wait(0.001):
        logger.info("busy")
        with tracer.start_as_current_span("parent"):
            pass


def child(held: trace.Span) -> int:
    """What is wrong, as bits."""
    # A lock that was inherited held: the child says where it waits, and ends.
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    run = session.current().run
    wrong = 0
    if run.current is not None or run.local.lane.step is not None or run.closed:
        wrong |= 1
    if any("otel-dl" in thread.name for thread in threading.enumerate()):
        wrong |= 2
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or signal.set_wakeup_fd(-1) != -1:
        wrong |= 4
    held.end()  # the parent's: it is the parent that exports it
    logger.info("child")
    with tracer.start_as_current_span("child"):
        pass
    trace.get_tracer_provider().force_flush(5000)
    return wrong


def main() -> None:
    otel_dl.instrument()
    # Not to a file: Python itself does not free the lock of a buffered file that another thread held at the fork.
    logging.basicConfig(stream=io.StringIO(), level=logging.INFO)
    stop = threading.Event()
    threads = [threading.Thread(target=busy, args=(stop,), daemon=True) for _ in range(2)]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for thread in threads:
        thread.start()
    good = 0
    for number in range(int(sys.argv[1])):
        optimizer.zero_grad()
        held = tracer.start_span("held")
        pid = os.fork()
        if pid == 0:
            code = 64
            try:
                code = child(held)
            finally:
                os._exit(code)
        held.end()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        good += status == 0
        if status:
            print(f"child {number}: {status}", flush=True)
    stop.set()
    for thread in threads:
        thread.join()
    print(f"{good} came back")


if __name__ == "__main__":
    main()
