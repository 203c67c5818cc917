"""Every collective and transfer of every rank, once, with its number, its bytes and its end. Jobs are of real gloo
processes; what this torch's source is (hooks of groups, or calls), the table says."""

from __future__ import annotations

import atexit
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from support.inprocess import Recorded, recording
from support.ranks import begin, job

import otel_dl
from otel_dl.forensics import layout, reader, report
from otel_dl.patches.groups import known_groups
from otel_dl.ranks import pending
from otel_dl.recording.collectives import CALL
from otel_dl.semconv import COLLECTIVES

HOOKED = hasattr(c10d.ProcessGroup, "register_pre_hook")
SOURCE = "hook" if HOOKED else "call"
RECORDED = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
"""Whether torch has a Flight Recorder for gloo: what C++ issues comes from there where there are no hooks."""
ON = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""For ranks that make groups before recording is on; torch's default from 2.13 on."""


# What ranks do.


def told(recorded: Recorded) -> list[dict[str, Any]]:
    """The collectives' spans by their start, with the name of what is around them."""
    names = {span.context.span_id: span.name for span in recorded.spans}
    return [
        {
            "name": span.name,
            "parent": names.get(span.parent.span_id) if span.parent else None,
            "start": span.start_time,
            "end": span.end_time,
            "failed": not span.status.is_unset,
            **dict(span.attributes.items()),
        }
        for span in sorted(recorded.spans, key=lambda span: span.start_time)
        if span.name in COLLECTIVES
    ]


