"""Checks on one NVIDIA GPU what a CPU cannot show: `python tests/gpu/device.py`, in ten minutes, torch 2.11 or later.

Prints one table. Exit code 0: every claim holds; 1: some do not; 2: there is nothing to check them on.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from table import Table  # noqa: E402

OLDEST = (2, 11)


def why_not() -> str:
    """Why nothing can be checked here; "" where it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST:
        return f"torch is {torch.__version__}; needed is {OLDEST[0]}.{OLDEST[1]} or later"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no NVIDIA GPU that it can use"
    return ""


def main() -> int:
    reason = why_not()
    if reason:
        print(f"Nothing was checked: {reason}.")
        return 2
    import compilation
    import convolutions
    import device_time
    import synchronization
    import torch

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    table = Table()
    # The last check of `synchronization` switches on a trace that stays.
    for part in (device_time, convolutions, compilation, synchronization):
        began = time.monotonic()
        for check in part.CHECKS:
            try:
                check(table)
            except Exception as error:
                traceback.print_exc()
                said = f"{type(error).__name__}: {error}".partition("\n")[0]
                table.add(f"{part.__name__}.{check.__name__}", said, "no exception", ok=False)
            torch.cuda.synchronize()
        print(f"{part.__name__}: {time.monotonic() - began:.0f} s", flush=True)
    print(table)
    if table.missed:
        print(f"{len(table.missed)} of {len(table.rows)} MISSED")
    return 1 if table.missed else 0


if __name__ == "__main__":
    sys.exit(main())
