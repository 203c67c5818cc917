"""Process groups: which time limit they get and who set it, their spans, and what the other ranks are told."""

from __future__ import annotations

import datetime
import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import children
from support.inprocess import Recorded, recording
from support.loader_jobs import spans as spans_in
from support.validate import from_sdk, validate
from torch.distributed import destroy_process_group as early_destroy
from torch.distributed import init_process_group as early_init
from torch.distributed import new_group as early_new_group
from torch.distributed import new_subgroups as early_new_subgroups
from torch.distributed.device_mesh import init_device_mesh as early_mesh

from otel_dl.forensics import reader
from otel_dl.patches.groups import group_of, known_groups
from otel_dl.recording.ranks import Explained, Group, Ranks, Wait

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
HALF_AN_HOUR = 1800.0
"""torch's own limit, for gloo."""
GLOO_OPTIONS: Any = dist.ProcessGroupGloo._Options


class Minutes(datetime.timedelta):
    """A timedelta that says something else."""

    def total_seconds(self) -> float:
        return -1.0


def seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)


class Heard(Ranks):
    """What the other ranks' side was told; explains everything in the same words."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def joining(self, wait: Wait, address: tuple[str, int] | None, rank: int, world: int) -> None:
        self.calls.append(("joining", wait.name, wait.group, address, rank, world))

    def joined(self, group: Group) -> None:
        self.calls.append(("joined", group))

    def left(self) -> None:
        self.calls.append(("left",))

    def explain(self, error: BaseException, wait: Wait) -> Explained | None:
        self.calls.append(("explain", type(error), wait.name, wait.group.id))
        return Explained("GLOO_TIMEOUT", "rank 1 did not come", {"rank_id": 0, "dl.missing_ranks": [1]})


@pytest.fixture(autouse=True)
def no_group_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def init(*args: Any, **kwargs: Any) -> None:
    dist.init_process_group(*(args or ("gloo",)), store=dist.HashStore(), rank=0, world_size=1, **kwargs)


def in_force(group: Any = None) -> float:
    """The limit that the backend of a group has, in seconds."""
    group = group or dist.group.WORLD
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def made(recorded: Recorded) -> list[tuple[str, float, str]]:
    """Of each group that was made, its span's (name, limit, who set it)."""
    recorded.finish()
    assert not validate([from_sdk(span) for span in recorded.spans])
    return [
        (span.name.removeprefix("dist."), span.attributes["dl.timeout_s"], span.attributes["dl.timeout.source"])
        for span in recorded.spans
        if span.attributes and "dl.timeout_s" in span.attributes
    ]


# Limits.


def by_keyword() -> None:
    init(timeout=seconds(9))


def by_position() -> None:
    init("gloo", None, seconds(9))


def by_subclass() -> None:
    init(timeout=Minutes(seconds=9))


def by_none() -> None:
    init(timeout=None)


def by_none_in_its_place() -> None:
    init("gloo", None, None)


def by_alias() -> None:
    early_init("gloo", store=dist.HashStore(), rank=0, world_size=1)


def without_backend() -> None:
    init(None)


def with_options() -> None:
    init(pg_options=GLOO_OPTIONS())


def with_options_of_another_limit() -> None:
    options = GLOO_OPTIONS()
    options._timeout = seconds(7)
    init(pg_options=options)


def with_nccl_options_of_another_limit() -> None:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = seconds(7)
    init(pg_options=options)


