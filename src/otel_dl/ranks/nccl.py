"""How NCCL calls a communicator: its unique id, as it lies in the job's store, and the hash of it in NCCL's own log.

Where the id lies in a group's store, "<group>//<device>/" (torch/csrc/distributed/c10d):

- ProcessGroupNCCL.cpp, `broadcastUniqueNCCLID`: under "0", the first communicator for collectives ("1" is the next;
  "0:1" is that of ranks 0 and 1 for point-to-point). Backend `nccl` up to 2.14, `nccl-legacy` in 2.15.
- nccl2/NCCLBootstrap.cpp, `exchangeUniqueIds`: under "<group>/nccl_storekey_0", and with more ranks than
  TORCH_NCCL_RANKS_PER_ROOT (128) "…_0_0" is the first of several, which NCCL hashes. Backend `nccl` in 2.15.

It is written when the communicator is made, which is with the first collective, not with the group. One that was split
off (`ncclCommSplit`) has no id.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import Final, NamedTuple

from otel_dl.ranks.store import JobStore, StoreGone
from otel_dl.recording import ids
from otel_dl.recording.ranks import Group

UID_BYTES: Final = 128
"""NCCL_UNIQUE_ID_BYTES (nccl.h)."""

OUTER: Final = ("default_pg/", "", "/worker/attempt_{attempt}/default_pg/")
"""What stands before a group's name in the store: where torch has made the store, where the user gave it, and where it
is torchrun's (2.4; no longer in 2.15)."""

_CHAR_IS_SIGNED: Final = platform.machine().lower() in ("x86_64", "amd64", "i686")


class Communicator(NamedTuple):
    """The names of a group's communicator."""

    uid: str
    """Hex of NCCL's 128 bytes, else of an id that is derived, the same on all ranks: 32 digits."""
    hash: str
    """As NCCL's log prints it ("commId 0x…"); empty where the id is derived."""


def nccl_uid(store: JobStore | None, group: Group, run: str, attempt: int) -> Communicator:
    """Names the communicator of `group`.

    Never through the group's own client, which may be in use by a thread that waits. Every key is looked for before it
    is read, so nothing waits for one. No store, one that is gone, or that has no such key: the derived id.

    `run` and `attempt` tell jobs apart where TORCHELASTIC_RUN_ID is not set; `run` must be the same on all ranks.
    """
    uid = _read(store, group.id, attempt) if store is not None and "nccl" in group.backend else None
    if uid is not None:
        return Communicator(uid.hex(), hash_of(uid))
    return Communicator(derived(group, run, attempt), "")


def derived(group: Group, run: str, attempt: int) -> str:
    """An id for what has none of NCCL's: H(run, attempt, group, its global ranks) in hex."""
    label = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    run = run if label in ("none", "") else label
    return f"{ids.trace_id(run, attempt, group.id, ','.join(map(str, group.ranks))):032x}"


def hash_of(uid: bytes) -> str:
    """NCCL's `getHash` of an id (NCCL 2.20 to 2.28: src/misc/utils.cc; init.cc: `commIdHash`): DJB2 over all bytes,
    each a C `char`, whose sign is the processor's."""
    result = 5381
    for byte in uid:
        char = byte - 256 if _CHAR_IS_SIGNED and byte > 127 else byte
        result = (result * 33 + char) & 0xFFFF_FFFF_FFFF_FFFF
    return f"0x{result:x}"


def _keys(group: str, attempt: int) -> Iterator[str]:
    """Where the id of a group's first communicator may lie in the store, without any prefix. (A PrefixStore joins
    prefix and key by a "/".)"""
    for outer in OUTER:
        place = f"{outer.format(attempt=attempt)}{group}//cuda//"
        yield f"{place}0"
        yield f"{place}{group}/nccl_storekey_0"
        yield f"{place}{group}/nccl_storekey_0_0"


def _read(store: JobStore, group: str, attempt: int) -> bytes | None:
    try:
        for key in _keys(group, attempt):
            value = store.get_from_elsewhere(key)
            if value is not None and len(value) == UID_BYTES:
                return value
    except StoreGone:
        pass
    return None
