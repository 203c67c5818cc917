"""What went wrong between ranks, in words: the rank that did not come first, then who waited, then what ended the rest.

Nothing is said that spans and status pages do not show.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from otel_dl.forensics.report import describe, lines, when
from otel_dl.semconv import MissingReason
from otel_dl.viewing.incidents import OF_RANKS, Culprit, Incident, Incidents, NotCome, Waiter
from otel_dl.viewing.seen import Step
from otel_dl.viewing.words import duration, ranks

_SHOWN: Final = 8
_CULPRITS_SHOWN: Final = 4
_AT_STEP: Final = re.compile(r" at step (\d+)\b")
"""What `otel_dl.ranks.verdict` says of the step that a rank has open."""


def rows(incidents: Incidents, jaeger_url: str) -> Iterator[tuple[str, str]]:
    """(label, text), a paragraph an incident."""
    for number, incident in enumerate(incidents.found[:_SHOWN], start=1):
        label = "Incident" if number == 1 else f"Incident {number}"
        for text in _paragraph(incident, jaeger_url):
            yield label, text
    more = len(incidents.found) - _SHOWN
    if more > 0:
        yield "Incidents", f"and {more} more"
    if incidents.left_out:
        yield "Incidents", f"{incidents.left_out:,} spans of failures and stalls were left out: there are too many"


def _paragraph(incident: Incident, jaeger_url: str) -> Iterator[str]:
    if incident.waiters:
        yield from _culprits(incident)
        yield from _waiters(incident)
    if incident.terminated:
        by_step: defaultdict[int, list[int]] = defaultdict(list)
        for rank, step in incident.terminated:
            by_step[step].append(rank)
        who = "; ".join(f"{ranks(each)} in step {step}" for step, each in sorted(by_step.items()))
        if incident.waiters:
            yield f"SIGTERM then ended {who} (launchers send it to the others when one rank has ended)"
        else:
            yield f"SIGTERM ended {who}; no failure or stall between ranks came before it in these traces"
            if incident.words:
                yield f"as said then by {incident.words}"
    for page in incident.dead:
        (words,) = lines([page])
        yield f"{words}, by its status page; whether that has to do with it is not known"
    if incident.trace_id:
        trace = f"{jaeger_url}/trace/{incident.trace_id}" if jaeger_url else incident.trace_id
        yield f"trace: {trace}"


def _culprits(incident: Incident) -> Iterator[str]:
    if not incident.known:
        yield "which rank had not come is not known" + (f": {incident.words}" if incident.words else "")
    elif not incident.culprits:
        yield "no rank was missing: all had come to it, or gone on from it"
    for culprit in incident.culprits[:_CULPRITS_SHOWN]:
        yield _culprit(culprit, incident)
    rest = [one.missing for one in incident.culprits[_CULPRITS_SHOWN:]]
    if rest:
        reasons: defaultdict[str, list[int]] = defaultdict(list)
        for one in rest:
            reasons[one.reason].append(one.rank)
        who = "; ".join(f"{ranks(each)} ({reason})" for reason, each in reasons.items())
        yield f"nor had {who}" + (f" and {incident.more:,} more" if incident.more else "")


def _culprit(culprit: Culprit, incident: Incident) -> str:
    missing = culprit.missing
    said = [_not_come(missing)]
    if culprit.failed_step is not None:
        said.append(failure(culprit.failed_step))
    elif culprit.page is not None:
        seen = f"last event {when(culprit.page.last_at)}" if missing.words else lines([culprit.page])[0]
        said.append(f"its status page: {seen}")
    came = next((waiter for waiter in incident.waiters if waiter.rank == missing.rank), None)
    if came is not None and missing.reason != MissingReason.MISMATCH:
        late = duration(max(0, came.start_ns - incident.start_ns))
        said.append(
            f"it came {late} after the first" + (f" and failed as well: {came.error_type}" if came.error_type else "")
        )
    return "; ".join(said)


def _not_come(missing: NotCome) -> str:
    if not missing.words:
        return f"rank {missing.rank} had not come ({missing.reason}); what it did is not known"
    if missing.reason == MissingReason.DEAD:
        return f"rank {missing.rank} {missing.words}"
    if missing.reason == MissingReason.MISMATCH:
        return f"rank {missing.rank} had not issued the same: it {missing.words}"
    return f"rank {missing.rank} had not come ({missing.reason}): it {missing.words}"


def _waiters(incident: Incident) -> Iterator[str]:
    culprits = {one.missing.rank for one in incident.culprits if one.missing.reason != MissingReason.MISMATCH}
    gone = {rank for rank, _ in incident.terminated}
    by_wait: defaultdict[tuple[str, int | None], list[Waiter]] = defaultdict(list)
    for waiter in incident.waiters:
        if waiter.rank not in culprits:
            by_wait[_what(waiter), waiter.step].append(waiter)
    for (what, step), waiters in by_wait.items():
        at = f" at step {step}{_behind(incident, step)}" if step is not None else ""
        who = ranks([each.rank for each in waiters])
        yield f"{who} waited {_how_long(waiters)} in {what}{at}{_ended(waiters, gone)}"


def _behind(incident: Incident, step: int) -> str:
    """Those that had not come for the step before was still open there."""
    behind = [
        culprit.missing.rank
        for culprit in incident.culprits
        for at in [_AT_STEP.search(culprit.missing.words)]
        if at is not None and int(at[1]) < step and culprit.missing.reason != MissingReason.MISMATCH
    ]
    return f", which {ranks(behind)} had not begun" if behind else ""


def _what(waiter: Waiter) -> str:
    return describe(waiter.name, waiter.group, waiter.seq or 0) if waiter.name else "what its spans do not name"


def _how_long(waiters: Sequence[Waiter]) -> str:
    shortest, longest = (duration(each(waiter.waited_ns for waiter in waiters)) for each in (min, max))
    return f"{longest}" if shortest == longest else f"{shortest} to {longest}"


def _ended(waiters: Sequence[Waiter], terminated: Collection[int]) -> str:
    by_end: defaultdict[str, list[int]] = defaultdict(list)
    for waiter in waiters:
        if waiter.error_type:
            then = f", and ended by {waiter.startup_error} before a first step" if waiter.startup_error else ""
            phase = f" in {waiter.phase}" if waiter.phase else ""
            by_end[f"failed{phase}: {waiter.error_type}{then}"].append(waiter.rank)
        elif waiter.rank not in terminated:
            by_end["went on later" if waiter.went_on else "how that ended is not in these traces"].append(waiter.rank)
    if len(by_end) == 1 and not any(waiter.rank in terminated and not waiter.error_type for waiter in waiters):
        return f"; {next(iter(by_end))}"
    return "".join(f"; {ranks(who)} {end}" for end, who in by_end.items())


def failure(step: Step) -> str:
    """Such as "ValueError in forward of step 2: the message"."""
    where = step.phase or ("outside any phase" if step.whole else "")
    of = f"in {where} of" if step.phase else f"{where} of" if where else "in"
    # Of a collective the message is the backend's: which connection was closed.
    message = "" if step.error_type.endswith(OF_RANKS) else step.message
    return f"{step.error_type} {of} step {step.number}" + (f": {message}" if message else "")
