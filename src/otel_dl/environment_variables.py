"""Names of our variables as `opentelemetry-instrument` wants them: each `OTEL_*` name here becomes one of its flags."""

from otel_dl.settings import described

globals().update({row.variable: row.variable for row in described()})
