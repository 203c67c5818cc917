"""Training is the same with and without otel-dl: every loss, every weight, every random number, every compiled graph;
and what can be done with a model, a loader or an optimizer without it can be done with it."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import pickletools
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.children import environment
from support.convolving import is_followed
from support.inprocess import recording
from support.loops import FORMS, LONG, loader, network, seed, sgd, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from otel_dl.recording import native

_forms = [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in FORMS]


def outcome(name: str, after_setup: Callable[[], None] = lambda: None) -> list[bytes]:
    """Everything that one draw too many, or one rounding otherwise, would change."""
    diary, weights = train(FORMS[name], after_setup)
    return [
        np.array(diary.losses).tobytes(),
        *(weight.numpy().tobytes() for weight in weights),
        repr(random.getstate()).encode(),
        repr([part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]).encode(),
        torch.get_rng_state().numpy().tobytes(),
    ]


@pytest.fixture(scope="module")
def bare() -> Callable[[str], list[bytes]]:
    known: dict[str, list[bytes]] = {}

    def of(name: str) -> list[bytes]:
        if name not in known:
            known[name] = outcome(name)
        return known[name]

    return of


class TestNumbers:
    @pytest.mark.parametrize("name", _forms)
    def test_a_form_is_the_same_twice_without_otel_dl(self, name: str, bare: Callable[[str], list[bytes]]) -> None:
        """Else the next two would show nothing."""
        assert outcome(name) == bare(name)

    @pytest.mark.parametrize("name", _forms)
    def test_switched_on_before_anything_exists(self, name: str, bare: Callable[[str], list[bytes]]) -> None:
        with recording():
            assert outcome(name) == bare(name)

    @pytest.mark.parametrize("name", _forms)
    def test_switched_on_when_model_optimizer_and_loader_exist(
        self, name: str, bare: Callable[[str], list[bytes]]
    ) -> None:
        with contextlib.ExitStack() as session:
            recorded = []
            without = bare(name)
            assert outcome(name, lambda: recorded.append(session.enter_context(recording()))) == without
        assert recorded[0].named("train.step")

    def test_with_an_sdk_that_otel_dl_set_up(self, tmp_path: Path) -> None:
        """All forms in one process, with the way to files whole; the same without, in another."""

        def outcomes(*arguments: str) -> dict[str, str]:
            done = subprocess.run(
                [sys.executable, str(Path(__file__).parent / "scripts" / "every_form.py"), *arguments],
                env=environment({"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(tmp_path)}),
                capture_output=True,
                text=True,
                check=True,
            )
            return json.loads(done.stdout)

        assert outcomes("instrument") == outcomes()
        assert list(tmp_path.iterdir())


class Users(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TestCompiling:
    """As many graphs, graph breaks and compilations as without."""

    @pytest.fixture(autouse=True)
    def _fresh(self) -> Iterator[None]:
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    def model(self) -> None:
        compiled: Any = torch.compile(network(), backend="eager")
        for rows in (4, 4, 5, 6):
            compiled(torch.randn(rows, 6)).sum().backward()

    def module_of_the_users(self) -> None:
        compiled: Any = torch.compile(Users(), backend="eager")
        for _ in range(2):
            compiled(torch.randn(4, 6)).sum().backward()

    def nested_modules_of_the_users(self) -> None:
        """With a context manager of Python's own, and a graph break in the innermost."""

        @contextlib.contextmanager
        def scale(model: nn.Module) -> Iterator[float]:
            yield 2.0 if model.training else 1.0

        class Inner(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = network()

            def forward(self, x: Tensor) -> Tensor:
                torch._dynamo.graph_break()
                with scale(self) as by:
                    return self.layers(x) * by

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = Inner()
                self.second = nn.ModuleList([nn.Sequential(nn.Linear(3, 6), Inner())])

            def forward(self, x: Tensor) -> Tensor:
                for layer in self.second:
                    x = layer(self.first(x))
                return x

        compiled: Any = torch.compile(Outer(), backend="eager")
        for rows in (4, 4, 5):
            compiled(torch.randn(rows, 6)).sum().backward()

    def distributed_data_parallel(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            compiled: Any = torch.compile(DistributedDataParallel(Users()), backend="eager")
            for rows in (4, 4, 5):
                compiled(torch.randn(rows, 6)).sum().backward()
        finally:
            dist.destroy_process_group()

    def convolutions(self) -> None:
        """By modules and by functions, in training and with a batch of another size."""

        class Convolutions(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3), nn.Flatten(2))
                self.weight = nn.Parameter(torch.randn(4, 3, 3))

            def forward(self, x: Tensor) -> Tensor:
                return F.conv1d(self.layers(x), self.weight) + torch.conv1d(self.layers(x), self.weight)

        for benchmark in (False, True):
            with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
                compiled: Any = torch.compile(Convolutions(), backend="aot_eager")
                for rows in (4, 4, 5):
                    compiled(torch.randn(rows, 3, 6, 6)).sum().backward()

    def submodules_one_by_one(self) -> None:
        model = network()
        for layer in model:
            layer.compile(backend="eager")
        for _ in range(3):
            model(torch.randn(4, 6)).sum().backward()

    def whole_step(self) -> None:
        model = network()
        optimizer = sgd(model)

        @torch.compile(backend="eager")
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        for _ in range(3):
            step(torch.randn(4, 6))

    def optimizer_step(self) -> None:
        model = network()
        optimizer = sgd(model)

        @torch.compile(backend="eager")
        def step() -> None:
            optimizer.step()

        for _ in range(3):
            model(torch.randn(4, 6)).sum().backward()
            step()
            optimizer.zero_grad()

    def evaluation_and_training(self) -> None:
        model = network()
        compiled: Any = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            compiled(torch.randn(4, 6)).sum().backward()
            model.eval()
            with torch.no_grad():
                compiled(torch.randn(4, 6))
            model.train()

    def in_a_loop_over_a_loader(self) -> None:
        model = network()
        optimizer = sgd(model)

        @torch.compile(backend="eager")
        def epoch() -> None:
            for x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        data = loader(3)
        epoch()

    def reads(self) -> None:
        @torch.compile(backend="eager")
        def read(x: Tensor) -> Any:
            total = x.sum()
            if total > 1e6 or bool(x.isnan().any()):
                return x
            return x * total.item() + float(total) + len(x.tolist()) + x.numpy().shape[0]

        @torch.compile(backend="eager")
        def move(x: Tensor) -> Any:
            y = x.to(torch.float64).cpu()
            y[x > 0] = 1.0
            return y[0], y[x > 0], y[:, 1:3], x.nonzero(), x.unique(), x.clone().copy_(x), x.equal(y.to(x))

        for rows in (4, 4, 5, 6):
            read(torch.ones(rows, 6))
            move(torch.ones(rows, 6))

    def reads_in_whole_graphs(self) -> None:
        # Where nothing breaks off, torch.compile would have to say so if it came to a function of ours.
        @torch.compile(backend="aot_eager", fullgraph=True)
        def whole(x: Tensor) -> Any:
            y = torch.Tensor.to(x, torch.float64)[0].cpu()
            return y.to("cpu"), x[1:], x[..., None], x.clone().copy_(x), torch.Tensor.__getitem__(x, 0)

        for rows in (4, 4, 5):
            whole(torch.ones(rows, 6))

    SCRIPTS = (
        model,
        module_of_the_users,
        nested_modules_of_the_users,
        convolutions,
        reads,
        reads_in_whole_graphs,
        submodules_one_by_one,
        whole_step,
        optimizer_step,
        evaluation_and_training,
        in_a_loop_over_a_loader,
    )
    ONCE = (distributed_data_parallel,)
    """Where torch.compile comes by functions of torch that it looks at once a process."""

    @staticmethod
    def counted(script: Callable[[Any], None], self: Any) -> dict[str, Any]:
        from torch._dynamo.convert_frame import register_bytecode_hook
        from torch._dynamo.utils import counters

        torch.compiler.reset()
        counters.clear()
        seed()
        compiled: list[str] = []
        hook = register_bytecode_hook(lambda code, _: compiled.append(code.co_name))
        try:
            script(self)
        finally:
            hook.remove()
        # Only what was compiled, and why it broke off; the text of a reason may name a line of the caller's.
        return {
            "compiled": compiled,
            "unique graphs": counters["stats"]["unique_graphs"],
            "calls captured": counters["stats"]["calls_captured"],
            # Before 2.6 torch.compile looks at frames of ours as well, and compiles nothing of them.
            "frames": dict(counters["frames"]) if hasattr(torch.compiler, "set_stance") else {},
            "graph breaks": sum(counters["graph_break"].values()),
            "recompilations": dict(counters["recompiles"]) if "recompiles" in counters else {},
        }

    @pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
    def test_as_without(self, script: Callable[[Any], None]) -> None:
        without = self.counted(script, self)
        if hasattr(torch.compiler, "set_stance"):  # torch 2.4 passes by submodules that are compiled one by one
            assert without["unique graphs"] > 0
        with recording():
            assert is_followed() or native.hooks is None
            assert self.counted(script, self) == without

    @pytest.mark.long
    def test_as_in_a_process_without(self) -> None:
        """Where torch.compile is imported together with otel-dl, what it is told for the whole process counts as well:
        in the test before it is told already."""

        def outcomes(*arguments: str, native: str = "true") -> dict[str, Any]:
            done = subprocess.run(
                [sys.executable, str(Path(__file__).parent / "scripts" / "every_compilation.py"), *arguments],
                env=environment({"OTEL_TRACES_EXPORTER": "none", "OTEL_DL_NATIVE": native}),
                capture_output=True,
                text=True,
                check=True,
            )
            return json.loads(done.stdout.splitlines()[-1])

        without = outcomes()
        assert outcomes("instrument") == without
        assert outcomes("instrument", native="false") == without

    def test_explain_says_the_same(self) -> None:
        def explained() -> tuple[int, int, int]:
            torch.compiler.reset()
            found = torch._dynamo.explain(network())(torch.randn(4, 6))
            return found.graph_count, found.graph_break_count, found.op_count

        without = explained()
        with recording():
            assert explained() == without

    @pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch.compiler.set_stance is of torch 2.6")
    def test_compiled_before_goes_on_without_compiling_again(self) -> None:
        model: Any = torch.compile(network(), backend="eager")
        x = torch.randn(4, 6)
        model(x).sum().backward()
        with recording() as recorded, torch.compiler.set_stance("fail_on_recompile"):
            model(x).sum().backward()
            assert recorded.run.current is not None
        with torch.compiler.set_stance("fail_on_recompile"):
            model(x).sum().backward()

    def test_fullgraph(self) -> None:
        with recording():
            compiled: Any = torch.compile(network(), backend="eager", fullgraph=True)
            compiled(torch.randn(4, 6))


class Objects:
    """What a script has in hand, made the same way each time."""

    def __init__(self) -> None:
        seed()
        self.model = network()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, 10)
        self.loader = loader(2)
        self.scaler = torch.amp.GradScaler("cpu")
        x, y = next(iter(self.loader))
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.scheduler.step()


