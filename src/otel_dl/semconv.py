"""The vocabulary: names of spans, attributes and metrics, with the type and the place of each.

This module is the contract that dashboards, sampling rules and tests build on. Extend it in the same style; rename
nothing. Times in names are in the unit that the name ends with (`_ms`, `_ns`, `_s`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

SCOPE: Final = "otel_dl"
USER_SCOPE: Final = "otel_dl.user"
"""Scope of spans that the user names through `otel_dl.span(name)`: their vocabulary is the user's."""

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"


class SpanName:
    """Names of the spans that otel-dl builds. None ever holds a step, a rank or a path."""

    STARTUP: Final = "train.startup"
    STARTUP_INTERPRETER: Final = "startup.interpreter"
    STARTUP_IMPORT_TORCH: Final = "startup.import_torch"
    SHUTDOWN: Final = "train.shutdown"
    STEP: Final = "train.step"
    EVAL: Final = "train.eval"
    NEXT: Final = "dataloader.next"
    FETCH: Final = "dataloader.fetch"
    START_WORKERS: Final = "dataloader.start_workers"
    WORKER: Final = "dataloader.worker"
    FORWARD: Final = "forward"
    BACKWARD: Final = "backward"
    OPTIMIZER_STEP: Final = "optimizer.step"
    ZERO_GRAD: Final = "optimizer.zero_grad"
    LR_SCHEDULER_STEP: Final = "lr_scheduler.step"
    INIT_PROCESS_GROUP: Final = "dist.init_process_group"
    NEW_GROUP: Final = "dist.new_group"
    DESTROY_PROCESS_GROUP: Final = "dist.destroy_process_group"
    ALL_REDUCE: Final = "dist.all_reduce"
    ALL_GATHER: Final = "dist.all_gather"
    ALL_TO_ALL: Final = "dist.all_to_all"
    BARRIER: Final = "dist.barrier"
    BROADCAST: Final = "dist.broadcast"
    GATHER: Final = "dist.gather"
    MONITORED_BARRIER: Final = "dist.monitored_barrier"
    RECV: Final = "dist.recv"
    REDUCE: Final = "dist.reduce"
    REDUCE_SCATTER: Final = "dist.reduce_scatter"
    SCATTER: Final = "dist.scatter"
    SEND: Final = "dist.send"
    STALL: Final = "train.stall"
    SYNCHRONIZE: Final = "cuda.synchronize"
    COMPILE: Final = "torch.compile"
    AUTOTUNE: Final = "triton.autotune"
    CAPTURE: Final = "cuda.graph.capture"
    DALI_RUN: Final = "dali.run"


FIRST_SPANS: Final = frozenset({SpanName.STARTUP, SpanName.STEP, SpanName.EVAL, SpanName.STALL})
"""First span of each rank in a trace, always. A `dataloader.fetch` is one as well when it has no parent."""

PHASES: Final = frozenset(
    {
        SpanName.NEXT,
        SpanName.FORWARD,
        SpanName.BACKWARD,
        SpanName.OPTIMIZER_STEP,
        SpanName.ZERO_GRAD,
        SpanName.LR_SCHEDULER_STEP,
    }
)

COLLECTIVES: Final = frozenset(
    {
        SpanName.ALL_REDUCE,
        SpanName.ALL_GATHER,
        SpanName.ALL_TO_ALL,
        SpanName.BARRIER,
        SpanName.BROADCAST,
        SpanName.GATHER,
        SpanName.MONITORED_BARRIER,
        SpanName.RECV,
        SpanName.REDUCE,
        SpanName.REDUCE_SCATTER,
        SpanName.SCATTER,
        SpanName.SEND,
    }
)
"""`dist.<op>`: one collective or transfer on one rank, from its issue to its completion."""

GROUPS: Final = frozenset({SpanName.INIT_PROCESS_GROUP, SpanName.NEW_GROUP, SpanName.DESTROY_PROCESS_GROUP})
"""What makes and ends process groups."""

CONVOLUTIONS: Final = frozenset(
    f"cudnn::{operation}{direction}"
    for operation in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    for direction in ("", "_backward_input", "_backward_weight")
)
"""`cudnn::<op>`: one convolution by cuDNN; the forward has no suffix."""

ONE_TIME: Final = frozenset({SpanName.COMPILE, SpanName.AUTOTUNE, SpanName.CAPTURE})
"""Work that is done once, and is no training."""

_ANY_FIRST: Final = "first"


