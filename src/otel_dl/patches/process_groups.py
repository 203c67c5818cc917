"""Process groups get a time limit, and are seen: `dist.init_process_group`, `dist.new_group`,
`dist.destroy_process_group` in the run's trace.

How each is reached (torch/distributed/distributed_c10d.py, 2.4 to 2.15):

- `init_process_group` and `split_group` through the cell of the decorators around them (`func`), so that names that
  were imported before `instrument()` are reached as well;
- `new_group`, and with it `new_subgroups`, DeviceMesh, FSDP and groups of functional collectives, where all of them
  look up `_new_group_with_tag`;
- `destroy_process_group` has neither: a name imported before `instrument()` is destroyed without a span. That there is
  no default group any more is heard of in any case, where torch looks up `_update_default_pg`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CellType
from typing import TYPE_CHECKING, Any, Final

from otel_dl.forensics.samples import ranges
from otel_dl.patches.groups import (
    address_of,
    ask,
    distributed_c10d,
    group_of,
    known_groups,
    told,
)
from otel_dl.patches.limits import Limit, Limits, standard
from otel_dl.patches.rendezvous import Deadline, Rendezvous
from otel_dl.recording.failure import Failure
from otel_dl.recording.lane import is_failure
from otel_dl.recording.ranks import Group, Wait
from otel_dl.recording.records import GroupChange, clock
from otel_dl.semconv import SpanName

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run


def install(run: Run, patches: Patches) -> None:
    """Patches torch.distributed, where this torch has it; raises where it lacks what is needed."""
    import torch.distributed

    distributed: Any = torch.distributed
    if not distributed.is_available():
        return
    c10d = distributed_c10d()
    limits = Limits(run.settings, c10d)

    def wrap(original: Any, kind: type[Call]) -> Any:
        parameters = Parameters(original)

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
            return kind(run, limits, c10d, parameters, args, kwargs)

        return around(run, patches, original, begin)

    for name, kind in (("init_process_group", Init), ("split_group", Split)):
        function = getattr(c10d, name, None)  # 2.4 has no split_group
        if function is not None:
            cell = _cell(function)
            patches.replace_cell(cell, wrap(cell.cell_contents, kind))
    patches.replace(c10d, "_new_group_with_tag", wrap(c10d._new_group_with_tag, New))
    destroy = wrap(c10d.destroy_process_group, Destroy)
    for module in (c10d, distributed):
        patches.replace(module, "destroy_process_group", destroy)
    _watch_the_end(run, patches, c10d)
    patches.when_imported("torch.distributed.device_mesh", functools.partial(_install_mesh, patches, limits))
    _tell_of_earlier(run, c10d)


def _cell(function: Any) -> CellType:
    return function.__closure__[function.__code__.co_freevars.index("func")]


def _watch_the_end(run: Run, patches: Patches, c10d: Any) -> None:
    original = c10d._update_default_pg

    @functools.wraps(original)
    def _update_default_pg(pg: Any) -> Any:
        result = original(pg)
        if pg is None:
            patches.guard(run.ranks.left)  # first: it says what was issued in them
            patches.guard(run.collectives.groups_ended)
        return result

    patches.replace(c10d, "_update_default_pg", _update_default_pg)


def _install_mesh(patches: Patches, limits: Limits, module: Any) -> None:
    """DeviceMesh gives `new_group` the limit that stands in a backend's options, whoever set it there."""

    def of_mesh(original: Any) -> Any:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            try:
                options = kwargs.get("pg_options")
                if options is not None and "timeout" in kwargs and not limits.set_by_user(options):
                    kwargs = {**kwargs, "timeout": None}
            except BaseException as error:
                patches.fault(error)
            return original(*args, **kwargs)

        return make

    for name in ("new_group", "split_group"):
        if hasattr(module, name):
            patches.replace(module, name, of_mesh(getattr(module, name)))


def _tell_of_earlier(run: Run, c10d: Any) -> None:
    """`instrument()` came after `init_process_group`."""
    default = group_of()
    if default is not None:
        address = address_of(ask(c10d._get_default_store, None))
        run.start((ask(c10d.get_rank, 0), len(default.ranks)))
        wait = Wait(SpanName.INIT_PROCESS_GROUP, default, 0, clock())
        run.ranks.joining(wait, address, ask(c10d.get_rank, 0), len(default.ranks))
        for group in known_groups():
            run.ranks.joined(group)


