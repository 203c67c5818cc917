"""DataLoader: each batch stands in its step, and names who read it, in every way a loader can read."""

from __future__ import annotations

import collections
import copy
import gc
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.inprocess import Recorded, recording
from support.loader_jobs import run, spans
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils import worker as torch_worker

from otel_dl.patches import dataloader as patch_dataloader
from otel_dl.patches._patching import Patches
from otel_dl.patches.dataloader import Info, Loaders
from otel_dl.recording import ids
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.run import Run
from otel_dl.settings import Settings
from otel_dl.viewing.reading import Span

QUICK = ("map_style", "iterable_style", "persistent", "stateful_resumed")
"""Under spawn, where each worker has to import torch; the other kinds take their time."""


class Trace:
    """What a job left behind, by what the truth can be compared with."""

    def __init__(self, directory: Path) -> None:
        self.spans = spans(directory)
        self.by_id = {span.span_id: span for span in self.spans}
        began: dict[str, int] = {}
        for step in self.named("train.step"):
            run = step.resource["dl.run.id"]
            began[run] = min(began.get(run, step.start_ns), step.start_ns)
        runs = sorted(began, key=began.__getitem__)
        self.steps = {
            (runs.index(step.resource["dl.run.id"]), step.attributes["dl.step"]): step
            for step in self.named("train.step")
        }
        self.step_of = {step.span_id: place for place, step in self.steps.items()}
        self.waits = [wait for wait in self.named("dataloader.next") if wait.parent_id in self.step_of]
        self.fetches: dict[int, list[Span]] = collections.defaultdict(list)
        for fetch in self.named("dataloader.fetch"):
            self.fetches[fetch.resource["process.pid"]].append(fetch)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def read(self, items: list[dict[str, Any]]) -> list[Span]:
        """The fetches in which all of this was read: by this process, at this time."""
        return [
            fetch
            for fetch in self.fetches[items[0]["pid"]]
            if all(fetch.start_ns <= item["at"] <= fetch.end_ns for item in items)
        ]

    def returned(self, fetch: Span) -> list[Span]:
        """The waits that this fetch is a child of, or in a worker links to and is linked from."""
        there = (fetch.trace_id, fetch.span_id)
        return [
            wait
            for wait in self.waits
            if fetch.parent_id == wait.span_id or (there in wait.links and (wait.trace_id, wait.span_id) in fetch.links)
        ]


def verdict(step: dict[str, Any], batch: dict[str, Any], trace: Trace, taken: list[str]) -> str:
    """What the trace says of this batch that is not so; empty where all is right. Notes the wait in `taken`."""
    fetches = trace.read(batch["items"])
    waits = [wait for fetch in fetches for wait in trace.returned(fetch)]
    if not waits:
        return "missing"
    if len(fetches) > 1 or len(waits) > 1:
        return "double"
    (fetch,), (wait,) = fetches, waits
    taken.append(wait.span_id)
    run, number = trace.step_of[wait.parent_id]
    asked = number if batch["asked"] is None else step["step"] + batch["asked"]
    if (run, number) != (step["run"], asked):
        return "step"
    first = batch["items"][0]
    pid = wait.resource["process.pid"] if first["worker"] is None else wait.attributes.get("dl.worker.pid")
    if (wait.attributes.get("dl.worker.id"), pid) != (first["worker"], first["pid"]):
        return "worker"
    if fetch.resource.get("dl.worker.id") != first["worker"]:
        return "worker of the fetch"
    if fetch.attributes["dl.batch.index"] != wait.attributes["dl.batch.index"]:
        return "batch"
    if wait.attributes["dl.loader.id"] != batch["loader"]:
        return "loader"
    began_with = batch is step["taken"][0] and batch["asked"] == 0
    if began_with and trace.steps[run, number].attributes["dl.epoch"] != batch["epoch"]:
        return "epoch"
    if first["worker"] is not None and any(
        (item["trace"], item["span"]) != (fetch.trace_id, fetch.span_id) for item in batch["items"]
    ):
        return "context"
    return ""