@pytest.mark.parametrize(
    ("make", "settings", "limit", "source"),
    [
        (init, {}, 600, "otel_dl"),
        (by_alias, {}, 600, "otel_dl"),
        (by_none, {}, 600, "otel_dl"),
        (by_none_in_its_place, {}, 600, "otel_dl"),
        (without_backend, {}, 600, "otel_dl"),
        (init, {"pg_timeout": 12.5}, 12.5, "otel_dl"),
        (init, {"pg_timeout": 0}, HALF_AN_HOUR, "torch"),
        (by_keyword, {}, 9, "user"),
        (by_position, {}, 9, "user"),
        (by_subclass, {}, 9, "user"),
        (by_keyword, {"pg_timeout": 0}, 9, "user"),
        (by_keyword, {"pg_timeout_max": 9}, 9, "user"),
        (by_keyword, {"pg_timeout_max": 5}, 5, "otel_dl"),
        (by_position, {"pg_timeout_max": 5}, 5, "otel_dl"),
        (by_subclass, {"pg_timeout_max": 5}, 5, "otel_dl"),
        (init, {"pg_timeout_max": 5}, 5, "otel_dl"),
        (init, {"pg_timeout": 0, "pg_timeout_max": 5}, 5, "otel_dl"),
        (init, {"pg_timeout": 0, "pg_timeout_max": 3600}, HALF_AN_HOUR, "torch"),
        # torch lets the argument's default win over a limit in the options: where somebody chose one, as without us.
        (with_options, {}, 600, "otel_dl"),
        (with_options_of_another_limit, {}, HALF_AN_HOUR, "torch"),
        (with_nccl_options_of_another_limit, {}, HALF_AN_HOUR, "torch"),
        (with_options_of_another_limit, {"pg_timeout_max": 5}, 5, "otel_dl"),
    ],
)
def test_the_limit_in_force_and_who_set_it(
    make: Callable[[], None], settings: dict[str, float], limit: float, source: str
) -> None:
    if make is with_nccl_options_of_another_limit and not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    with recording(**settings) as recorded:
        make()
        assert in_force() == limit
    assert made(recorded) == [("init_process_group", limit, source)]


def new_group() -> Any:
    return dist.new_group([0])


def new_group_by_alias() -> Any:
    return early_new_group([0])


def new_group_by_position() -> Any:
    return dist.new_group([0], seconds(7))


def new_group_of_all() -> Any:
    return dist.new_group(timeout=seconds(7))


def new_group_alone() -> Any:
    return dist.new_group([0], use_local_synchronization=True)


def subgroups() -> Any:
    return early_new_subgroups(1)[0]


def subgroups_by_enumeration() -> Any:
    return dist.new_subgroups_by_enumeration([[0]], timeout=seconds(7))[0]


def tagged_group() -> Any:
    """As torch makes them for functional collectives on ranks."""
    return dist.distributed_c10d._find_or_create_pg_by_ranks_and_tag("mine", [0], 1)


@pytest.mark.parametrize(
    ("make", "settings", "limit", "source"),
    [
        (new_group, {}, 600, "otel_dl"),
        (new_group_by_alias, {}, 600, "otel_dl"),
        (new_group_alone, {}, 600, "otel_dl"),
        (new_group_by_position, {}, 7, "user"),
        (new_group_of_all, {}, 7, "user"),
        (subgroups, {}, 600, "otel_dl"),
        (subgroups_by_enumeration, {}, 7, "user"),
        (tagged_group, {}, 600, "otel_dl"),
        (new_group, {"pg_timeout": 0}, HALF_AN_HOUR, "torch"),
        (new_group_by_position, {"pg_timeout_max": 6}, 6, "otel_dl"),
    ],
)
def test_a_group_inherits_nothing_from_the_one_that_it_is_made_in(
    make: Callable[[], Any], settings: dict[str, float], limit: float, source: str
) -> None:
    with recording(**settings) as recorded:
        init(timeout=seconds(5))
        assert in_force(make()) == limit
    assert made(recorded) == [("init_process_group", 5, "user"), ("new_group", limit, source)]


@pytest.mark.skipif(not hasattr(dist, "split_group"), reason="torch before 2.5 has no split_group")
@pytest.mark.parametrize(("keywords", "limit", "source"), [({}, 600, "otel_dl"), ({"timeout": seconds(7)}, 7, "user")])
def test_a_group_that_is_split_off(keywords: dict[str, Any], limit: float, source: str) -> None:
    split_group: Any = getattr(dist, "split_group", None)
    with recording() as recorded:
        init(timeout=seconds(5))
        try:
            group = split_group(split_ranks=[[0]], **keywords)
        except RuntimeError as error:
            pytest.skip(f"gloo can't split here: {error}")
        assert in_force(group) == limit
        name = group.group_name
    assert made(recorded)[1:] == [("new_group", limit, source)]
    assert recorded.named("dist.new_group")[0].attributes["dl.group.id"] == name


def test_a_device_mesh_makes_the_default_group_too(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(children.free_port())}
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    with recording(pg_timeout=11) as recorded:
        early_mesh("cpu", (1,))
        assert in_force() == 11
    assert ("init_process_group", 11, "otel_dl") in made(recorded)


