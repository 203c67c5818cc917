"""What C++ issues, where torch shows it by its Flight Recorder alone (2.8 to 2.14, gloo): DDP's buckets and functional
collectives are there once, beside what Python calls. Jobs are of real gloo processes."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from support.inprocess import Recorded, recording
from support.ranks import begin, job
from test_collectives import flight_recorder, network, told, train

from otel_dl.recording.flight_recorder import Entry, entries
from otel_dl.recording.keep import NeverHead

native: Any = torch._C._distributed_c10d
READ = hasattr(native, "_dump_fr_trace_json") and not hasattr(c10d.ProcessGroup, "register_pre_hook")
pytestmark = pytest.mark.skipif(
    not READ,
    reason="this torch has hooks of groups, which show all (2.15), or no Flight Recorder for gloo (before 2.8)",
)


# What ranks do.


class Dumps:
    """torch's own dump, each call noted; `change` may say something else of what it says."""

    def __init__(self, change: Any = lambda text: text) -> None:
        self.full = 0
        original = native._dump_fr_trace_json

        def dump(includeCollectives: bool = True, onlyActive: bool = False) -> Any:
            said = original(includeCollectives=includeCollectives, onlyActive=onlyActive)
            self.full += includeCollectives
            return change(said.decode()) if includeCollectives else said

        native._dump_fr_trace_json = dump


class Lines(logging.Handler):
    """What otel-dl says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("otel_dl").addHandler(self)
        logging.getLogger("otel_dl").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def about(self, words: str) -> list[str]:
        return [line for line in self.lines if words in line]


def parallel(group: Any = None) -> Any:
    return torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01, process_group=group)


def steps_of(recorded: Recorded) -> list[list[dict[str, Any]]]:
    """The collectives of each kept step, by its number."""
    spans = told(recorded)
    steps = sorted(recorded.named("train.step"), key=lambda step: step.attributes["dl.step"])
    return [[span for span in spans if step.start_time <= span["start"] <= step.end_time] for step in steps]


def buckets(rank: int, size: int, folder: str) -> Any:
    with recording() as recorded:
        begin(rank, size, folder)
        before = dict(os.environ)
        model = parallel(dist.new_group(list(range(size))))
        train(model, 5, rank)
        # DDP's own count of what it makes of its parameters from the second step on.
        sizes = [int(bytes) for bytes in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")]
        assert "TORCH_FR_BUFFER_SIZE" not in before
    return {"sizes": sizes, "steps": steps_of(recorded), "spans": told(recorded), "dropped": recorded.run.dropped}


def mixed(rank: int, size: int, folder: str) -> Any:
    """In each step what Python calls, what C++ issues, and what Python issues for itself, in groups of both."""
    import torch.distributed._functional_collectives as functional

    with recording() as recorded:
        begin(rank, size, folder)
        untouched = dist.new_group(list(range(size)))
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ones = torch.ones(4)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 60)).sum().backward()
            dist.all_reduce(ones)
            dist.all_reduce(ones, async_op=True).wait()
            dist.all_gather_object([None] * size, rank)
            functional.wait_tensor(functional.all_reduce(ones, "sum", dist.group.WORLD))
            functional.wait_tensor(functional.all_gather_tensor(ones, 0, untouched))
            dist.barrier()
            if rank == 0:
                dist.send(ones, 1)
            else:
                dist.recv(ones, 0)
            functional.wait_tensor(functional.all_reduce(ones, "sum", dist.group.WORLD))
            dist.all_reduce_coalesced([ones, ones])
            optimizer.step()
    return {"steps": steps_of(recorded), "groups": ["0", untouched.group_name]}


def sampled_out(rank: int, size: int, folder: str) -> Any:
    dumps = Dumps()
    with recording(head=NeverHead()) as recorded:
        begin(rank, size, folder)
        model = parallel()
        train(model, 1, rank)
        recorded.session.flush(10)  # the first step is kept in any case
        first = dumps.full
        train(model, 50, rank)
        recorded.session.flush(10)
        later = dumps.full
    return {"first": first, "later": later, "steps": len(recorded.named("train.step"))}


def kept(rank: int, size: int, folder: str) -> Any:
    """Many steps, all of them kept."""
    dumps = Dumps()
    since = time.monotonic()
    with recording() as recorded:
        begin(rank, size, folder)
        train(parallel(), 300, rank)
        seconds = time.monotonic() - since
    return {
        "dumps": dumps.full,
        "seconds": seconds,
        "issued": len(flight_recorder()),
        "counts": [Counter(span.get("dl.bucket.index") for span in step) for step in steps_of(recorded)],
    }


def python_only(rank: int, size: int, folder: str) -> Any:
    dumps = Dumps()
    with recording() as recorded:
        begin(rank, size, folder)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            model(torch.ones(2, 60)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    return {"dumps": dumps.full, "sources": Counter(span["dl.collective.source"] for span in told(recorded))}


def again(rank: int, size: int, folder: str) -> Any:
    """The groups of a second job within the process have the names and the numbers of the first one's."""
    with recording() as recorded:
        for part in ("one", "two"):
            os.mkdir(f"{folder}/{part}{rank}")
            dist.init_process_group("gloo", init_method=f"file://{folder}/{part}", rank=rank, world_size=size)
            train(parallel(), 3, rank)
            dist.all_reduce(torch.ones(3))
            dist.destroy_process_group()
    return {"steps": steps_of(recorded), "spans": told(recorded)}