# The calls.


class Parameters:
    """The parameters of a function, to find and set an argument however it is given."""

    def __init__(self, function: Any) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._places = {parameter.name: place for place, parameter in enumerate(parameters)}

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = None) -> Any:
        place = self._places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name, default)

    def set(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        place = self._places.get(name, len(args))
        if place < len(args):
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: value}


def around(run: Run, patches: Patches, original: Any, begin: Callable[..., Call]) -> Any:
    """`original`, with a `Call` around it."""

    @functools.wraps(original)
    def call_original(*args: Any, **kwargs: Any) -> Any:
        if not run.active:
            return original(*args, **kwargs)
        call: Call | None = None
        try:
            call = begin(args, kwargs)
            args, kwargs = call.args, call.kwargs
        except BaseException as error:
            patches.fault(error)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            if call is not None:
                patches.guard(call.failed, error)
            raise
        if call is not None:
            patches.guard(call.done, result)
        return result

    return call_original


class Call:
    """One call that makes or ends a process group, while it runs. `args` and `kwargs` are what torch is called with."""

    name: str = SpanName.NEW_GROUP
    limit = Limit(None, "")

    def __init__(
        self,
        run: Run,
        limits: Limits,
        c10d: Any,
        parameters: Parameters,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.run = run
        self.c10d = c10d
        self.args = args
        self.kwargs = kwargs
        self._parameters = parameters
        self.start = clock()
        self.group: Group | None = None
        """The group, as far as it is known before torch has made it."""
        self.prepare(limits)

    def argument(self, name: str, default: Any = None) -> Any:
        return self._parameters.get(name, self.args, self.kwargs, default)

    def prepare(self, limits: Limits) -> None:
        raise NotImplementedError

    def give_limit(self, limits: Limits, backend: Any, rank: int, ranks: tuple[int, ...]) -> None:
        given, options = self.argument("timeout"), self.argument(self.options)
        self.limit = limit = limits.decide(given, options, backend)
        if limit.timeout is not given:
            limits.prepare(limit, options)
            self.args, self.kwargs = self._parameters.set("timeout", limit.timeout, self.args, self.kwargs)
            limits.say(given, limit, rank, ranks)

    options = "pg_options"
    """What the parameter is called that holds a backend's options."""

    def expected(self, name: str, ranks: tuple[int, ...], backend: Any) -> Group:
        """The group that torch is about to make."""
        seconds = self.limit.seconds
        if seconds is None:
            seconds = standard(self.c10d, backend)
        return Group(name, ranks, str(backend), seconds)

    def done(self, result: Any) -> None:
        group = group_of(result)
        if group is not None:
            if not group.limit_s and self.group is not None:
                group = group._replace(limit_s=self.group.limit_s)
            self.group = group
            self.run.ranks.joined(group)
            self.tell(group.id)
        else:
            self.run.ranks.waiting(None)
            self.tell("")

    def failed(self, error: BaseException) -> None:
        failure, explained = None, None
        if is_failure(error):
            if self.group is not None and isinstance(error, Exception):
                explained = self.run.ranks.explain(error, Wait(self.name, self.group, 0, self.start))
            failure = Failure.of(error, explained)
            if explained is None:
                failure = failure._replace(attributes={"rank_id": self.run.identity.rank})
        self.run.ranks.waiting(None)
        self.tell(
            self.group.id if self.group is not None else "", failure, explained.words if explained is not None else ""
        )

    def tell(self, group: str, error: Failure | None = None, words: str = "") -> None:
        known = self.group
        ranks = known.ranks if known is not None else ()
        limit = known.limit_s if known is not None else self.limit.seconds
        self.run.tell(
            GroupChange(
                name=self.name,
                start=self.start,
                end=clock(),
                group=group,
                size=len(ranks),
                ranks=ranges(ranks) if self.limit.source else "",
                limit_s=limit if self.limit.source else None,
                source=self.limit.source,
                error=error,
                words=words,
            )
        )


class Init(Call):
    """`init_process_group`: the run begins with it, as with a first step."""

    name = SpanName.INIT_PROCESS_GROUP
    deadline: Deadline | None = None

    def prepare(self, limits: Limits) -> None:
        backend = self.argument("backend") or "undefined"
        there = Rendezvous(
            self.argument("init_method"), self.argument("store"), self.argument("rank", -1), self.argument("world_size")
        )
        if str(backend).lower() == "fake":
            there.address = None  # it has a store of its own where it is given none
        rank, world = there.member or (0, 1)
        again = group_of() is not None
        self.run.start(None if again else there.member)
        self.give_limit(limits, backend, rank, (0,))
        if again or there.member is None or (self.limit.timeout is not None and self.limit.seconds is None):
            return  # torch is about to refuse it, or takes rank and size from elsewhere (MPI)
        self.group = self.expected(_next_name(self.c10d), tuple(range(world)), backend)
        wait = Wait(self.name, self.group, 0, self.start)
        self.run.ranks.joining(wait, there.address, rank, world)
        if there.address is not None and self.limit.seconds is not None and self.argument("store") is None:
            self.deadline = Deadline(there.address, self.limit.seconds)

    def done(self, result: Any) -> None:
        self._returned()
        super().done(result)

    def failed(self, error: BaseException) -> None:
        self._returned()
        super().failed(error)

    def _returned(self) -> None:
        if self.deadline is not None:
            self.deadline.over()


class New(Call):
    """`_new_group_with_tag`: every group but the default one, and those that are split off."""

    options = "backend_options"

    def prepare(self, limits: Limits) -> None:
        default = group_of()
        backend = self.argument("backend") or (default.backend if default is not None else "")
        given = self.argument("ranks")
        ranks = told(given) if given is not None else default.ranks if default is not None else ()
        if self.argument("sort_ranks", True):
            ranks = tuple(sorted(ranks))
        self.give_limit(limits, backend, _rank(self.c10d), ranks)
        if default is not None and ranks:
            local = bool(self.argument("use_local_synchronization", False))
            self.group = self.expected(_next_name(self.c10d, ranks if local else ()), ranks, backend)
            self.run.ranks.waiting(Wait(self.name, self.group, 0, self.start))


class Split(Call):
    """`split_group` (torch 2.5 and newer)."""

    def prepare(self, limits: Limits) -> None:
        parent = group_of(self.argument("parent_pg"))
        backend = self.argument("backend") or (parent.backend if parent is not None else "")
        rank = _rank(self.c10d)
        places, ranks = self._mine(parent, rank)
        self.give_limit(limits, backend, rank, ranks)
        if ranks:
            self.group = self.expected(_next_name(self.c10d, places), ranks, backend)
            self.run.ranks.waiting(Wait(self.name, self.group, 0, self.start))

    def _mine(self, parent: Group | None, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """This rank's part: ranks in the parent, which torch makes the name of, and global ones."""
        parts = self.argument("split_ranks")
        if parent is not None and type(parts) in (list, tuple):
            for part in parts:
                places = told(part)
                ranks = ask(lambda places=places: tuple(parent.ranks[place] for place in places), ())
                if rank in ranks:
                    return places, ranks
        return (), ()


class Destroy(Call):
    """`destroy_process_group`."""

    name = SpanName.DESTROY_PROCESS_GROUP

    def prepare(self, limits: Limits) -> None:
        self.group = group_of(self.argument("group"))

    def done(self, result: Any) -> None:
        if self.group is not None:
            self.tell(self.group.id)


def _rank(c10d: Any) -> int:
    return ask(c10d.get_rank, 0)


_HASHES: Final = ("_hash_ranks_to_str", "_hash_ranks")
"""What makes a name of ranks: since 2.5, before."""


def _next_name(c10d: Any, hashed: tuple[int, ...] = ()) -> str:
    """The name that torch gives the next group, where it makes it of these ranks, or counts."""

    def name() -> str:
        if not hashed:
            return str(c10d._world.group_count)
        make = next(function for function in (getattr(c10d, name, None) for name in _HASHES) if function is not None)
        return str(make(list(hashed)))

    return ask(name, "")
