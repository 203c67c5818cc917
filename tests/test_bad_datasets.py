"""Datasets that misbehave: what comes of it is what comes of it without otel-dl."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.loader_jobs import run, spans


@pytest.mark.parametrize(
    ("method", "way", "last", "fetches"),
    [
        ("spawn", "no_pickle", "TypeError cannot pickle '_thread.lock' object", 0),
        ("spawn", "lambda", "AttributeError", 0),  # the message is another in each version of Python
        ("fork", "clear_environment", "[5]", 6),
        ("fork", "fork", "[5]", 6),
        ("fork", "replace_stdout", "[5]", 6),
        ("fork", "lose_stdout", "[5]", 6),
        # How many workers had read something when the first one's death was seen is chance.
        ("fork", "close_descriptors", "RuntimeError DataLoader worker (pid(s) … ) exited unexpectedly", None),
        # What was read and never arrives is reported: two batches of each worker.
        ("fork", "few_descriptors", "RuntimeError DataLoader timed out after 3 seconds", 4),
        # So many descriptors are left to the process: too few for torch, for us, enough.
        ("fork", "3", "OSError [Errno 24] Too many open files", 0),
        ("fork", "20", "[5]", 0),
        ("fork", "100", "[5]", 6),
    ],
)
def test_it_ends_as_without_us(method: str, way: str, last: str, fetches: int | None, tmp_path: Path) -> None:
    outputs = []
    for enabled in ("false", "true"):
        files = tmp_path / f"files_{enabled}"
        files.mkdir()
        folder = tmp_path / "traces"
        output = run("bad_datasets.py", method, way, directory=folder, OTEL_DL_ENABLED=enabled, FILES=str(files))
        outputs.append(output.splitlines())
    without, under = outputs
    assert under == without
    assert under[-1].startswith(last)
    ours = [span for span in spans(folder) if span.name == "dataloader.fetch"] if folder.exists() else []
    assert len({(span.trace_id, span.span_id) for span in ours}) == len(ours)
    assert len(ours) == fetches or fetches is None


def test_nothing_of_ours_lands_in_files_that_a_worker_opens_where_our_pipe_was(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    run("bad_datasets.py", "fork", "close_descriptors", directory=tmp_path / "traces", FILES=str(files))
    # torch itself writes a batch into one of them: a length and a pickle.
    written = [content for file in files.iterdir() if (content := file.read_bytes())]
    assert all(content[4:5] == b"\x80" for content in written), written
