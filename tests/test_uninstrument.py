"""Switching off puts every attribute back to the identical object, whatever came before, after and in between."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from support import children
from support.inprocess import recording
from support.loops import FORMS, loader, network, train, update

import otel_dl
from otel_dl.patches import _patching, training
from otel_dl.patches._patching import Patches

OURS = str(Path(otel_dl.__file__).parent)

Place = tuple[Any, str]


def snapshot() -> dict[Place, Any]:
    """Every attribute of every module and class of torch, and what the closures of their functions hold."""
    found: dict[Place, Any] = {}
    seen: set[int] = set()

    def walk(owner: Any) -> None:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        for name, value in tuple(vars(owner).items()):
            found[owner, name] = value
            # Not isinstance: some objects of torch warn, or look for a GPU, when they are asked for their class.
            if issubclass(type(value), type) and str(vars(value).get("__module__")).partition(".")[0] == "torch":
                walk(value)
            closures(value)

    def closures(value: Any) -> None:
        if type(value) is FunctionType and id(value) not in seen:
            seen.add(id(value))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    found[value, name] = cell.cell_contents
                except ValueError:
                    continue
                closures(cell.cell_contents)

    for name, module in tuple(sys.modules.items()):
        if name == "torch" or name.startswith("torch."):
            walk(module)
    return found


def differences(before: dict[Place, Any], after: dict[Place, Any]) -> list[str]:
    changed = [place for place in before.keys() & after.keys() if after[place] is not before[place]]
    gone = before.keys() - after.keys()
    ours = [place for place, value in after.items() if is_ours(value)]
    return sorted(f"{getattr(owner, '__name__', owner)}.{name}" for owner, name in {*changed, *gone, *ours})


def is_ours(value: Any) -> bool:
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    if type(value) is FunctionType:
        return value.__code__.co_filename.startswith(OURS)
    return type(value).__module__.startswith("otel_dl")


def train_in_all_ways() -> None:
    """Calls each function that is patched."""
    for name in ("item_and_scheduler_after_the_step", "grad_scaler_that_skips", "muon_and_adamw"):
        train(FORMS[name])


@pytest.fixture(scope="module", autouse=True)
def _torch_has_made_its_lazy_changes() -> None:
    """Classes of optimizers change with their first object, and modules are imported when they are needed."""
    for name in ("plain", "item_and_scheduler_after_the_step", "lbfgs", "grad_scaler_that_skips", "muon_and_adamw"):
        train(FORMS[name])


def test_what_is_patched_is_seen_by_the_walk() -> None:
    before = snapshot()
    with recording():
        changed = differences(before, snapshot())
    assert {
        "Module.__call__",
        "Module.zero_grad",
        "Optimizer.zero_grad",
        "Optimizer._patch_step_function",
        "torch.autograd._engine_run_backward",
        "LRScheduler.step",
        "ReduceLROnPlateau.step",
        "LRScheduler.__init__",
        "GradScaler.step",
        "_BaseDataLoaderIter.__next__",
        "torch.utils.data._utils.worker._worker_loop",
        "step.func",
    } <= set(changed)


@pytest.mark.parametrize(
    "name",
    ["plain", "item_and_scheduler_after_the_step", "lbfgs", "grad_scaler_that_skips", "no_loader_muon_and_adamw"],
)
def test_everything_is_back_after(name: str) -> None:
    before = snapshot()
    with recording():
        train(FORMS[name])
    assert differences(before, snapshot()) == []


def test_classes_that_are_made_meanwhile() -> None:
    def step(self: Any, closure: Any = None) -> None:
        """An optimizer's."""

    def schedule(self: Any, epoch: Any = None) -> None:
        """A scheduler's."""

    with recording():
        optimizer_class = type("Mine", (torch.optim.Optimizer,), {"step": step})
        scheduler_class = type("MyScheduler", (torch.optim.lr_scheduler.LRScheduler,), {"step": schedule})
        optimizer = optimizer_class(network().parameters(), {"lr": 0.1})
        scheduler_class(optimizer)
        assert vars(scheduler_class)["step"] is not schedule
    assert vars(scheduler_class)["step"] is schedule
    (cell,) = vars(optimizer_class)["step"].__closure__
    assert cell.cell_contents is step