def flight_recorder() -> list[tuple[str, str, int]]:
    """(group, operation, number) of what it has."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return [(entry["process_group"][0], entry["profiling_name"], entry["collective_seq_id"]) for entry in entries]


def functions(rank: int, size: int) -> dict[str, tuple[Callable[[], Any], str, str]]:
    """Every public function of c10d that moves something, what it does on this rank, and what its span is called."""
    ones = torch.ones(4)
    pieces = [torch.zeros(4) for _ in range(size)]
    wide = torch.zeros(4 * size)
    first = pieces if rank == 0 else None
    found: dict[str, tuple[Callable[[], Any], str, str]] = {
        "all_reduce": (lambda: dist.all_reduce(ones), "all_reduce", ""),
        "all_reduce_coalesced": (lambda: dist.all_reduce_coalesced([ones, ones]), "all_reduce", "coalesced"),
        "broadcast": (lambda: dist.broadcast(ones, 0), "broadcast", ""),
        "reduce": (lambda: dist.reduce(ones, 0), "reduce", ""),
        "all_gather": (lambda: dist.all_gather(pieces, ones), "all_gather", ""),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(wide, ones), "all_gather", "into_tensor"),
        "all_gather_coalesced": (
            lambda: dist.all_gather_coalesced([[torch.zeros(4)] for _ in range(size)], [ones]),
            "all_gather",
            "coalesced",
        ),
        "gather": (lambda: dist.gather(ones, first), "gather", ""),
        "scatter": (lambda: dist.scatter(ones, first), "scatter", ""),
        "all_to_all_single": (lambda: dist.all_to_all_single(torch.zeros(4), ones), "all_to_all", "single"),
        "barrier": (lambda: dist.barrier(), "barrier", ""),
        "monitored_barrier": (lambda: dist.monitored_barrier(), "monitored_barrier", ""),
        "all_gather_object": (lambda: dist.all_gather_object([None] * size, rank), "all_gather", "object"),
        "gather_object": (lambda: dist.gather_object(rank, [None] * size if rank == 0 else None), "gather", "object"),
        "broadcast_object_list": (lambda: dist.broadcast_object_list([rank]), "broadcast", "object_list"),
        "scatter_object_list": (
            lambda: dist.scatter_object_list([None], list(range(size))),
            "scatter",
            "object_list",
        ),
        "send, recv": (
            (lambda: dist.send(ones, 1)) if rank == 0 else (lambda: dist.recv(ones, 0)),
            "send" if rank == 0 else "recv",
            "",
        ),
        "isend, irecv": (
            (lambda: dist.isend(ones, 1).wait()) if rank == 0 else (lambda: dist.irecv(ones, 0).wait()),
            "send" if rank == 0 else "recv",
            "",
        ),
        "recv from any": (
            (lambda: dist.send(ones, 1)) if rank == 0 else (lambda: dist.recv(ones)),
            "send" if rank == 0 else "recv",
            "",
        ),
    }
    if hasattr(dist, "send_object_list"):
        found["send_object_list, recv_object_list"] = (
            (lambda: dist.send_object_list([1], 1)) if rank == 0 else (lambda: dist.recv_object_list([None], 0)),
            "send" if rank == 0 else "recv",
            "object_list",
        )
    if HOOKED:  # gloo has them since 2.8
        found["all_to_all"] = (lambda: dist.all_to_all(pieces, [ones] * size), "all_to_all", "")
        found["reduce_scatter"] = (lambda: dist.reduce_scatter(ones, pieces), "reduce_scatter", "")
        found["reduce_scatter_tensor"] = (
            lambda: dist.reduce_scatter_tensor(ones, wide),
            "reduce_scatter",
            "tensor",
        )
    return found


def every_function(rank: int, size: int, folder: str) -> Any:
    with recording() as recorded:
        recorded.run.start()
        begin(rank, size, folder)
        expected = []
        for function, (call, name, variant) in functions(rank, size).items():
            call()
            expected.append((function, f"dist.{name}", variant))
    dist.destroy_process_group()
    return {"expected": expected, "spans": told(recorded), "dropped": recorded.run.dropped}


def numbers(rank: int, size: int, folder: str) -> Any:
    """A mix, of which the first part ran before recording."""
    begin(rank, size, folder)
    ones = torch.ones(4)
    for function in functions(rank, size).values():
        function[0]()
    dist.all_reduce(ones)
    before = len(flight_recorder())
    with recording() as recorded:
        group = dist.new_group(list(range(size)))
        model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01, process_group=group)
        for name, function in functions(rank, size).items():
            function[0]()
            if name.startswith("all"):
                dist.all_reduce(ones, group=group, async_op=True).wait()
        for _ in range(3):
            model(torch.ones(2, 60)).sum().backward()
        with c10d._coalescing_manager():
            dist.all_reduce(ones)
            dist.all_reduce(ones)
        dist.all_reduce(ones)
        entries = flight_recorder()[before:]
    return {"entries": entries, "spans": told(recorded)}


def network(width: int = 60, layers: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])


def train(model: Any, steps: int, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(17 * step + rank)
        model(torch.randn(4, 60, generator=generator)).square().sum().backward()
        optimizer.step()
    return [float(parameter.double().sum()) for parameter in model.parameters()]


def data_parallel(rank: int, size: int, folder: str) -> Any:
    begin(rank, size, folder)
    plain = train(torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01), 3, rank)
    with recording() as recorded:
        model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01)
        recorded_too = train(model, 3, rank)
        entries = flight_recorder()
    return {"same": plain == recorded_too, "spans": told(recorded), "entries": entries}


def comm_hooks(rank: int, size: int, folder: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    begin(rank, size, folder)

    def pruned(state: Any, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        """Gathers the largest values of each rank."""
        values, places = bucket.buffer().abs().topk(4)
        values = bucket.buffer()[places]
        all_values, all_places = [values.clone() for _ in range(size)], [places.clone() for _ in range(size)]
        dist.all_gather(all_values, values)
        dist.all_gather(all_places, places)
        result = torch.zeros_like(bucket.buffer())
        for some, where in zip(all_values, all_places, strict=True):
            result[where] += some / size
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(result)
        return future

    def run(which: str) -> tuple[list[float], list[str]]:
        # Several buckets at a time are more than PowerSGD on gloo can do: it waits for ever, without us too.
        several = 25 if which == "power" else 0.01
        model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=several)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        hooks = {
            "compress": (None, default_hooks.fp16_compress_hook),
            "power": (state, powerSGD_hook.powerSGD_hook),
            "pruned": (None, pruned),
        }
        model.register_comm_hook(*hooks[which])
        return train(model, 4, rank), [hook.__name__ for hook, _ in model._comm_hooks]

    answer: dict[str, Any] = {}
    for which in ("compress", "power", "pruned"):
        plain = run(which)
        with recording() as recorded:
            recorded_too = run(which)
        answer[which] = {"same": plain == recorded_too, "spans": told(recorded)}
    return answer


class Noted:
    """Stands for the other ranks: what they would say of every failure."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.said: list[tuple[BaseException, Any]] = []

    def joining(self, *args: Any) -> None: ...
    def joined(self, *args: Any) -> None: ...
    def left(self, *args: Any) -> None: ...
    def kept(self, *args: Any) -> None: ...

    def recovered(self, group: str) -> None:
        self.asked.append(["recovered", group])

    def explain(self, error: BaseException, wait: Any) -> Any:
        from otel_dl.recording.ranks import Explained

        self.asked.append([wait.name, wait.seq, wait.group.id, list(wait.group.ranks), wait.group.backend,
                           wait.group.limit_s, wait.size])  # fmt: skip
        error.add_note("who is missing")
        explained = Explained("GLOO_TIMEOUT", "who is missing", {"rank_id": 0, "dl.missing_ranks": [1]})
        self.said.append((error, explained))
        return explained

    def of_this_error(self, error: BaseException) -> Any:
        return next((explained for known, explained in self.said if known is error), None)


