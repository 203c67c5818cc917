"""A trace beside a profile of the same run: pair them, compare them phase by phase, and say what the difference is.

profile (`kineto` through `events`, or `nsys`)  ─┐
trace (`steps`)                                 ─┴▶ `pairing` ──▶ `causes` ──▶ `text`
"""