OTHERS = {
    "no JSON": lambda text: text[: len(text) // 2],
    "another key": lambda text: text.replace("collective_seq_id", "sequence"),
    "no list": lambda text: '{"entries":{"0":1}}',
    "another kind": lambda text: text.replace('"process_group":["0"', '"process_group":[["0"]').replace(
        '"input_sizes":[[', '"input_sizes":[["x",'
    ),
}


def another_torch(rank: int, size: int, folder: str) -> Any:
    lines = Lines()
    Dumps(OTHERS[os.environ["WHICH"]])
    with recording() as recorded:
        begin(rank, size, folder)
        model = parallel()
        for _ in range(3):
            train(model, 2, rank)
            recorded.session.flush(10)
            dist.all_reduce(torch.ones(3))
    return {
        "said": lines.about("Flight Recorder"),
        "faults": lines.about("fault of ours"),
        "steps": len(recorded.named("train.step")),
        "sources": sorted({span["dl.collective.source"] for span in told(recorded)}),
    }


def small_ring(rank: int, size: int, folder: str) -> Any:
    with recording() as recorded:
        begin(rank, size, folder)
        train(parallel(), 30, rank)
    return {"dropped": recorded.run.dropped, "indices": [span.get("dl.bucket.index") for span in told(recorded)]}


def off(rank: int, size: int, folder: str) -> Any:
    lines = Lines()
    if os.environ.get("FIRST"):
        begin(rank, size, folder)
    with recording() as recorded:
        if not os.environ.get("FIRST"):
            begin(rank, size, folder)
        for _ in range(2):
            train(parallel(), 2, rank)
    return {
        "said": lines.about("gradient buckets"),
        "spans": told(recorded),
        "off": recorded.run.flight_recorder is None,
    }


# What it comes to.


def test_each_bucket_of_each_kept_step_is_there_once_on_every_rank() -> None:
    answers = job("test_flight_recorder:buckets")
    for answer in answers:
        assert len(answer["steps"]) == 5
        for step in answer["steps"][1:]:
            found = [span for span in step if "dl.bucket.index" in span]
            assert [span["dl.bucket.index"] for span in found] == list(range(len(answer["sizes"])))
            assert [span["dl.collective.bytes"] for span in found] == answer["sizes"]
            for span in found:
                assert (span["name"], span["parent"]) == ("dist.all_reduce", "backward")
                assert (span["dl.collective.source"], span["dl.collective.end"]) == ("flight_recorder", "phase")
                assert span["dl.collective.async"]
                assert span["dl.group.size"] == 2
        numbers = [(span["dl.group.id"], span["dl.collective.seq"]) for span in answer["spans"]]
        assert len(numbers) == len(set(numbers))
        assert answer["dropped"] == {}
    one, other = ([[span.get("dl.collective.seq") for span in step] for step in answer["steps"]] for answer in answers)
    assert one == other


def test_what_python_calls_is_not_doubled_and_functional_collectives_are_there_once() -> None:
    for rank, answer in enumerate(job("test_flight_recorder:mixed")):
        world, untouched = answer["groups"]
        transfer = "dist.send" if rank == 0 else "dist.recv"
        for step in answer["steps"]:
            assert [(span["name"], span["dl.group.id"], span["dl.collective.source"]) for span in step] == [
                ("dist.all_reduce", world, "call"),
                ("dist.all_reduce", world, "call"),
                ("dist.all_gather", world, "call"),
                ("dist.all_reduce", world, "flight_recorder"),
                ("dist.all_gather", untouched, "flight_recorder"),
                ("dist.barrier", world, "call"),
                (transfer, world, "call"),
                ("dist.all_reduce", world, "flight_recorder"),
                ("dist.all_reduce", world, "call"),
            ]
            seen = [(span["dl.group.id"], span["dl.collective.seq"]) for span in step if "dl.collective.seq" in span]
            assert len(seen) == len(set(seen)) == 8
        numbers = [span.get("dl.collective.seq", 0) for step in answer["steps"] for span in step
                   if span["dl.group.id"] == world and span["name"] != transfer]  # fmt: skip
        # The objects take two, of which the span has the second.
        assert [number - numbers[0] for number in numbers] == [8 * step + n for step in range(3)
                                                               for n in (0, 1, 3, 4, 5, 6, 7)]  # fmt: skip


def test_steps_that_nobody_keeps_are_not_looked_up() -> None:
    for answer in job("test_flight_recorder:sampled_out"):
        assert answer["steps"] < 51
        assert answer["later"] <= answer["first"] + answer["steps"]
        assert answer["later"] < 10


def test_one_dump_serves_many_steps() -> None:
    for answer in job("test_flight_recorder:kept", TORCH_FR_BUFFER_SIZE="2000"):
        first, *others = answer["counts"]
        assert len(others) == 299
        assert 0 in first or "0" in first
        assert len({tuple(sorted(counts.items())) for counts in others[1:]}) == 1
        assert answer["dumps"] <= 3 + answer["seconds"] / 2 + 300 * 6 / 1000


def test_a_job_whose_collectives_are_all_pythons_takes_no_dump() -> None:
    for answer in job("test_flight_recorder:python_only"):
        assert answer["sources"] == {"call": 160}
        assert answer["dumps"] == 0


def test_the_groups_of_a_second_job_are_not_taken_for_the_firsts() -> None:
    for answer in job("test_flight_recorder:again"):
        assert len(answer["steps"]) == 6
        for step in answer["steps"]:
            indices = [span["dl.bucket.index"] for span in step if "dl.bucket.index" in span]
            assert indices == list(range(len(indices)))
            assert indices
        called = [span for span in answer["spans"] if span["dl.collective.source"] == "call"]
        assert len(called) == 2
        everything = Counter((span["dl.group.id"], span["dl.collective.seq"]) for span in answer["spans"])
        assert set(everything.values()) == {2}  # once in each of the two


@pytest.mark.parametrize("which", list(OTHERS))
def test_a_dump_of_another_form_is_passed_over_with_one_message(which: str) -> None:
    for answer in job("test_flight_recorder:another_torch", ranks=1, WHICH=which):
        (said,) = answer["said"]
        assert "is not understood" in said
        assert "gradient buckets" in said
        assert answer["faults"] == []
        assert answer["steps"] == 6
        assert answer["sources"] == ["call"]


def test_what_the_ring_has_forgotten_is_counted() -> None:
    for answer in job("test_flight_recorder:small_ring", ranks=1, TORCH_FR_BUFFER_SIZE="4"):
        (what,) = answer["dropped"]
        assert "TORCH_FR_BUFFER_SIZE" in what


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"TORCH_FR_BUFFER_SIZE": "0"}, "TORCH_FR_BUFFER_SIZE=0: torch's Flight Recorder is read where"),
        ({"FIRST": "1"}, "call instrument() before"),
    ],
)
def test_where_it_is_off_the_user_hears_what_is_missing(setting: dict[str, str], words: str) -> None:
    (answer,) = job("test_flight_recorder:off", ranks=1, **setting)
    assert answer["off"]
    assert answer["spans"] == []
    (said,) = answer["said"]
    assert words in said


