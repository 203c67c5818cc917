"""The summary of a run as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from otel_dl.semconv import SpanName
from otel_dl.viewing import (
    compilation_text,
    device_text,
    incident_text,
    outside_text,
    outstanding,
    waiting_text,
    warmup_text,
)
from otel_dl.viewing.arrivals import Arrival, Arrivals, Late
from otel_dl.viewing.loading import SLOW_BATCH, Advice, Cause, Loading, More, SlowWorker
from otel_dl.viewing.reading import Reading
from otel_dl.viewing.seen import Ranks
from otel_dl.viewing.summary import PARTS, Distribution, Lost, Rank, Step, Summary, Times, distribution
from otel_dl.viewing.words import duration, labelled, of_ranks, percent, plural, ranks

_FAILED_SHOWN = 10
_RANKS_SHOWN = 16
_LATE_SHOWN = 4
_OWN_SHOWN = 8
_BETWEEN = {SpanName.START_WORKERS: "start of workers", SpanName.EVAL: "evaluation"}
"""What lies between two steps."""
_IN_ORDER = "as batches are handed out in order, unless in_order=False"


def render_summary(summary: Summary, jaeger_url: str = "", each_step: bool = False) -> str:
    """Some lines of text; with `each_step` one more for each kept step, of the rank that arrived last in it.

    With `jaeger_url` trace ids are links to `<jaeger_url>/trace/<id>`.
    """
    return "\n".join(labelled(_summary_rows(summary, jaeger_url.rstrip("/"), each_step)))


def render_heading(summary: Summary) -> str:
    """One line: what a run is told by where it is not told whole."""
    return "\n".join(labelled([("Run", f"{summary.run or 'not known'}: {_steps(summary)}")]))


def render_reading(reading: Reading) -> str:
    """What was read and what was passed over, with the place where each reason occurred first."""
    return "\n".join(labelled(_reading_rows(reading)))


def _summary_rows(summary: Summary, jaeger_url: str, each_step: bool) -> Iterator[tuple[str, str]]:
    if summary.run:
        yield "Run", summary.run
    yield "Steps", _steps(summary)
    yield from incident_text.rows(summary.incidents, jaeger_url)
    yield from outside_text.rows(summary.run_time, len(summary.ranks) > 1)
    if summary.times is not None:
        yield "Step time", f"{_distribution(summary.times.steps)} ({_basis(summary.times, len(summary.ranks))})"
        these = "this step" if summary.times.steps.size == 1 else f"these {_count(summary.times)}"
        yield "Time went to", _shares(summary.times.shares) + f" (of the time of {these})"
    if summary.warmup is not None:
        yield from warmup_text.rows(summary.warmup, summary.total)
    yield from waiting_text.rows(summary.waiting, len(summary.ranks))
    yield from device_text.rows(summary.device, summary.memory, len(summary.ranks))
    if len(summary.ranks) > 1:
        for rank in summary.ranks[:_RANKS_SHOWN]:
            yield "Ranks", _rank(rank)
        if len(summary.ranks) > _RANKS_SHOWN:
            yield "Ranks", f"and {len(summary.ranks) - _RANKS_SHOWN} more"
        if any(rank.own for rank in summary.ranks[:_RANKS_SHOWN]):
            yield "Ranks", "(own: the step without its waits, in collectives, for ranks that came later)"
    yield from _missing_rows(summary.missing)
    yield from _arrival_rows(summary.arrivals, each_step)
    for fetches in summary.fetches:
        by = f"{fetches.workers} worker{plural(fetches.workers)}" if fetches.workers else "the training process"
        batches = fetches.times.size
        yield (
            "Batch reading",
            f"{_distribution(fetches.times)} ({batches} batch{plural(batches, 'es')} by {by})",
        )
    yield from _loading_rows(summary.loading, len(summary.ranks) > 1)
    for words in summary.died:
        yield "Died", words
    yield from compilation_text.rows(summary.compilations)
    if summary.evaluation.stretches:
        stretches = summary.evaluation.stretches
        yield (
            "Evaluation",
            f"{duration(summary.evaluation.total_ns)} in {stretches:,} kept stretch{plural(stretches, 'es')}",
        )
    several_ranks = len(summary.ranks) > 1
    for step in summary.slowest:
        yield "Slowest", _step(step, several_ranks, jaeger_url)
    for step in summary.failed[:_FAILED_SHOWN]:
        where = f" in {step.failed_in}" if step.failed_in else ""
        yield "Failed", f"{step.error_type or 'error'}{where}: {_step(step, several_ranks, jaeger_url)}"
    if len(summary.failed) > _FAILED_SHOWN:
        yield "Failed", f"and {len(summary.failed) - _FAILED_SHOWN} more steps"
    for (name, error_type), count in summary.failed_elsewhere.items():
        error = error_type or "error"
        if name == SpanName.WORKER:
            yield "Failed", f"{count} worker{plural(count)} ended: {error}"
        else:
            yield "Failed", f"{error} in {count} {name} span{plural(count)}"
    yield from _own_rows(summary)
    if summary.dropped:
        yield "Dropped", f"{summary.dropped:,} records for lack of room"
    for lost in summary.lost[:_RANKS_SHOWN]:
        yield "Dropped", _lost(lost)
    if len(summary.lost) > _RANKS_SHOWN:
        yield "Dropped", f"so is that of {len(summary.lost) - _RANKS_SHOWN} more ranks"
    if not summary.dropped and not summary.lost:
        yield "Dropped", "nothing in these traces"


def _lost(lost: Lost) -> str:
    exported = f"its last exported step is {lost.exported}" if lost.exported is not None else "no step of it is here"
    return f"the tail of rank {lost.rank} is lost: its status page says step {lost.open_step}, {exported}"


def _own_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.user_spans:
        yield "Own spans", f"{summary.user_spans:,} of the script's own"
    for own in summary.own_spans[:_OWN_SHOWN]:
        yield (
            "Own spans",
            f"{own.name}: {own.spans:,}, median {duration(own.median_ns)}, {duration(own.total_ns)} in all",
        )
    if len(summary.own_spans) > _OWN_SHOWN:
        yield "Own spans", f"and {len(summary.own_spans) - _OWN_SHOWN} more names"


def _missing_rows(missing: Ranks) -> Iterator[tuple[str, str]]:
    if missing.unread:
        yield "Missing", f"nothing was read of {ranks(missing.unread)} of {missing.world:,}"
    if missing.without_step:
        yield "Missing", f"no step was kept of {ranks(missing.without_step)}"


def _arrival_rows(arrivals: Arrivals, each_step: bool) -> Iterator[tuple[str, str]]:
    for operation in arrivals.operations:
        yield (
            "Collectives",
            f"{operation.collectives:,} × {operation.name}: until the last rank came {_of(operation.wait_ns)}; from"
            f" then on {_of(operation.transfer_ns)}",
        )
    late_ranks, late_steps = outstanding.ranks(arrivals), outstanding.steps(arrivals)
    for late in late_ranks[:_LATE_SHOWN]:
        yield "Arrived last", _late(late, arrivals)
    rest = late_ranks[_LATE_SHOWN:]
    if rest:
        total = sum(late.late_ns for late in rest)
        yield (
            "Arrived last",
            f"{len(rest)} other rank{plural(len(rest))}: in {sum(late.steps for late in rest):,} steps,"
            f" {duration(total)} in all",
        )
    if late_ranks and arrivals.even:
        yield "Arrived last", f"no rank for sure: in {arrivals.even:,} of {_number_of_steps(arrivals.compared)}"
    elif arrivals.compared and outstanding.is_thin(arrivals) and len(arrivals.own) > 1:
        yield (
            "Arrived last",
            f"no rank is named: {_number_of_steps(arrivals.compared)} could be compared, of at least"
            f" {arrivals.ran:,} that ran",
        )
    elif arrivals.compared and not late_ranks and len(arrivals.own) > 1:
        yield (
            "Arrived last",
            f"no rank more often than by chance, of {_number_of_steps(arrivals.compared)}; waiting for whichever was"
            f" the last took {percent(sum(late.share for late in arrivals.ranks))} of the steps' time",
        )
    if arrivals.lacking:
        yield (
            "Arrived last",
            f"not told of {_number_of_steps(len(arrivals.lacking))}: ranks are missing in them",
        )
    if arrivals.unclear:
        yield (
            "Arrived last",
            f"not told of {_number_of_steps(len(arrivals.unclear))}: how far the hosts' clocks are apart is not known",
        )
    if arrivals.left_out:
        yield "Arrived last", f"{arrivals.left_out:,} spans of collectives were left out: there are too many"
    if each_step:
        yield from _each_step(arrivals)
    else:
        for arrival in late_steps[:_LATE_SHOWN]:
            yield "Longest waits", _wait_for(arrival)


def _each_step(arrivals: Arrivals) -> Iterator[tuple[str, str]]:
    told = {arrival.step: _arrival(arrival) for arrival in arrivals.steps}
    told |= {step: f"step {step}: not told, ranks are missing" for step in arrivals.lacking}
    told |= {step: f"step {step}: not told, clocks are not known" for step in arrivals.unclear}
    for step in sorted(told):
        yield "Last in", told[step]


def _late(late: Late, arrivals: Arrivals) -> str:
    most = f" (of at least {arrivals.ran:,} that ran)" if arrivals.compared + arrivals.warmup < arrivals.ran else ""
    longer = ", ".join(
        f"{_part(part)} in {count:,}" for part, count in sorted(late.longer.items(), key=lambda item: -item[1])
    )
    return (
        f"rank {late.rank}: in {late.steps:,} of {_number_of_steps(arrivals.compared)}{most}, the others waited"
        f" {duration(late.late_ns)} for it in all, {percent(late.share)} of the steps' time; what took it longer:"
        f" {longer}"
    )


def _arrival(arrival: Arrival) -> str:
    return (
        f"step {arrival.step}: rank {arrival.rank}, {duration(arrival.late_ns)} late, at {arrival.collectives:,} of"
        f" {arrival.of:,} collective{plural(arrival.of)}; what took it longer: {_part(arrival.longer)}"
    )


def _wait_for(arrival: Arrival) -> str:
    return (
        f"step {arrival.step}: {duration(arrival.late_ns)} for rank {arrival.rank}, at {arrival.collectives:,} of"
        f" {arrival.of:,} collective{plural(arrival.of)}; what took it longer: {_part(arrival.longer)}"
    )


def _part(longer: str) -> str:
    return _BETWEEN.get(longer) or PARTS.get(longer, longer) or "not known"


def _number_of_steps(count: int) -> str:
    return f"{count:,} kept step{plural(count)}"


def _of(durations: Sequence[int]) -> str:
    return _distribution(distribution(durations))


def _loading_rows(loading: Loading, several_ranks: bool) -> Iterator[tuple[str, str]]:
    parts: list[str] = []
    if loading.busy is not None:
        parts.append(f"busy {percent(loading.busy)} of their time")
    if loading.ready is not None:
        parts.append(f"{loading.ready:g} batch{plural(int(loading.ready), 'es')} ready at a next (median)")
    if loading.free_shm is not None:
        parts.append(f"{loading.free_shm / 2**20:,.0f} MiB of /dev/shm free at their start")
    if parts:
        yield "Workers", ", ".join(parts)
    for slow in loading.slow_workers:
        yield (
            "Slow worker",
            f"{_worker(slow, several_ranks)}: median {duration(slow.median_ns)} a batch,"
            f" the others {duration(slow.others_ns)}",
        )
    for fetch in loading.slow_fetches:
        yield "Slow samples", f"{fetch.samples}: {duration(fetch.duration_ns)} in worker {fetch.worker}"
    if loading.advice is not None:
        yield from _advice_rows(loading.advice)


def _worker(slow: SlowWorker, several_ranks: bool) -> str:
    rank = f"rank {slow.rank} " if several_ranks else ""
    processes = f"{slow.processes} processes, the last: " if slow.processes > 1 else ""
    loader = f" of loader {slow.loader}" if slow.loader is not None else ""
    return f"{rank}worker {slow.worker} ({processes}pid {slow.pid}){loader}"


def _advice_rows(advice: Advice) -> Iterator[tuple[str, str]]:
    wait = f"steps wait for data {percent(advice.wait)} of their time"
    read = "the one worker reads" if advice.workers == 1 else f"the {advice.workers} workers read"
    read += f" during {percent(advice.busy)} of {'its' if advice.workers == 1 else 'theirs'}"
    if advice.more is More.NO_WAIT:
        yield "More workers", f"would not help: {wait}, {read}"
    elif advice.more is More.YES:
        yield (
            "More workers",
            "would help where processors and storage have room for them. Reading is the limit: a batch takes"
            f" {duration(advice.fetch_ns)} in a worker, a step computes in {duration(advice.computing_ns)};"
            f" {wait}, {read}",
        )
    else:
        yield "Waiting", f"{wait}, {read}: that more of them would help is not shown"
        yield "Waiting", _cause(advice)


def _cause(advice: Advice) -> str:
    share = f"{percent(advice.share)} of that waiting is"
    if advice.cause is Cause.START:
        return (
            f"{share} for workers that start, at the first batches of an epoch: they were started {advice.starts}"
            " times; persistent_workers=True keeps them running"
        )
    if advice.cause is Cause.HANDOVER:
        return (
            f"{share} for batches that a worker had read already: the time goes into handing them over to the training"
            " process"
        )
    if advice.cause is Cause.SLOW_WORKER:
        return f"{share} for batches of a slow worker (see above): it holds up all others, {_IN_ORDER}"
    if advice.cause is Cause.SLOW_BATCHES:
        return (
            f"{share} for batches that took over {SLOW_BATCH} times the median to read: one holds up all after it,"
            f" {_IN_ORDER}"
        )
    return "what most of that waiting is for is not known from these traces"


def _reading_rows(reading: Reading) -> Iterator[tuple[str, str]]:
    yield (
        "Read",
        f"{reading.spans:,} span{plural(reading.spans)} in {reading.files} file{plural(reading.files)}"
        f" of {reading.directory}",
    )
    if reading.removed:
        yield (
            "Removed",
            f"{reading.removed:,} full file{plural(reading.removed)}, the oldest, to make room:"
            " OTEL_DL_FILE_MAX_FILES and OTEL_DL_FILE_MAX_BYTES keep more",
        )
    for reason, entry in reading.passed_over.items():
        yield "Passed over", f"{entry.count} × {reason} ({'first: ' if entry.count > 1 else ''}{entry.first})"


def _steps(summary: Summary) -> str:
    if not summary.kept:
        return "none"
    reasons = ", ".join(f"{reason or 'unknown'} {count:,}" for reason, count in summary.keep_reasons.items())
    on = f" on {len(summary.ranks):,} ranks" if len(summary.ranks) > 1 else ""
    return f"{summary.kept:,} kept of at least {summary.total:,}{on} (kept as: {reasons})"


def _basis(times: Times, ranks: int) -> str:
    each = f"{of_ranks(ranks)}, a step once for each rank," if ranks > 1 else ""
    if times.by_head:
        return f"{_count(times)}{each} kept by the head sampler"
    return f"all {_count(times)}{each} kept, none of them by the head sampler: not an even sample"


def _count(times: Times) -> str:
    return _steps_of(times.steps)


def _steps_of(times: Distribution) -> str:
    return f"{times.size:,} step{plural(times.size)}"


def _rank(rank: Rank) -> str:
    own = ""
    if rank.own is not None:
        # Of fewer steps than the median before: beside that one it could exceed the whole.
        several = rank.own.whole.size < rank.times.steps.size
        whole = f" of {duration(rank.own.whole.median_ns)}" if several else ""
        own = f" own median {duration(rank.own.own.median_ns)}{whole} ({_steps_of(rank.own.own)}),"
    return (
        f"rank {rank.rank}: {rank.kept:,} kept of at least {rank.total:,}, {_distribution(rank.times.steps)},"
        f"{own} data wait {percent(rank.times.shares['data wait'])} ({_count(rank.times)})"
    )


def _step(step: Step, with_rank: bool, jaeger_url: str) -> str:
    rank = f" rank {step.rank}" if with_rank else ""
    trace = f"{jaeger_url}/trace/{step.trace_id}" if jaeger_url else step.trace_id
    longest = f" ({_part(step.longest)} {percent(step.share)})" if step.longest else ""
    return f"step {step.number}{rank}, {duration(step.duration_ns)}{longest}, {trace}"


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {percent(share)}" for part, share in shares.items())


def _distribution(times: Distribution) -> str:
    return f"median {duration(times.median_ns)}, p99 {duration(times.p99_ns)}"
