"""What otel-dl says: through the logger `otel_dl`, and never at the cost of the process that it says it in."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """Training must not end because a log stream is closed or a handler of the user's raises."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **kwargs)


logger = _Logger(logging.getLogger("otel_dl"), {})


def say(line: str) -> None:
    """One line on stderr, where there is one."""
    with contextlib.suppress(Exception):
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)
