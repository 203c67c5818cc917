"""Records in this process: a real session whose spans land in a list, in the place of a sink."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from otel_dl import session
from otel_dl.export.provider import Connection
from otel_dl.export.sink import NoSink
from otel_dl.recording.keep import AdaptiveHead, Head
from otel_dl.settings import Settings


class ListSink(NoSink):
    def __init__(self) -> None:
        super().__init__()
        self.spans: list[ReadableSpan] = []

    def offer(self, spans: Sequence[ReadableSpan]) -> None:
        self.spans.extend(spans)


class Recorded:
    """A session and what it exported so far."""

    def __init__(self, head: Head | None, foreign: bool, **settings: Any) -> None:
        sink = ListSink()
        self.spans = sink.spans
        self.session = session.Session(Settings.read(**settings), {}, "never")
        self.run = self.session.run
        head = head or AdaptiveHead()
        resource = Resource({"service.name": "a test"})
        self.session._connection = Connection(sink, head, resource, "a list", foreign)
        self.run.keep.head = head
        self.run.foreign_provider = foreign

    def finish(self) -> None:
        """The end of the session; from then on `spans` is complete."""
        if session.current() is self.session:
            session.end()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


@contextlib.contextmanager
def recording(head: Head | None = None, foreign: bool = False, **settings: Any) -> Iterator[Recorded]:
    """`foreign`: as if spans of the user's went to a provider that is not ours."""
    recorded = Recorded(head, foreign, **settings)
    session._current = recorded.session
    try:
        recorded.session.install()
        yield recorded
    finally:
        recorded.finish()
