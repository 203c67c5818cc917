"""`JobRanks`: what stands behind `otel_dl.recording.ranks.Ranks` in a process that belongs to a process group.

A thread that trains leaves word here of what it waits in. The exchange's thread looks after it: it reports a wait that
lasts, and, where a wait has failed, finds out who is missing. One rank does that for all that wait in the same: it is
elected through the store, and publishes what it found.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from otel_dl.log import logger
from otel_dl.places import place_of
from otel_dl.ranks import pending, verdict
from otel_dl.ranks.exchange import TICK_S, Exchange
from otel_dl.ranks.nccl import Communicator, nccl_uid
from otel_dl.ranks.one_trace import OneTrace
from otel_dl.ranks.run_id import prefix
from otel_dl.ranks.statuses import Statuses
from otel_dl.ranks.store import JobStore, StoreGone
from otel_dl.ranks.verdict import LEFT, TRANSFERS, Verdict, describe, judge
from otel_dl.recording.failure import qualified
from otel_dl.recording.ranks import Explained, Group, Ranks, Stall, Wait
from otel_dl.recording.records import clock
from otel_dl.semconv import MissingReason as Reason

if TYPE_CHECKING:
    from otel_dl.recording.run import Run

ANSWER_S: Final = 0.9
"""How long a thread whose collective has failed waits for the names at most."""
_JUDGING_S: Final = 0.4
"""How long the elected rank looks for who is missing."""
_LOOK_S: Final = 0.05
_STILL_SHARE: Final = 0.1
"""Of the time after which a wait is reported: so long nothing moves until C++ is asked whether it waits."""
_PUBLISHED_S: Final = 0.6
"""How long the others wait for it, before they elect another one, and how much longer for each rank of the group."""
_A_RANK_S: Final = 1e-4
_ROUNDS: Final = 3
"""Elections that a rank waits for."""
_VERDICTS: Final = 30
"""Verdicts under one key that it looks at: attempts that have failed before have left some."""
_GROUPS: Final = 1_000
"""Groups of which it is told what was issued, at most."""
LAST_S: Final = 1.0
"""A wait is reported again so long before its limit."""
_SURELY_S: Final = 0.5
"""A wait that is shorter is none of a look's business."""
_STILL_TRUE_NS: Final = 3_000_000_000
"""So old may a report be that stands for what can't be found out any more."""
_JUST_NOW_NS: Final = 1_000_000_000
_LAST_WORDS_S: Final = 0.25
_MEETING_S: Final = 0.1
_TOGETHER: Final = 64
"""So many ranks may tick at once."""
_GOLDEN: Final = 0.618034
"""Multiples of it, taken modulo 1, lie far from each other."""

_GONE: Final = (Reason.DEAD, Reason.SILENT)

_PEER_LOST: Final = re.compile(
    r"Connection (closed|reset|refused) by peer|Connection reset|Broken pipe|Read timeout|remote process exited"
    r"|monitoredBarrier|NCCL communicator was aborted|unhandled system error|Socket closed|recvValue failed",
    re.IGNORECASE,
)
"""What backends say when another rank has gone (gloo/transport/tcp/pair.cc; ProcessGroupNCCL.cpp; TCPStore.cpp)."""


