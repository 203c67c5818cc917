"""Records in this process, without SDK or exporter: the patches of training on a run whose spans land in a list."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from otel_dl.patches import training
from otel_dl.patches._patching import Patches
from otel_dl.recording.builder import Builder, NoBatches
from otel_dl.recording.keep import AdaptiveHead
from otel_dl.recording.run import Run
from otel_dl.settings import Settings


class Recorded:
    def __init__(self, head: Any = None, **settings: Any) -> None:
        self.spans: list[ReadableSpan] = []
        self.run = Run(Settings.read(**settings), head or AdaptiveHead())
        self.builder = Builder(self.run, self, NoBatches(), Resource({}))

    def offer(self, spans: Any) -> None:
        self.spans.extend(spans)

    def finish(self) -> None:
        self.run.finish()
        self.run.active = False
        self.builder.drain(time.monotonic() + 60, final=True)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def steps(self) -> list[list[str]]:
        """The names of each step's direct children, in order of their start."""
        steps = []
        for step in self.named("train.step"):
            children = [s for s in self.spans if s.parent is not None and s.parent.span_id == step.context.span_id]
            steps.append([s.name for s in sorted(children, key=lambda s: s.start_time)])
        return steps


@contextlib.contextmanager
def recording(head: Any = None, **settings: Any) -> Iterator[Recorded]:
    recorded = Recorded(head, **settings)
    installed = []
    try:
        for target, install in training.INSTALLERS.items():
            patches = Patches(target)
            install(recorded.run, patches)
            installed.append(patches)
        with contextlib.suppress(ImportError):
            from otel_dl.patches import dataloader
            from otel_dl.workers.relay import Relay

            patches = Patches("dataloader")
            relay = Relay(recorded.run)
            dataloader.install(recorded.run, patches, relay)
            recorded.builder = Builder(recorded.run, recorded, relay, Resource({}))
            installed.append(patches)
        yield recorded
        recorded.finish()
    finally:
        recorded.run.active = False
        for patches in reversed(installed):
            patches.restore()
