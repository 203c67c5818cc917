"""The device's own time on phases and steps, by a stand-in device that runs when it is told to."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import children
from support.device import StandInDevice, use
from support.inprocess import Recorded, recording
from support.loops import Points, network, seed
from support.phases import lines
from support.validate import from_sdk, validate
from torch import Tensor
from torch.utils.data import DataLoader

from otel_dl.patches.device import TorchDevice, built_for
from otel_dl.recording.device import IN_FLIGHT, Memory
from otel_dl.recording.held import Held
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.lane import FORWARD

GIB = 2**30


@pytest.fixture(params=[True, False], ids=["C", "Python"])
def in_c(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with other things an event may be late."""
    monkeypatch.setattr("otel_dl.recording.device.LATE_NS", 10**12)


class Loop:
    """Steps that queue on the device, in milliseconds: 1 in `next`, 20 in forward, 300 in backward, 4000 in the
    optimizer, and 50000 after it. `turn` is called at the end of each."""

    def __init__(self, device: StandInDevice) -> None:
        seed()
        self.device = device
        self.model = network()
        self.losses: list[float] = []

        class Queueing(Points):
            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                device.work(0.25)
                return super().__getitem__(index)

        class QueueingSGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                device.work(4000)
                return super().step(closure)

        self._data = Queueing
        self.optimizer = QueueingSGD(self.model.parameters(), lr=0.1)
        self.model.register_forward_pre_hook(lambda *_: device.work(20))

    def batches(self, steps: int) -> Iterator[Any]:
        return iter(DataLoader(self._data(4 * steps), batch_size=4))

    def update(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        loss.register_hook(lambda _: self.device.work(300))
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.device.work(50_000)

    def __call__(self, steps: int, turn: Callable[[int], object] = lambda number: None) -> None:
        for number, (x, y) in enumerate(self.batches(steps)):
            self.update(x, y)
            turn(number)


WHOLE = 54_321.0
PHASES = {
    "dataloader.next": 1.0,
    "optimizer.zero_grad": 0.0,
    "forward": 20.0,
    "backward": 300.0,
    "optimizer.step": 4000.0,
}


def duration(span: Any) -> float | None:
    return span.attributes.get("dl.device.duration_ms")


def steps(recorded: Recorded) -> dict[int, Any]:
    return {span.attributes["dl.step"]: span for span in recorded.named("train.step")}


def phases(recorded: Recorded, number: int) -> dict[str, float | None]:
    trace_id = steps(recorded)[number].context.trace_id
    return {name: duration(span) for name in PHASES for span in recorded.named(name)
            if span.context.trace_id == trace_id}  # fmt: skip


def turn(recorded: Recorded) -> None:
    """The builder takes a turn."""
    builder = recorded.session._builder
    assert builder is not None
    with builder._lock:
        builder._turn(float("inf"))


def check(recorded: Recorded) -> None:
    assert validate([from_sdk(span) for span in recorded.spans], whole=False) == []


def test_phases_and_steps_say_how_long_the_device_took_for_what_was_queued_in_them(in_c: bool) -> None:
    device = StandInDevice()
    with recording(native=in_c) as recorded:
        use(recorded.run, device)
        Loop(device)(6, lambda number: device.run() if number % 2 else None)  # it is a step behind, every other step
        device.run()
    for number in range(6):
        assert duration(steps(recorded)[number]) == WHOLE, number
        assert phases(recorded, number) == PHASES, number
    assert {span.attributes["dl.device"] for span in steps(recorded).values()} == {"cuda:0"}
    assert device.waited == 0
    check(recorded)


def test_a_step_waits_to_be_built_until_the_device_has_passed_it(in_c: bool) -> None:
    device = StandInDevice()
    with recording(native=in_c) as recorded:
        use(recorded.run, device)
        loop = Loop(device)
        batches = loop.batches(8)
        for _ in range(3):
            loop.update(*next(batches))
        turn(recorded)
        assert steps(recorded) == {}
        device.run()
        loop.update(*next(batches))
        turn(recorded)
        assert duration(steps(recorded)[0]) == WHOLE
        # Step 2 has ended with the `next` of step 3, which the device has not passed.
        assert set(steps(recorded)) == {0, 1}
        while len(device.queue) > 1:
            device.step()
        loop.update(*next(batches))
        turn(recorded)
        assert set(steps(recorded)) == {0, 1, 2}
    assert set(steps(recorded)) == {0, 1, 2, 3, 4}
    assert device.waited == 0


def test_the_phases_of_a_long_step_are_the_occasion_to_look_where_a_step_waits() -> None:
    class First(NeverHead):
        def step(self, number: int) -> bool:
            return number == 1

        def no_earlier(self, number: int) -> int:
            return 1 if number <= 1 else 10**9

    device = StandInDevice()
    with recording(First()) as recorded:
        use(recorded.run, device)
        loop = Loop(device)
        batches = loop.batches(8)
        for _ in range(2):
            loop.update(*next(batches))
        batch = next(batches)
        turn(recorded)
        device.run()
        loop.update(*batch)
        turn(recorded)
        assert set(steps(recorded)) == {0, 1}
        assert duration(steps(recorded)[1]) == WHOLE


def test_a_device_that_does_not_come_so_far_is_not_waited_for(in_c: bool) -> None:
    device = StandInDevice()
    with recording(native=in_c) as recorded:
        use(recorded.run, device)
        Loop(device)(4)
    assert len(steps(recorded)) == 4
    assert {duration(span) for span in recorded.spans} == {None}
    assert device.waited == 0
    check(recorded)


def test_a_step_that_has_waited_long_enough_is_built_without(monkeypatch: pytest.MonkeyPatch) -> None:
    device = StandInDevice()
    with recording() as recorded:
        use(recorded.run, device)
        loop = Loop(device)
        batches = loop.batches(3)
        for _ in range(2):
            loop.update(*next(batches))
        next(batches)
        turn(recorded)
        assert steps(recorded) == {}
        monkeypatch.setattr("otel_dl.recording.builder.DEVICE_NS", 0)
        turn(recorded)
        assert {duration(span) for span in steps(recorded).values()} == {None}
        assert len(steps(recorded)) == 2


def test_events_are_pooled_and_bounded(in_c: bool) -> None:
    device = StandInDevice()
    with recording(native=in_c) as recorded:
        use(recorded.run, device)
        Loop(device)(60, lambda number: device.run())
        assert device.recorded > 500
        assert device.made < 40
        device.made = 0
        Loop(device)(100)
        assert device.made <= IN_FLIGHT


def test_steps_that_the_head_does_not_keep_have_an_event_at_each_end(in_c: bool) -> None:
    device = StandInDevice(eager=True)
    with recording(NeverHead(), native=in_c) as recorded:
        use(recorded.run, device)
        loop = Loop(device)
        for number, batch in enumerate(loop.batches(300)):
            if number == 10:
                before = device.recorded
            if number == 110:
                assert device.recorded - before == 100
            if number == 250:
                assert recorded.run.current is not None
                recorded.run.current.requested = True
                recorded.run.current.plain = False
            loop.update(*batch)
        assert device.made < 20
    kept = steps(recorded)[250]
    assert duration(kept) == WHOLE
    assert set(phases(recorded, 250).values()) == {None}
    check(recorded)


def test_a_step_of_the_head_has_its_phases_marked_and_the_next_one_has_not(in_c: bool) -> None:
    class Tenth(NeverHead):
        def step(self, number: int) -> bool:
            return number % 10 == 0

        def no_earlier(self, number: int) -> int:
            return -(-number // 10) * 10

    device = StandInDevice(eager=True)
    with recording(Tenth(), native=in_c) as recorded:
        use(recorded.run, device)
        Loop(device)(45)
    assert sorted(steps(recorded)) == [0, 10, 20, 30, 40]
    for number in steps(recorded):
        assert duration(steps(recorded)[number]) == WHOLE
        assert phases(recorded, number) == PHASES
    assert device.recorded < 5 * 14 + 45


def test_a_step_that_a_peer_asks_for_later_has_it_too(in_c: bool) -> None:
    device = StandInDevice(eager=True)
    with recording(NeverHead(), native=in_c) as recorded:
        use(recorded.run, device)
        recorded.run.held = held = Held(recorded.run, 10_000)

        def ask(number: int) -> None:
            if number == 190:
                held.keep([150, 160])

        Loop(device)(200, ask)
    for number in (150, 160):
        assert duration(steps(recorded)[number]) == WHOLE
        assert steps(recorded)[number].attributes["dl.keep.reason"] == "peer"


def test_an_event_that_comes_too_late_for_a_steps_boundary_is_none(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = StandInDevice(eager=True)
    with recording(NeverHead(), native=in_c) as recorded:
        use(recorded.run, device)

        def late(number: int) -> None:
            if number == 10:
                before.append(device.recorded)
                monkeypatch.setattr("otel_dl.recording.device.LATE_NS", 0)

        before: list[int] = []
        Loop(device)(20, late)
    assert [device.recorded] == before


def test_a_step_that_fails_has_it(in_c: bool) -> None:
    device = StandInDevice(eager=True)
    with recording(NeverHead(), native=in_c) as recorded:
        use(recorded.run, device)
        loop = Loop(device)
        for number, (x, y) in enumerate(loop.batches(20)):
            if number == 10:
                with pytest.raises(RuntimeError):
                    loop.model(x[:, :2])
                device.work(7)
                continue
            loop.update(x, y)
    assert duration(steps(recorded)[10]) == 1 + 20 + 7


def test_while_a_stream_is_captured_nothing_is_recorded_and_nothing_asked(in_c: bool) -> None:
    device = StandInDevice()
    with recording(native=in_c) as recorded:
        use(recorded.run, device)
        loop = Loop(device)
        for number, batch in enumerate(loop.batches(6)):
            if number == 3:
                device.run()
                device.capturing, before = True, device.recorded
            loop.update(*batch)
            if number == 3:
                assert device.recorded == before
                device.capturing = False
        device.run()
    assert recorded.run.device._driver is device, "no query was made, which the stand-in refuses"
    assert phases(recorded, 3)["dataloader.next"] == 1.0, "that was before"
    assert phases(recorded, 3)["forward"] is None
    assert duration(steps(recorded)[3]) == WHOLE
    assert phases(recorded, 4) == PHASES


def test_nothing_before_the_process_uses_the_device_itself(in_c: bool) -> None:
    device = StandInDevice(eager=True)
    device.on = False
    with recording(native=in_c) as recorded:
        use(recorded.run, device)

        def begin(number: int) -> None:
            if number == 3:
                assert set(device.calls) == {"is_on"}
                assert recorded.run.fast.on_step is recorded.run.fast.on_phase is None
                device.on = True

        Loop(device)(8, begin)
    assert duration(steps(recorded)[3]) is None
    assert duration(steps(recorded)[4]) == WHOLE


def test_the_switch(in_c: bool) -> None:
    device = StandInDevice(eager=True)
    with recording(native=in_c, device_events="false") as recorded:
        assert not recorded.run.device.awaited
        use(recorded.run, device, recorded.run.settings.device_events)
        Loop(device)(5)
    assert device.calls == []
    assert {duration(span) for span in recorded.spans} == {None}


def test_after_uninstrument_nothing_is_recorded(in_c: bool) -> None:
    device = StandInDevice(eager=True)
    with recording(native=in_c) as recorded:
        use(recorded.run, device)
        Loop(device)(3)
        recorded.run.device.stop()  # as the patches do when they are taken back
        assert recorded.run.fast.on_step is recorded.run.fast.on_phase is None
        device.calls.clear()
        Loop(device)(3)
        assert "record" not in device.calls
    device.calls.clear()
    Loop(device)(3)
    assert device.calls == []


def test_a_run_that_another_thread_ends_asks_the_device_nothing(in_c: bool) -> None:
    """As after SIGTERM, when the thread that trains may be stuck in the driver."""
    device = StandInDevice()
    with recording(native=in_c) as recorded:
        use(recorded.run, device)
        Loop(device)(3)
        device.run()
        device.calls.clear()
        ending = threading.Thread(target=recorded.run.finish)
        ending.start()
        ending.join()
        assert device.calls == []


def test_the_end_of_the_run_records_no_more_event(in_c: bool) -> None:
    device = StandInDevice()
    with recording(native=in_c) as recorded:
        use(recorded.run, device)
        loop = Loop(device)
        loop.update(*next(loop.batches(3)))
        device.run()
        before = device.recorded
    assert device.recorded == before
    assert duration(steps(recorded)[0]) == WHOLE - 50_000, "until its last phase"


def test_of_several_devices_each_has_its_own_events_and_no_duration_goes_from_one_to_another(in_c: bool) -> None:
    device = StandInDevice(eager=True)
    with recording(native=in_c) as recorded:
        use(recorded.run, device)

        def switch(number: int) -> None:
            device.index = number % 2

        Loop(device)(6, switch)
    assert recorded.run.device._driver is device, "no event was recorded on another device than before"
    assert {duration(steps(recorded)[number]) for number in range(1, 5)} == {None}
    assert [next(span for span in recorded.named("forward") if span.context.trace_id == step.context.trace_id)
            .attributes["dl.device"] for step in steps(recorded).values()] == [
        "cuda:0", "cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"
    ]  # fmt: skip


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
from support.device import StandInDevice, use
from support.inprocess import recording
import test_device_time as tests

device = StandInDevice(eager=True)
with recording() as recorded:
    use(recorded.run, device)
    loop = tests.Loop(device)
    batches = loop.batches(9)
    for _ in range(3):
        loop.update(*next(batches))
    child = os.fork()
    if child == 0:
        device.calls.clear()
        tests.Loop(device)(4)
        os._exit(0 if device.calls == [] else 1)
    _, status = os.waitpid(child, 0)
    for batch in batches:
        loop.update(*batch)
print(os.waitstatus_to_exitcode(status), [tests.duration(tests.steps(recorded)[number]) for number in range(8)])
"""


def test_a_forked_child_asks_the_device_nothing_and_the_parent_goes_on() -> None:
    result = children.run(FORKED, {"PYTHONPATH": f"{children.SOURCE}:{children.SOURCE.parent / 'tests'}"}, timeout=120)
    assert result.code == 0, result
    assert result.stdout.strip() == f"0 {[WHOLE] * 8}"


# Memory.


def test_the_peak_is_told_of_the_step_that_raised_it_and_retries_are_counted(in_c: bool) -> None:
    device = StandInDevice(eager=True)
    peaks = {1: 5 * GIB, 3: 7 * GIB, 6: 1 * GIB}  # in step 6 the user resets it
    with recording(native=in_c) as recorded:
        use(recorded.run, device)
        loop = Loop(device)
        for number, batch in enumerate(loop.batches(9)):
            peak = peaks.get(number, device.said.peak)
            device.said = device.said._replace(peak=peak, retries=(device.said.retries or 0) + (number == 4))
            loop.update(*batch)
    said = {number: span.attributes for number, span in steps(recorded).items()}
    told = {number: each.get("dl.memory.peak_bytes") for number, each in said.items()}
    assert {number: peak for number, peak in told.items() if peak is not None} == {1: 5 * GIB, 3: 7 * GIB}
    assert [said[number]["dl.memory.alloc_retries"] for number in range(8)] == [0, 0, 0, 0, 1, 0, 0, 0]
    check(recorded)


@pytest.mark.parametrize("events", ["true", "false"])
def test_out_of_memory_says_where_and_what_the_allocator_had(in_c: bool, events: str) -> None:
    device = StandInDevice(eager=True)
    device.said = Memory(70 * GIB, 71 * GIB, 78 * GIB, 0, GIB // 2)
    with recording(native=in_c, device_events=events) as recorded:
        use(recorded.run, device, recorded.run.settings.device_events)
        loop = Loop(device)
        for number, (x, y) in enumerate(loop.batches(6)):
            if number == 3:

                def full(*_: Any) -> None:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

                hook = loop.model[2].register_forward_pre_hook(full)
                with pytest.raises(torch.OutOfMemoryError):
                    loop.update(x, y)
                hook.remove()
                device.said = device.said._replace(allocated=GIB)
            else:
                loop.update(x, y)
    told = "in forward on cuda:0, 70.00 GiB allocated, 78.00 GiB reserved, 0.50 GiB free; CUDA out of memory. Tried to"
    failed = [span for span in recorded.spans if span.attributes.get("error.type") == "torch.OutOfMemoryError"]
    assert {span.name for span in failed} == {"train.step", "forward"}
    for span in failed:
        assert span.status.description.startswith(told)


def test_of_nested_phases_the_innermost_says_where_the_memory_ran_out() -> None:
    device = StandInDevice()
    device.said = Memory(GIB, GIB, GIB, 0)
    with recording() as recorded:
        time = use(recorded.run, device)
        error = torch.OutOfMemoryError("full")
        inner = time.out_of_memory(error, FORWARD, outermost=False)
        device.said = Memory(0, GIB, GIB, 0)
        assert (
            time.out_of_memory(error, 16, outermost=True)
            == inner
            == ("in forward on cuda:0, 1.00 GiB allocated, 1.00 GiB reserved")
        )
        assert time.out_of_memory(error, 16, outermost=True).startswith("in optimizer.step on cuda:0, 0.00 GiB")


@pytest.mark.parametrize("call", ["is_on", "current", "memory", "free"])
def test_a_driver_that_fails_then_changes_nothing(in_c: bool, call: str) -> None:
    device = StandInDevice(eager=True)
    with recording(native=in_c, device_events="false") as recorded:
        use(recorded.run, device, False)
        loop = Loop(device)
        device.failing[call] = RuntimeError("no driver")
        batch = next(loop.batches(2))

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("full")

        loop.model.register_forward_pre_hook(full)
        with pytest.raises(torch.OutOfMemoryError, match=r"^full$"):
            loop.update(*batch)
    (failed,) = recorded.named("forward")
    assert failed.status.description == "full"


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
