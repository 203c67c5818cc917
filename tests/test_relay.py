"""The pipe between a worker and its parent: what does not fit is dropped whole and counted, and nothing is torn."""

from __future__ import annotations

import enum
import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from otel_dl.forensics import writer as status_pages
from otel_dl.forensics.writer import StatusPage
from otel_dl.recording.failure import Failure
from otel_dl.recording.keep import AdaptiveHead
from otel_dl.recording.records import Fetch
from otel_dl.recording.run import Run
from otel_dl.settings import Settings
from otel_dl.workers import relay as relays
from otel_dl.workers import ring, wire
from otel_dl.workers.relay import Relay
from otel_dl.workers.ring import RingReader, RingWriter
from otel_dl.workers.writer import Writer

RESOURCE = Resource({"service.name": "a job", "dl.worker.id": 0}, "https://schema")


class Colour(enum.IntEnum):
    RED = 3


def context(number: int, flags: int = 1) -> SpanContext:
    return SpanContext((1 << 127) + number, number, False, TraceFlags(flags), TraceState([("vendor", "x")]))


def span(number: int = 7, flags: int = 1, **attributes: Any) -> ReadableSpan:
    return ReadableSpan(
        "decode",
        context(number, flags),
        context(number + 1),
        RESOURCE,
        attributes,
        [Event("seen", {"n": 1}, 5)],
        [Link(context(9), {"why": "because"})],
        SpanKind.CLIENT,
        status=Status(StatusCode.ERROR, "no"),
        start_time=10,
        end_time=20,
        instrumentation_scope=InstrumentationScope("user", "1", "https://other", {"a": 1}),
    )


def fetch(index: int, round: int = 0, read: bool = True, dropped: int = 0, error: Failure | None = None) -> bytes:
    return wire.encode_fetch(0, 4711, round, index, 100, 200, dropped, read, error)


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay(Run(Settings(), AdaptiveHead()))
    yield relay
    relay.close()


def opened(relay: Relay) -> Writer:
    """A worker's end, for a worker in this process."""
    (descriptor,) = relay.open("nonce", 1)
    assert descriptor is not None
    writer = Writer(os.dup(descriptor))
    relay.started([descriptor])
    return writer


def test_a_span_arrives_as_it_was() -> None:
    number, resource = wire.decode_resource(wire.encode_resource(3, RESOURCE))
    made = span(text="é", many=(1.5, 2.0), flag=True, colour=Colour.RED)
    batch, sent, rest = wire.span_resource(wire.encode_span((1, 2), 3, made))
    again = wire.decode_span(rest, resource, kept=False)
    assert (number, batch, sent) == (3, (1, 2), 3)
    assert again.to_json() == made.to_json()
    assert again.context == made.context
    assert again.instrumentation_scope == made.instrumentation_scope
    assert type(again.attributes["colour"]) is int


def test_a_span_that_goes_with_its_fetch_is_sampled_from_then_on() -> None:
    _, _, rest = wire.span_resource(wire.encode_span((0, 0), 0, span(flags=0)))
    assert wire.decode_span(rest, RESOURCE, kept=True).context.trace_flags.sampled
    assert not wire.decode_span(rest, RESOURCE, kept=False).context.trace_flags.sampled


def test_a_fetch_is_taken_once_with_the_spans_made_in_it(relay: Relay) -> None:
    writer = opened(relay)
    writer.write(wire.RESOURCE, wire.encode_resource(0, RESOURCE))
    writer.write(wire.SPAN, wire.encode_span((2, 5), 0, span()))
    writer.write(wire.SPAN, wire.encode_span(None, 0, span(8)))
    writer.write(wire.FETCH, fetch(5, 2, True, 1, Failure("KeyError", "é")))
    taken = relay.take(("nonce", 2, 5))  # reads what has arrived by itself
    assert taken is not None
    assert (taken.worker, taken.pid, taken.start, taken.end, taken.error, taken.dropped) == (
        0, 4711, 100, 200, Failure("KeyError", "é"), 1,
    )  # fmt: skip
    assert [s.context.span_id for s in taken.spans] == [7]
    assert [s.context.span_id for s in relay.outside()] == [8]
    assert relay.take(("nonce", 2, 5)) is None
    assert relay.outside() == []
    assert relay.take(("", 0, 0)) is None


