"""OpenTelemetry tracing for PyTorch training: one trace a step, its workers linked to it, always on.

    import otel_dl
    otel_dl.instrument()

is all that a training script needs; `opentelemetry-instrument python train.py` and `otel-dl run -- python train.py`
need no change at all. Importing this package imports neither torch nor the OpenTelemetry SDK.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeVar

from otel_dl.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from otel_dl.recording.lane import OpenSpan
    from otel_dl.recording.records import Step

__all__ = ["__version__", "flush", "instrument", "keep", "loader", "span", "step", "uninstrument"]

Batches = TypeVar("Batches", bound="Iterable[Any]")


def instrument(**settings: Any) -> None:
    """Switches tracing on, with the settings of `otel_dl.settings.Settings` as keywords (each has a variable too).

    Where nobody has set up the OpenTelemetry SDK it is set up from the standard OTEL_* variables. May be called before
    or after torch is imported and loaders, models and optimizers exist; a second call changes nothing. Never raises
    over a wrong setting. The run lasts until `uninstrument()` or the end of the process.
    """
    from otel_dl.autoload import switch_on

    switch_on(set_up_sdk="now", **settings)


def uninstrument() -> None:
    """Switches tracing off: what is kept is exported, every patched attribute is the object again that it was."""
    from otel_dl.instrumentor import TorchInstrumentor

    instrumentor = TorchInstrumentor()
    if instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.uninstrument()


def flush(timeout: float = 5.0) -> bool:
    """Exports what is kept so far, in `timeout` seconds at most; whether everything left.

    Unlike the SDK's `force_flush` it keeps its timeout whatever the exporter does.
    """
    from otel_dl import session

    current = session.current()
    return current.flush(timeout) if current is not None else True


def keep() -> None:
    """Exports the step that is open, whatever the sampler says (`dl.keep.reason` = `requested`)."""
    from otel_dl import session

    current = session.current()
    if current is not None and current.run.current is not None:
        current.run.current.requested = True
        current.run.current.plain = False


def loader(iterable: Batches) -> Batches:
    """`iterable` again, with its batches recorded as those of a DataLoader without workers are.

        for batch in otel_dl.loader(dataset.iter_torch_batches(batch_size=32)):
            ...

    For what is no `torch.utils.data.DataLoader` and reads from none: a generator, a webdataset, an IterableDataset of
    Hugging Face's, Ray Data. Each `next()` is a `dataloader.next` and bounds steps; each `iter()` begins an epoch of
    `iterable`. Of an iterator, which has one epoch, the result is an iterator. A DataLoader is recorded as ever.

    Batches, exceptions, the length where there is one and all attributes are those of `iterable`; nothing is read
    ahead. While tracing is off nothing is recorded; it may be switched on later. Raises nothing itself: what cannot be
    iterated over says so in `iter()`.
    """
    from otel_dl.batches import wrap

    return wrap(iterable)


def _fault(error: BaseException) -> None:
    from otel_dl import session

    current = session.current()
    if current is None:
        raise error
    current.faults.fault(error)


def _whole(number: object) -> int | None:
    """Also of a numpy integer or a tensor; None, said once, for what is no whole number of 64 bits."""
    if number is None or (type(number) is int and -(2**63) <= number < 2**63):
        return number
    from otel_dl.settings import say_once

    try:
        value = operator.index(number)  # pyright: ignore[reportArgumentType]
        if -(2**63) <= value < 2**63:
            return value
    except TypeError:
        pass
    say_once("otel-dl: otel_dl.step() was given a global_step that is no whole number of 64 bits; it is left out.")
    return None


class step:
    """Bounds a step by hand, for loops whose shape says too little: `with otel_dl.step(global_step=n): …`.

    From the first use in a thread on it alone bounds steps there. A batch taken since the last step belongs to it.
    """

    def __init__(self, global_step: int | None = None) -> None:
        self._global_step = _whole(global_step)
        self._step: Step | None = None

    def __enter__(self) -> None:
        from otel_dl import session

        current = session.current()
        if current is not None:
            try:
                self._lane = current.run.local.lane
                self._step = self._lane.enter_step(self._global_step)
            except BaseException as fault:
                _fault(fault)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._step is not None:
            try:
                self._lane.exit_step(self._step, error)
            except BaseException as fault:
                _fault(fault)


class span:
    """A span of one's own: `with otel_dl.span("augment"): …`. Recorded as cheaply as a phase.

    In a step or in evaluation it is a child of that. Outside, as of a checkpoint or of what is done before the first
    step, it is one of the run's own trace, which is exported whatever the sampling ratio: the first 200 of a name,
    1,000 in all; how many more there were is told at the end.
    """

    def __init__(self, name: str) -> None:
        self._name = str(name)
        self._began: OpenSpan | None = None

    def __enter__(self) -> None:
        from otel_dl import session

        current = session.current()
        if current is not None:
            try:
                self._lane = current.run.local.lane
                self._began = self._lane.begin_span(self._name)
            except BaseException as fault:
                _fault(fault)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._began is not None:
            try:
                self._lane.end_span(self._began, error)
            except BaseException as fault:
                _fault(fault)
