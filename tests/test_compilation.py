"""What torch.compile compiles in a run, why again, and what it costs a call: nothing.

`eager` and `aot_eager` compile with torch's own dynamo and AOTAutograd, and no C++.
"""

from __future__ import annotations

import contextlib
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support import children
from support.inprocess import Recorded, recording
from support.loops import sgd
from support.phases import lines
from support.validate import from_sdk, validate
from torch import Tensor, nn

import otel_dl
from otel_dl.patches.compilation import dynamo
from otel_dl.recording.keep import NeverHead
from otel_dl.viewing.summary import summarize
from otel_dl.viewing.text import render_summary

OURS = str(Path(otel_dl.__file__).parent / "patches" / "compilation")
COMPILES = "torch.compile"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    """A module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu().square().mean()


class Broken(Net):
    """Two graph breaks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        x = x.relu()
        torch._dynamo.graph_break()
        return x.square().mean()


CONVOLUTION = """
import torch
torch._logging.set_logs(recompiles=True, guards=True)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.layer(x)
        if y.shape[0] > 16:
            y = y + 1
        return torch.nn.functional.conv2d(y, torch.ones(1, 4, 1, 1))

net = torch.compile(Net(), backend="aot_eager", dynamic=True)
for rows in (4, 5, 20):
    net(torch.randn(rows, 3, 8, 8))
"""


def train(model: Any, rows: list[int], before: Callable[[int], None] = lambda number: None) -> None:
    """A step for each entry: a batch of so many rows."""
    optimizer = sgd(model)
    for number, count in enumerate(rows):
        optimizer.zero_grad()
        before(number)
        model(torch.ones(count, 6)).backward()
        optimizer.step()


def step(recorded: Recorded, number: int) -> Any:
    return next(span for span in recorded.named("train.step") if span.attributes["dl.step"] == number)


def compiled_in(recorded: Recorded, parent: Any) -> list[Any]:
    """The compilations in a trace, by start."""
    trace_id = parent.context.trace_id
    found = [span for span in recorded.named(COMPILES) if span.context.trace_id == trace_id]
    return sorted(found, key=lambda span: span.start_time)


def numbers(spans: list[Any]) -> list[str]:
    """What was compiled, without torch's number of the frame: `Net.forward [./1]`."""
    return [re.sub(r"\[\d+/", "[./", span.attributes["dl.compile.name"]) for span in spans]


def check(recorded: Recorded) -> None:
    assert validate([from_sdk(span) for span in recorded.spans], whole=False) == []