@pytest.mark.parametrize(("chosen", "limit", "source"), [(None, 600, "otel_dl"), (7, 7, "user"), (3600, 3600, "user")])
def test_a_device_mesh_hands_on_the_limit_of_a_backends_options(
    chosen: float | None, limit: float, source: str
) -> None:
    """It gives `new_group` whatever stands in the options: what a fresh one has is nobody's choice."""
    if TORCH < (2, 9):
        pytest.skip("init_device_mesh has no backend_override")
    options = GLOO_OPTIONS()
    if chosen is not None:
        options._timeout = seconds(chosen)
    with recording() as recorded:
        init(timeout=seconds(5))
        mesh = early_mesh("cpu", (1,), mesh_dim_names=("a",), backend_override={"a": ("gloo", options)})
        assert in_force(mesh.get_group()) == limit
    assert made(recorded)[1:] == [("new_group", limit, source)]


def test_options_that_torch_wrote_our_limit_into_are_still_nobodys_choice() -> None:
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    options = dist.ProcessGroupNCCL.Options()
    with recording(pg_timeout=60) as recorded:
        init(pg_options=options)
        assert options._timeout == seconds(60)
        dist.new_group([0], pg_options=options)
    assert made(recorded) == [("init_process_group", 60, "otel_dl"), ("new_group", 60, "otel_dl")]


def test_a_backend_that_does_not_say_its_limit_has_the_one_it_was_given() -> None:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    with recording() as recorded:
        dist.init_process_group("fake", rank=3, world_size=8, store=dist.HashStore())
        assert group_of() == Group("0", tuple(range(8)), "fake", 0.0)
    assert made(recorded) == [("init_process_group", 600, "otel_dl")]
    (span,) = recorded.named("dist.init_process_group")
    assert (span.attributes["dl.group.ranks"], span.attributes["dl.group.size"]) == ("0-7", 8)
    assert span.resource.attributes["dl.rank"] == 3


# Messages.


def test_who_trains_with_our_limit_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    with recording(pg_timeout=90):
        init()
        dist.new_group([0])
        dist.destroy_process_group()
        init()
    said = [line for line in capfd.readouterr().err.splitlines() if "without a timeout" in line]
    assert said == [
        "otel-dl: process groups without a timeout wait 90 s at most (OTEL_DL_PG_TIMEOUT; 0 leaves torch's)"
    ]


@pytest.mark.parametrize(("make", "settings"), [(by_keyword, {}), (init, {"pg_timeout": 0})])
def test_nobody_is_told_where_nothing_changes(
    make: Callable[[], None], settings: dict[str, float], capfd: pytest.CaptureFixture[str]
) -> None:
    with recording(**settings):
        make()
    assert "without a timeout" not in capfd.readouterr().err


def test_a_limit_that_is_capped_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with recording(pg_timeout_max=5):
        init(timeout=seconds(9))
        dist.new_group([0], timeout=seconds(8))
    assert [record.getMessage() for record in caplog.records if "PG_TIMEOUT_MAX" in record.getMessage()] == [
        "otel-dl: a process group asked for a time limit of 9 s; it gets 5 s (OTEL_DL_PG_TIMEOUT_MAX; 0 or unset: no"
        " cap). Said once."
    ]


@pytest.mark.filterwarnings("error")
def test_torch_does_not_warn_of_options_that_nobody_changed() -> None:
    """nccl warns where options and argument differ; whoever gives fresh options knows of no limit."""
    options = GLOO_OPTIONS()
    with recording(pg_timeout=60):
        init(pg_options=options)
    assert options._timeout == seconds(60)


