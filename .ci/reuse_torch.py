"""Lets this virtual environment use the torch of another Python, so that 3 GB are not downloaded again.

Usage: .venv/bin/python reuse_torch.py OTHER_PYTHON. Exit status 1, and nothing happens, where that Python has no torch
of the oldest supported version or later, or is of another minor version.

All that Python's packages become visible, after the environment's own. So install the rest with `--ignore-installed`:
else pip counts what it sees there as installed, and the environment lacks its commands.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

OLDEST = (2, 4)

ASK = """
import sys
from importlib.metadata import distribution
torch = distribution("torch")
print(sys.version_info[0], sys.version_info[1], torch.version, torch.locate_file(""), sep="\\n")
"""


def folder_with_torch(python: str) -> Path | None:
    """The site-packages in which `python` finds a torch that this Python can use."""
    try:
        answer = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor, version, folder = answer
    if (int(major), int(minor)) != sys.version_info[:2]:
        return None
    torch_version = tuple(int(part) for part in version.split(".")[:2])
    return Path(folder).resolve() if torch_version >= OLDEST else None


def main() -> int:
    folder = folder_with_torch(sys.argv[1])
    if folder is None:
        return 1
    Path(sysconfig.get_path("purelib"), "reused_torch.pth").write_text(f"{folder}\n")
    print(f"torch is reused from {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