class TestWhatIsCompiled:
    def test_the_first_call_compiles_the_forward_and_its_backward_when_that_is_needed(self) -> None:
        with recording() as recorded:
            train(torch.compile(Net(), backend="aot_eager"), [4, 4])
        first, second = lines(recorded.spans, "train.step")
        assert first == "zero_grad forward(torch.compile) backward(torch.compile) optimizer"
        assert second == "zero_grad forward backward optimizer"
        forward, backward = compiled_in(recorded, step(recorded, 0))
        assert numbers([forward, backward]) == ["Net.forward [./0]", "Net.forward [./0] backward"]
        for span in (forward, backward):
            assert span.attributes["is_warmup"] is True
            assert span.attributes["dl.compile.recompiled"] is False
            assert span.attributes["code.function.name"] == "Net.forward"
            assert span.attributes["code.file.path"] == __file__
            assert span.attributes["code.line.number"] == Net.forward.__code__.co_firstlineno
            assert "dl.compile.cache" not in span.attributes  # this backend has none
        assert forward.attributes["dl.compile.graph_breaks"] == 0
        check(recorded)

    def test_another_shape_compiles_again_and_says_torchs_reason(self) -> None:
        """In a step that nobody keeps otherwise."""
        with recording(NeverHead()) as recorded:
            train(torch.compile(Net(), backend="eager"), [4, 4, 4, 7, 9])
        kept = {span.attributes["dl.step"]: span.attributes["dl.keep.reason"] for span in recorded.named("train.step")}
        assert kept == {0: "warmup", 3: "warmup"}
        assert step(recorded, 3).attributes["is_warmup"] is True
        (again,) = compiled_in(recorded, step(recorded, 3))
        assert numbers([again]) == ["Net.forward [./1]"]
        assert again.attributes["dl.compile.recompiled"] is True
        assert again.attributes["dl.compile.reason"].endswith("size mismatch at index 0. expected 4, actual 7")
        check(recorded)

    def test_the_reason_is_the_one_in_torchs_own_metrics(self) -> None:
        from torch._dynamo.utils import get_compilation_metrics

        if not hasattr(torch.compiler, "set_stance"):
            pytest.skip("torch 2.4 has no reasons in its metrics")
        with recording() as recorded:
            train(torch.compile(Net(), backend="eager"), [4, 7])
            metrics: Any = get_compilation_metrics()[-1]
        (again,) = compiled_in(recorded, step(recorded, 1))
        assert again.attributes["dl.compile.reason"] == metrics.recompile_reason
        assert again.attributes["dl.compile.name"].startswith(f"Net.forward [{metrics.compile_id}]")

    def test_the_reason_and_the_guards_of_a_convolution_name_torchs_line(self, tmp_path: Path) -> None:
        """Each in a process: reasons and guards as torch logs them, without what differs from process to process."""

        def logged(setup: str) -> list[str]:
            path = tmp_path / "script.py"
            path.write_text(CONVOLUTION)
            script = f"{setup}; import runpy; runpy.run_path({str(path)!r})"
            result = children.run(script, env={"OTEL_TRACES_EXPORTER": "none", "PYTHONHASHSEED": "0"})
            assert result.code == 0, result
            found = re.findall(r"\[__(?:guards|recompiles)\].*", result.stderr)
            return sorted(re.sub(r"\d{8,}|type=<.*?>| +$", "", line) for line in found if "latency" not in line)

        without = logged("pass")
        assert any("size()[0]" in line and "[__recompiles]" in line for line in without)
        assert logged("import otel_dl; otel_dl.instrument()") == without

    def test_a_value_that_is_a_constant_to_the_graph_compiles_again(self) -> None:
        @torch.compile(backend="eager")
        def scale(x: Tensor, by: str) -> Tensor:
            return x * len(by)

        with recording() as recorded:
            train(Net(), [4, 4], lambda number: scale(torch.ones(2), "a" * (number + 1)))
        (again,) = compiled_in(recorded, step(recorded, 1))
        reason = again.attributes["dl.compile.reason"]
        assert "by" in reason
        assert "\n" not in reason
        assert "  " not in reason

    def test_graph_breaks_are_those_that_torch_explains(self) -> None:
        explained = torch._dynamo.explain(Broken())(torch.ones(4, 6))
        torch.compiler.reset()
        with recording() as recorded:
            train(torch.compile(Broken(), backend="eager"), [4])
        spans = compiled_in(recorded, step(recorded, 0))
        assert len(spans) == explained.graph_count == 3
        assert [span.attributes["dl.compile.graph_breaks"] for span in spans] == [1, 1, 0]
        assert explained.graph_break_count == 2
        check(recorded)

    def test_fullgraph(self) -> None:
        with recording() as recorded:
            train(torch.compile(Net(), backend="eager", fullgraph=True), [4, 4])
        (span,) = recorded.named(COMPILES)
        assert span.attributes["dl.compile.graph_breaks"] == 0

    def test_a_compiled_function_in_a_compiled_function_is_one_compilation(self) -> None:
        inner = torch.compile(lambda x: x + 1, backend="eager")
        outer = torch.compile(lambda x: inner(x) * 2, backend="eager")
        with recording() as recorded:
            train(Net(), [4], lambda number: outer(torch.ones(2)))
        assert len(recorded.named(COMPILES)) == 1

    def test_after_a_reset_everything_is_cold(self) -> None:
        with recording() as recorded:
            train(
                torch.compile(Net(), backend="aot_eager"),
                [4, 4, 4],
                lambda number: torch._dynamo.reset() if number == 1 else None,
            )
        told = lines(recorded.spans, "train.step")
        assert told[0] == told[1] == "zero_grad forward(torch.compile) backward(torch.compile) optimizer"
        assert told[2] == "zero_grad forward backward optimizer"
        assert not any(span.attributes["dl.compile.recompiled"] for span in recorded.named(COMPILES))

    @pytest.mark.parametrize("native", [True, False])
    def test_a_module_of_the_users_own_compiles_as_without(self, native: bool) -> None:
        """By `torch.compile(module)` and by `module.compile()`."""
        from torch._dynamo.utils import counters

        def counted() -> dict[str, Any]:
            torch.compiler.reset()
            counters.clear()
            train(torch.compile(Broken(), backend="eager"), [4, 4, 7])
            model = Broken()
            model.compile(backend="eager")
            train(model, [4])
            return {
                "frames": dict(counters["frames"]),
                "graphs": dict(counters["stats"]),
                "breaks": sum(counters["graph_break"].values()),
            }

        without = counted()
        with recording(native=native):
            assert counted() == without


