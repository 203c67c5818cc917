"""Which of torch's operations is which span."""

from __future__ import annotations

from typing import Final

from otel_dl.forensics.layout import OPS
from otel_dl.semconv import SpanName

Op = tuple[str, str, int]
"""(span's name, variant, its place on the status page)."""


def op(name: str, variant: str = "") -> Op:
    return name, variant, OPS.index(name)


HOOKED: Final[dict[str, Op]] = {
    "SEND": op(SpanName.SEND),
    "RECV": op(SpanName.RECV),
    "BROADCAST": op(SpanName.BROADCAST),
    "ALLREDUCE": op(SpanName.ALL_REDUCE),
    "ALLREDUCE_COALESCED": op(SpanName.ALL_REDUCE, "coalesced"),
    "REDUCE": op(SpanName.REDUCE),
    "ALLGATHER": op(SpanName.ALL_GATHER),
    "ALLGATHER_BASE": op(SpanName.ALL_GATHER, "into_tensor"),
    "ALLGATHER_COALESCED": op(SpanName.ALL_GATHER, "coalesced"),
    "ALLGATHER_INTO_TENSOR_COALESCED": op(SpanName.ALL_GATHER, "into_tensor_coalesced"),
    "REDUCE_SCATTER": op(SpanName.REDUCE_SCATTER),
    "REDUCE_SCATTER_BASE": op(SpanName.REDUCE_SCATTER, "tensor"),
    "REDUCE_SCATTER_TENSOR_COALESCED": op(SpanName.REDUCE_SCATTER, "tensor_coalesced"),
    "ALLTOALL": op(SpanName.ALL_TO_ALL),
    "ALLTOALL_BASE": op(SpanName.ALL_TO_ALL, "single"),
    "BARRIER": op(SpanName.BARRIER),
    "SCATTER": op(SpanName.SCATTER),
    "GATHER": op(SpanName.GATHER),
}
"""By `HookOpName` (torch/csrc/distributed/c10d/Types.hpp, 2.15). SPLIT and NEW_WINDOW move nothing."""

CALLED: Final[dict[str, tuple[str, int]]] = {
    "send": ("SEND", 0),
    "recv": ("RECV", 0),
    "recv_anysource": ("RECV", 0),
    "broadcast": ("BROADCAST", 0),
    "allreduce": ("ALLREDUCE", 0),
    "allreduce_coalesced": ("ALLREDUCE_COALESCED", 0),
    "reduce": ("REDUCE", 0),
    "allgather": ("ALLGATHER", 1),
    "_allgather_base": ("ALLGATHER_BASE", 1),
    "allgather_coalesced": ("ALLGATHER_COALESCED", 1),
    "allgather_into_tensor_coalesced": ("ALLGATHER_INTO_TENSOR_COALESCED", 1),
    "reduce_scatter": ("REDUCE_SCATTER", 1),
    "_reduce_scatter_base": ("REDUCE_SCATTER_BASE", 1),
    "reduce_scatter_tensor_coalesced": ("REDUCE_SCATTER_TENSOR_COALESCED", 1),
    "alltoall": ("ALLTOALL", 1),
    "alltoall_base": ("ALLTOALL_BASE", 1),
    "barrier": ("BARRIER", -1),
    "scatter": ("SCATTER", 1),
    "gather": ("GATHER", 1),
}
"""Methods of `ProcessGroup`, and which argument holds what this rank gives (torch 2.4 to 2.14)."""

OBJECTS: Final[dict[str, Op]] = {
    "all_gather_object": op(SpanName.ALL_GATHER, "object"),
    "gather_object": op(SpanName.GATHER, "object"),
    "broadcast_object_list": op(SpanName.BROADCAST, "object_list"),
    "scatter_object_list": op(SpanName.SCATTER, "object_list"),
    "send_object_list": op(SpanName.SEND, "object_list"),
    "recv_object_list": op(SpanName.RECV, "object_list"),
}
"""Each issues several collectives, which are one to the user: one span, its bytes their sum, its number the last's."""

TRANSFERS: Final = frozenset({SpanName.SEND, SpanName.RECV})
SYNCHRONOUS: Final = frozenset({"send", "recv"})
"""Public functions without `async_op`, that wait."""
