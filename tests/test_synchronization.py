"""The host's waits for a device: what is told of them, and that nothing else can tell they are looked for.

There is no GPU here: the device is a stand-in that torch takes for an accelerator (`support/accelerator.py`).
"""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import json
import operator
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import children
from support.convolving import is_followed
from support.inprocess import Recorded, recording
from support.validate import from_sdk, validate
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import otel_dl
from otel_dl.patches.synchronization import functions, loader, split, tensor, waiting
from otel_dl.recording import native
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.lane import NEXT

SCRIPTS = Path(__file__).parent / "scripts"
HAS_DEVICE = hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")
needs_device = pytest.mark.skipif(not HAS_DEVICE, reason="before 2.10 torch takes no device that is written in Python")
IN_C = [True, False] if native.hooks is not None else [False]


@functools.cache
def waited(form: str) -> dict[str, Any]:
    done = children.run(
        f"import runpy, sys; sys.argv = ['waits.py', {form!r}]\n"
        f"runpy.run_path({str(SCRIPTS / 'waits.py')!r}, run_name='__main__')",
        {"PYTHONPATH": os.pathsep.join((str(children.SOURCE), str(Path(__file__).parent)))},
    )
    assert done.code == 0, done
    assert "a fault of ours" not in done.stderr, done
    return json.loads(done.stdout)


@needs_device
@pytest.mark.parametrize("form", ["c", "python"])
class TestEveryWay:
    def test_each_wait_is_a_span_with_operation_device_and_the_users_line(self, form: str) -> None:
        result = waited(form)["long"]
        assert result["problems"] == []
        for done, step in zip(result["truth"], result["steps"], strict=True):
            (wait,) = step["waits"]
            assert wait["dl.sync.op"] == done["op"]
            assert wait["dl.device"] == "standin:0"
            assert os.path.basename(wait["code.file.path"]) == "waits.py"
            assert wait["code.line.number"] == done["line"], done
            assert wait["code.function.name"]
            assert step["sums"] == {}, "it is one span, and not those within it"

    def test_it_lasts_as_long_as_the_device_made_it_wait(self, form: str) -> None:
        for done, step in zip(waited(form)["long"]["truth"], waited(form)["long"]["steps"], strict=True):
            (wait,) = step["waits"]
            assert done["waits"], "the stand-in had to be waited for"
            assert all(wait["start"] <= start <= end <= wait["end"] for start, end in done["waits"]), done

    def test_where_torch_itself_reads_a_value_the_line_is_the_users(self, form: str) -> None:
        """Of clip_grad_norm_ and of GradScaler: the call, and no file of torch's."""
        result = waited(form)["in torch"]
        assert [done["op"] for done in result["truth"]] == ["Tensor.__bool__", "Tensor.item", "Tensor.item"]
        for done, step in zip(result["truth"], result["steps"], strict=True):
            (wait,) = step["waits"]
            assert wait["dl.sync.op"] == done["op"]
            assert (os.path.basename(wait["code.file.path"]), wait["code.line.number"]) == ("waits.py", done["line"])
            assert len(done["waits"]) == 1, "the stand-in had to be waited for"
            assert all(wait["start"] <= start <= end <= wait["end"] for start, end in done["waits"]), done

    def test_those_that_copy_are_to_say_how_long_they_copied_by_the_stream_of_the_device(self, form: str) -> None:
        copying = {*tensor.READ, "to", "copy_", "new_tensor"}
        marks = waited(form)["marks"]
        truth = waited(form)["long"]["truth"]
        assert {done["op"] for done in truth} >= {"Tensor.to", "Tensor.copy_", "Tensor.cpu", "Tensor.nonzero"}
        for done in truth:
            module, _, name = done["op"].rpartition(".")
            copies = name in (copying if module == "Tensor" else {*functions.MADE, "is_nonzero"})
            assert marks[str(done["line"])] == ["standin"] * copies, done
        for done in waited(form)["quiet"]["truth"]:
            assert marks[str(done["line"])] == [], done

    def test_short_ones_are_summed_up(self, form: str) -> None:
        for step in waited(form)["short"]["steps"]:
            assert step["waits"] == []
            assert step["sums"]["dl.sync.summed"] == 1
            assert 0 < step["sums"]["dl.sync.summed_ms"] < 60_000

    def test_what_does_not_wait_is_none(self, form: str) -> None:
        assert {done["op"] for done in waited(form)["quiet"]["truth"]} >= {"a cast", "a slice", "on the CPU"}
        for done, step in zip(waited(form)["quiet"]["truth"], waited(form)["quiet"]["steps"], strict=True):
            assert (step["waits"], step["sums"]) == ([], {}), done

    def test_switched_off_there_are_none(self, form: str) -> None:
        for step in waited(form)["off"]["steps"]:
            assert (step["waits"], step["sums"]) == ([], {})

    def test_an_exception_passes_and_is_told(self, form: str) -> None:
        result = waited(form)["failed"]
        assert result["raised"] == ["RuntimeError: the device is gone", "True"]
        (wait,) = result["steps"][0]["waits"]
        assert (wait["dl.sync.op"], wait["error.type"], wait["ok"]) == ("Tensor.item", "RuntimeError", False)

    def test_each_print_is_one_span(self, form: str) -> None:
        result = waited(form)["printed"]
        assert result["waits"] > 3, "the stand-in was asked for many values"
        assert [wait["dl.sync.op"] for wait in result["steps"][0]["waits"]] == ["Tensor.__repr__"] * 2

    def test_a_subclass_is_one_span_though_its_methods_fire_twice(self, form: str) -> None:
        result = waited(form)["subclass"]
        assert result["functions"] == ["item"]
        assert [wait["dl.sync.op"] for wait in result["steps"][0]["waits"]] == ["Tensor.item"]

    def test_deep_also_tells_of_what_only_cpp_knows(self, form: str) -> None:
        result = waited(form)["deep"]
        assert [wait["dl.sync.op"] for wait in result["steps"][0]["waits"]] == ["cudaStreamSynchronize"]
        (wait,) = result["steps"][0]["waits"]
        assert wait["start"] == wait["end"]
        assert "dl.sync.wait_ms" not in wait
        assert [wait["dl.sync.op"] for wait in result["steps"][1]["waits"]] == ["Tensor.item"], "and not what is in it"

    def test_another_threads_waits_are_none_of_the_step(self, form: str) -> None:
        assert [step["waits"] for step in waited(form)["elsewhere"]["steps"]] == [[]]