class TestWhereItIsCompiled:
    def test_before_the_loop_it_is_the_runs(self) -> None:
        scale = torch.compile(lambda x: x * 2, backend="eager")
        with recording() as recorded:
            scale(torch.ones(2))
            train(Net(), [4])
        assert "torch.compile" in lines(recorded.spans, "train.startup")[0].split()
        assert compiled_in(recorded, step(recorded, 0)) == []
        check(recorded)

    def test_in_a_thread_that_does_not_train_it_is_the_runs(self) -> None:
        """The thread compiles while a step is open."""
        scale = torch.compile(lambda x: x * 2, backend="eager")

        def elsewhere(number: int) -> None:
            if number == 1:
                thread = threading.Thread(target=scale, args=(torch.ones(2),))
                thread.start()
                thread.join()

        with recording() as recorded:
            train(Net(), [4, 4, 4], elsewhere)
        assert "torch.compile" in lines(recorded.spans, "train.startup")[0].split()
        assert step(recorded, 1).attributes["is_warmup"] is False
        assert compiled_in(recorded, step(recorded, 1)) == []

    def test_evaluation_that_compiles_makes_no_step_warm_up(self) -> None:
        model = Net()
        compiled: Any = torch.compile(model, backend="eager")
        loader = torch.utils.data.DataLoader(torch.ones(8, 6), batch_size=4)
        optimizer = sgd(model)
        with recording() as recorded:
            for _ in range(2):
                model.train()
                for batch in loader:
                    optimizer.zero_grad()
                    compiled(batch).backward()
                    optimizer.step()
                model.eval()
                with torch.no_grad():
                    for batch in loader:
                        compiled(batch)
        assert [span.attributes["is_warmup"] for span in recorded.named("train.step")] == [True, False, False, False]
        first, second = lines(recorded.spans, "train.eval")
        assert first == "next forward(torch.compile) next forward"
        assert second == "next forward next forward"
        check(recorded)