def failures(rank: int, size: int, folder: str) -> Any:
    """Rank 1 never comes to what rank 0 waits for."""
    from datetime import timedelta

    store = dist.FileStore(f"{folder}/common", size)
    answer: dict[str, Any] = {}
    with recording() as recorded:
        recorded.run.ranks = noted = Noted()  # type: ignore[assignment]
        begin(rank, size, folder, timeout=timedelta(seconds=30))
        groups = [dist.new_group(list(range(size)), timeout=timedelta(seconds=3)) for _ in range(3)]
        dist.barrier()
        model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01, process_group=groups[2])
        train(model, 2, rank)
        if rank:
            store.wait(["done"], timedelta(seconds=60))
            return None
        ones = torch.ones(4)

        def fails(call: Callable[[], Any]) -> list[Any]:
            before = len(noted.asked)
            try:
                call()
            except BaseException as error:
                return [type(error).__name__, getattr(error, "__notes__", []), noted.asked[before:]]
            return ["nothing"]

        answer["sync"] = fails(lambda: dist.all_reduce(ones, group=groups[0]))
        work = dist.all_reduce(ones, group=groups[1], async_op=True)
        answer["async"] = fails(work.wait)
        answer["wrong argument"] = fails(lambda: dist.all_reduce("no tensor"))
        answer["not supported"] = fails(lambda: dist.all_reduce(ones, op=dist.ReduceOp.BAND))

        def own() -> None:
            raise ValueError("the user's")

        class Raises(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                raise ValueError("the user's")

        answer["own error in backward"] = fails(
            lambda: Raises.apply(torch.ones(3, requires_grad=True)).sum().backward()
        )
        answer["backward"] = fails(lambda: model(torch.ones(2, 60)).sum().backward())
        store.set("done", "1")
    answer["spans"] = told(recorded)
    answer["steps"] = [dict(span.attributes) for span in recorded.named("train.step")]
    answer["backwards"] = [dict(span.attributes) for span in recorded.named("backward")]
    return answer


def waited_for_again(rank: int, size: int, folder: str) -> Any:
    """Rank 1 comes when rank 0 has given up twice."""
    from datetime import timedelta

    store = dist.FileStore(f"{folder}/common", size)
    caught: list[str] = []
    with recording() as recorded:
        recorded.run.ranks = noted = Noted()  # type: ignore[assignment]
        begin(rank, size, folder)
        collectives = recorded.run.collectives
        with otel_dl.step():
            if rank:
                store.wait(["given up"], timedelta(seconds=60))
            work = dist.all_reduce(torch.ones(4), async_op=True)
            for _ in range(0 if rank else 2):
                try:
                    work.wait(timedelta(seconds=0.1))
                except RuntimeError as error:
                    caught.append(str(error))
                    assert not collectives.waits
            store.set("given up", "1")
            work.wait()
            assert not collectives.outstanding
    return {"caught": caught, "asked": noted.asked, "spans": told(recorded),
            "steps": [dict(span.attributes) for span in recorded.named("train.step")]}  # fmt: skip


def counted(rank: int, size: int, folder: str) -> Any:
    """Collectives as a hook of the user's own counts them, without and with recording."""
    begin(rank, size, folder)
    group = c10d._get_default_group()
    seen: list[str] = []
    atexit.register(group.unregister_pre_hook, 1)  # or torch itself may die of it at the end
    group.register_pre_hook(1, lambda args: seen.append(args.name.name))
    everything = functions(rank, size)

    def all_of_it() -> list[str]:
        seen.clear()
        for function in everything.values():
            function[0]()
        train(torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01), 3, rank)
        return list(seen)

    plain = all_of_it()
    with recording():
        recorded = all_of_it()
    return [plain, recorded, all_of_it()]


