"""Phases under their own names in torch's profilers and in NVTX; and profilers work as they do without otel-dl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import children
from support.inprocess import recording
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from otel_dl.recording.keep import NeverHead
from otel_dl.semconv import PHASES, SpanName

STEP = (SpanName.NEXT, SpanName.ZERO_GRAD, SpanName.FORWARD, SpanName.BACKWARD, SpanName.OPTIMIZER_STEP)


def train(steps: int, each: Callable[[int], object] = lambda step: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(steps * 2, 4)), batch_size=2)):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        each(step)


def phases(profiler: Any) -> list[str]:
    """The names of otel-dl's ranges in a profile, in order."""
    return [event.name for event in profiler.events() if event.name in PHASES]


def cpu_profile(**options: Any) -> Any:
    return profile(activities=[ProfilerActivity.CPU], **options)


@pytest.mark.parametrize("native", [True, False])
class TestTorch:
    def test_phases_are_ranges_while_a_profiler_runs(self, native: bool) -> None:
        """Also in steps that are ordinary, which C records without it."""
        profiler = cpu_profile()

        def each(step: int) -> None:
            if step == 9:
                profiler.start()
            elif step == 12:
                profiler.stop()

        with recording(NeverHead(), native=native) as recorded:
            train(20, each)
            assert recorded.run.fast.on_phase is None
        assert phases(profiler) == 3 * list(STEP)

    def test_profiled_steps_stay_ordinary(self, native: bool) -> None:
        """They become one another, and are not closed and opened anew."""
        with recording(NeverHead(), native=native) as recorded:
            run = recorded.run
            opened: list[int] = []
            original = run.open

            def counted(*args: Any, **kwargs: Any) -> Any:
                opened.append(run.number)
                return original(*args, **kwargs)

            run.open = counted
            train(400)
            before = len(opened)
            with cpu_profile():
                train(400)
        assert len(opened) - before < 200

    def test_the_spans_are_the_same(self, native: bool) -> None:
        names: list[Counter[str]] = []
        for profiled in (False, True):
            with recording(native=native) as recorded:
                if profiled:
                    with cpu_profile():
                        train(6)
                else:
                    train(6)
            names.append(Counter(span.name for span in recorded.spans if not span.name.startswith("startup.")))
        assert names[0] == names[1]

    def test_a_phase_that_raises_ends_its_range(self, native: bool) -> None:
        class Fails(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise ValueError("on purpose")

        with recording(native=native), cpu_profile() as profiler:
            with pytest.raises(ValueError, match="on purpose"):
                Fails(4, 1)(torch.randn(2, 4))
            train(1)
        assert phases(profiler) == [SpanName.FORWARD, *STEP, SpanName.NEXT]
        failed, other = (event for event in profiler.events() if event.name == SpanName.FORWARD)
        assert failed.time_range.end <= other.time_range.start

    def test_a_profiler_that_stops_within_a_phase_leaves_nothing_open(self, native: bool) -> None:
        profiler = cpu_profile()

        class Stops(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                profiler.stop()
                return super().forward(x)

        with recording(native=native) as recorded:
            profiler.start()
            Stops(4, 1)(torch.randn(2, 4)).sum().backward()
            assert recorded.run.fast.on_phase is None
            train(2)

    def test_a_dispatch_mode_of_the_users_sees_none_of_it(self, native: bool) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Seen(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()
                self.names: list[str] = []

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.names.append(str(func))
                return func(*args, **(kwargs or {}))

        def seen() -> list[str]:
            with cpu_profile(), Seen() as mode:
                nn.Linear(4, 1)(torch.randn(2, 4)).sum().backward()
            return mode.names

        without = seen()
        with recording(native=native):
            assert seen() == without

    def test_taken_out_it_leaves_torch_as_it_was(self, native: bool) -> None:
        module = torch.autograd.profiler
        before = module._run_on_profiler_start, module._run_on_profiler_stop
        with recording(native=native):
            assert module._run_on_profiler_start is not before[0]
        assert (module._run_on_profiler_start, module._run_on_profiler_stop) == before


_STACK = """
    import json, sys
    if sys.argv[1:] == ["otel_dl"]:
        import otel_dl
        otel_dl.instrument()
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True, with_modules=True) as profiler:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    profiler.export_chrome_trace("/dev/stdout")
"""


def modules_of(native: str, *arguments: str) -> Counter[str]:
    """The calls of modules in a profile with the stack, of the script under otel-dl or alone."""
    ran = children.run(
        "import os, tempfile; os.chdir(tempfile.mkdtemp())\n" + children.textwrap.dedent(_STACK).replace(
            'profiler.export_chrome_trace("/dev/stdout")',
            'profiler.export_chrome_trace("p.json"); print("PROFILE", open("p.json").read().replace("\\n", " "))',
        ).replace("sys.argv[1:]", repr(list(arguments))),
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_DL_NATIVE": native},
    )  # fmt: skip
    assert ran.code == 0, str(ran)
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("PROFILE "))
    names = [event["name"] for event in json.loads(line.removeprefix("PROFILE "))["traceEvents"]]
    return Counter(name for name in names if name.startswith("nn.Module: "))


@pytest.mark.parametrize("native", ["true", "false"])
def test_a_profile_with_the_stack_shows_every_module_as_without_otel_dl(native: str) -> None:
    alone = modules_of(native)
    assert alone["nn.Module: Linear_0"] == 5
    assert modules_of(native, "otel_dl") == alone


_NVTX = """
    import otel_dl
    otel_dl.instrument()
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(6, 4)), batch_size=2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    otel_dl.uninstrument()
"""


class TestNvtx:
    @pytest.mark.skipif(
        not hasattr(torch._C, "_nvtx") or shutil.which("gcc") is None, reason="a CUDA build of torch; gcc"
    )
    def test_steps_and_phases_are_what_a_tool_is_told(self, tmp_path: Path) -> None:
        source = Path(__file__).with_name("scripts") / "nvtx_listener.c"
        library, heard = tmp_path / "listener.so", tmp_path / "heard"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
        environment = {
            "OTEL_TRACES_EXPORTER": "none",
            "NVTX_INJECTION64_PATH": str(library),
            "NVTX_LISTENER_FILE": str(heard),
        }
        ran = children.run(_NVTX, {**environment, "OTEL_DL_NVTX": "true"})
        assert ran.code == 0, str(ran)
        step = [line for name in STEP[1:] for line in (f"push {name}", "pop")]
        expected = ["push otel_dl", "pop"]  # whether there is anybody
        for number in range(3):
            ended = ["end"] if number else []
            expected += [*ended, "start train.step", "push dataloader.next", "pop", *step]
        # The next() that finds no more batch ends the last step, and the one that it began.
        expected += ["end", "start train.step", "push dataloader.next", "pop", "end"]
        assert heard.read_text().splitlines() == expected

        heard.unlink()
        assert children.run(_NVTX, environment).code == 0
        assert not heard.exists()

    @pytest.mark.skipif(hasattr(torch._C, "_nvtx"), reason="a build of torch without CUDA")
    def test_a_torch_without_nvtx_is_told(self) -> None:
        ran = children.run(_NVTX, {"OTEL_TRACES_EXPORTER": "none", "OTEL_DL_NVTX": "true"})
        assert ran.code == 0, str(ran)
        assert ran.stderr.count("OTEL_DL_NVTX=true has no effect here") == 1
