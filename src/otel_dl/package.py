"""What this instrumentation is for; the same range stands in the extra `instruments` of pyproject.toml."""

_instruments = ("torch >= 2.4",)
_supports_metrics = False
_semconv_status = "development"
