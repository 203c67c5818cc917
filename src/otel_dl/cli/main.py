"""Entry point of the command. Its libraries are an extra, so it says what to install where they are missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs `otel-dl` with the process's arguments; ends by SystemExit."""
    try:
        import click  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        sys.exit(_missing())
    from otel_dl.cli.commands import command

    command(prog_name="otel-dl")


def _missing() -> int:
    print("otel-dl: the command needs the package click: pip install otel-dl[cli]", file=sys.stderr)
    return 2
