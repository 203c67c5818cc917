"""Settings: a wrong value or name is said once, with what to do, and never stops training."""

from __future__ import annotations

import pytest
from support.children import run

from otel_dl.settings import Settings

SCRIPT = """
import otel_dl
otel_dl.instrument()
otel_dl.uninstrument()
otel_dl.instrument()
"""


def said(**environ: str) -> list[str]:
    result = run(SCRIPT, {"OTEL_TRACES_EXPORTER": "none", **environ})
    assert result.code == 0, result
    return [line for line in result.stderr.splitlines() if "otel-dl:" in line]


def test_a_misspelt_variable_is_named_once_with_the_nearest_there_is() -> None:
    (line,) = said(OTEL_DL_QUEUE_SPAN="5000", OTEL_DL_DIR="traces")
    assert "no setting OTEL_DL_QUEUE_SPAN;" in line
    assert line.endswith("The nearest is OTEL_DL_QUEUE_SPANS.")


def test_variables_that_are_right_or_not_ours_are_not_named() -> None:
    assert said(OTEL_DL_QUEUE_SPANS="5000", OTEL_SERVICE_NAMES="x", MY_OTEL_DL_DIR="x") == []


def test_nothing_is_said_where_it_is_switched_off() -> None:
    assert said(OTEL_DL_ENABLED="false", OTEL_DL_QUEUE_SPAN="5000") == []


@pytest.mark.parametrize("url", ["http://localhost:16686", "https://jaeger.example/base/", "http://[::1]:16686"])
def test_an_address_of_jaeger(url: str, caplog: pytest.LogCaptureFixture) -> None:
    assert Settings.read({"OTEL_DL_JAEGER_URL": url}).jaeger_url == url
    assert not caplog.records


@pytest.mark.parametrize("url", ["localhost:16686", "jaeger", "http://", "http:///trace", "ftp://x", "http://a b", "0"])
def test_what_is_no_address_of_jaeger_makes_no_links(url: str, caplog: pytest.LogCaptureFixture) -> None:
    assert Settings.read({"OTEL_DL_JAEGER_URL": url}).jaeger_url == ""
    assert "OTEL_DL_JAEGER_URL" in caplog.text
    assert repr(url) in caplog.text
    assert "an address like http://localhost:16686" in caplog.text
