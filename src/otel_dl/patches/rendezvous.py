"""How ranks find each other in `init_process_group`, and the time limit of that where torch keeps none.

A TCPStore client that is connected waits for the host's first answer without a limit (TCPStore.cpp, `ping`; measured
with 2.4 and 2.15): where something else listens at MASTER_PORT, or a firewall swallows what follows the handshake,
`init_process_group` never returns, whatever its `timeout`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from otel_dl import threads
from otel_dl.log import logger
from otel_dl.patches.groups import address_of, ask

Address = tuple[str, int]


class Rendezvous:
    """What the arguments of `init_process_group` say of it, before torch is called.

    As torch/distributed/rendezvous.py reads them (2.4 to 2.15). `rank` and `world` are -1 where nobody says them.
    """

    def __init__(self, method: Any, store: Any, rank: Any, world: Any) -> None:
        self.address: Address | None = None
        """Of the TCP store; None where it is, or will be, of another kind."""
        self.rank = _number(rank)
        self.world = _number(world)
        if store is not None:
            self.address = address_of(store)
        else:
            ask(lambda: self._read("env://" if method is None else str(method)), None)

    def _read(self, method: str) -> None:
        url = urlsplit(method)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        environ: Mapping[str, str] = os.environ if url.scheme == "env" else {}
        if self.rank < 0:
            self.rank = _number(query.get("rank", environ.get("RANK")))
        if self.world < 0:
            self.world = _number(query.get("world_size", environ.get("WORLD_SIZE")))
        if url.scheme == "env":
            self.address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        elif url.scheme == "tcp" and url.hostname is not None and url.port is not None:
            self.address = url.hostname, url.port

    @property
    def member(self) -> tuple[int, int] | None:
        """Rank and world size; None where they are not known, or cannot be."""
        return (self.rank, self.world) if 0 <= self.rank < self.world else None


def _number(value: Any) -> int:
    return ask(lambda: int(value), -1)


class Deadline:
    """Ends connections to `address` that nothing was ever received on, once `seconds` have passed: torch, which waits
    for the first byte, then raises what it raises when a store goes away.

    A host that has answered once is none of its business: from there on torch keeps its limits itself.
    """

    def __init__(self, address: Address, seconds: float) -> None:
        self._address = address
        self._seconds = seconds
        self._over = threading.Event()
        self._said = False
        if sys.platform == "linux" and seconds < threading.TIMEOUT_MAX:
            with contextlib.suppress(RuntimeError):  # no more threads: torch's limits alone hold
                threads.start("otel-dl-rendezvous", self._watch)

    def over(self) -> None:
        """`init_process_group` has come back."""
        self._over.set()

    def _say(self) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "otel-dl: %s:%d (MASTER_ADDR, MASTER_PORT) took the connection of init_process_group and has not"
                " answered within the time limit of %g s; torch would wait without end. The connection is closed:"
                " init_process_group fails now. Is it the job's store that listens there, and does a firewall let its"
                " packets pass?",
                *self._address,
                self._seconds,
            )

    def _watch(self) -> None:
        before: set[tuple[int, int]] = set()
        wait = self._seconds
        while not self._over.wait(wait):
            wait = _ONCE_MORE_S
            with contextlib.suppress(OSError):  # no descriptors are left to look with: perhaps the next time
                before = self._look(before)

    def _look(self, before: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """Ends those that were found unanswered `before` and are so still; those that are unanswered now."""
        now = dict(_unanswered(self._address))
        for key in before & now.keys():
            self._say()  # first: it may be the last that is heard of this process
            with contextlib.suppress(OSError):  # it has ended meanwhile
                now[key].shutdown(socket.SHUT_RDWR)
        for connection in now.values():
            connection.close()
        return set(now)


_ONCE_MORE_S: Final = 0.5
"""A connection has to be found twice, so far apart: torch may have made it just now."""
_RECEIVED: Final = slice(128, 136)
"""`tcpi_bytes_received` in Linux' `struct tcp_info` (linux/tcp.h, since 4.1)."""


def _unanswered(address: Address) -> Iterator[tuple[tuple[int, int], socket.socket]]:
    """This process's connections to `address` on which no byte has come, by descriptor and inode; as duplicates."""
    hosts: set[str] = set()
    with contextlib.suppress(OSError):
        hosts = {str(info[4][0]) for info in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            known = os.fstat(int(name))
            if not stat.S_ISSOCK(known.st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
            if _is_unanswered(connection, hosts, address[1]):
                yield (int(name), known.st_ino), connection
            else:
                connection.close()


def _is_unanswered(connection: socket.socket, hosts: set[str], port: int) -> bool:
    with contextlib.suppress(OSError):
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            host, peer, *_ = connection.getpeername()
            information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.stop)
            received = information[_RECEIVED]
            return peer == port and host.removeprefix("::ffff:") in hosts and received == bytes(8)
    return False