def step_with(recorded: Recorded, work: Callable[[], object]) -> list[Any]:
    """The waits of a step in which `work` was done."""
    before = len(recorded.named("cuda.synchronize"))
    with otel_dl.step():
        work()
    recorded.finish()
    assert validate([from_sdk(span) for span in recorded.spans], whole=False) == []
    return recorded.named("cuda.synchronize")[before:]


class Alarm(BaseException):
    """Raised by a signal handler of the user's."""


def alarm_at(reading: int, clock: Callable[[], int]) -> Callable[[], int]:
    """`clock`, and at this reading of it the alarm."""
    readings = itertools.count()

    def read() -> int:
        if next(readings) == reading:
            raise Alarm
        return clock()

    return read


class TestWaitingAlone:
    """`synchronize`, of a module, a stream and an event: what is called is a stand-in, as there is no driver."""

    @pytest.fixture(autouse=True)
    def _driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def synchronize(device: Any = None) -> str:
            return "torch's own"

        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: "an event's")

    @pytest.mark.parametrize(
        ("call", "device"),
        [
            (lambda: torch.cuda.synchronize(), "cuda:3"),
            (lambda: torch.cuda.synchronize(1), "cuda:1"),
            (lambda: torch.cuda.synchronize("cuda:2"), "cuda:2"),
            (lambda: torch.cuda.synchronize(device=torch.device("cuda")), "cuda:3"),
        ],
    )
    def test_all_of_it_is_waiting(self, call: Callable[[], object], device: str) -> None:
        returned: list[object] = []
        with recording(sync_min_ms=0) as recorded:
            (wait,) = step_with(recorded, lambda: returned.append(call()))
        assert returned == ["torch's own"]
        said = wait.attributes
        assert (said["dl.sync.op"], said["dl.device"]) == ("torch.cuda.synchronize", device)
        assert said["dl.sync.wait_ms"] == (wait.end_time - wait.start_time) / 1e6
        assert "dl.sync.copy_ms" not in said
        assert said["code.file.path"] == __file__

    @pytest.mark.parametrize("reading", [0, 1])
    def test_after_the_users_alarm_others_are_seen(self, reading: int, monkeypatch: pytest.MonkeyPatch) -> None:
        with recording(sync_min_ms=0) as recorded:
            with monkeypatch.context() as patch:
                patch.setattr(waiting, "clock", alarm_at(reading, waiting.clock))
                with pytest.raises(Alarm):
                    torch.cuda.synchronize()
            assert len(step_with(recorded, torch.cuda.synchronize)) == 1

    def test_an_events(self) -> None:
        event = torch.cuda.Event.__new__(torch.cuda.Event) if torch.cuda.is_available() else SimpleNamespace()
        with recording(sync_min_ms=0) as recorded:
            (wait,) = step_with(recorded, lambda: torch.cuda.Event.synchronize(event))
        assert wait.attributes["dl.sync.op"] == "torch.cuda.Event.synchronize"


def test_without_a_driver_synchronize_raises_as_ever() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises((RuntimeError, AssertionError)) as without:
        torch.cuda.synchronize()
    with recording() as recorded:

        def work() -> None:
            with pytest.raises((RuntimeError, AssertionError)) as within:
                torch.cuda.synchronize()
            assert (type(within.value), str(within.value)) == (type(without.value), str(without.value))

        (wait,) = step_with(recorded, work)
    assert wait.attributes["error.type"]


