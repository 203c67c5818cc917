"""Numbers as words."""

from __future__ import annotations

import re

import pytest

from otel_dl.viewing.words import duration, scale

US, MS, S = 1e3, 1e6, 1e9


@pytest.mark.parametrize(
    ("nanoseconds", "words"),
    [
        (0, "0 µs"),
        (135, "under 1 µs"),
        (999, "under 1 µs"),
        (1_000, "1 µs"),
        (3_141, "3.1 µs"),
        (31_415, "31.4 µs"),
        (314_159, "314 µs"),
        (999_499, "999 µs"),
        (999_500, "1 ms"),
        (1.2345 * MS, "1.23 ms"),
        (52.1 * MS, "52.1 ms"),
        (999.6 * MS, "1 s"),
        (9.999 * S, "10 s"),
        (71.42 * S, "71.4 s"),
        (99.94 * S, "99.9 s"),
        (99.96 * S, "1 min 40 s"),
        (120 * S, "2 min"),
        (723 * S, "12 min 3 s"),
        (3_599 * S, "59 min 59 s"),
        (3_599.6 * S, "1 h"),
        (7_500 * S, "2 h 5 min"),
        (400_000 * S, "111 h 7 min"),
        (-52.1 * MS, "−52.1 ms"),
    ],
)
def test_a_duration(nanoseconds: float, words: str) -> None:
    assert duration(nanoseconds) == words


def test_no_duration_below_a_minute_has_more_than_three_digits_or_an_exponent() -> None:
    tried = 0
    nanoseconds = 1.0
    while nanoseconds < 60 * S:
        text = duration(nanoseconds)
        assert re.fullmatch(r"under 1 µs|[0-9.]+ (µs|ms|s)", text), (nanoseconds, text)
        assert len(text.split()[0].replace(".", "").lstrip("0")) <= 3 or text == "under 1 µs", (nanoseconds, text)
        nanoseconds *= 1.003
        tried += 1
    assert tried > 1_000


@pytest.mark.parametrize(
    ("longest", "nanoseconds", "words"),
    [
        (53.8 * MS, 53.8 * MS, "+53.8 ms"),
        (53.8 * MS, -0.14 * MS, "−0.1 ms"),
        (53.8 * MS, -0.01 * MS, "+0.0 ms"),
        (3.11 * MS, 0.187 * MS, "+0.19 ms"),
        (102 * US, 1_234, "+1 µs"),
        (999.6 * US, 999.6 * US, "+1.00 ms"),
        (12_345 * S, 12_345 * S, "+12,345 s"),
        (0, 0, "+0.0 µs"),
    ],
)
def test_durations_below_each_other_have_one_unit_and_as_many_digits_as_the_longest(
    longest: float, nanoseconds: float, words: str
) -> None:
    assert scale(longest).signed(nanoseconds) == words
