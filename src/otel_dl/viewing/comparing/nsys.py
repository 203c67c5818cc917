"""Profiles of Nsight Systems: the SQLite file of `nsys export --type sqlite`.

Tables and columns are those of the schema reference in NVIDIA's documentation ("Nsight Systems export documentation,
SQLite Export Schema Reference", 2020.1 to 2021.5): times are nanoseconds since the session's start, which
TARGET_INFO_SESSION_START_TIME.utcEpochNs puts into the time of day; a `globalTid` holds the process in bits 24 to 47.
Tables that a report had nothing for are not there.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from otel_dl.viewing.comparing.profile import Profile, ProfileError

MAGIC: Final = b"SQLite format 3\0"
_RANGES: Final = "(59, 60)"
"""NVTX_EVENTS.eventType of push/pop ranges and of start/end ranges."""


def read(path: Path, pids: Collection[int]) -> Profile:
    """Of the first of these processes that it has ranges of, or calls. Raises ProfileError where it can't be used."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as database:
            return _read(database, pids)
    except sqlite3.Error as error:
        raise ProfileError(f"is no export of Nsight Systems that can be read: {error}") from None


def _read(database: sqlite3.Connection, pids: Collection[int]) -> Profile:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables & {"NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL"}:
        raise ProfileError("has no table of NVTX ranges or CUDA calls: it is no export of Nsight Systems")
    profile = Profile("Nsight Systems", shows_operations=False)
    found: set[int] = set()
    for table in ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"):
        if table in tables:
            found |= {pid for (pid,) in database.execute(
                f"SELECT DISTINCT (globalTid >> 24) & 0xFFFFFF FROM {table} WHERE globalTid IS NOT NULL"
            )}  # fmt: skip
    profile.pid = min(found & set(pids), default=min(found, default=0))
    ours = f"(({{}} >> 24) & 0xFFFFFF) = {profile.pid}"
    names = "StringIds" in tables

    def rows(table: str, columns: str, where: str) -> Iterator[Any]:
        if table in tables:
            yield from database.execute(f"SELECT {columns} FROM {table} WHERE {where}")

    def column(table: str, name: str) -> bool:
        return any(row[1] == name for row in database.execute(f"PRAGMA table_info({table})"))

    text = "text"
    if names and column("NVTX_EVENTS", "textId"):
        text = "COALESCE(text, (SELECT value FROM StringIds WHERE id = textId))"
    for start, end, name in rows(
        "NVTX_EVENTS",
        f'start, "end", {text}',
        f'"end" IS NOT NULL AND eventType IN {_RANGES} AND {ours.format("globalTid")}',
    ):
        profile.events += 1
        if profile.add_range(str(name), None, start, end):
            profile.see(start, end)
    name = "(SELECT value FROM StringIds WHERE id = nameId)" if names else "''"
    for start, end, thread, correlation, called in rows(
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        f'start, "end", globalTid, correlationId, {name}',
        f"{ours.format('globalTid')} ORDER BY start",
    ):
        profile.events += 1
        profile.add_call(str(called), thread, start, end, correlation if correlation is not None else -1)
        profile.see(start, end)
    for kind in ("KERNEL", "MEMCPY", "MEMSET"):
        table = f"CUPTI_ACTIVITY_KIND_{kind}"
        of_process = ours.format("globalPid") if table in tables and column(table, "globalPid") else "1"
        for start, end, correlation in rows(table, 'start, "end", correlationId', of_process):
            profile.events += 1
            profile.kernels.add(start, end, correlation if correlation is not None else -1)
    profile.settle()
    if not profile.own and not len(profile.operations):
        raise ProfileError("has neither NVTX ranges nor CUDA calls of a process")
    if "TARGET_INFO_SESSION_START_TIME" in tables and column("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
        began = database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        if began is not None and began[0]:
            profile.shift(int(began[0]))
            profile.anchored = True
    return profile