def test_a_full_pipe_drops_whole_messages_and_the_next_one_says_how_many(relay: Relay) -> None:
    writer = opened(relay)
    writer.write(wire.RESOURCE, wire.encode_resource(0, RESOURCE))
    body = wire.encode_span(None, 0, span(text="x" * 10_000))
    accepted = sum(writer.write(wire.SPAN, body) for _ in range(100))
    assert 0 < accepted < 100
    # A fetch waits in the worker for room; spans behind it don't.
    assert writer.write(wire.FETCH, fetch(1))
    assert not writer.write(wire.SPAN, body)
    relay.drain()
    writer.flush()
    relay.drain()
    assert len(relay.outside()) == accepted
    assert relay.take(("nonce", 0, 1)) is not None
    assert writer.write(wire.FETCH, fetch(2))
    assert relay.take(("nonce", 0, 2)) is not None
    assert relay.dropped == {"messages of workers": 100 - accepted + 1}


def test_fetches_that_find_no_room_at_all_are_bounded_and_counted(relay: Relay) -> None:
    writer = opened(relay)
    written = [writer.write(wire.FETCH, fetch(index)) for index in range(20_000)]
    accepted = written.index(False)
    assert not any(written[accepted:])
    while writer._rest:
        relay.drain()
        writer.flush()
    relay.drain()
    assert relay.take(("nonce", 0, accepted - 1)) is not None
    assert relay.take(("nonce", 0, accepted)) is None


def test_a_parent_that_is_gone_is_no_error_to_the_worker(relay: Relay) -> None:
    writer = opened(relay)
    relay.only()
    assert not writer.write(wire.FETCH, fetch(0))
    writer.flush()


def test_a_run_that_is_over_breaks_no_pipe_of_a_worker_that_still_runs(relay: Relay) -> None:
    writer = opened(relay)
    (read_end,) = [pipe.descriptor for pipe in relay._pipes]
    relay.close()
    assert writer.write(wire.FETCH, fetch(0))
    assert read_end in relays._left_open
    writer._descriptor.close()
    while read_end in relays._left_open:
        relays._close_ended()  # reads what is left, then finds the end


def test_sampled_fetches_that_no_step_took_expire_and_the_others_go(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "FETCHES", 10)
    monkeypatch.setattr(relays, "batch_sampled", lambda head, nonce, round, index: index % 2 == 1)
    writer = opened(relay)
    for index in range(20):
        writer.write(wire.FETCH, fetch(index))
    relay.drain()
    assert [f.place for f in relay.expired()] == [1, 3, 5, 7, 9]
    assert relay.take(("nonce", 0, 11)) is not None
    relay.drain(final=True)
    assert [f.place for f in relay.expired()] == [13, 15, 17, 19]
    assert not relay.dropped


def test_spans_that_wait_are_bounded_and_those_lost_are_counted(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "SPANS", 10)
    monkeypatch.setattr(relays, "batch_sampled", lambda *batch: False)
    writer = opened(relay)
    writer.write(wire.RESOURCE, wire.encode_resource(0, RESOURCE))
    for index in range(8):
        for _ in range(4):
            writer.write(wire.SPAN, wire.encode_span((0, index), 0, span()))
        writer.write(wire.FETCH, fetch(index))
    relay.drain()
    kept = [relay.take(("nonce", 0, index)) for index in range(8)]
    waiting = sum(len(fetch.spans) for fetch in kept if fetch is not None)
    assert waiting <= 10
    assert relay.dropped["spans of workers"] == 32 - waiting


def test_spans_of_a_fetch_that_its_worker_did_not_finish_are_not_lost(relay: Relay) -> None:
    writer = opened(relay)
    writer.write(wire.RESOURCE, wire.encode_resource(0, RESOURCE))
    writer.write(wire.SPAN, wire.encode_span((0, 0), 0, span(1)))
    writer.write(wire.SPAN, wire.encode_span((0, 1), 0, span(2)))
    writer.write(wire.FETCH, fetch(1, read=False))
    writer._descriptor.close()
    relay.drain()
    assert sorted(s.context.span_id for s in relay.outside()) == [1, 2]
    assert not relay._pipes


def test_what_is_no_message_is_counted_and_what_follows_is_read(relay: Relay) -> None:
    writer = opened(relay)
    writer.write(wire.SPAN, b"not what marshal writes")
    writer.write(99, b"of a later version")
    writer.write(wire.FETCH, fetch(0))
    assert relay.take(("nonce", 0, 0)) is not None
    assert relay.dropped == {"messages not understood": 1}


def file_in_the_place_of(number: int, path: Path) -> None:
    """As where a script closes what it does not know, and opens a file of its own next."""
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.dup2(file, number)
    os.close(file)
    os.write(number, b"the user's")
    os.lseek(number, 0, os.SEEK_SET)


