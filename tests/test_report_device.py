"""The summary tells a wait for data from work that is queued on the device."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.device import AsynchronousDevice, use
from support.inprocess import recording
from support.loops import Points, network, seed, sgd, update
from support.validate import from_sdk
from test_report import Run, summary_of
from torch import Tensor
from torch.utils.data import DataLoader

from otel_dl.viewing.summary import summarize
from otel_dl.viewing.text import render_summary

PHASES = ("dataloader.next", "forward", "backward", "optimizer.step", "optimizer.zero_grad")


def step(run: Run, number: int, ms: tuple[float, float], phases: list[tuple[float, float | None]], **said: Any) -> None:
    """A step and its phases: the host's milliseconds and the device's."""
    attributes: dict[str, Any] = {"dl.run.id": run.run, "dl.rank": 0, "dl.step": number, "dl.keep.reason": "head",
                                  "dl.device.duration_ms": ms[1], "otel_dl.dropped": 0}  # fmt: skip
    context = run.span("train.step", number + 1, ms[0], **attributes, **said)
    for name, (host, device) in zip(PHASES, phases, strict=False):
        own: dict[str, Any] = {} if device is None else {"dl.device.duration_ms": device}
        run.span(name, number + 1, host, parent=context, **own)


def told(run: Run) -> list[str]:
    lines = render_summary(summary_of(run)).splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Host | device")), len(lines))
    more = next((i for i, line in enumerate(lines[start + 1 :]) if not line.startswith(" ")), 0)
    return lines[start : start + 1 + more]


def test_a_wait_while_the_device_is_busy_is_told_as_queued_work() -> None:
    run = Run()
    for number in range(10):
        step(run, number, (100, 100), [(60, 1), (5, 40), (5, 50), (2, 5), (1, 0)])
    assert told(run) == [
        "Host | device  data wait 60.0% | 1.0%, forward 5.0% | 40.0%, backward 5.0% | 50.0%, optimizer 2.0% | 5.0%,"
        " zero_grad 1.0% | 0.0%, other 27.0% | 4.0% (of 100 ms | 100 ms a step, the mean of 10)",
        "               while the host waits for data the device works off what was queued before, for 59.0% of the"
        " time: 1.0% of its own time is all that faster loading could save it",
    ]


def test_a_wait_that_the_device_shares_is_told_as_one() -> None:
    run = Run()
    for number in range(10):
        step(run, number, (100, 100), [(60, 60), (5, 10), (5, 20), (2, 5), (1, 0)])
    assert told(run)[1].strip() == (
        "the device waits for data as the host does: 60.0% of its own time, copies that were queued meanwhile included"
    )


def test_steps_without_the_devices_time_of_each_phase_do_not_count() -> None:
    run = Run()
    step(run, 0, (100, 100), [(60, 1), (5, 40), (5, 50)])
    step(run, 1, (100, 100), [(60, None), (5, 90), (5, 9)])
    step(run, 2, (100, 100), [])
    (times,) = [summary_of(run).device]
    assert times is not None
    assert times.steps == 1
    assert times.wait.device == pytest.approx(0.01)


def test_without_the_devices_time_nothing_is_said_of_it() -> None:
    run = Run()
    for number in range(3):
        run.step(number, 100, dataloader__next=60)
    assert summary_of(run).device is None
    assert told(run) == []


def test_the_peak_and_the_retries_of_the_allocator() -> None:
    run = Run()
    for number, said in enumerate([{"dl.memory.peak_bytes": 2**30}, {"dl.memory.peak_bytes": 3 * 2**30}, {}]):
        step(run, number, (10, 10), [(1, 1)], **said, **{"dl.memory.alloc_retries": number})
    assert (
        "Device memory  at most 3.00 GiB given out, reached in step 1; 3 allocations had to free cached blocks first"
        " (each waits for the device)"
    ) in render_summary(summary_of(run)).splitlines()


@pytest.mark.parametrize("queues_ahead", [True, False], ids=["queued work", "an idle device"])
def test_of_a_training_whose_data_is_slow_it_tells_whether_the_device_waits_too(queues_ahead: bool) -> None:
    """Reading a batch takes 8 ms, the step's work on the device 20; the host waits for it before it reads, or not."""
    device = AsynchronousDevice()

    class Slow(Points):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            time.sleep(0.002)
            return super().__getitem__(index)

    seed()
    model = network()
    optimizer = sgd(model)
    model.register_forward_pre_hook(lambda *_: device.work(20))
    with recording() as recorded:
        use(recorded.run, device)
        for x, y in DataLoader(Slow(4 * 12), batch_size=4):
            update(model, optimizer, x, y)
            if not queues_ahead:
                device.wait()
        device.wait()
    (summary,) = summarize(from_sdk(span) for span in recorded.spans)
    times = summary.device
    assert times is not None
    assert times.steps == 11, "all but the first, which is kept as warm-up"
    if queues_ahead:
        assert times.wait.device < times.wait.host / 2
        assert times.queued > times.wait.host / 2
        assert "works off what was queued before" in render_summary(summary)
    else:
        assert times.wait.device == pytest.approx(times.wait.host, rel=0.2)
        assert times.queued < 0.05
        assert "waits for data as the host does" in render_summary(summary)
