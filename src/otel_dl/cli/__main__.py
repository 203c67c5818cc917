"""`python -m otel_dl.cli` is the command `otel-dl` of this Python, whatever the PATH says."""

from otel_dl.cli.main import main

main()
