"""What a job's store bears: statuses of N simulated ranks, their looks at the keep requests, and one stall.

The server is a real `TCPStore` of torch in a process of its own, the clients are real connections, one a rank as far as
the limit on descriptors goes; what is simulated is the training. A few processes are all the ranks: each goes through
its ranks once a second. Where that takes longer than a second the clients are what is slow, and what the server would
need at one status a second follows from its CPU time a round.

Messages and bytes are those of TCPStore's own (as torch 2.15 sends them: a byte for the kind, 8 for each length, keys
begin with "/"; a `get` is two requests), without TCP's.

    python benchmarks/store.py [RANKS ...]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil
from _measure import machine

SIZES = (100, 1_000, 10_000)
PROCESSES = 4
ROUNDS = 5
POLL_S = 0.25
CHUNK = 500
"""Statuses read with one message: a chunk is then 150 KB."""
TIMEOUT = timedelta(seconds=120)


class Traffic(NamedTuple):
    messages: int = 0
    """Requests and answers."""
    size: int = 0
    """Bytes."""

    def __add__(self, other: tuple[Any, ...]) -> Traffic:
        return Traffic(self.messages + other[0], self.size + other[1])


class Protocol:
    """What one rank says to the store. The names and sizes stand for those of `otel_dl.ranks`."""

    STATUS = "otel_dl/status/{}"
    KEEPS = "otel_dl/keeps"
    ELECT = "otel_dl/stall/1/elect"
    VERDICT = "otel_dl/stall/1/verdict"

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.traffic = Traffic()
        self._status = self.STATUS.format(rank)

    def begin(self) -> None:
        """Once, rank 0: what others may look for is there."""
        self.store.set(self.KEEPS, b"0" * 64)

    def publish(self, seq: int) -> None:
        status = f"{self.rank} {seq} dist.all_reduce 0 {time.time_ns()}".ljust(300)
        self.store.set(self._status, status)
        self._count(1, 1 + _text(self._status) + 8 + 300)

    def look_for_keeps(self) -> None:
        self._check(self.KEEPS)
        self._get(self.KEEPS)

    def stalled(self, seq: int) -> bool:
        """Says so; True for the one that reports."""
        self.publish(seq)
        first = self.store.add(self.ELECT, 1) == 1
        self._count(2, 1 + _text(self.ELECT) + 8 + 8)
        return first

    def report(self) -> None:
        """Reads all statuses, in chunks, and publishes who is late."""
        behind: list[int] = []
        for start in range(0, self.world, CHUNK):
            keys = [self.STATUS.format(rank) for rank in range(start, min(start + CHUNK, self.world))]
            statuses = self.store.multi_get(keys)
            asked = 1 + 8 + sum(map(_text, keys))  # twice: whether all are there, and what they are
            self._count(4, 2 * asked + 1 + sum(8 + len(status) for status in statuses))
            for status in statuses:
                rank, seq, _ = status.split(b" ", 2)
                if int(seq) < 431 or int(rank) % (self.world // 10) == 0:
                    behind.append(int(rank))
        verdict = json.dumps({"words": "w" * 2000, "missing": behind[:64], "reasons": ["late"] * len(behind[:64])})
        self.store.set(self.VERDICT, verdict)
        self._count(1, 1 + _text(self.VERDICT) + 8 + len(verdict))

    def verdict(self) -> bool:
        """Whether it has come; if so it has been read."""
        there = self._check(self.VERDICT)
        if there:
            self._get(self.VERDICT)
        return there

    def _check(self, key: str) -> bool:
        self._count(2, 1 + 8 + _text(key) + 1)
        return bool(self.store.check([key]))

    def _get(self, key: str) -> bytes:
        value: bytes = self.store.get(key)  # which asks first whether it is there
        self._count(4, 1 + 8 + _text(key) + 1 + 1 + _text(key) + 8 + len(value))
        return value

    def _count(self, messages: int, size: int) -> None:
        self.traffic += Traffic(messages, size)


def _text(key: str) -> int:
    return 8 + 1 + len(key)


def connect(port: int) -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def serve(pipe: Connection) -> None:
    _raise_limit()
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    pipe.send(store.port)
    pipe.recv()


def client(pipe: Connection, port: int, ranks: range, world: int, connections: int) -> None:
    """All of `ranks`, over so many connections."""
    _raise_limit()
    import torch

    torch.set_num_threads(1)
    pipe.send("imported")
    pipe.recv()
    stores = [connect(port) for _ in range(connections)]
    protocols = [Protocol(stores[at % connections], rank, world) for at, rank in enumerate(ranks)]
    if 0 in ranks:
        protocols[0].begin()
    for protocol in protocols:
        protocol.publish(0)
        protocol.traffic = Traffic()
    stores[-1].check(["-"])  # all that was written before has arrived
    pipe.send(None)

    pipe.recv()
    began = time.monotonic()
    busy = 0.0
    for seq in range(ROUNDS):
        start = time.monotonic()
        for protocol in protocols:
            protocol.publish(430 + seq)
            protocol.look_for_keeps()
        busy += time.monotonic() - start
        time.sleep(max(0.0, began + seq + 1 - time.monotonic()))
    pipe.send((busy / ROUNDS, _sum(protocols)))

    pipe.recv()
    reporter: threading.Thread | None = None
    took: list[float] = []
    waiting: list[Protocol] = []

    def report(protocol: Protocol) -> None:
        # On a connection of its own: others of this process share neither with it.
        protocol.store = connect(port)
        start = time.monotonic()
        protocol.report()
        took.append(time.monotonic() - start)

    for protocol in protocols:
        if protocol.stalled(431):
            reporter = threading.Thread(target=report, args=(protocol,))
            reporter.start()
        else:
            waiting.append(protocol)
    while waiting:
        start = time.monotonic()
        waiting = [protocol for protocol in waiting if not protocol.verdict()]
        if waiting:
            time.sleep(max(0.0, start + POLL_S - time.monotonic()))
    if reporter is not None:
        reporter.join()
    pipe.send((time.monotonic(), took, _sum(protocols)))
    pipe.recv()


def _sum(protocols: list[Protocol]) -> Traffic:
    """Of all of them since it was asked last."""
    whole = sum((protocol.traffic for protocol in protocols), Traffic())
    for protocol in protocols:
        protocol.traffic = Traffic()
    return whole


def _raise_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class Row(NamedTuple):
    ranks: int
    connections: int
    """As many as the limit on descriptors allows."""
    connect_s: float
    messages_s: float
    """A second, at one round a second."""
    size_s: float
    round_s: float
    """What a client process is busy for, a round."""
    server_share: float
    """Its CPU time a round, so the share of a core that it needs at one a second."""
    stall_messages: int
    stall_size: int
    read_s: float
    """Reading all statuses and writing the verdict."""
    all_s: float
    """From the stall until the last rank has the verdict."""
    stall_server_s: float
    """CPU time of the server."""
    rss: int
    """Bytes that the server's memory has grown by."""


