"""The connection to the job's store, against torch's own server."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from otel_dl.ranks.store import JobStore, StoreGone


@pytest.fixture
def server() -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)


@pytest.fixture
def store(server: Any) -> JobStore:
    return JobStore(("127.0.0.1", server.port), "otel_dl/0/")


def test_a_missing_key_is_none_at_once(store: JobStore) -> None:
    assert store.get("nothing") is None
    assert not store.has("nothing")


def test_keys_have_the_prefix(server: Any, store: JobStore) -> None:
    store.set("a", "1")
    assert server.get("otel_dl/0/a") == b"1"


def test_many_keys_of_which_some_are_missing(store: JobStore) -> None:
    for number in (0, 3, 4, 9):
        store.set(f"status/{number}", str(number))
    found = store.get_many([f"status/{number}" for number in range(10)])
    assert [number for number, value in enumerate(found) if value is not None] == [0, 3, 4, 9]
    assert found[9] == b"9"


def test_few_messages_for_many_keys_however_many_are_missing(server: Any) -> None:
    sent: list[int] = []

    class Counting(JobStore):
        def _send(self, query: int, *parts: bytes) -> None:
            sent.append(query)
            super()._send(query, *parts)

    store = Counting(("127.0.0.1", server.port), "otel_dl/0/")
    keys = [f"status/{number}" for number in range(2_500)]
    for key in keys[::3]:
        store.set(key, key)
    sent.clear()
    expected = [None if number % 3 else key.encode() for number, key in enumerate(keys)]
    assert store.get_many(keys) == expected
    assert len(sent) == 6
    sent.clear()
    assert store.get_many(keys[1:3]) == [None, None]
    assert len(sent) == 1


def test_what_is_appended_stands_behind_what_was_there(store: JobStore) -> None:
    store.append("log", "1;")
    store.append("log", "2;")
    assert store.get("log") == b"1;2;"


def test_what_is_deleted_is_missing(store: JobStore) -> None:
    store.set("key", "1")
    assert store.delete("key")
    assert store.get("key") is None
    assert not store.delete("key")


def test_a_counter_begins_at_0(store: JobStore) -> None:
    assert [store.add("elected"), store.add("elected")] == [1, 2]


def test_waiting_for_a_key(server: Any, store: JobStore) -> None:
    assert not store.wait("verdict", 0.05)
    setting = threading.Timer(0.05, server.set, ("otel_dl/0/verdict", "x"))
    setting.start()
    assert store.take("verdict", 10) == b"x"
    assert store.wait("verdict", 10)
    assert store.take("nothing", 0.01) is None
    setting.join()


def test_a_store_that_is_not_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # a port that nobody listens at
        with pytest.raises(StoreGone, match="refused"):
            JobStore(("127.0.0.1", taken.getsockname()[1]), "")


def test_a_store_that_goes_away() -> None:
    import torch.distributed as dist

    server: Any = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    store = JobStore(("127.0.0.1", server.port), "")
    store.set("a", "1")
    assert store.get("a") == b"1"
    del server
    for use in (lambda: store.get("a"), lambda: store.wait("b", 0.1), lambda: store.add("c"), lambda: store.has("a")):
        with pytest.raises(StoreGone):
            use()


def test_a_host_that_never_answers() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(StoreGone, match="no answer"):
            JobStore(silent.getsockname(), "")


def test_a_host_that_is_no_store(server: Any) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        answering = threading.Thread(target=lambda: other.accept()[0].close())
        answering.start()
        with pytest.raises(StoreGone):
            JobStore(other.getsockname(), "")
        answering.join()


def test_a_large_value_and_many_keys(server: Any, store: JobStore) -> None:
    large = bytes(range(256)) * 10_000
    store.set("large", large)
    assert store.get("large") == large
    keys = [f"many/{number}" for number in range(2_500)]
    for key in keys:
        store.set(key, key)
    assert store.get_many(keys) == [key.encode() for key in keys]


def test_what_torch_wrote_is_read_and_torch_reads_what_we_wrote(server: Any, store: JobStore) -> None:
    server.set("of torch", "1")
    assert server.get("of torch") == b"1"  # a `set` has no answer: now it has arrived
    assert store.get_from_elsewhere("of torch") == b"1"
    assert store.get_from_elsewhere("nothing") is None
    assert server.add("otel_dl/0/counter", 2) == store.add("counter", 0) == 2


@pytest.mark.parametrize("libuv", [True, False])
def test_both_kinds_of_server(libuv: bool) -> None:
    import torch.distributed as dist

    server: Any = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, use_libuv=libuv)
    store = JobStore(("127.0.0.1", server.port), "")
    store.append("log", "1")
    assert store.get("log") == b"1"
    assert not store.wait("nothing", 0.05)
    assert store.add("n") == 1
    assert store.get_many([*("missing" for _ in range(1_999)), "log"])[-2:] == [None, b"1"]


def test_a_script_that_closes_what_it_does_not_know(server: Any, store: JobStore, tmp_path: Path) -> None:
    number = store._socket.fileno()
    with (tmp_path / "users").open("wb") as users:
        os.dup2(users.fileno(), number)
        with pytest.raises(StoreGone, match="descriptor"):
            store.set("a", "1")
        del store
        os.write(number, b"the user's")  # it is still open
        os.close(number)
    assert (tmp_path / "users").read_bytes() == b"the user's"