class Attribute(NamedTuple):
    """One attribute of the vocabulary.

    `kind` is the Python type of its value (`list[str]` and `list[int]` for arrays), `on` the span names that may carry
    it (`first` stands for the first spans of a trace), `built` whether this version sets it on every span of `on`.
    """

    name: str
    kind: type | str
    on: frozenset[str]
    built: bool = False
    meaning: str = ""


def _on(*names: str) -> frozenset[str]:
    return frozenset(names)


_NEXT_FETCH = _on(SpanName.NEXT, SpanName.FETCH)
_OF_A_WORKER = _NEXT_FETCH | {SpanName.WORKER}
_OF_A_LOADER = _OF_A_WORKER | {SpanName.START_WORKERS}
_MAKES_GROUPS = _on(SpanName.INIT_PROCESS_GROUP, SpanName.NEW_GROUP)
_SUMMED = PHASES | {SpanName.STEP, SpanName.EVAL}
"""What sums up the details that became no span: the step, where they ran in no phase."""
_ON_A_DEVICE = PHASES | CONVOLUTIONS | {SpanName.STEP, SpanName.SYNCHRONIZE, SpanName.DALI_RUN, SpanName.CAPTURE}
_OF_A_LINE = _on(SpanName.STALL, SpanName.SYNCHRONIZE, SpanName.COMPILE, SpanName.AUTOTUNE)
_CAN_BE_STUCK = COLLECTIVES | GROUPS | PHASES | {SpanName.STALL, SpanName.STEP}
"""Phases and the step where the exception that left them is a collective's."""