# Wrong arguments.


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    """What came of it: the exception, or the limit in force."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    finally:
        limit = in_force() if dist.is_initialized() else None
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 0  # a group that failed has used up a name
    return (limit,)


@pytest.mark.parametrize(
    "keywords",
    [
        {"timeout": 5},
        {"timeout": 5.0},
        {"timeout": "5"},
        {"timeout": True},
        {"timeout": seconds(-5)},
        {"timeout": seconds(0)},
        {"timeout": datetime.timedelta.max},
        {"timeout": seconds(5), "no_such": 1},
        {"no_such": 1},
        {"pg_options": 5},
        {"rank": 7},
        {"world_size": "two"},
        {"store": 5},
        {"init_method": "tcp://127.0.0.1:1"},
        {"init_method": "none://", "store": None},
        {"init_method": "tcp://127.0.0.1", "store": None},
        {"init_method": "tcp://127.0.0.1:port", "store": None},
        {"init_method": 5, "store": None},
        {"store": None},
        {"store": None, "rank": -1, "world_size": -1},
    ],
    ids=str,
)
def test_what_is_wrong_is_torchs_to_refuse(keywords: dict[str, Any]) -> None:
    def call() -> None:
        dist.init_process_group("gloo", **{"store": dist.HashStore(), "rank": 0, "world_size": 1, **keywords})

    without = outcome(call)
    with recording(pg_timeout=HALF_AN_HOUR) as recorded:
        assert outcome(call) == without
    (span,) = recorded.named("dist.init_process_group")
    assert span.status.is_unset == (len(without) == 1)


@pytest.mark.parametrize(
    ("args", "keywords"),
    [
        (([0],), {"timeout": 5}),
        (([0], "5"), {}),
        (([0, 0],), {}),
        (([1],), {}),
        ((["x"],), {}),
        ((5,), {}),
        (([0],), {"backend": "none"}),
        (([0], None, None, None, False, None, None, True, 9, 9), {}),
    ],
    ids=str,
)
def test_the_same_holds_for_new_groups(args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    def call() -> None:
        init()
        dist.new_group(*args, **keywords)

    without = outcome(call)
    with recording(pg_timeout=HALF_AN_HOUR):
        assert outcome(call) == without
    assert len(without) == 2


def test_ranks_that_can_be_read_only_once_are_torchs_to_read() -> None:
    def call() -> None:
        init()
        dist.new_group(iter([0]))

    without = outcome(call)
    with recording(pg_timeout=HALF_AN_HOUR):
        assert outcome(call) == without


def test_init_twice() -> None:
    def call() -> None:
        init()
        init()

    without = outcome(call)
    heard = Heard()
    with recording(pg_timeout=HALF_AN_HOUR) as recorded:
        recorded.run.ranks = heard
        assert outcome(call) == without == (ValueError, "trying to initialize the default process group twice!")
    assert [call[0] for call in heard.calls] == ["joining", "joined", "left"]
    first, second = recorded.named("dist.init_process_group")
    assert first.status.is_unset
    assert second.attributes["error.type"] == "ValueError"


# Stores, and what the other ranks are told.


def test_a_group_comes_and_goes() -> None:
    heard = Heard()
    with recording() as recorded:
        recorded.run.ranks = heard
        port = children.free_port()
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        default = Group("0", (0,), "gloo", 600.0)
        group = dist.new_group([0], timeout=seconds(7))
        assert known_groups() == [default, Group("1", (0,), "gloo", 7.0)]
        dist.destroy_process_group(group)
        dist.destroy_process_group()
        assert known_groups() == []
    assert heard.calls == [
        ("joining", "dist.init_process_group", default, ("127.0.0.1", port), 0, 1),
        ("joined", default),
        ("joined", Group("1", (0,), "gloo", 7.0)),
        ("left",),
    ]
    assert [span.attributes["dl.group.id"] for span in recorded.named("dist.destroy_process_group")] == ["1", "0"]


def test_a_name_that_was_imported_earlier_ends_the_default_group_for_the_other_ranks_too() -> None:
    heard = Heard()
    with recording() as recorded:
        recorded.run.ranks = heard
        init()
        early_destroy()
    assert heard.calls[-1] == ("left",)
    assert not recorded.named("dist.destroy_process_group")


def test_destroying_what_is_no_group_is_torchs_to_refuse() -> None:
    def call() -> None:
        init()
        group = dist.new_group([0])
        dist.destroy_process_group(group)
        dist.destroy_process_group(group)

    without = outcome(call)
    with recording():
        assert outcome(call) == without
    assert outcome(dist.destroy_process_group) == outcome(early_destroy)


def test_a_group_that_was_destroyed_is_not_kept() -> None:
    with recording() as recorded:
        recorded.run.ranks = Heard()
        init()
        group = dist.new_group([0])
        gone = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("kind", ["tcp", "prefix", "hash", "file", "environment", "file url"])
def test_where_the_store_is(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    address: tuple[str, int] | None = None
    keywords: dict[str, Any] = {"rank": 0, "world_size": 1}
    if kind in ("tcp", "prefix"):
        store = dist.TCPStore("127.0.0.1", 0, 1, True, multi_tenant=False)
        address = "127.0.0.1", store.port
        keywords["store"] = dist.PrefixStore("a", dist.PrefixStore("b", store)) if kind == "prefix" else store
    elif kind == "hash":
        keywords["store"] = dist.HashStore()
    elif kind == "file":
        keywords["store"] = dist.FileStore(str(tmp_path / "store"), 1)
    elif kind == "file url":
        keywords["init_method"] = f"file://{tmp_path}/store"
    else:
        address = "127.0.0.1", children.free_port()
        variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        keywords = {}
    with recording() as recorded:
        recorded.run.ranks = heard
        dist.init_process_group("gloo", **keywords)
    assert heard.calls[0][3:] == (address, 0, 1)
    assert heard.calls[1][0] == "joined"


def test_instrumented_after_init_the_other_ranks_are_told_of_the_groups_that_are_there() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    early_init("gloo", store=store, rank=0, world_size=1)
    early_new_group([0])
    heard = Heard()
    recorded = Recorded(None, False)
    recorded.run.ranks = heard
    recorded.session.install()
    try:
        assert [call[0] for call in heard.calls] == ["joining", "joined", "joined"]
        assert heard.calls[0][3:] == (("127.0.0.1", store.port), 0, 1)
    finally:
        recorded.session.uninstall()


def test_what_is_known_of_a_failure_stands_on_the_span() -> None:
    heard = Heard()
    with recording(pg_timeout=1) as recorded:
        recorded.run.ranks = heard
        with pytest.raises(dist.DistStoreError, match="1/2 clients joined"):
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{children.free_port()}", rank=0, world_size=2)
    assert heard.calls[-1] == ("explain", dist.DistStoreError, "dist.init_process_group", "0")
    (span,) = recorded.named("dist.init_process_group")
    assert not validate([from_sdk(span) for span in recorded.spans])
    said = {name: span.attributes[name] for name in ("error.type", "rank_id", "dl.missing_ranks", "dl.group.size")}
    assert said == {"error.type": "GLOO_TIMEOUT", "rank_id": 0, "dl.missing_ranks": [1], "dl.group.size": 2}
    assert span.status.description.startswith("rank 1 did not come; ")


def test_groups_that_are_made_anew_inherit_nothing_of_those_before(tmp_path: Path) -> None:
    """Their names and numbers begin again: what was issued before the end would count as having come."""
    with recording(directory=str(tmp_path)) as recorded:
        init()
        dist.barrier()
        assert [latest.seq for latest in recorded.run.collectives.latest.values()] == [1]
        dist.destroy_process_group()
        init()
        page = reader.decode(recorded.run.status.page)
        assert page is not None
        assert (recorded.run.collectives.latest, page.collective) == ({}, None)
        dist.barrier()
        assert [latest.seq for latest in recorded.run.collectives.latest.values()] == [1]


def test_torchs_functions_are_its_own_again() -> None:
    c10d: Any = dist.distributed_c10d
    names = ("destroy_process_group", "_new_group_with_tag", "_update_default_pg")
    before = [vars(c10d)[name] for name in names], early_init.__closure__[0].cell_contents
    with recording():
        assert vars(c10d)["_new_group_with_tag"] is not before[0][1]
    assert ([vars(c10d)[name] for name in names], early_init.__closure__[0].cell_contents) == before


def test_a_fault_of_ours_leaves_the_call_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with recording() as recorded:
        recorded.run.ranks = None
        init()
        assert in_force() == HALF_AN_HOUR
    assert len([record for record in caplog.records if "a fault of ours" in record.getMessage()]) == 1


# Processes of their own.


def run(script: str, directory: Path, **environment: str) -> children.Result:
    return children.run(
        "import os, sys, datetime, torch, torch.distributed as dist\ntorch.set_num_threads(1)\n" + script,
        {"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(directory), **environment},
    )


INSTRUMENT = "import otel_dl; otel_dl.instrument()\n"


def last_line(result: children.Result) -> str:
    """Of the traceback, without otel-dl's note behind it."""
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith("otel-dl: ")]
    return lines[-1]