def test_a_file_of_the_users_under_the_number_of_a_workers_end_is_not_written_to(relay: Relay, tmp_path: Path) -> None:
    writer = opened(relay)
    number = writer._descriptor.number
    file_in_the_place_of(number, tmp_path / "file")
    assert not writer.write(wire.FETCH, fetch(0))
    writer.flush()
    assert (tmp_path / "file").read_bytes() == b"the user's"
    os.close(number)  # EBADF, had it been closed by us


@pytest.mark.parametrize("end", ["drain", "close", "only", "over"])
def test_a_file_of_the_users_under_the_number_of_our_end_is_neither_read_nor_closed(
    relay: Relay, end: str, tmp_path: Path
) -> None:
    writer = opened(relay)
    if end == "over":  # the run, before the worker
        relay.close()
        number = relays._left_open[-1].number
    else:
        (number,) = [pipe.descriptor.number for pipe in relay._pipes]
    file_in_the_place_of(number, tmp_path / "file")
    relays._close_ended() if end == "over" else getattr(relay, end)()
    assert os.read(number, 100) == b"the user's"
    os.close(number)
    assert relay.dropped == ({"pipes of workers, closed by others": 1} if end == "drain" else {})
    writer._descriptor.close()


def test_no_descriptor_is_left(relay: Relay) -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    writers = [opened(relay) for _ in range(5)]
    for writer in writers:
        writer._descriptor.close()
    relay.drain()
    assert set(os.listdir("/proc/self/fd")) == before
    relay.open("another", 3)
    relay.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_process_that_the_worker_forked_writes_nothing(relay: Relay) -> None:
    writer = opened(relay)
    pid = os.fork()
    if pid == 0:
        os._exit(writer.write(wire.FETCH, fetch(0)))
    assert os.waitpid(pid, 0)[1] == 0
    assert relay.take(("nonce", 0, 0)) is None


def ringing(relay: Relay, folder: Path, nonce: str = "nonce", workers: int = 1) -> list[RingWriter]:
    """The rings of an iterator's workers, which all run in this process."""
    pages = [str(folder / f"{nonce}.{number}.status") for number in range(workers)]
    for number, page in enumerate(pages):
        status_pages.create(page, relay._run.identity, worker=number, nonce=nonce, tail=ring.SIZE)
    relay.started(relay.open(nonce, workers, pages))  # our write ends are closed: the next `drain` finds their end
    return [RingWriter(StatusPage(page, ring.SIZE).tail) for page in pages]


def test_what_lies_in_the_rings_is_found_late_and_once(relay: Relay, tmp_path: Path) -> None:
    rings = ringing(relay, tmp_path, workers=3)
    for round in range(2):
        for index in range(300):
            rings[index % 3].write(round, index, index, index + 10)
    relay.drain()
    assert not relay._pipes  # their ends came with what they said: the memory is gone
    assert relay.ready(("nonce", 1, 100), 125) == 16
    assert relay.ready(("nonce", 1, 100), 1000) == relays.AHEAD
    assert relay.ready(("nonce", 0, 290), 1000) == 10
    for round, index in [(0, 0), (1, 299), (0, 150), (1, 100)]:
        peeked, taken = relay.peek(("nonce", round, index)), relay.take(("nonce", round, index))
        assert peeked == taken
        assert taken == Fetch("nonce", round, index, index % 3, os.getpid(), index, index + 10, None, [], 0)
        assert relay.take(("nonce", round, index)) is None
    assert relay.take(("nonce", 0, 300)) is None
    assert relay.take(("another", 0, 1)) is None
    assert relay.ready(("nonce", 1, 100), 125) == 15
    assert relay.dropped == {"fetches not found": 6}


def test_what_is_written_over_before_it_was_read_is_counted(tmp_path: Path) -> None:
    memory, lost = memoryview(bytearray(ring.SIZE)), Counter[str]()
    writer, reader = RingWriter(memory), RingReader("nonce", 0, lost)
    written = 0
    for more in (1, 500, ring.SLOTS - 1, 7, ring.SLOTS + 100, 3):
        for _ in range(more):
            writer.write(0, written, written, written + 1)
            written += 1
        reader.read(memory)
        assert len(reader) + lost[ring.LOST] == written
        assert all(reader.fetch((0, written - back)) for back in range(1, min(more, ring.SLOTS - 1) + 1))
    # The oldest of a full ring is where the worker writes next: it may be torn.
    assert lost[ring.LOST] == 101
    reader.read(memory)
    assert len(reader) + lost[ring.LOST] == written