ATTRIBUTES: Final[tuple[Attribute, ...]] = (
    Attribute("dl.run.id", str, _on(_ANY_FIRST), built=True, meaning="one id for all processes of a run"),
    Attribute("dl.run.attempt", int, _on(_ANY_FIRST), built=True, meaning="restarts of an elastic job"),
    Attribute("dl.rank", int, _on(_ANY_FIRST), built=True, meaning="torch.distributed's; 0 outside it"),
    Attribute("dl.local_rank", int, _on(_ANY_FIRST), built=True, meaning="torch.distributed's; 0 outside it"),
    Attribute("dl.world_size", int, _on(_ANY_FIRST), built=True, meaning="torch.distributed's; 1 outside it"),
    Attribute("dl.trace.kind", str, _on(_ANY_FIRST), built=True, meaning="`step`, `run`, `batch`, `eval`, `stall`"),
    Attribute(
        "dl.keep",
        bool,
        _on(_ANY_FIRST),
        built=True,
        meaning="kept for a reason other than `head`: for a collector's tail sampling to keep",
    ),
    Attribute(
        "dl.keep.reason",
        str,
        _on(_ANY_FIRST),
        built=True,
        meaning="`head` (the sampler), `error`, `requested`, `slow`, `peer` (another rank asked), `warmup`",
    ),
    Attribute(
        "otel_dl.dropped",
        int,
        _on(_ANY_FIRST, SpanName.SHUTDOWN),
        built=True,
        meaning="records of this trace that were dropped for lack of room",
    ),
    Attribute(
        "dl.run.steps", int, _on(SpanName.SHUTDOWN), built=True, meaning="steps that ran on this rank, kept or not"
    ),
    Attribute("dl.run.steps_ms", float, _on(SpanName.SHUTDOWN), built=True, meaning="how long they took in all"),
    Attribute(
        "dl.run.evals",
        int,
        _on(SpanName.SHUTDOWN),
        built=True,
        meaning="stretches of evaluation after the first step and outside of any, kept or not",
    ),
    Attribute("dl.run.evals_ms", float, _on(SpanName.SHUTDOWN), built=True, meaning="how long they took in all"),
    Attribute(
        "dl.run.start_workers_ms",
        float,
        _on(SpanName.SHUTDOWN),
        built=True,
        meaning="how long workers were started for, after the first step and outside of any and of evaluation, in all",
    ),
    Attribute(
        "dl.run.longest_outside_ms",
        float,
        _on(SpanName.SHUTDOWN),
        built=True,
        meaning="the longest stretch after a step and before the next one, or the end, without evaluation and starts of"
        " workers",
    ),
    Attribute("dl.run.longest_outside_after", int, _on(SpanName.SHUTDOWN), meaning="the number of the step before it"),
    Attribute("dl.step", int, _on(SpanName.STEP), built=True, meaning="count of steps in this run, from 0"),
    Attribute("dl.epoch", int, _on(SpanName.STEP), meaning="epoch of the loader object that the first batch came from"),
    Attribute(
        "dl.global_step", int, _on(SpanName.STEP), meaning="the user's own number, from `otel_dl.step(global_step=…)`"
    ),
    Attribute(
        "dl.joined",
        bool,
        _on(SpanName.STEP),
        meaning="true: the rank has run out of data, and takes part in the others' step (`Join`, `DDP.join`)",
    ),
    Attribute(
        "dl.user_spans",
        str,
        _on(SpanName.STEP),
        meaning="`not_recorded`: the user's own spans of a step kept late could not be had",
    ),
    Attribute(
        "dl.detail.reduced",
        "list[str]",
        _on(SpanName.STEP),
        meaning="what was left out of this step for its trace to stay under 10,000 spans, by name: how many, how long",
    ),
    Attribute(
        "is_warmup",
        bool,
        PHASES | CONVOLUTIONS | ONE_TIME | {SpanName.STEP},
        built=True,
        meaning="one-time work (autotuning, compilation, lazy start-up) ran inside",
    ),
    Attribute(
        "dl.conv.key",
        str,
        CONVOLUTIONS,
        built=True,
        meaning="what cuDNN's autotuner tells apart, as `name=value` pairs",
    ),
    Attribute(
        "dl.conv.changed",
        str,
        CONVOLUTIONS,
        meaning="what differs from the last key of this convolution: `x: 64,3,8,8 → 128,3,8,8`",
    ),
    Attribute(
        "dl.warmup.source", str, CONVOLUTIONS, meaning="of a warm-up: `predicted` (the key is new) or `observed`"
    ),
    Attribute(
        "dl.conv.shared",
        bool,
        CONVOLUTIONS,
        meaning="true: its time is that of both backward directions, which are one call of torch",
    ),
    Attribute(
        "dl.conv.summed", int, _SUMMED, meaning="convolutions that found their plan and became no span of their own"
    ),
    Attribute("dl.conv.summed_ms", float, _SUMMED, meaning="how long the host spent in them"),
    Attribute(
        "dl.sync.op",
        str,
        _on(SpanName.SYNCHRONIZE),
        built=True,
        meaning="what waited: `Tensor.item`, `torch.nonzero`, `torch.cuda.synchronize`, …",
    ),
    Attribute(
        "dl.sync.wait_ms",
        float,
        _on(SpanName.SYNCHRONIZE),
        meaning="waiting for work that was queued before; absent where it can't be told from what the call did itself",
    ),
    Attribute("dl.sync.copy_ms", float, _on(SpanName.SYNCHRONIZE), meaning="copying, from the device or to it"),
    Attribute("dl.sync.summed", int, _SUMMED, meaning="waits shorter than `OTEL_DL_SYNC_MIN_MS`, which became no span"),
    Attribute("dl.sync.summed_ms", float, _SUMMED, meaning="how long they were in all"),
    Attribute("dl.device", str, _ON_A_DEVICE, meaning="`cuda:0`"),
    Attribute(
        "dl.device.duration_ms",
        float,
        PHASES | {SpanName.STEP},
        meaning="time on the device between two events at its ends, read without waiting",
    ),
    Attribute(
        "dl.memory.peak_bytes",
        int,
        _on(SpanName.STEP),
        meaning="the most that the device's allocator had given out, where it was more than ever before",
    ),
    Attribute(
        "dl.memory.alloc_retries", int, _on(SpanName.STEP), meaning="allocations that had to free cached blocks first"
    ),
    Attribute(
        "dl.compile.name",
        str,
        _on(SpanName.COMPILE),
        built=True,
        meaning="the function that was compiled, with the compiler's number of it: `Net.forward [0/1]`, and ` backward`"
        " where it is that one's",
    ),
    Attribute(
        "dl.compile.recompiled",
        bool,
        _on(SpanName.COMPILE),
        built=True,
        meaning="whether it had been compiled before, and no result of that fitted",
    ),
    Attribute("dl.compile.reason", str, _on(SpanName.COMPILE), meaning="torch's own reason of a recompilation"),
    Attribute("dl.compile.cache", str, _on(SpanName.COMPILE), meaning="of inductor's cache: `hit`, `miss`, `bypass`"),
    Attribute("dl.compile.graph_breaks", int, _on(SpanName.COMPILE), meaning="graph breaks in this function"),
    Attribute("dl.autotune.configurations", int, _on(SpanName.AUTOTUNE), built=True, meaning="how many were tried"),
    Attribute("dl.loader.id", int, _OF_A_LOADER, meaning="loaders counted in the process"),
    Attribute("dl.batch.index", int, _NEXT_FETCH, meaning="the loader's own batch number in this epoch"),
    Attribute("dl.worker.id", int, _OF_A_WORKER, meaning="the worker; of a batch, the one that read it"),
    Attribute("dl.worker.pid", int, _OF_A_WORKER, meaning="its process"),
    Attribute("dl.worker.start_method", str, _OF_A_LOADER, meaning="`fork`, `spawn`, `forkserver`"),
    Attribute("dl.worker.count", int, _on(SpanName.START_WORKERS), built=True, meaning="how many were started"),
    Attribute(
        "dl.worker.end",
        str,
        _on(SpanName.WORKER),
        built=True,
        meaning="how it ended: `finished`, `exception`, `signal`, `exit`, `killed_by_parent`, `unknown`",
    ),
    Attribute("dl.worker.signal", str, _on(SpanName.WORKER), meaning="the signal that ended it: `SIGSEGV`, …"),
    Attribute("dl.worker.exit_code", int, _on(SpanName.WORKER), meaning="where no signal did"),
    Attribute(
        "dl.sample.indices",
        str,
        _on(SpanName.WORKER, SpanName.FETCH),
        meaning="as ranges, 256 characters at most: the samples that a worker had in hand when it died; of a fetch that"
        " failed or took over 4 times the mean, those that it read",
    ),
    Attribute(
        "dl.shm.free_bytes", int, _on(SpanName.START_WORKERS), meaning="room in /dev/shm when the workers were started"
    ),
    Attribute(
        "dl.queue.depth",
        int,
        _on(SpanName.NEXT),
        meaning="batches of workers that lay ready when it began, its own included (64 at most)",
    ),
    Attribute("dl.worker.fetches", int, _on(SpanName.WORKER), meaning="batches that it read"),
    Attribute("dl.worker.busy_ms", float, _on(SpanName.WORKER), meaning="how long it read them, in all"),
    Attribute(
        "dl.worker.idle_ms",
        float,
        _on(SpanName.WORKER),
        meaning="how long it waited for something to read",
    ),
    Attribute("dl.fetch.duration_ms", float, _on(SpanName.NEXT), meaning="how long the batch took to read"),
    Attribute(
        "dl.fetch.ready_ms", float, _on(SpanName.NEXT), meaning="how long it had lain ready; 0 when it was waited for"
    ),
    Attribute(
        "dl.collective.seq", int, _CAN_BE_STUCK, meaning="its number in its group, from 1, as the Flight Recorder's"
    ),
    Attribute("dl.collective.bytes", int, COLLECTIVES, meaning="what this rank gives into it"),
    Attribute("dl.collective.async", bool, COLLECTIVES, built=True, meaning="whether the caller went on at once"),
    Attribute("dl.collective.variant", str, COLLECTIVES, meaning="`into_tensor`, `object`, `coalesced`, …"),
    Attribute(
        "dl.collective.source",
        str,
        COLLECTIVES,
        built=True,
        meaning="`hook`, `call`, `flight_recorder`: how it is known",
    ),
    Attribute(
        "dl.collective.end",
        str,
        COLLECTIVES,
        built=True,
        meaning="how its end is known: `wait` (the call, or the wait for it, returned; on a device its work was queued"
        " by then), `callback` (a comm hook's callback began), `poll` (it was found complete, and may have been"
        " earlier), `phase` (it was not seen: the end of the phase it was issued in, at the latest)",
    ),
    Attribute("dl.collective.wait_ms", float, COLLECTIVES, meaning="how long Python waited for it, in all"),
    Attribute("dl.collective.arrived_ns", int, COLLECTIVES, meaning="start on the device, epoch ns, where known"),
    Attribute("dl.bucket.index", int, COLLECTIVES, meaning="DDP's gradient bucket"),
    Attribute(
        "dl.hook.compute_ms",
        float,
        COLLECTIVES,
        meaning="on a bucket's first collective: how long a comm hook of the user's and its callbacks ran for it,"
        " without waiting",
    ),
    Attribute("dl.hook.sent_bytes", int, COLLECTIVES, meaning="on the same: what it gave into all of them"),
    Attribute("dl.group.id", str, _CAN_BE_STUCK, meaning="the group's name in torch; `0` is the default group"),
    Attribute("dl.group.size", int, _CAN_BE_STUCK, meaning="ranks in it"),
    Attribute("dl.group.ranks", str, _MAKES_GROUPS, meaning="which, as ranges: `0-7,16`"),
    Attribute("dl.timeout_s", float, _MAKES_GROUPS, meaning="the time limit in force"),
    Attribute("dl.timeout.source", str, _MAKES_GROUPS, meaning="who set it: `user`, `otel_dl`, `torch`"),
    Attribute(
        "rank_id", int, _CAN_BE_STUCK, meaning="this rank, on what failed or got stuck: the name that alerts read"
    ),
    Attribute(
        "nccl_uid",
        str,
        _CAN_BE_STUCK,
        meaning="hex of NCCL's unique id (128 bytes) where there is one, else an id derived from run, group and ranks",
    ),
    Attribute("dl.nccl_uid_hash", str, _CAN_BE_STUCK, meaning="the short hash of it that NCCL's own log prints"),
    Attribute(
        "dl.missing_ranks",
        "list[int]",
        _CAN_BE_STUCK,
        meaning="the ranks that had not issued this (group, number), or are silent or dead, when the report was made;"
        " 64 at most; absent when nobody can know",
    ),
    Attribute("dl.missing_ranks.count", int, _CAN_BE_STUCK, meaning="how many those are in all"),
    Attribute(
        "dl.missing.reason",
        "list[str]",
        _CAN_BE_STUCK,
        meaning="of each: `late`, `elsewhere` (waits in something else), `silent` (no status for 3 s), `dead`,"
        " `mismatch` (another operation or shape under this number), `unknown`",
    ),
    Attribute(
        "dl.missing.words",
        "list[str]",
        _CAN_BE_STUCK,
        meaning="of each: what it does instead, or how it ended and what it did then, as far as known; empty beyond the"
        " first 8",
    ),
    Attribute(
        "dl.clock.offset_ns",
        int,
        _on(_ANY_FIRST),
        meaning="this rank's clock less rank 0's, read at one instant: a time of this rank's spans less it is a time of"
        " rank 0's clock",
    ),
    Attribute("dl.clock.error_ns", int, _on(_ANY_FIRST), meaning="how far off that may be, either way"),
    Attribute("dl.stall.in", str, _on(SpanName.STALL), built=True, meaning="what has not come back: a span's name"),
    Attribute(
        "code.file.path", str, _OF_A_LINE, meaning="the user's line that waits; where what is compiled or tuned stands"
    ),
    Attribute(
        "code.line.number",
        int,
        _OF_A_LINE,
        meaning="the user's line that waits; where what is compiled or tuned stands",
    ),
    Attribute("code.function.name", str, _OF_A_LINE, meaning="the function that waits, is compiled or is tuned"),
    Attribute(
        "error.type",
        str,
        PHASES
        | FIRST_SPANS
        | COLLECTIVES
        | GROUPS
        | CONVOLUTIONS
        | ONE_TIME
        | {SpanName.FETCH, SpanName.START_WORKERS, SpanName.WORKER, SpanName.SYNCHRONIZE, SpanName.DALI_RUN},
        meaning="the exception's qualified name; of a worker also the signal's; of a collective `GLOO_TIMEOUT`,"
        " `NCCL_TIMEOUT`, … when its time limit has passed, `GLOO_PEER_LOST`, `NCCL_PEER_LOST` before",
    ),
)
"""The attributes that this version may set; a span never carries another."""

