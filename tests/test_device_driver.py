"""A driver that fails, a signal while it is asked, a forked child; and torch's own where there is no device."""

from __future__ import annotations

import logging
import signal
from types import SimpleNamespace

import pytest
import torch
from support import children
from support.device import WHOLE, Loop, StandInDevice, use
from support.inprocess import recording
from support.phases import lines

from otel_dl.patches.device import TorchDevice, built_for
from otel_dl.recording.device import Memory


@pytest.mark.parametrize("call", ["is_on", "record", "query", "elapsed_time", "current", "is_capturing", "event",
                                  "memory"])  # fmt: skip
def test_a_driver_that_disappears_is_told_once_and_training_goes_on(
    in_c: bool, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = StandInDevice(eager=True)
    if call == "is_on":
        device.on = False
    alone = Loop(StandInDevice())
    alone(12)
    with recording(native=in_c) as recorded, caplog.at_level(logging.WARNING, "otel_dl"):
        use(recorded.run, device)

        def fail(number: int) -> None:
            if number == 5:
                device.failing[call] = RuntimeError("CUDA error: an illegal memory access was encountered")
                device.eager = call != "event"  # one that falls behind needs another one soon
                device.calls.clear()

        loop = Loop(device)
        loop(12, fail)
    assert loop.losses == alone.losses
    assert device.calls.count(call) == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert "illegal memory access" in message
    assert "Training goes on" in message
    assert lines(recorded.spans, "train.step") == ["next zero_grad forward backward optimizer"] * 12


@pytest.mark.parametrize("call", ["record", "query", "memory"])
def test_what_a_signal_handler_raises_while_the_driver_is_asked_arrives(in_c: bool, call: str) -> None:
    device = StandInDevice(eager=True)
    called, done = device.called, 0

    def interrupted(name: str) -> None:
        called(name)
        if name == call and done == 5:
            device.called = called  # type: ignore[method-assign]
            signal.raise_signal(signal.SIGINT)

    device.called = interrupted  # type: ignore[method-assign]
    with recording(native=in_c) as recorded:
        use(recorded.run, device)
        loop = Loop(device)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            for done, batch in enumerate(loop.batches(10)):  # noqa: B007
                loop.update(*batch)
        Loop(device)(4)
    assert len(lines(recorded.spans, "train.step")) >= 8


FORKED = """
import os, sys
from support.device import Loop, StandInDevice, duration, steps, use
from support.inprocess import recording

device = StandInDevice(eager=True)
with recording() as recorded:
    use(recorded.run, device)
    loop = Loop(device)
    batches = loop.batches(9)
    for _ in range(3):
        loop.update(*next(batches))
    child = os.fork()
    if child == 0:
        device.calls.clear()
        Loop(device)(4)
        os._exit(0 if device.calls == [] else 1)
    _, status = os.waitpid(child, 0)
    for batch in batches:
        loop.update(*batch)
print(os.waitstatus_to_exitcode(status), [duration(steps(recorded)[number]) for number in range(8)])
"""


def test_a_forked_child_asks_the_device_nothing_and_the_parent_goes_on() -> None:
    result = children.run(FORKED, {"PYTHONPATH": f"{children.SOURCE}:{children.SOURCE.parent / 'tests'}"}, timeout=120)
    assert result.code == 0, result
    assert result.stdout.strip() == f"0 {[WHOLE] * 8}"


# The real one, where there is no device.


def test_torchs_own_device_is_asked_and_never_begun() -> None:
    device = built_for()
    if device is None:
        pytest.skip("this torch was built for no device that has events")
    assert device.type in ("cuda", "xpu")
    with recording() as recorded:
        Loop(StandInDevice())(3)
        assert recorded.run.device._driver is not None
        assert recorded.run.device.awaited == (not device.is_on())
    assert not torch.cuda.is_initialized()


def test_what_torchs_device_is_asked_is_there() -> None:
    """Where the names it uses are gone, the device's time would silently be."""
    module = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 3,
        is_current_stream_capturing=lambda: False,
        Event=torch.cuda.Event,
        memory=SimpleNamespace(
            memory_stats_as_nested_dict=lambda device: {
                "allocated_bytes": {"all": {"current": device, "peak": 5}},
                "reserved_bytes": {"all": {"current": 7}},
                "num_alloc_retries": 2,
            }
        ),
        mem_get_info=lambda device: (11, 12),
    )
    for name in vars(module):
        assert hasattr(torch.cuda, name), name
    assert hasattr(torch.cuda.memory, "memory_stats_as_nested_dict")
    for name in ("record", "query", "elapsed_time"):
        assert hasattr(torch.cuda.Event, name)
    device = TorchDevice("cuda", module)
    assert device.current() == 3
    assert device.memory(1) == Memory(1, 5, 7, 2)
    assert device.free(1) == 11
    module.memory.memory_stats_as_nested_dict = lambda device: {}
    assert TorchDevice("xpu", module).memory(0) == Memory()
