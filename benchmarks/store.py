"""What a job's store bears: N ranks' statuses, looks at the keep requests, requests, a stall, and its verdict.

The server is a real `TCPStore` of torch in a process of its own. The clients are `otel_dl.ranks` itself: a `JobRanks` a
rank, with a connection of its own, whose thread is not started; what it does in a tick is called in turn, by a few
processes that are all the ranks. In a stall rank 0 looks who is missing, all others wait at once. What is simulated is
the training. Two cores are no 10,000 hosts: where the clients need longer than a second for a round, that is said, and
what the server needs follows from its CPU time.

Messages are what a client has sent, each with its answer where there is one; bytes are those of both, without TCP's.

    python benchmarks/store.py [RANKS ...]
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import resource
import select
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil
from _measure import machine

from otel_dl.forensics.writer import StatusPage, create
from otel_dl.ranks import exchange, job, nccl, store, verdict
from otel_dl.ranks.job import JobRanks
from otel_dl.ranks.peers import _key
from otel_dl.ranks.statuses import _SEARCHES
from otel_dl.ranks.store import JobStore
from otel_dl.recording.collectives import Collective, Communicator
from otel_dl.recording.held import Held
from otel_dl.recording.keep import NeverHead
from otel_dl.recording.ranks import Group, Wait
from otel_dl.recording.records import clock
from otel_dl.recording.run import Run
from otel_dl.settings import Settings

SIZES = (100, 1_000, 10_000)
PROCESSES = 4
ROUNDS = 5
A_HOST = 8
"""Ranks."""
BACKEND = "gloo"
LATE = 77
"""The rank that does not come."""


class Counts:
    """Of all connections of this process."""

    messages = 0
    size = 0

    @classmethod
    def take(cls) -> tuple[int, int]:
        taken = cls.messages, cls.size
        cls.messages = cls.size = 0
        return taken


class CountingStore(JobStore):
    def _send(self, query: int, *parts: bytes) -> None:
        Counts.messages += 1
        Counts.size += 1 + sum(map(len, parts))
        super()._send(query, *parts)

    def _read(self, size: int) -> bytes:
        Counts.size += size
        return super()._read(size)


class Rank:
    """One rank of the job; `run` is shared by those of a process that do the same."""

    def __init__(self, run: Run, rank: int, world: Group, address: tuple[str, int]) -> None:
        self.ranks = JobRanks(run, lambda seconds: None)
        self.number = rank
        self._world = world
        statuses, exchange_ = self.ranks._statuses, self.ranks._exchange
        statuses.rank = rank
        statuses._host = f"00000000-0000-0000-0000-{rank // A_HOST:012}"
        self.ranks._one_trace.joining(True, rank, len(world.ranks))
        self.ranks._one_trace.run_id._joined = True
        self.ranks._groups[world.id] = world
        exchange_._address, exchange_._prefix = address, job.prefix(0)

    def connect(self) -> None:
        self.ranks._exchange._connect()
        if self.ranks._one_trace.run_id._expected.shared is None:
            raise RuntimeError("rank 0's run id is not there")
        self.ranks._statuses._searches = _SEARCHES  # as where the pages of its host were found

    @property
    def store(self) -> Any:
        return self.ranks._exchange.store

    def tick(self) -> None:
        self.ranks._exchange._tick()

    def agree(self, seq: int, kind: str) -> verdict.Verdict:
        wait = Wait("dist.all_reduce", self._world, seq, clock() - 300_000_000_000, 4_000_000)
        return self.ranks._agree(self.ranks._exchange.store, wait, kind, job._JUDGING_S)


def runs(folder: str, group: Group) -> tuple[Run, Run]:
    """One that waits in collective 431, and one that has not come to it."""
    found: list[Run] = []
    for seq in (431, 430):
        run = Run(Settings(), NeverHead())
        run.identity = run.identity._replace(world_size=len(group.ranks))
        path = f"{folder}/{os.getpid()}-{seq}"
        create(path, run.identity)
        page = StatusPage(path)
        page.path = ""  # no neighbour looks at it: there is one for all
        page.step(87)
        run.status = page
        run.held = Held(run, 1_000)
        communicator = Communicator(group.id, len(group.ranks), lambda: group, lambda: 0)
        collective = Collective(communicator, "dist.all_reduce", 0, "", "", 4_000_000, clock(), False)
        collective.seq = seq
        run.collectives.latest[group.id] = collective
        found.append(run)
    return found[0], found[1]


def serve(pipe: Connection) -> None:
    _raise_limit()
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    pipe.send(server.port)
    pipe.recv()


def client(pipe: Connection, port: int, numbers: range, world: int) -> None:
    """All of `numbers`. The process of rank 0 is that rank alone, and is elected: it comes first."""
    _raise_limit()
    exchange.JobStore = CountingStore  # type: ignore[misc]
    # With the time of real life: so many clients on few cores are slower than their store.
    store.OPERATION_S = 60.0  # type: ignore[misc]
    verdict.FRESH_NS = verdict.SILENT_NS = 120_000_000_000  # type: ignore[misc]
    nccl.derived = functools.cache(nccl.derived)  # each rank does it once; on a host of its own
    group = Group("0", tuple(range(world)), BACKEND, 600.0)
    with tempfile.TemporaryDirectory() as folder:
        here, late = runs(folder, group)
        ranks = [Rank(late if number == LATE else here, number, group, ("127.0.0.1", port)) for number in numbers]
        pipe.send(None)
        while (question := pipe.recv()) is not None:
            busy, start = time.process_time(), time.monotonic()
            answer = QUESTIONS[question[0]](ranks, *question[1:])
            pipe.send((time.monotonic(), time.monotonic() - start, time.process_time() - busy, Counts.take(), answer))


def connect(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.connect()
    ranks[-1].ranks._exchange.store.has("")  # all that was written before has arrived


def rounds(ranks: list[Rank], count: int) -> None:
    for _ in range(count):
        start = time.monotonic()
        for rank in ranks:
            rank.tick()
        time.sleep(max(0.0, start + 1 - time.monotonic()) if count > 1 else 0)


def keep(ranks: list[Rank], askers: int) -> None:
    """The first so many ranks find step 87 slow."""
    for rank in ranks:
        if rank.number < askers:
            rank.ranks.kept(80 + askers, "slow", 400 + rank.number)


def burst(ranks: list[Rank], number: int) -> None:
    """All ask for one step, and none of them has read what the others want."""
    for rank in ranks:
        rank.store.append(_key(int(time.time()) // 60), f"s{number}:400 ")
    ranks[-1].store.has("")


def stall(ranks: list[Rank], kind: str) -> Any:
    """All but one wait in the same. Rank 0 is the first, and looks who is missing; what they are told."""
    waiting = [rank for rank in ranks if rank.number != LATE]
    found = [waiting[0].agree(431, kind)] if waiting[0].number == 0 else wait(waiting, kind)
    said = {str([one.rank for one in each.missing]) if each.missing is not None else each.why for each in found}
    return len(found), said, {one.by for one in found}, len(found[0].encode())


def wait(ranks: list[Rank], kind: str) -> list[verdict.Verdict]:
    """What ranks say that are not elected (`JobRanks._elected`), all at once: 2,000 threads would cost more."""
    key = f"0/dist.all_reduce/431/{kind}/0"
    found: list[bytes] = []
    stores: dict[int, Any] = {}
    polling = select.epoll()
    for rank in ranks:
        if kind == "error":
            rank.ranks._statuses.publish(rank.store)
        rank.store._send(store._ADD, rank.store._text(f"elect/{key}"), store._number(1))
        stores[rank.store._socket.fileno()] = rank.store
        polling.register(rank.store._socket, select.EPOLLIN)
    told: set[int] = set()
    while len(found) < len(ranks):
        for number, _ in polling.poll():
            here = stores[number]
            if number not in told:
                told.add(number)
                assert here._read_number() > 1, "rank 0 comes first"
                here._send(store._WAIT, *here._texts([f"verdict/{key}"]))
                continue
            here._read(1)
            here._send(store._GET, here._text(f"verdict/{key}"))
            found.append(here._read(here._read_number()))
            polling.unregister(number)
    return [*map(decode, found)]


@functools.cache
def decode(text: bytes) -> verdict.Verdict:
    """Each rank does it once, on a core of its own."""
    return verdict.Verdict.decode(text)


def read(ranks: list[Rank], absent: int) -> int:
    """All statuses, of a group in which so many ranks have none yet."""
    world = len(ranks[0]._world.ranks)
    missing = set(range(0, world, world // absent)) if absent else set()
    asked = [number + world if number in missing else number for number in range(world)]
    statuses = ranks[0].ranks._statuses
    return len(statuses.read_all(ranks[0].ranks._exchange.store, asked))


QUESTIONS: dict[str, Any] = {
    "connect": connect, "rounds": rounds, "keep": keep, "burst": burst, "stall": stall, "read": read,
}  # fmt: skip


def _raise_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class Figures(NamedTuple):
    wall: float
    """From the start until the last client was through."""
    server: float
    """CPU seconds."""
    clients: float
    """CPU seconds of the busiest client process."""
    messages: int
    size: int
    first: Any
    """What the process of rank 0 took (CPU seconds), and answered."""
    answers: list[Any]

    def __str__(self) -> str:
        return (
            f"{self.wall:6.2f} s, {self.messages:9,} messages, {self.size / 1e6:8.2f} MB,"
            f" server {self.server:6.3f} s CPU, busiest client {self.clients:5.2f} s CPU"
        )


class Job:
    def __init__(self, world: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._server_pipe, theirs = spawn.Pipe()
        self._server = spawn.Process(target=serve, args=(theirs,))
        self._server.start()
        port = self._server_pipe.recv()
        self.process = psutil.Process(self._server.pid)
        self._before = self.process.memory_info().rss
        bounds = [0, 1, *(1 + (at + 1) * (world - 1) // PROCESSES for at in range(PROCESSES))]
        self._pipes: list[Connection] = []
        self._clients: list[Any] = []
        for first, end in itertools.pairwise(bounds):
            mine, his = spawn.Pipe()
            self._clients.append(spawn.Process(target=client, args=(his, port, range(first, end), world)))
            self._clients[-1].start()
            self._pipes.append(mine)
        for pipe in self._pipes:
            pipe.recv()

    @property
    def memory(self) -> float:
        """MB that the server has grown by."""
        return (self.process.memory_info().rss - self._before) / 2**20

    def ask(self, *question: Any, only_first: bool = False) -> Figures:
        pipes = self._pipes[:1] if only_first else self._pipes
        before, start = self._cpu(), time.monotonic()
        for pipe in pipes:
            pipe.send(question)
            if pipe is self._pipes[0]:
                time.sleep(0.02)  # it is the first
        answers = [pipe.recv() for pipe in pipes]
        return Figures(
            max(each[0] for each in answers) - start,
            self._cpu() - before,
            max(each[2] for each in answers),
            sum(each[3][0] for each in answers),
            sum(each[3][1] for each in answers),
            (answers[0][1], answers[0][2]),
            [each[4] for each in answers],
        )

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def close(self) -> None:
        for pipe in [*self._pipes, self._server_pipe]:
            pipe.send(None)
        for each in [*self._clients, self._server]:
            each.join(30)
            if each.is_alive():
                each.kill()


def measure(world: int) -> None:
    job_ = Job(world)
    try:
        print(f"\n{world:,} ranks")
        job_.ask("connect", only_first=True)
        print(f"  connect                {job_.ask('connect')}")
        job_.ask("rounds", 1)
        steady = job_.ask("rounds", ROUNDS)
        a_second = [each / ROUNDS for each in (steady.messages, steady.size / 1e6, steady.server)]
        print(
            f"  every second           {a_second[0]:9,.0f} messages, {a_second[1]:6.2f} MB,"
            f" server {a_second[2]:.3f} s CPU"
            f" (a round took {steady.wall / ROUNDS:.2f} s; {1e6 * steady.clients * PROCESSES / world / ROUNDS:.0f} µs"
            f" CPU a rank; server has grown by {job_.memory:.1f} MB)"
        )
        for askers in sorted({1, 100, world}):
            job_.ask("keep", askers)
            print(f"  {askers:6,} ask to keep     {job_.ask('rounds', 1)}")
            print(f"            and then     {job_.ask('rounds', 1)}")
        print(f"  all write, none reads  {job_.ask('burst', 70)}")
        print(f"            and then     {job_.ask('rounds', 1)}")
        print(f"            and then     {job_.ask('rounds', 1)}")
        for absent in (0, 1, world // 10, world // 2):
            figures = job_.ask("read", absent, only_first=True)
            print(f"  read, {absent:5,} absent    {figures}")
        for kind in ("stall", "error"):
            job_.ask("rounds", 1)
            figures = job_.ask("stall", kind)
            told, answers = sum(each[0] for each in figures.answers), figures.answers
            said, by = (set().union(*(each[at] for each in answers)) for at in (1, 2))
            wall, cpu = figures.first
            print(f"  {kind:22} {figures}")
            print(
                f"     {told:,} were told {said} by {sorted(by)}; rank 0 took {wall:.2f} s, {cpu:.2f} s CPU;"
                f" a verdict of {answers[0][3]:,} bytes; server has grown by {job_.memory:.1f} MB"
            )
    finally:
        job_.close()


if __name__ == "__main__":
    # torch's server asks the name service for the name of each client that connects, and waits 5 s for each answer that
    # is lost, in its one thread.
    os.environ.setdefault("RES_OPTIONS", "use-vc timeout:1 attempts:1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    print(machine(), "load", " ".join(map(str, os.getloadavg())))
    for size in map(int, sys.argv[1:]) if len(sys.argv) > 1 else SIZES:
        measure(size)