def test_an_init_that_fails_is_exported_though_the_process_ends_by_it(tmp_path: Path) -> None:
    """Rank 1 of 4, started without a launcher: its rank is init's argument. Nobody listens."""
    script = f"dist.init_process_group('gloo', 'tcp://127.0.0.1:{children.free_port()}', rank=1, world_size=4)"
    without = run(script.replace("rank=1", "timeout=datetime.timedelta(seconds=1), rank=1"), tmp_path / "without")
    result = run(INSTRUMENT + script, tmp_path / "with", OTEL_DL_PG_TIMEOUT="1")
    assert (result.code, last_line(result)) == (without.code, last_line(without)), result
    found = spans_in(tmp_path / "with")
    assert not validate(found)
    (span,) = [span for span in found if span.name == "dist.init_process_group"]
    assert span.failed
    assert span.attributes["error.type"] == "GLOO_TIMEOUT", "whatever the message says: the limit has passed"
    assert "dl.missing_ranks" not in span.attributes
    assert (span.attributes["dl.timeout_s"], span.attributes["dl.timeout.source"]) == (1.0, "otel_dl")
    assert (span.resource["dl.rank"], span.resource["dl.world_size"], span.attributes["rank_id"]) == (1, 4, 1)
    assert [span.name for span in found if span.name == "train.startup"] == ["train.startup"]


