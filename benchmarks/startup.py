"""Start-up time, threads and memory that otel-dl adds: to the main process, to a worker, to helper processes.

Each case is a process of its own that imports torch and trains two steps with two spawned workers, started in turn with
and without `otel-dl run`'s bootstrap.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _measure import machine

ROUNDS = 5

SCRIPT = """
import glob, json, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.ones(2)

def processes():
    found = {}
    for status in glob.glob('/proc/[0-9]*/status'):
        pid = int(status.split('/')[2])
        try:
            if f'BENCHMARK={os.getppid()}' not in open(f'/proc/{pid}/environ').read():
                continue
            command = open(f'/proc/{pid}/cmdline').read()
            pages = int(open(f'/proc/{pid}/statm').read().split()[1])
            threads = len(os.listdir(f'/proc/{pid}/task'))
        except OSError:
            continue
        kind = ('resource tracker' if 'resource_tracker' in command else
                'worker' if 'spawn_main' in command else 'main' if pid == os.getpid() else 'other')
        found.setdefault(kind, []).append((threads, pages * os.sysconf('SC_PAGE_SIZE') / 2**20))
    return found

if __name__ == '__main__':
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(Numbers(), num_workers=2, multiprocessing_context='spawn'))
    for _ in range(2):
        optimizer.zero_grad(); model(next(batches)).sum().backward(); optimizer.step()
    json.dump({'ready': time.time(), 'processes': processes()}, sys.stdout)
    sys.stdout.flush()
    os._exit(0)
"""


def run(script: Path, traces: str, instrumented: bool) -> dict[str, tuple[float, ...]]:
    bootstrap = Path(__file__).parent.parent / "src" / "otel_dl" / "cli" / "bootstrap"
    environment = {**os.environ, "BENCHMARK": str(os.getpid())}
    if instrumented:
        environment |= {"PYTHONPATH": str(bootstrap), "OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": traces}
    began = time.time()
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    figures: dict[str, tuple[float, ...]] = {"seconds to the second step": (result["ready"] - began,)}
    for kind, processes in result["processes"].items():
        threads, memory = zip(*processes, strict=True)
        figures[f"{kind}: threads, MiB"] = (max(threads), statistics.mean(memory))
    return figures


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "job.py"
        script.write_text(SCRIPT)
        runs = [(run(script, directory, False), run(script, directory, True)) for _ in range(ROUNDS)]
    for name in runs[0][0]:
        without = [statistics.median(column) for column in zip(*(one[name] for one, _ in runs), strict=True)]
        added = [
            statistics.median(b - a for a, b in zip(before, after, strict=True))
            for before, after in zip(
                zip(*(one[name] for one, _ in runs), strict=True),
                zip(*(other[name] for _, other in runs), strict=True),
                strict=True,
            )
        ]
        before = " ".join(f"{value:8.2f}" for value in without)
        print(f"{name:30} without {before}   added {' '.join(f'{value:+8.2f}' for value in added)}")


if __name__ == "__main__":
    main()
