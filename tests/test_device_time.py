"""The device's own time on phases and steps, by a stand-in device that runs when it is told to."""

from __future__ import annotations

import threading

import pytest
from support.device import PHASES, WHOLE, Loop, StandInDevice, check, duration, phases, steps, use
from support.inprocess import Recorded, recording

from otel_dl.recording.device import IN_FLIGHT
from otel_dl.recording.held import Held
from otel_dl.recording.keep import NeverHead


def turn(recorded: Recorded) -> None:
    """The builder takes a turn."""
    builder = recorded.session._builder
    assert builder is not None
    with builder._lock:
        builder._turn(float("inf"))


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
        time = use(recorded.run, device)

        def late(number: int) -> None:
            if number == 10:
                before.append(device.recorded)
                time.late_ns = 0

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