def plain(value: Any) -> Any:
    """`value` as something that `==` compares, tensors by their bits."""
    if isinstance(value, Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def shape(pickled: bytes) -> list[Any]:
    """What a pickle says; names of tensors' storages are addresses."""
    return [
        (opcode.name, argument if isinstance(argument, str) and not argument.isdigit() else None)
        for opcode, argument, _ in pickletools.genops(pickled)
    ]


class TestCopying:
    @pytest.mark.parametrize("name", ["model", "optimizer", "scheduler", "loader", "scaler"])
    def test_pickles_are_those_without(self, name: str) -> None:
        without = pickle.dumps(getattr(Objects(), name))
        with recording():
            made = pickle.dumps(getattr(Objects(), name))
        assert shape(made) == shape(without)
        pickle.loads(made)

    @pytest.mark.parametrize("name", ["model", "optimizer", "scheduler", "loader", "scaler"])
    def test_deep_copies_are_equal_and_independent(self, name: str) -> None:
        with recording():
            objects = Objects()
            original = getattr(objects, name)
            copied = copy.deepcopy(original)
            assert type(copied) is type(original)
            if hasattr(original, "state_dict"):
                assert plain(copied.state_dict()) == plain(original.state_dict())
            else:
                assert len(copied) == len(original)
                next(iter(copied))

    def test_what_was_pickled_with_it_is_read_without_and_the_other_way(self) -> None:
        with recording():
            made = pickle.dumps(Objects().model)
        assert plain(pickle.loads(made).state_dict()) == plain(Objects().model.state_dict())
        made = pickle.dumps(Objects().model)
        with recording():
            assert plain(pickle.loads(made).state_dict()) == plain(Objects().model.state_dict())

    @pytest.mark.parametrize(
        "function",
        [
            "torch.nn.Module.zero_grad",
            "torch.optim.Optimizer.zero_grad",
            "torch.optim.SGD.step",
            "torch.nn.Module.__call__",
            "torch.utils.data._utils.worker._worker_loop",
            "torch.conv2d",
            "torch.nn.functional.conv_transpose3d",
        ],
    )
    def test_patched_functions_are_still_pickled_by_their_name(self, function: str) -> None:
        def found() -> Any:
            value: Any = sys.modules["torch"]
            for part in function.split(".")[1:]:
                value = getattr(value, part)
            return value

        with recording():
            pickle.loads(pickle.dumps(found()))


def _script(model: nn.Module) -> str:
    return torch.jit.script(model).code


def _trace(model: nn.Module) -> str:
    return torch.jit.trace(model, torch.ones(4, 6)).code


def _symbolic_trace(model: nn.Module) -> str:
    return torch.fx.symbolic_trace(model).code


def _export(model: nn.Module) -> str:
    return str(torch.export.export(model, (torch.ones(4, 6),)).graph)


def _grad(model: nn.Module) -> Any:
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    return plain(torch.func.grad(loss)(parameters, torch.ones(4, 6)))


def _vmap(model: nn.Module) -> Any:
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    return plain(torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.ones(4, 6)))