class _Answer:
    """From the exchange's thread to the one that asked."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._verdict: Verdict | None = None

    def give(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._came.set()

    def take(self, seconds: float) -> Verdict | None:
        self._came.wait(seconds)
        return self._verdict


class JobRanks(Ranks):
    """The ranks of a job with process groups. `flush` exports what was told, within so many seconds."""

    def __init__(self, run: Run, flush: Callable[[float], object]) -> None:
        self._run = run
        self._flush = flush
        self._one_trace = OneTrace(run)
        self._statuses = Statuses(run, self._waits, lambda: list(self._groups))
        self._exchange = Exchange([self._one_trace, self._statuses], self._look)
        self._begin()

    def _begin(self) -> None:
        self._generation = 0
        """Process groups that were destroyed: the next ones count their collectives anew."""
        self._groups: dict[str, Group] = {}
        self._making: Wait | None = None
        """What makes a process group, and waits for the others."""
        self._reported: tuple[Wait, int] | None = None
        """What is waited in, and how many reports there were of it."""
        self._stalls = 0
        self._last_words: _Answer | None = None
        self._failing: tuple[Wait, int] | None = None
        """What has failed last, and when."""
        self._names: dict[str, Communicator] = {}
        """By group, as far as they were asked for."""
        self._last: tuple[Wait, Verdict] | None = None
        """The latest report's."""
        self._failed: dict[str, tuple[int, Explained]] = {}
        """By group: the first collective that failed, with what was found. From then on all of them fail."""

    # From the threads that train.

    def joining(self, wait: Wait, address: tuple[str, int] | None, rank: int, world: int) -> None:
        self._making = wait
        if not self._groups:
            identity = self._run.identity
            self._statuses.rank, self._statuses.end = rank, ""
            self._one_trace.joining(address is not None, rank, world)
            # Thousands of ranks that begin together don't tick together: what one asks for the next one has read.
            phase_s = rank * _GOLDEN % TICK_S if world > _TOGETHER else 0.0
            self._exchange.begin(address, prefix(identity.attempt, self._generation), phase_s)

    def joined(self, group: Group) -> None:
        self._making = None
        if not self._groups:
            self._exchange.ask(self._meet)
        if len(self._groups) >= _GROUPS:  # most of them were destroyed, which nobody tells
            self._groups.pop(next(key for key in self._groups if key != next(iter(self._groups))))
        self._groups[group.id] = group
        self._one_trace.joined()

    def waiting(self, wait: Wait | None) -> None:
        self._making = wait

    def kept(self, number: int, reason: str, milliseconds: int) -> None:
        self._one_trace.kept(number, reason, milliseconds)

    def left(self) -> None:
        if self._groups:
            self._generation += 1
        self._statuses.end = LEFT
        self._exchange.ask(self._farewell)
        ended = self._exchange.stop(time.monotonic() + LAST_S)
        self._groups.clear()
        self._failed.clear()
        if ended:  # else it may be reading the neighbours' pages just now
            self._statuses.close()

    def explain(self, error: BaseException, wait: Wait) -> Explained | None:
        explained = self.of_this_error(error)
        if explained is not None or not isinstance(error, RuntimeError):
            return explained
        former = self._failed.get(wait.group.id)
        if former is not None and wait.seq > former[0]:
            explained = former[1]._replace(words=f"the group has failed before: {former[1].words}")
        else:
            explained = self._find_out(error, wait)
        if explained is not None:
            if wait.seq:
                self._failed.setdefault(wait.group.id, (wait.seq, explained))
            _add_note(error, f"otel-dl: {explained.words}")
            error.__dict__["_otel_dl"] = explained
        return explained

    def _find_out(self, error: BaseException, wait: Wait) -> Explained | None:
        self._failing = wait, clock()
        waited = (clock() - wait.start) / 1e9
        found: Verdict | None = None
        if self._exchange.running:
            answer = _Answer()
            self._exchange.ask(lambda store: answer.give(self._agree(store, wait, "error", _JUDGING_S)))
            found = answer.take(ANSWER_S)
        if found is None:
            # What can be read without the store: the pages of this host.
            found = self._search(None, wait, 0.0, self._exchange.trouble or "the job's store does not answer")
        timed_out = _timed_out(wait, waited)
        if found.missing is None:
            found = self._as_reported(wait) or found
        names = found.seen_by(self._statuses.rank)
        lost = bool(_PEER_LOST.search(str(error)))
        gone = any(one.reason in _GONE for one in names or ())
        misfit = any(one.reason == Reason.MISMATCH for one in names or ())
        if not (timed_out or lost or gone or misfit):
            return None  # of this rank alone; that others are late just now is no reason
        if timed_out:
            error_type = f"{_backend(wait.group)}_TIMEOUT"
        elif lost or gone:
            error_type = f"{_backend(wait.group)}_PEER_LOST"
        else:
            error_type = qualified(type(error))
        return self._explained(wait, waited, found, error_type)

    def _as_reported(self, wait: Wait) -> Verdict | None:
        """What was found moments ago: the store may end with the rank that hosts it and has waited in vain."""
        last = self._last
        if last is None or not _is_same(last[0], wait) or self._statuses.now() - last[1].at > _STILL_TRUE_NS:
            return None
        return last[1]

    def recovered(self, group: str) -> None:
        self._failed.pop(group, None)

    def of_this_error(self, error: BaseException) -> Explained | None:
        return getattr(error, "__dict__", {}).get("_otel_dl")

    # The end.

    def lost(self) -> Explained | None:
        if self._exchange.running and not self._statuses.has_found_all:
            met = _Answer()

            def meet(store: JobStore | None) -> None:
                self._meet(store)
                met.give(self._unknown(""))

            self._exchange.ask(meet)
            met.take(_MEETING_S)
        dead = sorted(self._statuses.dead().items())
        if not dead:
            return None
        now = self._statuses.now()
        words = "; ".join(f"rank {rank} {status.words(now)}" for rank, status in dead[: verdict.NAMED])
        # No `dl.missing_ranks`: nothing says that this one waited for them, which may have died of waiting for it.
        return Explained("SIGTERM", words, {"rank_id": self._statuses.rank})

    def ending(self, how: str) -> None:
        """The run is about to end: "finished", "SIGTERM", or the exception's name. `end` waits for what is said then: a
        process that is ended while it waits says for whom."""
        if not self._exchange.running:
            return
        self._statuses.end = how
        self._last_words = answer = _Answer()

        def last(store: JobStore | None) -> None:
            wait = self._wait() or pending.stuck(self._run, self._groups, still_ns=0)
            if wait is None and self._failing is not None and clock() - self._failing[1] < _JUST_NOW_NS:
                wait = self._failing[0]  # its exception may not get so far as to be exported
            found = self._unknown("")
            if wait is not None and how == "SIGTERM":
                found = self._agree(store, wait, "error", _LAST_WORDS_S)
                names = found.seen_by(self._statuses.rank)
                if names:
                    lost = any(one.reason in _GONE for one in names)
                    self._tell(wait, found, f"{_backend(wait.group)}_PEER_LOST" if lost else "SIGTERM")
            answer.give(found)
            self._farewell(store)

        self._exchange.ask(last)

    def end(self, deadline: float) -> None:
        """The run ends, by `deadline` (monotonic)."""
        if self._last_words is not None:
            self._last_words.take(max(0.0, deadline - time.monotonic()))
            self._exchange.stop(min(deadline, time.monotonic() + LAST_S))

    def _meet(self, store: JobStore | None) -> None:
        if store is not None:
            self._statuses.find_neighbours(store)

    def _farewell(self, store: JobStore | None) -> None:
        self._one_trace.stop(store)
        if store is not None:
            self._statuses.publish(store)
            self._one_trace.last(store)

    def close(self) -> None:
        self._statuses.close()

    def after_fork(self) -> None:
        self._exchange.after_fork()
        self._statuses.after_fork()
        self._one_trace.after_fork()
        self._begin()

    # In the exchange's thread: waits that last.

    def _wait(self) -> Wait | None:
        """What this rank waits in now, as far as can be told without asking the backend."""
        return self._making or pending.waiting(self._run, self._groups)

    def _waits(self) -> tuple[str, str, int] | None:
        wait = self._wait()
        return (wait.name, wait.group.id, wait.seq) if wait is not None else None

    def _look(self) -> float:
        """Reports a wait that lasts; in how many seconds to look again."""
        wait = self._wait() or pending.stuck(self._run, self._groups, self._still_ns())
        if wait is None:
            self._reported = None
            return TICK_S
        former = self._reported
        reports = former[1] if former is not None and _is_same(former[0], wait) else 0
        self._reported = wait, reports
        dues = _dues(wait.group, self._run.settings.stall_after)
        waited = (clock() - wait.start) / 1e9
        # Of two that are due at once, the later one says all.
        due = sum(waited >= due for due in dues)
        # One that waits for the dead is told at once: NCCL says nothing until the limit.
        bereft = not reports and waited >= _SURELY_S and not self._statuses.dead().keys().isdisjoint(wait.group.ranks)
        if due > reports or bereft:
            self._reported = wait, max(due, 1)
            last = due == len(dues) and wait.group.limit_s > 0
            found = self._agree(self._exchange.store, wait, "limit" if last else "stall", _JUDGING_S)
            error_type = f"{_backend(wait.group)}_TIMEOUT" if last else ""
            if bereft and not last:
                error_type = f"{_backend(wait.group)}_PEER_LOST"
            self._report(wait, found, error_type)
        return min(TICK_S, max(0.0, dues[due] - waited)) if due < len(dues) else TICK_S

    def _still_ns(self) -> int:
        """How long nothing has moved when the Flight Recorder is asked what is under way: that takes 40 ms (2,000
        entries, torch 2.15), which a long `backward` should not cost it each second."""
        groups, stall_after = list(self._groups.values()), self._run.settings.stall_after
        first = min((_dues(group, stall_after)[0] for group in groups), default=stall_after)
        return int(max(pending.STILL_NS, first * _STILL_SHARE * 1e9))

    def _report(self, wait: Wait, found: Verdict, error_type: str) -> None:
        self._tell(wait, found, error_type)
        self._flush(_LAST_WORDS_S)

    def _tell(self, wait: Wait, found: Verdict, error_type: str) -> None:
        waited = (clock() - wait.start) / 1e9
        explained = self._explained(wait, waited, found, error_type)
        self._last = wait, found
        self._stalls += 1
        now = clock()
        place = place_of(self._run.trainer)
        self._run.tell(
            Stall(self._stalls, wait.name, wait.start, now, explained, place.file, place.line, place.function)
        )
        if found.by == self._statuses.rank:
            logger.warning("otel-dl: %s.", explained.words)

    # In the exchange's thread: who is missing.

    def _agree(self, store: JobStore | None, wait: Wait, kind: str, seconds: float) -> Verdict:
        """What the elected one found; this rank may be it."""
        if wait.name in TRANSFERS:
            return self._search(None, wait, 0.0)
        found = self._elected(store, wait, kind, seconds)
        if found.communicator is not None:
            self._names[wait.group.id] = Communicator._make(found.communicator)
        return found

    def _elected(self, store: JobStore | None, wait: Wait, kind: str, seconds: float) -> Verdict:
        if store is None:
            return self._search(None, wait, seconds, self._exchange.trouble or "no connection to the job's store yet")
        key = f"{wait.group.id}/{wait.name}/{wait.seq}/{kind}"
        try:
            if kind == "error":
                self._statuses.publish(store)
            tried, latest = 0, None
            for round in range(_VERDICTS):
                if store.add(f"elect/{key}/{round}") == 1:
                    named = nccl_uid(store, wait.group, self._run.identity.run, self._run.identity.attempt)
                    found = self._search(store, wait, seconds)._replace(communicator=named)
                    store.set(f"verdict/{key}/{round}", found.encode())
                    return found
                published = store.take(f"verdict/{key}/{round}", _PUBLISHED_S + len(wait.group.ranks) * _A_RANK_S)
                found = Verdict.decode(published) if published is not None else None
                if found is not None:
                    if any(one.rank == self._statuses.rank for one in found.missing or ()):
                        return self._search(store, wait, seconds)  # it was made before this rank had come
                    if self._statuses.now() - found.at > _STILL_TRUE_NS:
                        continue  # others have come since
                    if not wait.seq and found.at < self._statuses.time(wait.start):
                        continue  # that of an attempt before this one tells nothing of it
                    if found.missing is not None:
                        return found
                tried, latest = tried + 1, found or latest
                if tried == _ROUNDS:
                    break
            return latest if latest is not None else self._search(store, wait, seconds)
        except StoreGone as error:
            return self._search(None, wait, seconds, f"the job's store is gone ({error})")

    def _search(self, store: JobStore | None, wait: Wait, seconds: float, trouble: str = "") -> Verdict:
        """Looks until it is shown who is missing, for so many seconds at most. With thousands of ranks a look takes a
        good part of them."""
        until = time.monotonic() + seconds
        while True:
            began = time.monotonic()
            if store is not None:
                self._statuses.find_neighbours(store)
            statuses = self._statuses.read_all(store, wait.group.ranks)
            since = self._statuses.time(wait.start)
            found = judge(wait, self._statuses.rank, statuses, since, self._statuses.now(), trouble)
            now = time.monotonic()
            if now + (now - began) >= until or self._is_shown(found, wait):
                return found
            time.sleep(_LOOK_S)

    def _is_shown(self, found: Verdict, wait: Wait) -> bool:
        """Before the limit who is late is none to blame: one that has died shows within moments."""
        if found.missing is None:
            return False
        if _timed_out(wait, (clock() - wait.start) / 1e9) or (self._reported is not None and self._reported[1]):
            return True
        return bool(found.missing or found.shapes) and all(one.reason != Reason.LATE for one in found.missing)

    def _unknown(self, why: str) -> Verdict:
        return Verdict(self._statuses.now(), self._statuses.rank, None, (), why)

    def _explained(self, wait: Wait, waited: float, found: Verdict, error_type: str) -> Explained:
        rank, group = self._statuses.rank, wait.group
        limit = f" (its limit is {group.limit_s:g} s)" if group.limit_s else ""
        words = (
            f"rank {rank} has waited {waited:.1f} s{limit} in {describe(wait.name, group.id, wait.seq)}"
            f" ({group.backend}, {len(group.ranks)} ranks): {found.words(rank)}"
        )
        identity = self._run.identity
        named = self._names.get(group.id) or nccl_uid(None, group, identity.run, identity.attempt)
        attributes: dict[str, Any] = {
            "rank_id": rank,
            "nccl_uid": named.uid,
            "dl.group.id": group.id,
            "dl.group.size": len(group.ranks),
            **verdict.attributes(found.seen_by(rank)),
        }
        if named.hash:
            attributes["dl.nccl_uid_hash"] = named.hash
        if wait.seq:
            attributes["dl.collective.seq"] = wait.seq
        return Explained(error_type, words, attributes)


def _is_same(one: Wait, other: Wait) -> bool:
    # The Flight Recorder's clock is another one.
    return one[:3] == other[:3] and abs(one.start - other.start) < 1_000_000


def _dues(group: Group, stall_after: float) -> list[float]:
    """The seconds after which a wait in `group` is reported: once, and again before its limit."""
    limit = group.limit_s
    if not limit:
        return [stall_after]
    first, last = min(stall_after, limit / 2), limit - LAST_S
    return [first, last] if last > first else [first]


def _timed_out(wait: Wait, waited: float) -> bool:
    # The backend began to count a moment before or after us.
    return 0 < wait.group.limit_s * 0.98 <= waited


def _backend(group: Group) -> str:
    return re.sub(r"[^a-z].*", "", group.backend.lower()).upper() or "BACKEND"


def _add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        logger.error("%s", note)
