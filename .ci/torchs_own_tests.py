"""PyTorch's own test/test_dataloader.py with and without otel-dl, compared outcome by outcome.

`torchs_own_tests.py CHECKOUT [PYTEST_ARGUMENT …]`: CHECKOUT is a checkout of pytorch/pytorch at the version that is
installed. Exit status 1 where an outcome differs; without the file 0, with a line that says so.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

TIMEOUT_S = 3600
# Only against a hang: torch 2.9.1's test_shuffler_iterdatapipe starts 45 workers by spawn, which took 425 s without
# otel-dl on two busy cores.
TEST_TIMEOUT_S = 900


def outcomes(command: list[str], file: Path, arguments: list[str], folder: Path) -> dict[str, str]:
    """What became of each test, run by `command` (of Python) in `folder`."""
    folder.mkdir()
    report = folder / "report.xml"
    run = ["-m", "pytest", str(file), "-q", "-p", "no:cacheprovider"]
    run += [f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={report}"]
    with (folder / "output").open("wb") as output:
        subprocess.run(
            [*command, sys.executable, *run, *arguments],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    if not report.exists():
        sys.exit(f"pytest left no report; what it said:\n{(folder / 'output').read_text()}")
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        what = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        message = what.get("message", "").partition("\n")[0] if what is not None else ""
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        found[name] = f"{what.tag}: {message}" if what is not None else "passed"
    return found


def main() -> int:
    checkout = sys.argv[1] if len(sys.argv) > 1 else ""
    file = Path(checkout, "test", "test_dataloader.py").resolve()
    if not checkout or not file.is_file():
        print(
            "Skipped: there is no test/test_dataloader.py in"
            f" PYTORCH={checkout or '(not set)'}. Give a checkout of pytorch/pytorch at the version that is installed:"
            " make test-torch PYTORCH=path"
        )
        return 0
    arguments = sys.argv[2:]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        without = outcomes([], file, arguments, folder / "without")
        under = outcomes([sys.executable, "-m", "otel_dl.cli", "run", "--"], file, arguments, folder / "under")
    kinds = ("passed", "skipped", "failure", "error")
    for name, found in (("without", without), ("under otel-dl", under)):
        counts = ", ".join(f"{sum(what.startswith(kind) for what in found.values())} {kind}" for kind in kinds)
        print(f"{name}: {len(found)} tests: {counts}")
    differing = [name for name in sorted(without.keys() | under.keys()) if without.get(name) != under.get(name)]
    for name in differing:
        print(f"{name}\n    without:       {without.get(name, 'not run')}")
        print(f"    under otel-dl: {under.get(name, 'not run')}")
    print(f"{len(differing)} outcomes differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
