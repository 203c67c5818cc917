"""`TorchInstrumentor`: the entry point `opentelemetry_instrumentor`, and what `otel_dl.instrument()` calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import (
    BaseInstrumentor,  # pyright: ignore[reportMissingTypeStubs]
)

from otel_dl import session
from otel_dl.package import _instruments  # pyright: ignore[reportPrivateUsage]


class TorchInstrumentor(BaseInstrumentor):
    """Instruments training with PyTorch. Patches are installed when torch is imported; nothing here imports it.

    Keywords are the fields of `otel_dl.settings.Settings`. `set_up_sdk="now"` or `"late"` (when the first step begins)
    sets up the OpenTelemetry SDK where nobody has; without it, as under `opentelemetry-instrument`, none ever is.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        return _instruments

    def _instrument(self, **kwargs: Any) -> None:
        # The SDK's machinery gives them to every instrumentor; ours looks for them when the first step begins.
        for name in ("tracer_provider", "meter_provider", "logger_provider"):
            kwargs.pop(name, None)
        session.begin(set_up_sdk=kwargs.pop("set_up_sdk", "never"), **kwargs)

    def _uninstrument(self, **kwargs: Any) -> None:
        session.end()
