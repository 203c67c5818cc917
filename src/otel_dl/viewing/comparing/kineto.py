"""Profiles of torch.profiler: Kineto's Chrome trace, plain or gzipped.

The fields are those that `export_chrome_trace` writes (third_party/kineto/libkineto/src/output_json.cpp, torch 2.4 and
2.15): an event's `ts` and `dur` are microseconds, `ts` since `baseTimeNanoseconds`, which stands before the events in
2.15 and behind them in 2.4; older ones have none, and `ts` since the epoch. Work of a device (`kernel`, `gpu_memcpy`,
`gpu_memset`) has the `correlation` of the call that launched it (`cuda_runtime`, `cuda_driver`, and the like).
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from otel_dl.viewing.comparing.events import Events
from otel_dl.viewing.comparing.profile import Profile, ProfileError

_ON_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS: Final = frozenset({"cuda_runtime", "cuda_driver", "privateuse1_runtime", "privateuse1_driver", "xpu_runtime"})
_HOST: Final = frozenset({"cpu_op", "user_annotation"})
_EPOCH_US: Final = 1e15
_LATEST_NS: Final = 1 << 62
"""Microseconds since the epoch are more; those since a start of a computer less."""
_OTHERS: Final = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}


def read(path: Path) -> Profile:
    """Raises ProfileError where it is none, is cut off or damaged; OSError where it can't be read."""
    with path.open("rb") as file:
        beginning = file.read(4)
        file.seek(0)
        for magic, name in _OTHERS.items():
            if beginning.startswith(magic):
                raise ProfileError(f"is compressed with {name}: decompress it first; gzip is read as it is")
        if not beginning:
            raise ProfileError("is empty")
        try:
            if beginning.startswith(b"\x1f\x8b"):
                with gzip.open(file) as inner:
                    return _read(cast(BinaryIO, inner))
            return _read(file)
        except EOFError:
            raise ProfileError("is cut off: the gzip data ends too early. Export or copy it again") from None
        except (zlib.error, gzip.BadGzipFile) as error:
            raise ProfileError(f"is damaged: {error}. Export or copy it again") from None


def _read(file: BinaryIO) -> Profile:
    profile = Profile("torch.profiler")
    events = Events(file)
    for event in events:
        if isinstance(event, dict):
            profile.events += 1
            try:
                _take(profile, cast(dict[str, Any], event))
            except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
                continue  # an event whose fields are none of theirs
    profile.settle()
    if not len(profile.operations) and not len(profile.kernels) and not profile.own:
        raise ProfileError(f"has no operation in its {profile.events:,} events: it is no profile of torch.profiler")
    base = events.header.get("baseTimeNanoseconds")
    if isinstance(base, (int, float)):
        if not 0 <= base < _LATEST_NS:  # nor NaN
            raise ProfileError(f"says that its clock began at baseTimeNanoseconds = {base!r}: no time since 1970")
        profile.shift(int(base))
        profile.anchored = True
    else:
        profile.anchored = profile.first > _EPOCH_US * 1000
    profile.host = str(events.header.get("host_name", ""))
    return profile


def _take(profile: Profile, event: dict[str, Any]) -> None:
    if event.get("ph") != "X":
        return
    category = event.get("cat")
    if not isinstance(category, str):
        return
    category = category.lower()
    start = round(event["ts"] * 1000)
    end = start + round(event.get("dur", 0) * 1000)
    if category in _ON_DEVICE:
        profile.kernels.add(start, end, int(event.get("args", {}).get("correlation", -1)))
        return
    name = str(event.get("name", ""))
    if category in _CALLS:
        profile.add_call(name, event.get("tid"), start, end, int(event.get("args", {}).get("correlation", -1)))
    elif category in _HOST:
        if not profile.pid and isinstance(event.get("pid"), int):
            profile.pid = event["pid"]
        if not profile.add_range(name, event.get("tid"), start, end) and category == "cpu_op":
            profile.add_operation(event.get("tid"), start, end)
    elif category == "python_function":
        profile.add_function(name, event.get("tid"), start, end)
        return
    else:
        return
    profile.see(start, end)