BY_NAME: Final[dict[str, Attribute]] = {attribute.name: attribute for attribute in ATTRIBUTES}

RESOURCE: Final[dict[str, type]] = {
    "service.name": str,
    "service.instance.id": str,
    "process.pid": int,
    "host.name": str,
    "dl.run.id": str,
    "dl.rank": int,
    "dl.local_rank": int,
    "dl.world_size": int,
}
"""Required in the resource of every span that otel-dl builds; a worker's has `dl.worker.id` (int) as well."""


class TraceKind:
    STEP: Final = "step"
    RUN: Final = "run"
    BATCH: Final = "batch"
    EVAL: Final = "eval"
    STALL: Final = "stall"


class TimeoutSource:
    """Who set a process group's time limit: `dl.timeout.source`."""

    USER: Final = "user"
    OTEL_DL: Final = "otel_dl"
    TORCH: Final = "torch"


class MissingReason:
    """Why a rank is missing: `dl.missing.reason`."""

    LATE: Final = "late"
    ELSEWHERE: Final = "elsewhere"
    SILENT: Final = "silent"
    DEAD: Final = "dead"
    MISMATCH: Final = "mismatch"
    UNKNOWN: Final = "unknown"


class KeepReason:
    """Why a trace is exported, in the order in which they are tried: the first that holds is the reason."""

    ERROR: Final = "error"
    REQUESTED: Final = "requested"
    SLOW: Final = "slow"
    PEER: Final = "peer"
    WARMUP: Final = "warmup"
    HEAD: Final = "head"
