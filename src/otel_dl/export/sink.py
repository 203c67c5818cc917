"""Where spans leave: what takes finished spans, whatever stands behind it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from opentelemetry.sdk.trace import ReadableSpan


class Sink(Protocol):
    """What takes finished spans. Deadlines are readings of `time.monotonic`."""

    @property
    def dropped(self) -> Counter[str]:
        """Spans lost, by reason: `queue_full`, `export_failed` (refused for good), `exit` (the end did not wait)."""
        ...

    @property
    def exported(self) -> int:
        """Spans that the receiver took, or the provider that they were handed to."""
        ...

    @property
    def waiting(self) -> int:
        """Spans that were offered and are neither exported nor dropped."""
        ...

    def open(self) -> None:
        """Makes the thread and the exporter, and waits for them, 2 s at most; else the first span does it.

        For the beginning of the first step. Importing gRPC takes 0.2 s and more under the GIL: later it would be a step
        that stands still, and at the end of the process too late.
        """
        ...

    def offer(self, spans: Sequence[ReadableSpan]) -> None:
        """Takes `spans` over; from any thread, also in a signal handler."""
        ...

    def flush(self, deadline: float) -> bool:
        """Whether everything offered before the call was exported by `deadline`."""
        ...

    def close(self, deadline: float) -> bool:
        """`flush`, then the end: what is still waiting at `deadline` is dropped and counted, as is what comes later."""
        ...

    def after_fork(self) -> None:
        """In a forked child: a new queue without anything of the parent's, a thread and an exporter of its own."""
        ...


class NoSink:
    """Where nothing is exported: `always_off`, `OTEL_TRACES_EXPORTER=none`, an exporter that is not installed."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.exported = 0

    @property
    def waiting(self) -> int:
        return 0

    def open(self) -> None:
        pass

    def offer(self, spans: Sequence[ReadableSpan]) -> None:
        pass

    def flush(self, deadline: float) -> bool:
        return True

    def close(self, deadline: float) -> bool:
        return True

    def after_fork(self) -> None:
        pass


class Sinks:
    """Several exporters, each with a queue and a thread of its own: one that hangs holds up no other."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    @property
    def dropped(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for sink in self._sinks:
            total.update(sink.dropped)
        return total

    @property
    def exported(self) -> int:
        return min(sink.exported for sink in self._sinks)

    @property
    def waiting(self) -> int:
        return max(sink.waiting for sink in self._sinks)

    def open(self) -> None:
        for sink in self._sinks:
            sink.open()

    def offer(self, spans: Sequence[ReadableSpan]) -> None:
        for sink in self._sinks:
            sink.offer(spans)

    def flush(self, deadline: float) -> bool:
        return self._all([sink.flush for sink in self._sinks], deadline)

    def close(self, deadline: float) -> bool:
        return self._all([sink.close for sink in self._sinks], deadline)

    @staticmethod
    def _all(calls: list[Callable[[float], bool]], deadline: float) -> bool:
        """Together, not one after another: a hung exporter would use up the time of the next."""
        results: list[bool] = []

        def run(call: Callable[[float], bool]) -> None:
            results.append(call(deadline))

        threads: list[threading.Thread] = []
        here = calls[:1]
        for call in calls[1:]:
            thread = threading.Thread(target=run, args=(call,), daemon=True)
            try:
                thread.start()
                threads.append(thread)
            except RuntimeError:  # 3.12.0 and .1 start no thread at exit
                here.append(call)
        for call in here:
            run(call)
        for thread in threads:
            thread.join(max(0.0, deadline - monotonic()) + 0.2)
        return len(results) == len(calls) and all(results)

    def after_fork(self) -> None:
        for sink in self._sinks:
            sink.after_fork()