class TestFailures:
    def test_an_exception_of_the_backends_reaches_the_user_as_without(self) -> None:
        def backend(graph: Any, inputs: Any) -> Any:
            raise ValueError("this backend compiles nothing")

        def outcome() -> tuple[Any, ...]:
            torch.compiler.reset()
            with pytest.raises(Exception, match="compiles nothing") as raised:
                torch.compile(Net(), backend=backend)(torch.ones(4, 6))
            error = raised.value
            return type(error), str(error), type(error.__cause__), repr(error.__context__)

        without = outcome()
        with recording() as recorded:
            train(Net(), [4])
            assert outcome() == without
            train(Net(), [4])
        (span,) = recorded.named(COMPILES)
        assert not span.status.is_unset
        assert span.attributes["error.type"].endswith(without[0].__name__)
        assert "compiles nothing" in span.status.description
        check(recorded)

    def test_a_graph_break_under_fullgraph(self) -> None:
        with recording() as recorded:
            train(Net(), [4])
            with pytest.raises(torch._dynamo.exc.Unsupported):
                torch.compile(Broken(), backend="eager", fullgraph=True)(torch.ones(4, 6))
        (span,) = recorded.named(COMPILES)
        assert span.attributes["error.type"] == "torch._dynamo.exc.Unsupported"

    @pytest.mark.parametrize("name", ["_counts", "Function", "Compilation", "_told_again"])
    def test_a_fault_of_ours_leaves_the_compilation_alone(
        self, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with recording() as recorded:
            monkeypatch.setattr(dynamo, name, operator.concat)  # which raises TypeError whatever it is called with
            train(torch.compile(Net(), backend="aot_eager"), [4, 7, 9])
            monkeypatch.undo()
            torch.compiler.reset()
            scale = torch.compile(lambda x: x * 2, backend="eager")
            scale(torch.ones(2))
        assert len(recorded.named("train.step")) == 3
        assert not any("<lambda>" in span.attributes["dl.compile.name"] for span in recorded.named(COMPILES))
        said = [record.getMessage() for record in caplog.records if record.name.startswith("otel_dl")]
        assert len([words for words in said if "fault of ours in the instrumentation of compilation" in words]) == 1

    def test_at_torchs_limit_the_span_says_that_it_gave_up(self) -> None:
        with recording() as recorded, torch._dynamo.config.patch(cache_size_limit=1):
            train(torch.compile(Net(), backend="eager", dynamic=False), [4, 5, 6])
        spans = recorded.named(COMPILES)
        assert [span.status.is_unset for span in spans] == [True, False]
        assert spans[1].attributes["dl.compile.recompiled"] is True


class TestWhatItCosts:
    def test_a_compiled_call_runs_no_line_of_this(self) -> None:
        """Phases are recorded as ever."""

        @torch.compile(backend="aot_eager")
        def compute(x: Tensor) -> Tensor:
            return (x * x).sum()

        x = torch.ones(4, 6, requires_grad=True)
        ran: list[str] = []

        def watch(frame: FrameType, event: str, argument: Any) -> None:
            ran.append(frame.f_code.co_filename)

        with recording():
            train(Net(), [4])
            compute(x).backward()
            sys.setprofile(watch)
            try:
                compute(x)
            finally:
                sys.setprofile(None)
        assert ran
        assert [file for file in ran if file.startswith(OURS)] == []

    def test_a_compiler_that_the_script_does_not_import_is_not_imported(self) -> None:
        """torch 2.15 imports it with the first optimizer."""
        script = """
            import torch
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(4, 2)).sum().backward()
                optimizer.step()
            import sys
            of_it = ("torch._dynamo", "torch._inductor", "triton")
            print(sorted(name for name in sys.modules if name.startswith(of_it)))
            """
        instrument = "            import otel_dl; otel_dl.instrument()" + script
        without, result = children.run(script), children.run(instrument, env={"OTEL_TRACES_EXPORTER": "none"})
        assert result.stdout == without.stdout, result

    def test_with_dynamo_disabled_nothing_is_compiled(self) -> None:
        script = f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            import torch
            from support.inprocess import recording
            with recording() as recorded:
                model = torch.compile(torch.nn.Linear(2, 1), backend="eager")
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(3):
                    optimizer.zero_grad()
                    model(torch.ones(4, 2)).sum().backward()
                    optimizer.step()
            print(len(recorded.named("train.step")), len(recorded.named("torch.compile")))
            """
        result = children.run(script, env={"TORCHDYNAMO_DISABLE": "1"})
        assert result.stdout.split() == ["3", "0"], result

    def test_switching_off_puts_torchs_own_back(self) -> None:
        from torch._dynamo import convert_frame
        from torch._functorch._aot_autograd import runtime_wrappers

        def stands() -> list[Any]:
            reasons = [value for name, value in vars(convert_frame).items() if "recompilation_reason" in name]
            return [convert_frame._compile, runtime_wrappers.track_graph_compiling, *reasons]

        before = stands()
        with recording():
            assert all(now is not then for now, then in zip(stands(), before, strict=True))
        assert all(now is then for now, then in zip(stands(), before, strict=True))

    def test_torchs_log_of_the_callers_is_as_without(self) -> None:
        from torch._dynamo.utils import get_compilation_metrics

        if not hasattr(torch.compiler, "set_stance"):
            pytest.skip("torch 2.4 keeps no stacks")

        def stack() -> Any:
            torch.compiler.reset()
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
            return get_compilation_metrics()[-1].stack_trace

        stacks: list[Any] = []
        for session in (contextlib.nullcontext(), recording()):
            with session:
                stacks.append(stack())
        assert stacks[0]
        assert stacks[0] == stacks[1]


class TestSummary:
    def summary(self, recorded: Recorded) -> tuple[Any, str]:
        (summary,) = summarize(from_sdk(span) for span in recorded.spans)
        return summary.compilations, render_summary(summary)

    def test_it_says_what_was_compiled_how_long_and_why_again(self) -> None:
        with recording() as recorded:
            train(torch.compile(Broken(), backend="aot_eager"), [4, 4, 7])
        compilations, text = self.summary(recorded)
        spans = recorded.named(COMPILES)
        (function,) = compilations.functions
        assert (function.name, function.file) == ("Broken.forward", __file__)
        assert compilations.compiled.spans == function.count == len(spans)
        assert compilations.compiled.time_ns == sum(span.end_time - span.start_time for span in spans)
        assert compilations.recompilations == function.recompilations == 3
        assert compilations.graph_breaks == function.graph_breaks == 4
        rows = [line for line in text.splitlines() if line.startswith("Compil")]
        assert rows[0].startswith(f"Compilation    {len(spans)} by torch.compile, ")
        assert rows[0].endswith(" in all (3 of them again; 4 graph breaks)")
        assert rows[1].startswith(f"Compiled       Broken.forward ({__file__}): {len(spans)}, ")
        assert "3 again, because: tensor " in rows[1]
        assert "size mismatch at index 0. expected 4, actual 7" in rows[1]

    def test_of_a_run_that_compiles_nothing_it_says_nothing(self) -> None:
        with recording() as recorded:
            train(Net(), [4])
        compilations, text = self.summary(recorded)
        assert compilations.compiled.spans == 0
        assert "Compil" not in text


@pytest.mark.long
def test_inductors_cache_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, forgotten by dynamo, compiled again: inductor has it in its folder."""
    import torch._inductor.config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with recording() as recorded, torch._inductor.config.patch(fx_graph_cache=True):
        model = Net()
        compiled = torch.compile(model)
        train(compiled, [4, 4, 4], lambda number: torch._dynamo.reset() if number == 1 else None)
    assert {span.attributes["dl.compile.cache"] for span in compiled_in(recorded, step(recorded, 0))} == {"miss"}
    assert {span.attributes["dl.compile.cache"] for span in compiled_in(recorded, step(recorded, 1))} == {"hit"}
    assert compiled_in(recorded, step(recorded, 2)) == []
    check(recorded)