@pytest.mark.parametrize(
    ("method", "kinds"),
    [
        ("none", ()),
        ("fork", ()),
        ("spawn", QUICK),
        ("forkserver", ()),
        pytest.param("spawn", (), marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else "some_kinds" if value else "all_kinds",
)
def test_table_of_batches_and_user_spans(
    method: str, kinds: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run("loaders.py", method, *kinds, directory=tmp_path, timeout=400)
    *truth, last = [json.loads(line) for line in output.splitlines()]
    assert set(last["helpers"].values()) <= {1}, "threads of the fork server and the resource tracker"
    files = {file.name.rpartition("-")[0] for file in tmp_path.iterdir()}
    assert len(files) == 1, "neither they nor workers export anything"
    trace = Trace(tmp_path)
    decoded: dict[int, list[str]] = collections.defaultdict(list)
    for span in trace.named("decode"):
        decoded[span.attributes["at"]].append(span.trace_id)
    rows: dict[str, collections.Counter[str]] = {}
    taken: list[str] = []
    in_workers: list[dict[str, Any]] = []
    for step in truth:
        row = rows.setdefault(step["kind"], collections.Counter())
        row["steps"] += 1
        for batch in step["taken"]:
            row["batches"] += 1
            row["wrong: " + verdict(step, batch, trace, taken)] += 1
            for item in batch["items"]:
                # Without workers they are in the step's trace, in one in the batch's own, in a thread in their own.
                row["items"] += 1
                found = decoded[item["at"]]
                row["once"] += len(found) == 1 and (int(item["trace"], 16) == 0 or found == [item["trace"]])
            in_workers += [item for item in batch["items"] if item["worker"] is not None]
    kind_of = {(step["run"], step["step"]): step["kind"] for step in truth}
    for wait in trace.waits:
        if wait.span_id not in taken:
            rows[kind_of[trace.step_of[wait.parent_id]]]["wrong: double"] += 1
    with capsys.disabled():
        print(f"\n{'start':<11}{'loader':<29}{'batches':>8}{'wrong':>7}{'missing':>9}{'double':>8}{'user spans':>12}")
        for kind, row in rows.items():
            row["bad"] = sum(n for what, n in row.items() if what.startswith("wrong: ")) - row["wrong: "]
            missing, double = row["wrong: missing"], row["wrong: double"]
            wrong = row["bad"] - missing - double
            items = f"{row['once']}/{row['items']}"
            print(f"{method:<11}{kind:<29}{row['batches']:>8}{wrong:>7}{missing:>9}{double:>8}{items:>12}")
        for kind, lacks in last["missing"].items():
            print(f"{method:<11}{kind:<29} not tried: {', '.join(lacks)} is not installed")
    assert trace.steps.keys() == kind_of.keys()
    for kind, row in rows.items():
        assert not row["bad"], (kind, row)
        assert row["once"] == row["items"] > 0, (kind, row)
    assert not any("otel" in thread for item in in_workers for thread in item["threads"])
    inits = trace.named("init")
    runs = {s.trace_id for s in trace.named("train.startup")}
    assert {s.trace_id for s in inits} <= runs, "outside a fetch a worker's context is the run's"
    assert len({s.attributes["pid"] for s in inits}) == len(inits)
    assert {s.attributes["pid"] for s in inits} >= {item["pid"] for item in in_workers}


# In this process, with forked workers.


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            self.third()
        return torch.tensor(index)

    def third(self) -> None:
        pass


class Failing(Numbers):
    def third(self) -> None:
        raise KeyError("three")


def train(batches: Any) -> list[Any]:
    """A step a batch; what the batches were."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for batch in batches:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(batch)
    return seen


def waits(recorded: Recorded) -> list[dict[str, Any]]:
    return [dict(span.attributes or {}) for span in recorded.named("dataloader.next")]


def forked(dataset: Dataset[Any], **keywords: Any) -> DataLoader[Any]:
    return DataLoader(dataset, num_workers=2, multiprocessing_context="fork", **keywords)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_stands_on_wait_and_fetch_and_is_torchs(workers: int) -> None:
    with recording() as recorded:
        loader = forked(Failing()) if workers else DataLoader(Failing())
        with pytest.raises(KeyError, match="three"):
            train(loader)
    errors = [(span.name, span.attributes["error.type"]) for span in recorded.spans if "error.type" in span.attributes]
    assert ("dataloader.next", "KeyError") in errors
    assert ("dataloader.fetch", "KeyError") in errors
    failed = [wait for wait in waits(recorded) if "error.type" in wait]
    assert [wait["dl.batch.index"] for wait in failed] == [3]


def test_an_iterator_older_than_the_run_has_waits_and_no_worker_that_reports() -> None:
    loader = forked(Numbers(), persistent_workers=True)
    iterator = iter(loader)
    with recording() as recorded:
        train(iterator)
        assert train(loader) == list(range(6))
    first, second = waits(recorded)[:6], waits(recorded)[6:]
    assert len(second) == 6
    assert not any("dl.batch.index" in wait for wait in first)
    assert [wait["dl.batch.index"] for wait in second] == list(range(6))
    assert all("dl.worker.pid" in wait and "dl.fetch.duration_ms" not in wait for wait in second)
    assert not recorded.named("dataloader.fetch")


def test_an_iterator_of_an_earlier_run_is_older_than_this_one() -> None:
    loader = forked(Numbers(), persistent_workers=True)
    with recording():
        iterator = iter(loader)
        train([next(iterator), next(iterator)])
    with recording() as recorded:
        train(DataLoader(Numbers()))
        train(iterator)
        assert train(loader) == list(range(6))
    other, rest, again = waits(recorded)[:6], waits(recorded)[6:10], waits(recorded)[10:]
    assert {wait["dl.loader.id"] for wait in other} == {0}
    assert not any("dl.loader.id" in wait or "dl.worker.pid" in wait for wait in rest)
    assert [(wait["dl.loader.id"], wait["dl.batch.index"]) for wait in again] == [(1, index) for index in range(6)]
    assert all("dl.worker.pid" in wait for wait in again)
    assert not any(span.links for span in recorded.named("dataloader.next"))


def test_what_a_dataset_reads_from_a_loader_of_its_own_is_part_of_its_fetch() -> None:
    class Nested(Numbers):
        def third(self) -> None:
            assert len(list(DataLoader(Numbers(), batch_size=2))) == 3

    with recording() as recorded:
        train(DataLoader(Nested()))
        train(forked(Nested()))
    assert len(recorded.named("dataloader.next")) == len(recorded.named("dataloader.fetch")) == 12


@pytest.mark.skipif(
    "in_order" not in inspect.signature(DataLoader).parameters, reason="DataLoader has in_order from torch 2.6 on"
)
def test_batches_that_come_out_of_order_keep_their_own_index() -> None:
    with recording() as recorded:
        got = [int(batch) for batch in train(forked(Numbers(), in_order=False))]
    assert [wait["dl.batch.index"] for wait in waits(recorded)] == got


def test_loaders_are_numbered_by_first_use_whatever_their_equality() -> None:
    class Odd(DataLoader[Any]):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    with recording() as recorded:
        first, second = Odd(Numbers(), batch_size=3), Odd(Numbers(), batch_size=3)
        for loader in (second, first, second):
            train(loader)
    found = [(wait["dl.loader.id"], wait["dl.batch.index"]) for wait in waits(recorded)]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1)]


def test_the_table_of_loaders_keeps_none_alive_and_takes_no_successor_for_one() -> None:
    loaders = Loaders()
    numbers = []
    for _ in range(50):
        loader = DataLoader(Numbers())
        numbers.append(loaders.epoch(loader))
        del loader
        gc.collect()
    assert numbers == [(number, 0) for number in range(50)]
    assert not loaders._known


def test_a_stream_that_ends_in_a_worker_leaves_no_fetch() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with recording() as recorded:
        assert len(train(forked(Stream()))) == 6
    assert len(recorded.named("dataloader.fetch")) == 6


def test_uninstalling_puts_back_the_identical_objects_and_pickling_is_as_before() -> None:
    kinds = (
        torch_dataloader._BaseDataLoaderIter,
        torch_dataloader._SingleProcessDataLoaderIter,
        torch_dataloader._MultiProcessingDataLoaderIter,
    )
    before = [dict(vars(kind)) for kind in kinds]
    loop = torch_worker._worker_loop
    loader = forked(Numbers(), persistent_workers=True)
    with recording():
        assert torch_worker._worker_loop is not loop
        assert pickle.loads(pickle.dumps(torch_worker._worker_loop)) is not None
        copied: Any = copy.deepcopy(loader)
        assert train(pickle.loads(pickle.dumps(loader))) == train(copied) == list(range(6))
        with pytest.raises(NotImplementedError):
            pickle.dumps(iter(loader))
    assert torch_worker._worker_loop is loop
    for kind, members in zip(kinds, before, strict=True):
        assert dict(vars(kind)) == members
    assert train(loader) == list(range(6))


def test_the_name_of_a_batch_is_known_before_it_is_read() -> None:
    with recording() as recorded:
        train(forked(Numbers()))
    wait = recorded.named("dataloader.next")[0]
    fetch = recorded.named("dataloader.fetch")[0]
    assert wait.links[0].context.trace_id == fetch.context.trace_id
    assert fetch.parent is None
    assert ids.span_id("a", "batch", 0, 0, "fetch") != ids.span_id("a", "batch", 0, 1, "fetch")


def counts_itself(self: Any, data: Any) -> Any:
    self._rcvd_idx += 1
    self._try_put_index()
    return data


def is_told_nothing(self: Any, data: Any) -> Any:
    self._try_put_index()
    return data


def is_told_the_worker(self: Any, data: Any, worker_idx: int) -> Any:
    self._try_put_index()
    return data


@pytest.mark.parametrize("form", [counts_itself, is_told_nothing, is_told_the_worker])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("native", [True, False], ids=["C", "Python"])
def test_batch_and_worker_are_known_in_each_form_of_torchs_iterator(form: Any, in_order: bool, native: bool) -> None:
    """Stand-ins for iterators of other versions: seven batches for three workers; out of order the last comes first."""

    class Iterator:
        _process_data = form

        def __init__(self) -> None:
            self._rcvd_idx = self._send_idx = 0
            self._task_info: dict[int, tuple[int]] = {}
            self._otel_dl = Info("nonce")
            self._otel_dl.in_order, self._otel_dl.pids = in_order, (70, 71, 72)

        def _get_data(self) -> tuple[int, str]:
            return min(self._task_info) if in_order else max(self._task_info), "batch"

        def _try_put_index(self) -> None:
            if self._send_idx < 7:
                self._task_info[self._send_idx] = (self._send_idx % 3,)
                self._send_idx += 1

        def __next__(self) -> Any:
            index, data = self._get_data()
            (worker,) = self._task_info.pop(index)
            if index == self._rcvd_idx and form is not counts_itself:
                self._rcvd_idx += 1
            return self._process_data(data, worker) if form is is_told_the_worker else self._process_data(data)

    patches = Patches("test")
    patch_dataloader._install_returned(Run(Settings(native=native), NeverHead()), patches, Iterator)
    if not in_order:
        patch_dataloader._watch_order(patches)(Iterator)
    iterator: Any = Iterator()
    for _ in range(3):
        iterator._try_put_index()
    found = []
    for _ in range(7):
        next(iterator)
        _, _, index, _, _, worker, pid, *_ = iterator._otel_dl.batch
        found.append((index, worker, pid))
    order = range(7) if in_order else [2, 3, 4, 5, 6, 1, 0]
    assert found == [(index, index % 3, 70 + index % 3) for index in order]
    patches.restore()
    assert vars(Iterator)["_process_data"] is form