class Counting(torch.Tensor):
    """A subclass that sees every function."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


def _subclass(model: nn.Module) -> list[str]:
    Counting.seen = []
    model(torch.ones(4, 6).as_subclass(Counting)).sum().backward()
    return Counting.seen


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(-1, (1, 6)), nn.Conv1d(1, 2, 3), nn.ConvTranspose1d(2, 1, 3), nn.Flatten(-2), nn.Linear(6, 3)
    )


@pytest.mark.parametrize("make", [network, convolutions], ids=lambda make: make.__name__)
@pytest.mark.parametrize("benchmark", [False, True], ids=["", "benchmark"])
@pytest.mark.parametrize(
    "use", [_script, _trace, _symbolic_trace, _export, _grad, _vmap, _subclass], ids=lambda use: use.__name__[1:]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_torch_makes_of_a_model_is_the_same(
    use: Callable[[nn.Module], Any], benchmark: bool, make: Callable[[], nn.Module]
) -> None:
    torch.compiler.reset()
    seed()
    model = make().eval()
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
        without = use(model)
        with recording():
            assert is_followed() or native.hooks is None
            assert use(model) == without


CONVOLUTIONS = """
import copy, inspect, pickle, sys, torch, types, warnings
warnings.simplefilter("ignore")
from torch import nn
from torch.fx.operator_schemas import normalize_function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