def test_a_process_that_makes_no_group_exports_nothing(tmp_path: Path) -> None:
    result = run(INSTRUMENT + "dist.is_initialized()", tmp_path)
    assert result.code == 0, result
    assert not list(tmp_path.iterdir())


def test_instrumented_after_init_the_run_has_begun(tmp_path: Path) -> None:
    """What hangs or fails before the first step, as in DDP's constructor, is told as well."""
    join = f"dist.init_process_group('gloo', 'tcp://127.0.0.1:{children.free_port()}', rank=0, world_size=1)\n"
    result = run(join + INSTRUMENT + "dist.all_reduce(torch.ones(1)); dist.destroy_process_group()", tmp_path)
    assert result.code == 0, result
    assert {"train.startup", "dist.all_reduce"} <= {span.name for span in spans_in(tmp_path)}


@pytest.mark.parametrize(
    "store",
    ["dist.FileStore('/dev/null/store', 1)", "None, init_method='file:///dev/null/store'"],
    ids=["a store object", "an address"],
)
def test_a_store_that_can_not_be_written(store: str, tmp_path: Path) -> None:
    """Not a folder, rather than one without permission: tests may be run by root."""
    script = f"dist.init_process_group('gloo', rank=0, world_size=1, store={store})"
    without, result = run(script, tmp_path / "without"), run(INSTRUMENT + script, tmp_path / "with")
    assert without.code == result.code == 1, (without, result)
    assert last_line(result) == last_line(without)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux alone says what was received")
def test_a_host_that_never_answers_is_waited_for_no_longer_than_the_limit(tmp_path: Path) -> None:
    """Something listens at MASTER_PORT that is no store: torch's own limit does not hold there, it waits for ever."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        host, port = listener.getsockname()
        result = run(
            INSTRUMENT + "dist.init_process_group('gloo')",
            tmp_path,
            OTEL_DL_PG_TIMEOUT="1",
            RANK="1",
            WORLD_SIZE="2",
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
        )
    assert result.code == 1, result
    assert "DistNetworkError" in last_line(result)
    assert result.stderr.count("took the connection of init_process_group and has not answered") == 1
    assert [span.failed for span in spans_in(tmp_path) if span.name == "dist.init_process_group"] == [True]


TWO_RANKS = """
rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group('gloo', f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)
group = dist.new_group([1], timeout=datetime.timedelta(seconds=7))
print(group == dist.GroupMember.NON_GROUP_MEMBER, flush=True)
dist.destroy_process_group(group)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_group_without_this_rank(tmp_path: Path) -> None:
    port = children.free_port()
    header = "import os, sys, datetime, torch, torch.distributed as dist\ntorch.set_num_threads(1)\n"
    ranks = [
        children.Child(
            f"import sys; sys.argv = ['x', '{rank}', '{port}']\n" + header + INSTRUMENT + TWO_RANKS,
            {"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": str(tmp_path)},
        )
        for rank in (0, 1)
    ]
    results = [rank.finish() for rank in ranks]
    assert [result.code for result in results] == [0, 0], results
    assert [result.stdout.split()[0] for result in results] == ["True", "False"]
    said = [
        (span.resource["dl.rank"], span.attributes.get("dl.group.id"), span.attributes["dl.group.ranks"])
        for span in spans_in(tmp_path)
        if span.name == "dist.new_group"
    ]
    assert sorted(said, key=lambda row: row[0]) == [(0, None, "1"), (1, "1", "1")]
    assert sum("without a timeout" in result.stderr for result in results) == 1


def test_a_forked_child_has_the_groups_and_ends_in_peace(tmp_path: Path) -> None:
    script = """
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
child = os.fork()
if not child:
    assert dist.get_world_size() == 1
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
dist.destroy_process_group()
"""
    result = run(INSTRUMENT + script, tmp_path)
    assert result.code == 0, result
    names = [span.name for span in spans_in(tmp_path)]
    assert names.count("dist.init_process_group") == names.count("dist.destroy_process_group") == 1
