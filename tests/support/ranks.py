"""Jobs of several gloo ranks: each test module's function runs in processes of its own, and answers with JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.children import SOURCE, environment

TESTS = Path(__file__).resolve().parents[1]


def job(call: str, ranks: int = 2, timeout: float = 90, python: str = sys.executable, **env: str) -> list[Any]:
    """What `call` (`module:function`) returns on each rank; the function is given (rank, size) when the group is up
    and recording is not on."""
    module, function = call.split(":")
    # gloo's threads abort now and then at the end of the interpreter (torch 2.4, 2.15; without us too).
    leave = "import os; os._exit(0)\n"
    with tempfile.TemporaryDirectory() as folder:
        script = (
            "import json, sys, warnings; warnings.simplefilter('ignore')\n"
            f"sys.path[:0] = [{str(TESTS)!r}]\n"
            "import torch; torch.set_num_threads(1)\n"
            f"from {module} import {function}\n"
            f"rank = int(sys.argv[1]); answer = {function}(rank, {ranks}, {folder!r})\n"
            f"file = open({folder!r} + f'/{{rank}}.json', 'w'); file.write(json.dumps(answer)); file.close()\n"
            + (leave if function != "ends" else "")
        )
        processes = [
            subprocess.Popen(
                [python, "-c", script, str(rank)],
                env=environment({**env, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}", "RANK": str(rank),
                                 "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        said: list[str] = []
        try:
            said = [process.communicate(timeout=timeout)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        answers = []
        for rank, process in enumerate(processes):
            assert process.returncode == 0, f"rank {rank}: {process.returncode}\n{said[rank]}"
            answers.append(json.loads((Path(folder) / f"{rank}.json").read_text()))
        return answers


def begin(rank: int, size: int, folder: str, **options: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, **options)