# The form.


def _dump(*found: dict[str, Any]) -> str:
    return json.dumps({"entries": list(found), "version": "2.10"}, sort_keys=True, separators=(",", ":"))


def _found(id: int, **other: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": id + 1, "op_id": id + 2, "input_dtypes": ["Float"], "input_sizes": [[2, 3]],
        "is_p2p": False,
        "output_dtypes": [], "output_sizes": [], "process_group": ["0", "default_pg"], "thread_name": 'a},{"b',
        "profiling_name": "gloo:all_reduce", "record_id": id, "retired": True, "time_created_ns": 5, **other,
    }  # fmt: skip


def test_entries_are_read_from_the_first_new_one_on() -> None:
    dump = _dump(*map(_found, range(7)))
    assert [entry.id for entry in entries(dump)] == list(range(7))
    assert [entry.id for entry in entries(dump.encode(), after=4)] == [5, 6]
    assert list(entries(dump, after=6)) == []
    assert [entry.id for entry in entries(_dump(*map(_found, range(10, 13))), after=6)] == [10, 11, 12]
    assert list(entries('{"pg_config":{},"version":"2.10"}')) == []
    assert next(entries(dump)) == Entry(0, "0", "all_reduce", 1, 2, False, True, 5, 24, "Float")
    assert next(entries(_dump(_found(0, input_dtypes=["Float4"])))).size == -1
    assert next(entries(_dump(_found(0, input_dtypes=[], input_sizes=[])))).size == 0
