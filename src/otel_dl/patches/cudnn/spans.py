"""What a convolution becomes in a trace: a span, or a part of a sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_dl.recording.details import Detail

if TYPE_CHECKING:
    from otel_dl.patches.cudnn.keys import Key
    from otel_dl.recording.failure import Failure
    from otel_dl.recording.run import Run

PREDICTED: Final = "predicted"
"""`dl.warmup.source`: the key is new to the model of the cache. Nothing was observed."""


class Convolution(Detail):
    """One operation of cuDNN. `warm`: it had no plan, so benchmark chose one."""

    __slots__ = ("changed", "device", "key", "name", "shared", "warm")
    family = "conv"

    def __init__(self, name: str, key: Key, device: str, warm: bool, changed: str = "", shared: bool = False) -> None:
        self.name = name
        self.key = key
        self.device = device
        self.warm = warm
        self.changed = changed
        self.shared = shared

    def attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {"dl.conv.key": str(self.key), "dl.device": self.device}
        if self.warm:
            attributes["dl.warmup.source"] = PREDICTED
        if self.changed:
            attributes["dl.conv.changed"] = self.changed
        if self.shared:
            attributes["dl.conv.shared"] = True
        return attributes


class Sum(Detail):
    """Those of one phase that become no span: as many records would take the room of the step's phases."""

    __slots__ = ("count", "spent")
    family = "conv"
    name = "cudnn::conv"
    summed = True

    def __init__(self) -> None:
        self.count = 0
        self.spent = 0

    def add(self, duration: int) -> None:
        self.count += 1
        self.spent = (self.spent or 0) + duration

    def attributes(self) -> dict[str, Any]:
        return {}


class Steps:
    """The convolutions that found their plan, in steps that the head sampler keeps: so many spans, the rest summed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._most = run.settings.conv_spans
        self._number = -1
        self._spans = 0
        self._sum: Sum | None = None
        self._phase = 0

    @property
    def wanted(self) -> bool:
        """Whether the step that is open is such a one."""
        step = self._run.current
        return step is not None and step.head

    def add(self, detail: Convolution, start: int, end: int, error: Failure | None = None) -> None:
        """Between these readings of the clock."""
        step = self._run.current
        if step is None or not step.head:
            return
        if step.number != self._number:
            self._number, self._spans, self._sum = step.number, 0, None
        if self._spans < self._most:
            self._spans += 1
            self._run.note(detail, start, end, error)
            return
        # A sum belongs to the phase in which its first one ran, and is changed only while the step is open.
        lane = self._run.stepper or self._run.main
        phase = lane.kinds if lane is not None else 0
        if self._sum is None or phase != self._phase:
            self._sum, self._phase = Sum(), phase
            self._run.note(self._sum, start, end)
        self._sum.add(end - start)
