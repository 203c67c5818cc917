"""Ids that are derived, so that whoever knows the run can name a trace without asking, and random ones that draw from
nothing of the user's.

`H` is BLAKE2b over the parts as text joined by NUL; 16 bytes for a trace id, its first 8 bytes for a span id.
"""

from __future__ import annotations

import os
from hashlib import blake2b

from opentelemetry.sdk.trace.id_generator import IdGenerator

from otel_dl.semconv import TraceKind

_from_bytes = int.from_bytes


def trace_id(*parts: str | int) -> int:
    """The 128-bit id derived from `parts`; never zero (the W3C recommendation reserves zero as invalid)."""
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()
    return _from_bytes(digest, "big") or 1


def span_id(*parts: str | int) -> int:
    """The 64-bit id derived from `parts`: the first 8 bytes of their 16-byte digest; never zero."""
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()
    return _from_bytes(digest[:8], "big") or 1


def batch_trace_id(nonce: str, round: int, place: int) -> int:
    """The trace of a batch that a worker reads: of the iterator with this nonce, in this epoch of it, at this place."""
    return trace_id(nonce, TraceKind.BATCH, round, place)


def batch_ids(nonce: str, round: int, place: int) -> tuple[int, int]:
    """(trace id, span id) of its `dataloader.fetch`."""
    return batch_trace_id(nonce, round, place), span_id(nonce, TraceKind.BATCH, round, place, "fetch")


class SecretsIdGenerator(IdGenerator):
    """Random ids from the operating system: nothing is drawn from `random`, a user's seeded sequence stays as it was.

    The SDK's own `RandomIdGenerator` uses the global `random` (opentelemetry/sdk/trace/id_generator.py, 1.45): after
    `random.seed(42)` every rank gets the same ids, and one span changes the user's next random number.
    Selected by `OTEL_PYTHON_ID_GENERATOR=otel_dl`, and by otel-dl where it sets up the SDK.
    """

    def generate_span_id(self) -> int:
        return _from_bytes(os.urandom(8), "big") or 1

    def generate_trace_id(self) -> int:
        return _from_bytes(os.urandom(16), "big") or 1

    def is_trace_id_random(self) -> bool:
        return True