BENCHMARK, RECORDED = (each == "True" for each in sys.argv[1:])
torch.backends.cudnn.benchmark = BENCHMARK
NAMES = [f"conv{form}{n}d" for form in ("", "_transpose") for n in (1, 2, 3)]
before = [getattr(torch, name) for name in NAMES]
TABLE = dict.fromkeys(before, 3.0)
hashes = [hash(function) for function in before]
x, weight = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2)

class Duck:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return cls.__name__, func is F.conv2d, [each.__name__ for each in types], len(args), kwargs

class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func.__qualname__, func is F.conv2d, list(types), sys._getframe(1).f_code.co_name

class Users(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 1, 2), nn.ConvTranspose2d(1, 1, 2))
        self.table = TABLE

    def forward(self, x):
        return F.conv2d(self.layers(x), torch.ones(1, 1, 2, 2)) * self.table[torch.conv2d]

def looked_at():
    for name, function, code in zip(NAMES, before, hashes):
        assert getattr(torch, name) is getattr(F, name) is function and hash(function) == code and TABLE[function] == 3
        assert pickle.loads(pickle.dumps(function)) is copy.deepcopy(function) is function
        assert inspect.isbuiltin(function) and type(function) is types.BuiltinFunctionType
        print(function, function.__name__, function.__qualname__, function.__self__, function.__module__, dir(function))
        print(function.__text_signature__, len(function.__doc__), torch.overrides.resolve_name(function))
    print(F.conv2d(Duck(), weight), F.conv2d(x, weight=Duck()), F.conv2d(input=Duck(), weight=weight, stride=2))
    with Mode():
        print(F.conv2d(x, weight), F.conv2d(*(x,), **{'weight': weight}))
    print(normalize_function(F.conv_transpose2d, (x, weight), normalize_to_only_use_kwargs=True))
    model = Users().requires_grad_(False)
    traced = torch.fx.symbolic_trace(model)
    print(traced.graph, [node.target is F.conv2d for node in traced.graph.nodes])
    print(torch.jit.trace(model, x).inlined_graph, torch.jit.script(nn.Conv2d(1, 1, 2)).code)
    print(F.conv2d.__call__(x, weight), torch.vmap(F.conv2d, (0, None))(x[None], weight))