def test_an_alias_that_torch_takes_when_it_is_imported_is_of_torchs_own() -> None:
    done = children.run(
        """
        import torch
        from support.inprocess import recording

        original = torch.nn.Module.__call__
        with recording():
            assert torch.nn.Module.__call__ is not original
            import torch.fx._symbolic_trace
            assert torch.fx._symbolic_trace._orig_module_call is original
            import torch._dynamo.variables.nn_module
        for owner in (torch._dynamo.utils, torch._dynamo.variables.nn_module):
            assert getattr(owner, "unpatched_nn_module_call", original) is original  # not in torch 2.4
        """,
        {"PYTHONPATH": str(Path(__file__).parent)},
    )
    assert done.code == 0, done


def test_what_another_thread_is_importing_is_patched_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, whole = threading.Event(), []

    def somebody_waits() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return bool(whole) or any(each.name == "imported" for each in traceback.extract_stack(frame))

    def halfway() -> None:
        begun.set()
        while not somebody_waits():
            pass

    (tmp_path / "takes_long.py").write_text("from test_uninstrument import halfway\nhalfway()\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "halfway", halfway, raising=False)
    thread = threading.Thread(target=importlib.import_module, args=("takes_long",))
    thread.start()
    begun.wait()
    Patches("a test").when_imported("takes_long", lambda module: whole.append(hasattr(module, "whole")))
    thread.join()
    assert whole == [True]


def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, halfway: Callable[[], None]) -> str:
    """The name of a module that calls `halfway` while it is imported."""
    name = f"takes_long_{halfway.__qualname__.split('.')[0]}"
    (tmp_path / f"{name}.py").write_text("from test_uninstrument import halfway\nhalfway()\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "halfway", halfway, raising=False)
    return name


def test_an_import_that_needs_the_thread_that_would_wait_for_it_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, patched = threading.Event(), threading.Event(), threading.Event()

    def halfway() -> None:
        begun.set()
        goes_on.wait()

    name = importing(tmp_path, monkeypatch, halfway)
    monkeypatch.setattr(_patching, "_IMPORT_S", 0.01, raising=False)
    thread = threading.Thread(target=importlib.import_module, args=(name,))
    thread.start()
    begun.wait()
    patches = Patches("a test")
    patches.when_imported(name, lambda module: hasattr(module, "whole") and patched.set())
    goes_on.set()
    thread.join()
    assert patched.wait(60)


def test_what_this_thread_is_importing_is_patched_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches, patched = Patches("a test"), threading.Event()

    def halfway() -> None:
        patches.when_imported(name, lambda module: hasattr(module, "whole") and patched.set())

    name = importing(tmp_path, monkeypatch, halfway)
    importlib.import_module(name)
    assert patched.wait(60)


def test_an_import_that_fails_in_another_thread_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, calls, patches = threading.Event(), threading.Event(), [0], Patches("a test")

    def halfway() -> None:
        calls[0] += 1
        begun.set()
        goes_on.wait()
        raise ValueError("the user's")

    def fails() -> None:
        with pytest.raises(ValueError, match="the user's"):
            importlib.import_module(name)

    name = importing(tmp_path, monkeypatch, halfway)
    monkeypatch.setattr(_patching, "_IMPORT_S", 0.01, raising=False)
    thread = threading.Thread(target=fails)
    thread.start()
    begun.wait()
    patches.when_imported(name, lambda module: None)
    (waiting,) = [each for each in threading.enumerate() if each.name == "otel-dl-import"]
    goes_on.set()
    thread.join()
    waiting.join()
    assert calls == [1]


def test_aliases_that_were_taken_meanwhile_still_work() -> None:
    with recording() as recorded:
        call, backward = torch.nn.Module.__call__, torch.autograd._engine_run_backward
        zero_grad = torch.nn.Module.zero_grad
    model = network()
    assert call(model, torch.ones(4, 6)).shape == (4, 3)
    zero_grad(model)
    loss = model(torch.ones(4, 6)).sum()
    backward((loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert recorded.run.current is None
    assert recorded.spans == []


def wrapped(original: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """As another tool would patch it."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(original.__name__)
        return original(*args, **kwargs)

    return wrapper


PATCHED_BY_OTHERS = [
    (torch.nn.Module, "__call__"),
    (torch.nn.Module, "zero_grad"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.optim.lr_scheduler.LRScheduler, "step"),
    (torch.autograd, "_engine_run_backward"),
    (torch.amp.GradScaler, "step"),
    (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__"),
]
_names = [f"{owner.__name__}.{name}" for owner, name in PATCHED_BY_OTHERS]


@pytest.mark.parametrize(("owner", "name"), PATCHED_BY_OTHERS, ids=_names)
class TestWithPatchesOfOthers:
    @pytest.fixture(autouse=True)
    def _as_it_was(self, owner: Any, name: str) -> Iterator[None]:
        original = vars(owner)[name]
        yield
        setattr(owner, name, original)

    def test_on_top_of_ours_stays_and_works(self, owner: Any, name: str) -> None:
        calls: list[str] = []
        with recording() as recorded:
            theirs = wrapped(vars(owner)[name], calls)
            setattr(owner, name, theirs)
            train(FORMS["plain"])
        recorded_steps = len(recorded.named("train.step"))
        assert vars(owner)[name] is theirs
        calls.clear()
        train_in_all_ways()
        assert calls
        assert recorded_steps == len(recorded.named("train.step")) == 10
        # And once more, with theirs (and what is left of ours) underneath.
        with recording() as again:
            diary, _ = train(FORMS["plain"])
        assert len(again.named("train.step")) == len(diary.steps)
        assert len(again.named("forward")) == len(diary.steps)
        assert vars(owner)[name] is theirs

    def test_beneath_ours_is_put_back_and_called(self, owner: Any, name: str) -> None:
        calls: list[str] = []
        theirs = wrapped(vars(owner)[name], calls)
        setattr(owner, name, theirs)
        train_in_all_ways()
        without = list(calls)
        calls.clear()
        with recording():
            train_in_all_ways()
        assert calls == without
        assert vars(owner)[name] is theirs


def test_one_target_for_each_installer() -> None:
    """So that a fault in one switches that one off."""
    with recording() as recorded:
        targets = [patches.target for patches in recorded.session._patches]
    assert len(set(targets)) == len(targets)
    assert set(training.INSTALLERS) < set(targets)


def test_an_epoch_that_was_begun_before_goes_on() -> None:
    model, data = network(), loader(6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = iter(data)
    for _ in range(2):
        update(model, optimizer, *next(batches))
    with recording() as recorded:
        for _ in range(2):
            update(model, optimizer, *next(batches))
    for x, y in batches:
        update(model, optimizer, x, y)
    assert len(recorded.named("train.step")) == 2


def test_instrument_twice_and_again_after_uninstrument(tmp_path: Path) -> None:
    done = children.run(
        """
        import torch
        import otel_dl
        from support.loops import FORMS, train
        from test_uninstrument import differences, snapshot

        train(FORMS["plain"])
        before = snapshot()
        otel_dl.instrument()
        otel_dl.instrument()
        train(FORMS["plain"])
        otel_dl.uninstrument()
        otel_dl.uninstrument()
        print(differences(before, snapshot()))
        train(FORMS["plain"])
        otel_dl.instrument()
        train(FORMS["plain"])
        otel_dl.uninstrument()
        print(differences(before, snapshot()))
        """,
        {
            "OTEL_TRACES_EXPORTER": "otel_dl_file",
            "OTEL_DL_DIR": str(tmp_path),
            "PYTHONPATH": str(Path(__file__).parent),
        },
    )
    assert done.code == 0, done
    assert done.stdout.splitlines() == ["[]", "[]"]
    assert done.stderr.count("otel-dl 0.") == 2, "a run each"
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert text.count('"train.step"') == 20
