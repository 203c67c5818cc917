"""The command `otel-dl`."""