def test_what_the_worker_writes_while_the_ring_is_copied_is_not_taken_for_what_it_was() -> None:
    memory, lost = memoryview(bytearray(ring.SIZE)), Counter[str]()
    writer, reader = RingWriter(memory), RingReader("nonce", 0, lost)
    for index in range(ring.SLOTS - 1):
        writer.write(0, index, index, index + 1)

    original = ring._read_number
    readings = 0

    def read_number(*args: Any) -> Any:
        nonlocal readings
        readings += 1
        if readings == 2:  # after the copy
            for index in range(5):
                writer.write(1, index, index, index + 1)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_read_number", read_number)
        reader.read(memory)
    assert reader.fetch((0, 4)) is None
    assert reader.fetch((0, 5)) is not None
    assert lost[ring.LOST] == 5
    reader.read(memory)
    assert reader.fetch((1, 0)) is not None
    assert len(reader) == ring.SLOTS - 1


def test_a_torn_fetch_is_counted_and_nobodys() -> None:
    memory, lost = memoryview(bytearray(ring.SIZE)), Counter[str]()
    writer, reader = RingWriter(memory), RingReader("nonce", 0, lost)
    for index in range(3):
        writer.write(0, index, 5, 10)
    memory[ring._FIRST + ring._SLOT_SIZE + 16] ^= 1
    reader.read(memory)
    assert [reader.fetch((0, index)) is not None for index in range(3)] == [True, False, True]
    assert lost[ring.LOST] == 1
    assert [fetch.place for fetch in reader.let_go(3, lambda round, index: True)] == [0, 2]
    assert lost[ring.LOST] == 2


def test_of_those_in_the_rings_too_the_oldest_go_and_the_sampled_ones_expire(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def sampled(head: Any, nonce: str, round: int, index: int) -> bool:
        asked.append(index)
        return index % 5 == 0

    monkeypatch.setattr(relays, "FETCHES", 20)
    monkeypatch.setattr(relays, "batch_sampled", sampled)
    rings = ringing(relay, tmp_path, workers=2)
    for index in range(40):
        rings[index % 2].write(0, index, 0, 1)
    assert relay.take(("nonce", 0, 35)) is not None
    assert sorted(fetch.place for fetch in relay.expired()) == [0, 5, 10, 15]
    assert relay.take(("nonce", 0, 7)) is None
    assert relay.dropped == {"fetches not found": 1}
    relay.drain(final=True)
    assert sorted(fetch.place for fetch in relay.expired()) == [20, 25, 30]
    assert sorted(asked) == [index for index in range(40) if index != 35]


def test_the_room_of_an_iterator_is_all_of_its_workers(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reads on when the others have come to the end of their shares."""
    monkeypatch.setattr(relays, "FETCHES", 20)
    monkeypatch.setattr(relays, "batch_sampled", lambda *batch: False)
    rings = ringing(relay, tmp_path, workers=4)
    for index in range(100):
        rings[index % 4 if index < 10 else 2].write(0, index, 0, 1)
    assert [relay.take(("nonce", 0, index)) is not None for index in (78, 79, 80, 99)] == [False, False, True, True]


def test_fetches_of_workers_that_have_ended_are_bounded_together(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "FETCHES", 20)
    monkeypatch.setattr(relays, "batch_sampled", lambda head, nonce, round, index: True)
    for epoch in range(30):
        (writer,) = ringing(relay, tmp_path, f"epoch {epoch}")
        for index in range(3):
            writer.write(0, index, 0, 1)
        for index in range(epoch % 4):
            assert relay.take((f"epoch {epoch}", 0, index)) is not None or index == 3
        relay.drain()
        assert sum(map(len, relay._ended)) <= 20
        assert len(relay._ended) <= 21
        assert len(relay._rings) == len(relay._ended)
    assert relay.take(("epoch 29", 0, 2)) is not None
    relay.drain(final=True)
    taken = sum(min(epoch % 4, 3) for epoch in range(30)) + 1
    assert len(relay.expired()) + taken == 90 - relay.dropped["fetches of workers"]


def test_a_page_that_somebody_has_cut_is_looked_at_no_more(relay: Relay, tmp_path: Path) -> None:
    """A look behind its end would be SIGBUS."""
    path = tmp_path / "a.status"
    status_pages.create(str(path), relay._run.identity, worker=0, nonce="n", tail=ring.SIZE)
    relay.open("n", 1, [str(path)])
    os.truncate(path, 0)
    relay.drain()
    assert relay.dropped["status pages of workers, cut by others"] == 1
    relay.drain()
