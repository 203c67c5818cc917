"""What a bootstrap (`otel-dl run`) calls in every Python process it reaches; light until torch is imported."""

from __future__ import annotations

import os
import sys

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

    def torch_imported(_: object) -> None:
        from otel_dl.instrumentor import TorchInstrumentor

        instrumentor = TorchInstrumentor()
        if not instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.instrument(set_up_sdk="late")

    wrapt.register_post_import_hook(torch_imported, "torch")