def measure(world: int) -> Row:
    spawn = multiprocessing.get_context("spawn")
    most = _raise_limit() - 200  # what a process has open besides
    connections = min(world, most)
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(theirs,))
    server.start()
    port = ours.recv()
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    pipes: list[Connection] = []
    clients: list[Any] = []
    for at in range(PROCESSES):
        ranks = range(at * world // PROCESSES, (at + 1) * world // PROCESSES)
        mine, his = spawn.Pipe()
        share = max(1, len(ranks) * connections // world)
        clients.append(spawn.Process(target=client, args=(his, port, ranks, world, share)))
        clients[-1].start()
        pipes.append(mine)
    try:
        together(pipes)
        start = time.monotonic()
        go(pipes)
        together(pipes)
        connect_s = time.monotonic() - start
        cpu = _cpu(process)
        go(pipes)
        steady = together(pipes)
        steady_cpu = _cpu(process) - cpu
        traffic = sum((Traffic(*each[1]) for each in steady), Traffic())
        cpu, start = _cpu(process), time.monotonic()
        go(pipes)
        stall = together(pipes)
        stalled = sum((Traffic(*each[2]) for each in stall), Traffic())
        return Row(
            world,
            connections,
            connect_s,
            traffic.messages / ROUNDS,
            traffic.size / ROUNDS,
            max(each[0] for each in steady),
            steady_cpu / ROUNDS,
            stalled.messages,
            stalled.size,
            max(took for each in stall for took in each[1]),
            max(each[0] for each in stall) - start,
            _cpu(process) - cpu,
            process.memory_info().rss - before,
        )
    finally:
        for pipe in [*pipes, ours]:
            pipe.send(None)
        for each in [*clients, server]:
            each.join(30)
            if each.is_alive():
                each.kill()


def go(pipes: list[Connection]) -> None:
    for pipe in pipes:
        pipe.send(None)


def together(pipes: list[Connection]) -> list[Any]:
    return [pipe.recv() for pipe in pipes]


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    # A TCPStore client asks the name service for the name of the server's address when it connects, and waits 5 s for
    # each answer that is lost. That is none of the store's. Nor is the warning that there is no answer.
    os.environ.setdefault("RES_OPTIONS", "use-vc timeout:1 attempts:1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    print(machine())
    print(f"{PROCESSES} client processes; each rank, each second: a status of 300 bytes, a look for keep requests")
    print("                                every second                             in one stall")
    print(
        f"{'ranks':>7} {'connected':>10} {'in s':>6} | {'messages':>9} {'MB':>6} {'clients s':>10} {'server s':>9} |"
        f" {'messages':>9} {'MB':>6} {'read s':>7} {'all s':>6} {'server s':>9} | {'server MB':>9}"
    )
    for size in map(int, sys.argv[1:]) if len(sys.argv) > 1 else SIZES:
        row = measure(size)
        print(
            f"{row.ranks:7,} {row.connections:10,} {row.connect_s:6.2f} | {row.messages_s:9,.0f}"
            f" {row.size_s / 1e6:6.2f} {row.round_s:10.2f} {row.server_share:9.3f} | {row.stall_messages:9,}"
            f" {row.stall_size / 1e6:6.2f} {row.read_s:7.3f} {row.all_s:6.2f} {row.stall_server_s:9.2f} |"
            f" {row.rss / 2**20:9.1f}",
            flush=True,
        )
    print(
        "clients s: what the busiest client process needs for a round; above 1 the clients are the limit. server s: CPU"
        "\ntime of the server, which is one thread. read s: all statuses read and the verdict written. all s: from the"
        "\nstall until the last rank has the verdict, of which it looks for one every "
        f"{POLL_S} s. server MB: what its memory grew by."
    )