def ends(rank: int, size: int, folder: str) -> Any:
    """Nobody destroys the group, and recording is on until the end."""
    import otel_dl

    otel_dl.instrument()
    begin(rank, size, folder)
    train(torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01), 3, rank)
    return True


def restored(rank: int, size: int, folder: str) -> Any:
    begin(rank, size, folder)
    owners = (c10d, dist, c10d.ProcessGroup, c10d.Work, torch._C.Future, torch.autograd,
              torch.nn.parallel.DistributedDataParallel)  # fmt: skip

    def everything() -> list[Any]:
        found = [dict(vars(owner)) for owner in owners]
        cells: dict[str, Any] = {}
        for name, function in vars(c10d).items():
            if type(function) is FunctionType and "func" in function.__code__.co_freevars:
                cells[f"cell of {name}"] = inspect.getclosurevars(function).nonlocals["func"]
        return [*found, cells]

    def is_same(one: list[Any], other: list[Any]) -> list[str]:
        return [
            name
            for a, b in zip(one, other, strict=True)
            for name in a.keys() | b.keys()
            if a.get(name) is not b.get(name) and name != "_group_count"
        ]

    before = everything()
    with recording():
        changed = is_same(before, everything())
        dist.all_reduce(torch.ones(3))
        dist.new_group(list(range(size)))
    with recording() as recorded:
        recorded.run.start()
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))
    return [sorted(changed), sorted(is_same(before, everything())), len(told(recorded))]


def faulty(rank: int, size: int, folder: str) -> Any:
    """Our own code raises in the middle of each."""
    from otel_dl.recording.collectives import Collectives

    begin(rank, size, folder)
    said: list[Any] = []
    for method in ("issue", "complete", "show"):
        with recording() as recorded:
            ones = torch.ones(4)

            # What is no function can't be called: a fault of ours.
            recorded.run.collectives.__class__ = type("Faulty", (Collectives,), {method: None})
            dist.all_reduce(ones)
            dist.all_reduce(ones, async_op=True).wait()
            dist.barrier()
            model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01)
            train(model, 2, rank)
            said.append(ones.tolist())
    return said


def sharded(rank: int, size: int, folder: str) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    begin(rank, size, folder)
    with recording() as recorded:
        model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
        train(model, 2, rank)
        if hasattr(dist, "fsdp") and hasattr(dist.fsdp, "fully_shard"):
            second = network()
            dist.fsdp.fully_shard(second, mesh=dist.device_mesh.init_device_mesh("cpu", (size,)))
            train(second, 2, rank)
    return {"spans": told(recorded), "entries": flight_recorder()}