def compiled():
    graphs = [0]

    def backend(module, inputs):
        graphs[0] += 1
        print(len(torch._guards.TracingContext.get().guards_context.dynamo_guards))
        return module

    model = torch.compile(Users(), backend=backend, fullgraph=True)
    return lambda: (model(x), graphs[0])[1]

model = compiled()
print("graphs", model())
looked_at()
if RECORDED:
    import otel_dl
    otel_dl.instrument()
    from support.convolving import is_followed
    from otel_dl.recording import native
    assert is_followed() or native.hooks is None
print("graphs", model())
looked_at()
print("graphs", compiled()())
if RECORDED:
    otel_dl.uninstrument()
print("graphs", model())
looked_at()
"""


@pytest.mark.parametrize("benchmark", [False, True], ids=["", "benchmark"])
def test_nothing_of_the_convolutions_shows(benchmark: bool, tmp_path: Path) -> None:
    """In a fresh process, for torch keeps what it has found out about a function: only the first time shows."""
    script = tmp_path / "script.py"
    script.write_text(CONVOLUTIONS)

    def printed(recorded: bool) -> str:
        done = subprocess.run(
            [sys.executable, str(script), str(benchmark), str(recorded)],
            env=environment({"PYTHONPATH": os.pathsep.join(sys.path)}),
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return re.sub(r" at 0x[0-9a-f]+", "", done.stdout)

    assert printed(recorded=True) == printed(recorded=False)