# Nobody can tell.


NAMES = [*tensor.READ, *tensor.COMPUTED, "cuda", "to", "copy_", "new_tensor"]
FUNCTIONS = {(call.operation, name): getattr(owner, name) for owner, name, call in functions.calls(torch._C)}
PYTHONS = ("__format__", "__repr__", "unique", "unique_consecutive")
"""Functions of torch's that are written in Python."""


@pytest.mark.parametrize("in_c", IN_C)
class TestUnseen:
    @pytest.fixture(autouse=True)
    def _recording(self, in_c: bool) -> Iterator[None]:
        self.originals = {name: getattr(torch.Tensor, name) for name in NAMES}
        self.static = {name: vars(torch.Tensor).get(name) for name in NAMES}
        with recording(native=in_c, sync="deep" if not in_c else "on") as recorded:
            self.recorded = recorded
            yield
        assert {name: getattr(torch.Tensor, name) for name in NAMES} == self.originals

    def test_in_the_dict_of_the_class_stands_only_what_can_be_nowhere_else(self, in_c: bool) -> None:
        changed = {name for name in NAMES if vars(torch.Tensor).get(name) is not self.static[name]}
        assert changed == ({name for name in NAMES if name in PYTHONS} if in_c else set(NAMES))

    @pytest.mark.parametrize("name", ["item", "to", "cpu", "nonzero"])
    def test_what_is_bound_to_any_tensor_is_of_the_same_kind(self, name: str, in_c: bool) -> None:
        if not in_c:
            pytest.skip("in Python a tensor on a device is bound by a method of ours")
        bound = [getattr(torch.ones(2, device=device), name) for device in ("cpu", "meta")]
        self.recorded.finish()
        for within in bound:
            without = getattr(within.__self__, name)
            assert (type(within), within.__qualname__) == (type(without), without.__qualname__)

    def test_what_was_bound_before_it_is_taken_back_works_on(self) -> None:
        item, to, meta = torch.ones(()).item, torch.ones(2).to, torch.ones((), device="meta").item
        self.recorded.finish()
        assert item() == 1.0
        assert to(torch.float64).dtype == to(dtype=torch.float64).dtype == torch.float64
        with pytest.raises(RuntimeError):
            meta()

    def test_to_the_class_each_is_the_object_that_it_was(self) -> None:
        for _ in range(1000):  # the interpreter looks names up in another way once it knows them
            found = torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.to
            wanted = self.originals["item"], self.originals["__int__"], self.originals["to"]
            assert all(map(operator.is_, found, wanted))
        assert all(getattr(torch.Tensor, name) is original for name, original in self.originals.items())
        assert all(
            getattr(nn.Parameter, name) is original for name, original in self.originals.items() if name != "__repr__"
        )

    def test_they_are_pickled_copied_named_and_documented_as_without(self) -> None:
        for name, original in self.originals.items():
            method = getattr(torch.ones(()), name)
            assert pickle.loads(pickle.dumps(original)) is original
            assert copy.deepcopy(method.__func__ if hasattr(method, "__func__") else original) is not None
            assert method.__name__ == name
            assert method.__doc__ == original.__doc__
        moved = pickle.loads(pickle.dumps(torch.ones(2).item))
        assert type(moved) is type(torch.ones(2).item)

    def test_functions_of_torch_are_followed_and_the_objects_that_they_were(self, in_c: bool) -> None:
        def shown() -> list[Any]:
            return [
                (id(each), hash(each), repr(each), dir(each), each.__reduce__(), torch.overrides.resolve_name(each))
                for each in FUNCTIONS.values()
            ]

        assert len(FUNCTIONS) > 30
        assert [name for (name, _), each in FUNCTIONS.items() if is_followed(each) != in_c] == []
        assert all(pickle.loads(pickle.dumps(each)) is copy.deepcopy(each) is each for each in FUNCTIONS.values())
        assert torch.nonzero is FUNCTIONS["torch.nonzero", "nonzero"] is torch._C._VariableFunctions.nonzero
        assert torch.linalg.inv is FUNCTIONS["torch.linalg.inv", "linalg_inv"]
        assert nn.functional.one_hot is FUNCTIONS["torch.nn.functional.one_hot", "one_hot"]
        within = shown()
        self.recorded.finish()
        assert [name for (name, _), each in FUNCTIONS.items() if is_followed(each)] == []
        assert shown() == within

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda: torch.nonzero(),
            lambda: torch.nonzero(torch.ones(2), nothing=1),
            lambda: torch.nonzero("no tensor"),
            lambda: torch.where("no tensor"),
            lambda: torch.tensor(),
            lambda: torch.tensor([1], device="nowhere"),
            lambda: torch.tensor(["a"], device="meta"),
            lambda: torch.equal(torch.ones(2, device="meta"), torch.ones(2)),
            lambda: torch.nonzero(torch.ones(2, device="meta").bool(), out=1),
            lambda: torch.linalg.inv(torch.ones(2, 2)),
            lambda: torch.repeat_interleave(),
            lambda: torch.repeat_interleave(torch.ones(2, device="meta"), repeats="often"),
            lambda: nn.functional.one_hot(torch.ones(2, device="meta")),
            lambda: nn.functional.one_hot(torch.ones(2, device="meta").long(), num_classes=torch.ones(2)),
            lambda: torch.linalg.inv_ex(torch.ones(2, 2, device="meta"), check_errors=torch.ones(2)),
            lambda: torch.ones(2, device="meta").to("cpu", non_blocking=torch.ones(2)),
        ],
    )
    def test_wrong_calls_of_functions_raise_what_they_raised(
        self, wrong: Callable[[], object], caplog: pytest.LogCaptureFixture
    ) -> None:
        def raised() -> tuple[type[BaseException], str]:
            with pytest.raises(Exception) as caught, otel_dl.step():  # noqa: PT011
                wrong()
            return type(caught.value), str(caught.value)

        within = raised()
        assert not caplog.records, "nor are they a fault of ours"
        self.recorded.finish()
        with pytest.raises(within[0]) as without:
            wrong()
        assert str(without.value) == within[1]

    def test_a_tensor_on_the_cpu_has_its_own_method(self) -> None:
        assert type(torch.ones(()).item) is type(self.originals["item"].__get__(torch.ones(())))

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda x: x.item(1),
            lambda x: torch.ones(3).item(),
            lambda x: x.to("nowhere"),
            lambda x: x.to(torch.float32, nothing=1),
            lambda x: x.copy_(),
            lambda x: x.copy_("no tensor"),
            lambda x: x[7],
            lambda x: x["a"],
            lambda x: torch.Tensor.item(),
            lambda x: torch.Tensor.item("no tensor"),
            lambda x: torch.Tensor.to("no tensor", torch.float32),
            lambda x: torch.Tensor.__getitem__("no tensor", 0),
            lambda x: operator.setitem(x, 9, 1.0),
            lambda x: operator.delitem(x, 0),
            lambda x: [1, 2][x],
        ],
    )
    def test_wrong_calls_raise_what_they_raised(self, wrong: Callable[[Any], object]) -> None:
        def raised() -> tuple[type[BaseException], str]:
            try:
                wrong(torch.ones(4))
            except Exception as error:
                # Python names a method by its class or by the object's.
                return type(error), str(error).replace("TensorBase.", "Tensor.")
            raise AssertionError("it had to raise")

        within = raised()
        self.recorded.finish()
        assert raised() == within

    @staticmethod
    def everything(x: torch.Tensor) -> list[object]:
        total = x.sum()
        y = x.clone()
        y[0] = 2.0
        y[y > 1] = y[y > 1] + 1
        return [
            total.item(), float(total), int(total), bool(total), complex(total), x.tolist(), x.cpu(), x.numpy().sum(),
            x.to(torch.float64).dtype, x.to("cpu"), x.to(torch.device("cpu")), x.to(y), y.copy_(x), x[0], x[:, 1],
            x[..., None], x[x > 0], x[torch.tensor([0, 1])], x.nonzero(), x.unique(), x.equal(x), repr(x), y,
            torch.nonzero(x), torch.nonzero(input=x, as_tuple=True), torch.where(x > 0), torch.where(x > 0, x, y),
            torch.masked_select(x, x > 1), torch.equal(x, x), torch.allclose(x, y), torch.unique(x), torch.argwhere(x),
            torch.unique(x, dim=0, return_counts=True), torch.unique_consecutive(x), torch.bincount(x.flatten().long()),
            torch.repeat_interleave(x, torch.tensor(2)), torch.as_tensor(x, device="cpu"), torch.linalg.svdvals(x),
            torch.linalg.inv(x @ x.mT), nn.functional.one_hot(x.long()), torch.tensor([[1.0, 2.0]], device="cpu"),
            torch.tensor([x[0, 0], x[0, 1]]), x.new_tensor([1]),
        ]  # fmt: skip

    def test_values_are_the_same(self) -> None:
        within = repr(self.everything(torch.arange(6.0).reshape(2, 3)))
        self.recorded.finish()
        assert repr(self.everything(torch.arange(6.0).reshape(2, 3))) == within

    def test_function_modes_and_subclasses_see_the_same_functions(self) -> None:
        class Seen(TorchFunctionMode):
            def __init__(self) -> None:
                self.functions: list[Any] = []

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.functions.append(func)
                return func(*args, **(kwargs or {}))

        called: list[Any] = []

        class Mine(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                called.append(func)
                return super().__torch_function__(func, types, args, kwargs or {})

        def seen() -> list[Any]:
            called.clear()
            with Seen() as mode:
                self.everything(torch.arange(6.0).reshape(2, 3))
            mine = torch.arange(6.0).reshape(2, 3).as_subclass(Mine)
            self.everything(mine)
            return [*mode.functions, "and", *called]

        within = seen()
        self.recorded.finish()
        without = seen()
        assert len(within) == len(without) > 60
        assert [str(func) for func in within] == [str(func) for func in without]
        assert self.originals["item"] in within

    def test_dispatch_modes_see_the_same_operations(self) -> None:
        class Seen(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()
                self.functions: list[str] = []

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.functions.append(str(func))
                return func(*args, **(kwargs or {}))

        def seen() -> list[str]:
            with Seen() as mode:
                self.everything(torch.arange(6.0).reshape(2, 3))
            return mode.functions

        within = seen()
        self.recorded.finish()
        assert within == seen()

    def test_tables_of_torchs_own_methods_that_were_made_before_still_have_them(self) -> None:
        lazy = nn.LazyLinear(4)
        assert lazy.cpu().to(torch.float64)(torch.ones(2, 3, dtype=torch.float64)).shape == (2, 4)

    def test_a_subclass_that_raises_when_it_is_asked_for_its_device(self) -> None:
        class Shy(torch.Tensor):
            @property
            def is_cuda(self) -> bool:  # pyright: ignore
                raise RuntimeError("not your business")

            is_cpu = device = is_cuda  # pyright: ignore

        shy = torch.ones(()).as_subclass(Shy)
        with otel_dl.step():
            assert shy.item() == 1.0
            assert float(shy) == 1.0
            assert shy.cpu().shape == ()

    @pytest.mark.skipif(not HAS_DEVICE, reason="torch 2.4 asks CUDA's driver about fake tensors as well")
    def test_fake_tensors_of_a_device_wait_for_none(self) -> None:
        from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.ones(4, device="cuda")
            with otel_dl.step():
                with pytest.raises(DataDependentOutputException):
                    x.sum().item()
                with pytest.raises(DataDependentOutputException):
                    torch.equal(x, x)
                assert torch.tensor([1.0], device="cuda").device.type == "cuda"
                assert x.cpu().device.type == "cpu"
                assert x[:2].device.type == "cuda"
        self.recorded.finish()
        (step,) = self.recorded.named("train.step")
        assert self.recorded.named("cuda.synchronize") == []
        assert "dl.sync.summed" not in step.attributes

    def test_scripts_traces_and_transforms_are_the_same(self) -> None:
        def work(x: torch.Tensor) -> torch.Tensor:
            y = x.to(torch.float64).cpu()
            if bool(y.sum() > 0):
                y[0] = y[1] * int(x.sum().item())
            if torch.equal(y, x) and torch.nonzero(x).numel() > 7:
                y = torch.masked_select(y, torch.where(y > 0, y, x) > 1)
            return y[y > 0]

        def compiled() -> list[str]:
            torch.compiler.reset()
            graphs: list[str] = []

            def backend(module: Any, inputs: Any) -> Any:
                graphs.append(module.code)
                return module

            def forward(x: torch.Tensor) -> torch.Tensor:
                x = torch.where(x > 0, x, torch.tensor([0.0])) + torch.repeat_interleave(x, 1)
                return torch.nonzero(x) + torch.linalg.cholesky(torch.ones(1, 1)).long()

            result = torch.compile(forward, backend=backend)(torch.ones(4))
            return [*graphs, str(result)]

        def traced(x: torch.Tensor) -> torch.Tensor:
            return x[0].to(torch.float64) + x[1:].cpu()

        def outcome() -> list[str]:
            x = torch.arange(4.0) + 1
            return [
                torch.jit.script(work).code,
                str(torch.jit.script(work)(x)),
                re.sub("#.*", "", str(torch.jit.trace(traced, x).graph)),  # where it says which line it came from
                torch.fx.symbolic_trace(traced).code,
                str(torch.func.vmap(traced)(torch.ones(2, 3))),
                str(torch.func.vmap(torch.linalg.inv)(torch.eye(2).expand(3, 2, 2))),
                str(torch.func.grad(lambda x: torch.where(x > 0, x, torch.tensor(2.0)).sum())(x)),
                *compiled(),
                str(torch.func.grad(lambda x: x[0].to(torch.float64).sum())(x)),
                str(torch.export.export(_Module(traced), (x,)).graph),
            ]

        within = outcome()
        self.recorded.finish()
        torch.jit._state._clear_class_state()
        assert outcome() == within


@pytest.mark.skipif(native.hooks is None, reason="functions are followed in C")
def test_torch_compile_does_not_compile_what_is_called_around_a_function() -> None:
    """A function that it gives up runs as it is, and whatever is called there is looked at."""
    from torch._dynamo.utils import counters

    def given_up(x: torch.Tensor) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for _ in range(2):
            torch._dynamo.graph_break()
            made.append(torch.as_tensor(x, device="meta"))
        return made

    def compiled() -> tuple[list[str], dict[str, int]]:
        torch.compiler.reset()
        counters.clear()
        function = torch.compile(given_up, backend="eager")
        return [str(each.device) for _ in range(3) for each in function(torch.ones(2))], dict(counters["frames"])

    without = compiled()
    with recording(), otel_dl.step():
        assert is_followed(torch.as_tensor)
        assert compiled() == without


class _Module(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Before(torch.Tensor):
    """A subclass that was there before anything was patched."""


def protocols() -> dict[str, object]:
    """What C takes a tensor for."""

    class Now(torch.Tensor):
        """A subclass that is made meanwhile."""

    checks = ("PySequence_Check", "PyMapping_Check", "PyNumber_Check", "PyIndex_Check", "PyCallable_Check")
    asked: list[Callable[[Any], object]] = []
    for name in checks:
        function = getattr(ctypes.pythonapi, name)
        function.argtypes = [ctypes.py_object]
        asked.append(function)
    parts = [torch.tensor(1.0), torch.tensor(2.0)]
    kinds: list[type[torch.Tensor]] = [torch.Tensor, nn.Parameter, Before, Now]
    return {
        "checks": [[check(kind(torch.ones(2))) for check in asked] for kind in kinds],
        "slots": [sorted(name for name in dir(kind) if name.startswith("__")) for kind in kinds],
        "of tensors": str(torch.tensor(parts)),
        "of rows": str(torch.tensor([torch.ones(1), torch.ones(1)])),
        "size": list(torch.zeros(6).view(*torch.tensor([2, 3])).shape),
        "iterated": [str(each) for each in torch.ones(2)],
        "reversed": [str(each) for each in reversed(torch.ones(2))],
    }


def slots(kind: type[torch.Tensor]) -> dict[int, int | None]:
    """The functions that C finds in a class: `typeslots.h`, of which 80 are in every version."""
    function = ctypes.pythonapi.PyType_GetSlot
    function.argtypes, function.restype = [ctypes.py_object, ctypes.c_int], ctypes.c_void_p
    return {slot: function(kind, slot) for slot in range(1, 81)}


@pytest.mark.parametrize("in_c", IN_C)
@pytest.mark.parametrize("mode", ["on", "deep"])
def test_to_c_a_tensor_is_what_it_was(in_c: bool, mode: str) -> None:
    before = protocols()
    assert before["checks"] == [[0, 1, 1, 1, 0]] * 4, "a mapping, a number, and no sequence"
    with recording(native=in_c, sync=mode):
        assert protocols() == before
    assert protocols() == before


@pytest.mark.skipif(True not in IN_C, reason="it is C that does it")
def test_in_c_indices_are_looked_at_without_a_change_to_any_dict() -> None:
    get, set_ = 5, 3  # Py_mp_subscript, Py_mp_ass_subscript

    class Own(torch.Tensor):
        def __getitem__(self, index: Any) -> Any:
            return "my own"

    there: list[type[torch.Tensor]] = [torch.Tensor, nn.Parameter, Before]
    dicts = [dict(vars(kind)) for kind in (nn.Parameter, Before, Own, torch._C.TensorBase)]
    before, own, base = slots(torch.Tensor), slots(Own), slots(torch._C.TensorBase)
    with recording():

        class Now(torch.Tensor):
            """Made meanwhile."""

        class OfBefore(Before):
            """The same."""

        there += [Now, OfBefore]
        within = [slots(kind) for kind in there]
        assert within[0][get] != before[get]
        assert within[0][set_] != before[set_]
        for kind, found in zip(there, within, strict=True):
            expected = {**slots(kind), get: within[0][get], set_: within[0][set_]}
            assert found == expected, kind
        assert slots(Own)[get] == own[get]
        assert torch.ones(2).as_subclass(Own)[0] == "my own"
        assert slots(torch._C.TensorBase) == base
        assert not {"__getitem__", "__setitem__", "__delitem__"} & vars(torch.Tensor).keys()
        assert [dict(vars(kind)) for kind in (nn.Parameter, Before, Own, torch._C.TensorBase)] == dicts
    assert slots(torch.Tensor) == before
    assert slots(Own) == own
    for kind in there:
        assert (slots(kind)[get], slots(kind)[set_]) == (before[get], before[set_])


@pytest.mark.parametrize(
    "work", [lambda x: x[x > 1], lambda x: x.masked_select(x > 1), lambda x: torch.masked_select(x, x > 1)]
)
def test_a_fault_of_ours_takes_it_back_from_within(work: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before, zeros = slots(torch.Tensor), iter([0] * 5)
    fails = map(operator.truediv, itertools.repeat(1), zeros)  # without a frame, which would be somebody else's
    mine = torch.arange(4.0).as_subclass(Before)  # it may override anything: what is called is ours
    with recording():
        monkeypatch.setattr(waiting, "clock", fails.__next__)
        for _ in range(3):
            assert torch.equal(work(mine), torch.tensor([2.0, 3.0]))
        assert slots(torch.Tensor) == before
        assert [name for (name, _), each in FUNCTIONS.items() if is_followed(each)] == []
    assert len(list(zeros)) == 4, "it failed once"


# How the time is split.


class FakeEvent:
    """A CUDA event, on a stream whose time the test sets."""

    now = 0.0
    ready = False
    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        FakeEvent.recorded += 1
        self.at = FakeEvent.now

    def query(self) -> bool:
        return FakeEvent.ready

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


class TestSplit:
    """Of calls that wait for `cuda:0`, by stand-in events."""

    @pytest.fixture(autouse=True)
    def _cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeEvent.now, FakeEvent.ready, FakeEvent.recorded = 0.0, False, 0
        self.capturing = False
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(device=device))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def on_cuda(self) -> Any:
        return torch.device("cuda:0")

    def wait(self, ms: float) -> Any:
        from otel_dl.recording.waits import Wait

        return Wait("Tensor.item", "cuda:0", None, int(ms * 1e6))

    def test_what_lies_between_the_events_is_copying_and_the_rest_waiting(self) -> None:
        splits, wait = split.Split(), self.wait(52.0)
        mark = splits.begin(self.on_cuda())
        FakeEvent.now = 2.0
        splits.end(mark, wait)
        assert "dl.sync.wait_ms" not in wait.attributes(), "the device has not said so yet, and is not waited for"
        FakeEvent.ready = True
        splits.end(splits.begin(self.on_cuda()), None)
        said = wait.attributes()
        assert (said["dl.sync.wait_ms"], said["dl.sync.copy_ms"]) == (50.0, 2.0)

    def test_events_are_used_again(self) -> None:
        splits = split.Split()
        FakeEvent.ready = True
        marks = [splits.begin(self.on_cuda())]
        for _ in range(10):
            splits.end(marks[-1], None)
            marks.append(splits.begin(self.on_cuda()))
        assert len({id(mark[0]) for mark in marks}) <= 2

    def test_two_threads_do_not_read_the_same_events(self, monkeypatch: pytest.MonkeyPatch) -> None:
        splits, waits = split.Split(), [self.wait(52.0), self.wait(52.0)]
        marks = [splits.begin(self.on_cuda()) for _ in waits]
        for mark, wait in zip(marks, waits, strict=True):
            splits.end(mark, wait)

        def query(event: FakeEvent) -> bool:
            if threading.current_thread() is threading.main_thread():
                other = threading.Thread(target=splits.begin, args=(self.on_cuda(),))
                other.start()
                other.join()
            return event is marks[0][1]

        monkeypatch.setattr(FakeEvent, "query", query)
        splits.begin(self.on_cuda())
        assert ["dl.sync.wait_ms" in wait.attributes() for wait in waits] == [True, False]

    def test_nothing_is_recorded_while_a_stream_is_captured(self) -> None:
        self.capturing = True
        assert split.Split().begin(self.on_cuda()) is None
        assert FakeEvent.recorded == 0

    def test_of_other_devices_nothing_is(self) -> None:
        for device in (None, torch.device("cpu"), torch.device("xpu:0")):
            assert split.Split().begin(device) is None
        assert FakeEvent.recorded == 0

    @pytest.mark.parametrize(
        ("call", "device"),
        [
            (lambda x: x.cuda(), "cuda"),
            (lambda x: x.cuda(1), "cuda:1"),
            (lambda x: x.cuda(device="cuda:2"), "cuda:2"),
            (lambda x: x.cuda(non_blocking=True), None),
            (lambda x: x.to("cuda:1"), "cuda:1"),
            (lambda x: x.to(torch.device("cuda"), torch.float64), "cuda"),
            (lambda x: x.to(dtype=torch.float64, device="cuda:3"), "cuda:3"),
            (lambda x: x.to("cuda", non_blocking=True), None),
            (lambda x: x.to("nowhere"), None),
            (lambda x: torch.tensor([1.0], device="cuda:1"), "cuda:1"),
            (lambda x: torch.as_tensor(x, device=torch.device("cuda", 1)), "cuda:1"),
        ],
    )
    @pytest.mark.skipif(native.hooks is None, reason="some of them are seen in C")
    def test_what_is_copied_to_cuda_waits_for_the_stream_of_the_device_that_is_named(
        self, call: Callable[[Any], object], device: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There is no driver: it is asked before torch says so."""
        asked: list[str] = []
        monkeypatch.setattr(split.Split, "begin", lambda self, given: given and asked.append(str(given)))
        with recording(), otel_dl.step(), pytest.raises((RuntimeError, AssertionError)):
            call(torch.ones(2))
        assert asked == ([device] if device else [])

    def test_a_device_that_has_failed_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: Any, stream: Any) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        monkeypatch.setattr(FakeEvent, "record", fail)
        splits = split.Split()
        assert splits.begin(self.on_cuda()) is None
        monkeypatch.undo()
        assert splits.begin(self.on_cuda()) is None

    def test_it_is_for_steps_that_the_head_keeps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(split.Split, "begin", lambda self, given: asked.append(given))
        meta = torch.ones((), device="meta")
        for head, times in ((None, 1), (NeverHead(), 0)):
            asked.clear()
            with recording(head), otel_dl.step(), pytest.raises(RuntimeError):
                meta.item()
            assert len(asked) == times


# Batches.


class Batch:
    """One that pins itself, as torch lets it."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.parts = [1, 2]

    def pin_memory(self) -> Batch:
        return self


class Fed(torch.utils.data.Dataset[int]):
    """Gives what it is fed."""

    def __init__(self, food: Any) -> None:
        self.food = food

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return self.food.get()


def pair(items: list[int]) -> list[Batch]:
    return [Batch(items[0])] * 2


def pinned(recorded: Recorded, line: int) -> None:
    waits = recorded.named("cuda.synchronize")
    nexts = {span.context.span_id for span in recorded.named("dataloader.next")}
    assert [wait.attributes["dl.sync.op"] for wait in waits] == ["DataLoader.pin_memory"] * 3, "one a batch"
    assert {wait.parent.span_id for wait in waits} <= nexts
    assert [(wait.attributes["code.file.path"], wait.attributes["code.line.number"]) for wait in waits] == [
        (__file__, line)
    ] * 3


def test_pinning_within_next_is_told() -> None:
    loader = torch.utils.data.DataLoader(range(3), batch_size=1, collate_fn=pair)
    with recording() as recorded:
        batches: Any = iter(loader)
        batches._pin_memory, batches._pin_memory_device = True, None
        line = sys._getframe().f_lineno + 1
        for batch in batches:
            with otel_dl.step():
                assert len(batch) == 2
    pinned(recorded, line)


@pytest.mark.skipif(not HAS_DEVICE, reason="before, pinning asks CUDA's driver")
def test_pinning_in_its_thread_is_told_with_the_line_that_waits_for_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own thread, as if there was a device. Each batch is read only once it is waited for."""
    for name, value in (("is_available", True), ("current_device_index", 0), ("set_device_index", None)):
        monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    food: Any = torch.multiprocessing.get_context("fork").SimpleQueue()
    loader = torch.utils.data.DataLoader(
        Fed(food), batch_size=1, collate_fn=pair, num_workers=1, pin_memory=True, multiprocessing_context="fork"
    )
    had, waited = threading.Semaphore(1), threading.Event()
    with recording() as recorded:

        def feed() -> None:
            for index in range(3):
                had.acquire(timeout=60)
                while not (recorded.run.main and recorded.run.main.kinds & NEXT):
                    waited.wait(0.001)
                food.put(index)

        thread = threading.Thread(target=feed)
        thread.start()
        line = sys._getframe().f_lineno + 1
        for batch in loader:
            with otel_dl.step():
                assert len(batch) == 2
            had.release()
        thread.join()
    pinned(recorded, line)


@pytest.mark.parametrize("reading", [0, 1])
def test_after_the_users_alarm_pinning_is_told(reading: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.utils.data.DataLoader(range(2), batch_size=1, collate_fn=lambda items: Batch(items[0]))

    def read() -> None:
        batches: Any = iter(data)
        batches._pin_memory, batches._pin_memory_device = True, None
        with otel_dl.step():
            next(batches)

    with recording() as recorded:
        with monkeypatch.context() as patch:
            patch.setattr(loader, "clock", alarm_at(reading, loader.clock))
            with pytest.raises(Alarm):
                read()
        read()
    assert len(recorded.named("cuda.synchronize")) == 1


def test_pinning_while_nobody_waits_for_it_is_none() -> None:
    from torch.utils.data._utils import pin_memory

    with recording() as recorded:
        waits = step_with(recorded, lambda: pin_memory.pin_memory([Batch(1)]))
    assert waits == []


@pytest.mark.parametrize("mode", ["on", "deep"])
def test_it_is_taken_back_whole(mode: str) -> None:
    from torch.cuda import _gpu_trace

    def found() -> list[Any]:
        return [
            dict(vars(torch.Tensor)),
            vars(torch.cuda)["synchronize"],
            vars(torch.cuda.Stream)["synchronize"],
            vars(torch.cuda.Event)["synchronize"],
            list(_gpu_trace.StreamSynchronizationCallbacks.callback_list),
        ]

    before = found()
    with recording(sync=mode):
        assert found() != before
    assert found() == before


def test_a_wrong_mode_is_named_and_the_default_is_used() -> None:
    from otel_dl.settings import Settings

    assert Settings.read({"OTEL_DL_SYNC": "deeper"}).sync == "on"
    assert Settings.read({"OTEL_DL_SYNC": "Deep"}).sync == "deep"