def functional(rank: int, size: int, folder: str) -> Any:
    import torch.distributed._functional_collectives as fc
    from torch._dynamo.utils import counters

    begin(rank, size, folder)

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = fc.all_reduce(x * 2, "sum", list(range(size)))
        dist.all_reduce(y)
        return y + 1

    answers: list[Any] = []
    for on in (False, True):
        torch._dynamo.reset()
        counters.clear()

        def run() -> list[Any]:
            compiled = torch.compile(compute, backend="eager")
            results = [compiled(torch.ones(4) * n).tolist() for n in range(3)]
            return [results, dict(counters["graph_break"]), dict(counters["stats"])]

        if on:
            with recording() as recorded:
                recorded.run.start()
                answers.append(run())
            spans = told(recorded)
        else:
            answers.append(run())
    return {"answers": answers, "spans": spans}


# What it comes to.


@pytest.fixture(scope="module")
def of_every_function() -> list[Any]:
    return job("test_collectives:every_function")


def test_each_public_function_is_one_span_of_its_name(of_every_function: list[Any]) -> None:
    for rank, answer in enumerate(of_every_function):
        for (function, name, variant), span in zip(answer["expected"], answer["spans"], strict=True):
            if rank == 0:
                print(f"  {function:<36}{span['name']:<24}{variant:<14}{span['dl.collective.source']}")
            assert (span["name"], span.get("dl.collective.variant", "")) == (name, variant), function
            assert span["dl.collective.source"] == SOURCE
            assert span["dl.collective.end"] == "wait"
            assert span["dl.collective.async"] == (function == "isend, irecv"), function
            assert span["start"] < span["end"]
            assert (span["dl.group.id"], span["dl.group.size"]) == ("0", 2)
        assert answer["dropped"] == {}


def test_what_a_rank_gives_is_counted_in_bytes(of_every_function: list[Any]) -> None:
    spans = {function[0]: span for function, span in zip(of_every_function[0]["expected"],
                                                         of_every_function[0]["spans"], strict=True)}  # fmt: skip
    assert spans["all_reduce"]["dl.collective.bytes"] == 16
    assert spans["all_reduce_coalesced"]["dl.collective.bytes"] == 32
    assert spans["all_to_all_single"]["dl.collective.bytes"] == 16
    assert spans["send, recv"]["dl.collective.bytes"] == 16


@pytest.mark.skipif(not RECORDED, reason="the Flight Recorder knows gloo from torch 2.8 on")
def test_numbers_are_the_flight_recorders() -> None:
    for answer in job("test_collectives:numbers", **ON):
        known = {(group, number) for group, _, number in answer["entries"]}
        ours = [(span["dl.group.id"], span["dl.collective.seq"]) for span in answer["spans"]
                if "dl.collective.seq" in span and span["name"] != "dist.monitored_barrier"]  # fmt: skip
        assert len(ours) == len(set(ours))
        assert set(ours) <= known
        inner = known - set(ours)  # the first of an object collective's, the second half of an emulated one
        assert len(inner) <= 7


def check_buckets(answers: list[Any]) -> None:
    for answer in answers:
        assert answer["same"]
        buckets = [span for span in answer["spans"] if "dl.bucket.index" in span]
        assert {span["parent"] for span in buckets} == {"backward"}
        assert {span["name"] for span in buckets} == {"dist.all_reduce"}
        assert all(span["dl.collective.async"] for span in buckets)
        by_step: list[list[int]] = []
        for span in buckets:
            index = span["dl.bucket.index"]
            if index == 0:
                by_step.append([])
            assert index == len(by_step[-1])
            by_step[-1].append(index)
        assert len(by_step) == 3
        assert len(by_step[1]) == len(by_step[2]) > 1
        reduced = {number for _, name, number in answer["entries"] if name == "gloo:all_reduce"}
        mine = {span["dl.collective.seq"] for span in buckets}
        first = min(mine)
        assert mine == {number for number in reduced if number >= first}
        assert len(mine) == len(buckets)


