"""The end of a training job, however it comes and whatever the receiver does.

What was kept arrives where it can, the delay is bounded, the exit code is the one without us.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from support.children import INSTRUMENT, Child, Result, free_port
from support.receiver import Receiver, Span, otlp_environment, receiving

STEPS = 20

TRAINING = f"""
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.randn({4 * STEPS + 4}, 4), torch.randn({4 * STEPS + 4}, 1))
batches = iter(DataLoader(data, batch_size=4))

def train(steps):
    for _ in range(steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

train({STEPS // 2})
time.sleep(2)  # after SIGTERM there is half a second, in which gRPC can't be imported: a job has run for a while
train({STEPS // 2})
inputs, targets = next(batches)  # the last step, which comes to no end of its own
optimizer.zero_grad()
loss = model(inputs).sum()
"""

INSTRUMENTED = "import otel_dl; otel_dl.instrument()\n" + TRAINING
AFTER = "import atexit, time; atexit.register(lambda: print('AFTER', time.monotonic(), flush=True))\n"
"""Registered after the provider's own end and before ours, so it is called between them."""
A_SPAN = "\nfrom opentelemetry import trace; trace.get_tracer('user').start_span('mine').end()\n"
WITH_A_SPAN_OF_THE_USERS = AFTER + TRAINING + A_SPAN


@dataclass(frozen=True)
class End:
    last: str
    """What the script does last."""
    number: int | None
    """The signal that it is sent."""
    code: int
    error: str | None
    """`error.type` of the step that was open."""


WAIT = "print('waiting', flush=True); time.sleep(60)"
MARK = "print('END', time.monotonic(), flush=True)\n"
ENDS = {
    "return": End(MARK, None, 0, None),
    "exception": End(MARK + "raise ValueError('the user fails')", None, 1, "ValueError"),
    "sys.exit(3)": End(MARK + "sys.exit(3)", None, 3, None),
    "SIGINT": End(WAIT, signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
    "SIGTERM": End(WAIT, signal.SIGTERM, -signal.SIGTERM, None),
}
MODES = ("fine", "refused", "silent", "unavailable")
EXIT_DELAY, TERM_DELAY = 5.0, 0.5
MARGIN = 4.0
"""Seconds beyond a bound: the machine is shared, and several jobs end at once."""


def job(training: str, end: End, env: dict[str, str], command: tuple[str, ...] = (sys.executable,)) -> Result:
    child = Child(training + end.last, env, command)
    if end.number is not None:
        child.wait_for_line("waiting")
        child.send(end.number)
    return child.finish(120)


def together(jobs: list[Callable[[], Result]]) -> list[Result]:
    """Two at a time: most of their time is spent waiting."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda each: each(), jobs))


def with_receivers(
    cases: list[tuple[str, str]], run: Callable[[str, dict[str, str]], Result]
) -> tuple[list[Result], list[list[Span]]]:
    """Each case (end, receiver's mode) with a receiver of its own: how it ended, and what arrived."""
    receivers = [Receiver() for _ in cases]
    try:
        environments = [environment(mode, receiver) for (_, mode), receiver in zip(cases, receivers, strict=True)]
        results = together(
            [lambda name=name, env=env: run(name, env) for (name, _), env in zip(cases, environments, strict=True)]
        )
        return results, [receiver.spans() for receiver in receivers]
    finally:
        for receiver in receivers:
            receiver.close()


def before_the_providers(result: Result) -> float:
    """Seconds from the script's end to the moment when the provider's own end begins, or the process is dead."""
    marks = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("AFTER ")]
    return result.ending - (result.ended - marks[0]) if marks else result.ending


def delay(end: str) -> float:
    return TERM_DELAY if end == "SIGTERM" else EXIT_DELAY


def environment(mode: str, receiver: Receiver) -> dict[str, str]:
    if mode == "refused":
        return otlp_environment("grpc", free_port())
    receiver.mode(mode)
    return receiver.environment()


def steps(spans: list[Span]) -> list[Span]:
    return sorted((span for span in spans if span.name == "train.step"), key=lambda span: span.attributes["dl.step"])


QUICK = [(end, "fine") for end in ("return", "exception", "SIGTERM")] + [("return", "silent"), ("SIGTERM", "silent")]
REST = [(end, mode) for end in ENDS for mode in MODES if (end, mode) not in QUICK]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(REST, marks=pytest.mark.long)], ids=["quick", "rest"])
def test_own_sink(cases: list[tuple[str, str]]) -> None:
    """Under the SDK that `otel_dl.instrument()` sets up."""
    names = list(dict.fromkeys(name for name, _ in cases))
    plain = dict(zip(names, together([lambda name=name: job(TRAINING, ENDS[name], {}) for name in names]), strict=True))
    results, arrived = with_receivers(cases, lambda name, env: job(INSTRUMENTED, ENDS[name], env))
    print(f"\n{'end':12} {'receiver':12} {'exit code':>9} {'steps arrived':>14} {'end, s':>7} {'without us, s':>13}")
    for (name, mode), result, spans in zip(cases, results, arrived, strict=True):
        end, without, there = ENDS[name], plain[name], steps(spans)
        print(f"{name:12} {mode:12} {result.code:9} {len(there):14} {result.ending:7.2f} {without.ending:13.2f}")
        assert result.code == without.code == end.code, result
        assert result.ending < without.ending + delay(name) + MARGIN, result
        if mode == "fine":
            assert [step.attributes["dl.step"] for step in there] == [*range(STEPS + 1)]
            assert there[-1].attributes.get("error.type") == end.error
            assert len([span for span in spans if span.name == "train.startup"]) == 1
            assert len({span.span_id for span in spans}) == len(spans), "each arrives once"
        else:
            assert spans == []
            assert name == "SIGTERM" or "did not reach otlp" in result.stderr, result


QUICK_FOREIGN = [("return", "fine"), ("return", "silent"), ("SIGTERM", "silent")]
REST_FOREIGN = [(end, mode) for end in ENDS for mode in MODES if (end, mode) not in QUICK_FOREIGN]


@pytest.mark.parametrize(
    "cases", [QUICK_FOREIGN, pytest.param(REST_FOREIGN, marks=pytest.mark.long)], ids=["quick", "rest"]
)
def test_under_opentelemetry_instrument(cases: list[tuple[str, str]]) -> None:
    """Somebody else's provider has an end of its own, 10 s and more where the receiver is silent: what ours adds to it.

    The whole grows further where an export of our spans hangs already when the end comes: the provider waits for it.
    """
    quiet = {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    off = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "torch"}

    def foreign(name: str, env: dict[str, str]) -> Result:
        return job(WITH_A_SPAN_OF_THE_USERS, ENDS[name], {**quiet, **env}, INSTRUMENT)

    ours, arrived = with_receivers(cases, foreign)
    plain, _ = with_receivers(cases, lambda name, env: foreign(name, {**env, **off}))
    print(f"\n{'end':12} {'receiver':12} {'steps arrived':>14} {'end, s':>7} {'without us, s':>13} {'our end, s':>10}")
    for (name, mode), result, without, spans in zip(cases, ours, plain, arrived, strict=True):
        added = before_the_providers(result) - before_the_providers(without)
        print(f"{name:12} {mode:12} {len(steps(spans)):14} {result.ending:7.2f} {without.ending:13.2f} {added:10.2f}")
        assert result.code == without.code == ENDS[name].code, result
        assert added < delay(name) + MARGIN, result
        if mode == "fine":
            assert len(steps(spans)) == STEPS + 1


def test_sigterm_in_a_gloo_collective() -> None:
    """A rank that waits in a collective for one that does not come: dead within a second, with what was kept."""
    ranks = (
        "import datetime, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=60))\n"
    )
    waiting = End("print('waiting', flush=True); dist.all_reduce(loss)", signal.SIGTERM, -signal.SIGTERM, None)
    absent = "\nprint('here', flush=True); time.sleep(60)"
    with receiving() as receiver:
        port = str(free_port())
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", **receiver.environment()}
        other = Child(ranks + TRAINING + absent, {**group, "RANK": "1", "OTEL_DL_ENABLED": "false"})
        try:
            result = job("import otel_dl; otel_dl.instrument()\n" + ranks + TRAINING, waiting, {**group, "RANK": "0"})
        finally:
            os.kill(other.process.pid, signal.SIGKILL)
            other.finish()
        spans = receiver.spans()
    print(f"\nSIGTERM in all_reduce: {result.code} after {result.ending:.2f} s, {len(steps(spans))} steps arrived")
    assert result.code == -signal.SIGTERM, result
    assert result.ending < 3
    assert len(steps(spans)) == STEPS + 1
