"""Switching on: what `otel_dl.instrument()`, a rank's start and a bootstrap (`otel-dl run`) have in common, and what
the bootstrap calls in every Python process it reaches. Light until torch is imported."""

from __future__ import annotations

import os
import sys
from typing import Any

from otel_dl.log import logger

_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch._inductor.compile_worker")


def is_helper() -> bool:
    """Whether this process only serves others: resource tracker, fork server, inductor's compile worker."""
    return any(helper in argument for argument in sys.orig_argv for helper in _HELPERS)


def activate() -> None:
    """Instruments this process once it imports torch. No SDK is set up before the first step begins."""
    if is_helper() or os.environ.get("OTEL_DL_ENABLED", "").strip().lower() in ("false", "0", "no", "off"):
        return
    import wrapt

    from otel_dl import startup

    startup.zero_code = True
    startup.import_torch.install()
    wrapt.register_post_import_hook(_torch_imported, "torch")


def _torch_imported(torch: object) -> None:
    switch_on(set_up_sdk="late")


def switch_on(**keywords: Any) -> None:
    """Instruments this process, unless it is; raises nothing. For `keywords` see `TorchInstrumentor`."""
    try:
        from otel_dl.instrumentor import TorchInstrumentor

        instrumentor = TorchInstrumentor()
        if not instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.instrument(**keywords)
    except Exception:
        # OpenTelemetry itself refuses some values of OTEL_* when it is imported.
        logger.warning("otel-dl: tracing could not be switched on; training goes on without.", exc_info=True)