@pytest.mark.skipif(not RECORDED, reason="what DDP's C++ issues is seen from torch 2.8 on")
def test_each_gradient_bucket_is_there_once_and_results_are_the_same() -> None:
    check_buckets(job("test_collectives:data_parallel", **ON))


@pytest.mark.long
@pytest.mark.skipif(not RECORDED, reason="what DDP's C++ issues is seen from torch 2.8 on")
def test_each_gradient_bucket_of_eight_ranks_is_there_once() -> None:
    answers = job("test_collectives:data_parallel", ranks=8, **ON)
    check_buckets(answers)
    ours = [[(span["dl.collective.seq"], span["dl.bucket.index"], span["dl.collective.bytes"])
             for span in answer["spans"] if "dl.bucket.index" in span] for answer in answers]  # fmt: skip
    assert all(some == ours[0] for some in ours)


def test_a_comm_hook_shows_what_it_computes_and_sends_bucket_by_bucket() -> None:
    for answer in job("test_collectives:comm_hooks"):
        for which, sent in (("compress", 0.5), ("pruned", None)):
            assert answer[which]["same"]
            spans = [span for span in answer[which]["spans"] if "dl.bucket.index" in span]
            firsts = [span for span in spans if "dl.hook.sent_bytes" in span]
            assert all(span["dl.hook.compute_ms"] > 0 for span in firsts)
            assert [span["dl.bucket.index"] for span in firsts if span["dl.bucket.index"] == 0] == [0] * 4
            if sent is not None:
                assert len(spans) == len(firsts)
                assert {span["dl.collective.end"] for span in spans} == {"callback"}
            else:
                assert len(spans) == 2 * len(firsts)
                assert {span["dl.hook.sent_bytes"] for span in firsts} == {4 * 4 + 4 * 8}
        power = answer["power"]
        assert power["same"]
        names = {(span["name"], span.get("dl.bucket.index", -1)) for span in power["spans"]}
        assert ("dist.all_reduce", 0) in names


@pytest.mark.skipif(not HOOKED, reason="a hook of the user's counts them")
def test_no_collective_is_added() -> None:
    for plain, recorded, after in job("test_collectives:counted"):
        assert plain == recorded == after


@pytest.mark.skipif(not HOOKED, reason="there are no hooks to be taken back")
def test_a_process_that_destroys_no_group_ends_as_ever() -> None:
    assert job("test_collectives:ends", OTEL_TRACES_EXPORTER="none") == [True, True]


def test_uninstrument_puts_everything_back() -> None:
    for changed, left, spans in job("test_collectives:restored"):
        assert "wait" in changed
        assert left == []
        assert spans == 1


def test_a_fault_of_ours_reaches_nobody() -> None:
    for said in job("test_collectives:faulty"):
        assert said == [[4.0] * 4] * 3


def test_a_failure_is_told_with_what_is_known_of_the_other_ranks() -> None:
    answer, _ = job("test_collectives:failures")
    for which in ("sync", "async"):
        kind, notes, (asked,) = answer[which]
        assert (kind, notes) == ("RuntimeError", ["who is missing"])
        name, seq, _, ranks, backend, limit, size = asked
        assert (name, seq, ranks, backend, limit, size) == ("dist.all_reduce", 1, [0, 1], "gloo", 3.0, 16)
    assert answer["wrong argument"][1:] == [[], []]
    assert answer["not supported"][1:] == [[], []]
    assert answer["own error in backward"] == ["ValueError", [], []]
    kind, notes, (asked,) = answer["backward"]
    assert (kind, notes) == ("RuntimeError", ["who is missing"])
    assert asked[0] == "dist.all_reduce"
    failed = [span for span in answer["spans"] if span["failed"]]
    of_ranks = [span for span in failed if span["error.type"] == "GLOO_TIMEOUT"]
    assert len(of_ranks) == (3 if HOOKED else 2)
    assert [span["rank_id"] for span in failed if "rank_id" in span] == [0] * len(of_ranks)
    assert [span["error.type"] for span in answer["backwards"] if "error.type" in span] == [
        "ValueError",
        "GLOO_TIMEOUT",
    ]
    assert "GLOO_TIMEOUT" in [step.get("error.type") for step in answer["steps"]]


