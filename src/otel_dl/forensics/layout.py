"""The layout of a status page: one file of `SIZE` bytes a process, which its process writes through a shared mapping.

Every number is a signed 64-bit integer, little-endian, at the fixed offset named here; every text is UTF-8, padded with
NUL. Instants are readings of `time.perf_counter_ns` (CLOCK_MONOTONIC: one clock for all processes of a host).

A writer may die between any two stores, and a reader may look between them, so what consists of several numbers is a
block that ends with a check word, its numbers and `CHECK` joined by exclusive or. A block whose check word is wrong is
not known; a block of zeros was never written (its check word would be `CHECK`).

Who writes: the header is written by whoever makes the file, but for `PID`, `STARTED` and `BEGAN`, which are the
process's own; the phases and `STEP` by its thread that bounds steps, in a worker by its main thread.

    0      MAGIC       8 bytes; another layout has another one
    8      PID         of the process that writes; 0: it has not begun
    16     STARTED     field 22 of /proc/<pid>/stat, clock ticks since boot: tells a process from a later one of its pid
    24     BEGAN       when it began to write
    32     EPOCH       nanoseconds since the epoch when BEGAN was read
    40     PARENT      pid of the training process, in a worker; else 0
    48     RANK
    56     WORKER      -1: the training process itself
    64     NONCE       32 bytes, of the iterator that a worker reads for
    96     RUN         96 bytes, `dl.run.id`; rank 0's, once it is known
    192    HOST        64 bytes

    256    STEP        the step that is open; -1: none
    264    END         how it ended, as far as it could say so itself: 0 not yet, 1 finished, 2 by an exception,
                       3 by SIGTERM
    272    ERROR       64 bytes, the exception's qualified name (written before END)

    384    PHASES      DEPTH blocks of PHASE: kind (`records.Kind`), start, check. The open phases, outermost first,
                       up to the first with kind 0, whose second number is when it ended.
    640    BATCH       block: epoch or round, index, start, samples, form, check of these and of the samples' Adler-32
    688    SAMPLES     SAMPLES_SIZE bytes. FORM_INTEGERS: the first SAMPLES_MOST indices as numbers. FORM_TEXT: text
    1712   DONE        block: round, index, end of the last fetch that was finished, fetches, busy ns, idle ns, check
    1776   COLLECTIVE  block: state (1 issued, 2 waited for in Python, 3 complete), place in OPS, number in its group,
                       bytes, start, check of these and of the group's Adler-32; 48 bytes, the group's id. The one that
                       was issued, waited for or completed last, by any thread: one store.

Phases nest, so a phase that ends is overwritten by (0, end, check) and one that begins by (kind, start, check) at the
same place: one store of three numbers an event. Phases deeper than `DEPTH` are not written.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

from otel_dl.recording.records import NAMES, Kind
from otel_dl.semconv import SpanName

SIZE: Final = 4096
MAGIC: Final = b"OTELDL\x00\x01"
CHECK: Final = 0x0D1E_5EED_0D1E_5EED

PID: Final = 8
STARTED: Final = 16
BEGAN: Final = 24
EPOCH: Final = 32
PARENT: Final = 40
RANK: Final = 48
WORKER: Final = 56
NONCE: Final = 64
RUN: Final = 96
HOST: Final = 192
STEP: Final = 256
END: Final = 264
ERROR: Final = 272
PHASES: Final = 384
DEPTH: Final = 10
PHASE_SIZE: Final = 24
BATCH: Final = 640
SAMPLES: Final = 688
SAMPLES_SIZE: Final = 1024
SAMPLES_MOST: Final = SAMPLES_SIZE // 8
DONE: Final = 1712
COLLECTIVE: Final = 1776

HEADER_STRUCT: Final = Struct("<8sqqqqqqq32s96s64s")
PROCESS_STRUCT: Final = Struct("<qqqq")
"""PID, STARTED, BEGAN, EPOCH."""
RUN_STRUCT: Final = Struct("<96s")
NUMBER_STRUCT: Final = Struct("<q")
ERROR_STRUCT: Final = Struct("<64s")
PHASE_STRUCT: Final = Struct("<qqq")
BATCH_STRUCT: Final = Struct("<qqqqqq")
DONE_STRUCT: Final = Struct("<qqqqqqq")
COLLECTIVE_STRUCT: Final = Struct("<qqqqqq48s")
GROUP_SIZE: Final = 48

FORM_NONE: Final = 0
"""The samples are not known: the dataset is iterable, or its indices are neither numbers nor text."""
FORM_INTEGERS: Final = 1
FORM_TEXT: Final = 2

FETCH: Final = 2
"""The kind of the phase in which a worker reads a batch; the other kinds are `records.Kind`."""
USER_SPAN: Final = 1 << 16
"""The kind of a span that the user named."""

NAMES_OF_PHASES: Final[dict[int, str]] = {
    **{int(kind): name for kind, name in NAMES.items()},
    FETCH: SpanName.FETCH,
    USER_SPAN: "a span of the user's",
}

OPS: Final = (
    "",
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
)
"""Names of collectives, by their number on a page: append only."""
STATES: Final = ("", "issued", "waiting", "complete")

assert FETCH not in set(map(int, Kind))


class End(IntEnum):
    """How a process ended, in its own words."""

    NONE = 0
    FINISHED = 1
    EXCEPTION = 2
    TERMINATED = 3