def test_what_is_complete_in_the_end_has_not_failed_and_is_explained_once() -> None:
    answers = job("test_collectives:waited_for_again")
    assert [len(answer["caught"]) for answer in answers] == [2, 0]
    assert len(set(answers[0]["caught"])) == 1
    assert [asked[0] for asked in answers[0]["asked"]] == ["dist.all_reduce", "recovered"]
    for answer in answers:
        (span,), (step,) = answer["spans"], answer["steps"]
        assert not span["failed"]
        assert "error.type" not in span
        assert "error.type" not in step
    (first,) = answers[0]["spans"]
    assert first["end"] - first["start"] >= 200_000_000, "it ends where it was complete, not where a wait gave up"


@pytest.mark.long
def test_fully_sharded_models_show_all_they_issue() -> None:
    for answer in job("test_collectives:sharded", timeout=120, **ON):
        names = {span["name"] for span in answer["spans"]}
        assert {"dist.all_gather", "dist.reduce_scatter"} <= names or not HOOKED


@pytest.mark.long
def test_functional_collectives_are_seen_and_break_no_graph() -> None:
    for answer in job("test_collectives:functional", timeout=200, **ON):
        plain, recorded = answer["answers"]
        assert plain == recorded
        if RECORDED:
            assert len(answer["spans"]) == 6


# In one process, without ranks.


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_collective_is_under_the_phase_it_was_issued_in_and_may_outlive_it(alone: None) -> None:
    with recording() as recorded:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            works = []

            class Reduces(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                    return x.clone()

                @staticmethod
                def backward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                    works.append(dist.all_reduce(x.clone(), async_op=True))  # noqa: B023
                    return x

            Reduces.apply(model(torch.ones(2, 60))).sum().backward()
            works.pop().wait()
            optimizer.step()
    assert [span["parent"] for span in told(recorded)] == ["backward"] * 2
    backwards = sorted(recorded.named("backward"), key=lambda span: span.start_time)
    for span, backward in zip(told(recorded), backwards, strict=True):
        assert backward.start_time < span["start"] < backward.end_time < span["end"]


def test_the_latest_of_each_group_can_be_read(alone: None) -> None:
    with recording() as recorded:
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        latest = recorded.run.collectives.latest["0"]
        assert (latest.name, latest.seq, latest.watched) == ("dist.barrier", 2, True)
        assert latest.end > latest.start
        assert not recorded.run.collectives.outstanding


def test_what_was_issued_last_counts_what_was_not_seen(alone: None) -> None:
    """As DDP's buckets before torch 2.15: a rank that waits for them has come, though nothing of ours saw it."""
    with recording() as recorded:
        collectives = recorded.run.collectives
        dist.all_reduce(torch.ones(3))
        assert collectives.issued("0") == (1, "dist.all_reduce", 12)
        collectives.latest["0"].source = CALL  # of hooks nothing escapes
        recorded.run.active = False
        dist.barrier()
        recorded.run.active = True
        assert collectives.issued("0") == (2, "", -1)
        assert collectives.issued("another") == (0, "", -1)


def test_the_status_page_says_what_is_waited_for(alone: None, tmp_path: Path) -> None:
    with recording(directory=str(tmp_path)) as recorded:
        recorded.run.start()
        path = recorded.run.status.path
        dist.all_reduce(torch.ones(3))
        page = reader.read(path)
        assert page is not None
        assert page.collective is not None
        assert page.collective[:4] == ("complete", "dist.all_reduce", 1, 12)
        assert page.collective.group == "0"
        work = dist.all_reduce(torch.ones(5), async_op=True)
        page = reader.read(path)
        assert page is not None
        assert page.collective is not None
        assert page.collective[:4] == ("issued", "dist.all_reduce", 2, 20)
        assert "has issued all_reduce 2 of the default group" in report.lines([page])[0]
        work.wait()


def test_a_torn_block_on_the_page_is_not_known() -> None:
    data = bytearray(layout.SIZE)
    data[: len(layout.MAGIC)] = layout.MAGIC
    page = reader.decode(bytes(data))
    assert page is not None
    assert page.collective is None
    layout.COLLECTIVE_STRUCT.pack_into(data, layout.COLLECTIVE, 1, 1, 7, 12, 5, 99, b"0")
    page = reader.decode(bytes(data))
    assert page is not None
    assert page.collective is None


def test_no_work_and_no_tensor_is_kept(alone: None) -> None:
    import gc
    import weakref

    with recording():
        ones = torch.ones(3)
        work = dist.all_reduce(ones, async_op=True)
        work.wait()
        left = dist.all_reduce(ones, async_op=True)  # nobody waits for it
        gone = [weakref.ref(work), weakref.ref(left), weakref.ref(ones)]
        del work, left, ones
        gc.collect()
        assert [reference() for reference in gone] == [None] * 3


@pytest.mark.skipif(not HOOKED, reason="the Flight Recorder knows gloo from torch 2.8 on")
def test_the_flight_recorder_is_asked_only_where_nothing_moves(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = torch._C._distributed_c10d
    dump, asked = native._dump_fr_trace_json, []
    monkeypatch.setattr(native, "_dump_fr_trace_json", lambda **options: asked.append(options) or dump(**options))
    with recording(directory=str(tmp_path)) as recorded:
        recorded.run.start()
        groups = {group.id: group for group in known_groups()}

        class Issues(torch.nn.Linear):
            """What it issues, C++ would wait for."""

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.work = dist.all_reduce(torch.ones(3), async_op=True)
                pending.stuck(recorded.run, groups)
                found.append(len(asked))
                pending.stuck(recorded.run, groups, still_ns=0)
                found.append(len(asked))
                return super().forward(x)

        found: list[int] = []
        model = Issues(2, 2)
        model(torch.ones(2, 2))
        pending.stuck(recorded.run, groups, still_ns=0)  # outside any phase it computes, whatever is under way
        found.append(len(asked))
        model.work.wait()
    assert found == [0, 1, 1]


def test_a_step_with_collectives_is_no_work_for_the_garbage_collector(alone: None) -> None:
    import gc
    import weakref

    with recording() as recorded:
        model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01)

        def hook(state: Any, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value()[0])

        model.register_comm_hook(None, hook)
        gc.disable()
        try:
            with otel_dl.step():
                model(torch.ones(2, 60)).sum().backward()
                step = recorded.run.current
                assert step is not None
                found = [collective for collective in step.collectives if collective.bucket is not None]
                assert [collective.opens_bucket for collective in found] == [True] * len(found)
                reached = gc.get_referents(*[collective.bucket for collective in found])
            gone = weakref.ref(step)
            assert found
            assert not [each for each in reached if type(each) is type(found[0])]
            del step, found, reached
            recorded.finish()
            assert gone() is None
        finally:
            gc.enable()


def test_what_is_too_much_for_a_step_is_counted(alone: None) -> None:
    with recording(step_records=16) as recorded:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        for _ in range(20):
            dist.all_reduce(torch.ones(2))
        model(torch.ones(2, 60)).sum().backward()
        optimizer.step()
    (step,) = recorded.named("train.step")
    assert len(told(recorded)) == 16
    assert step.attributes["otel_dl.dropped"] == 4
