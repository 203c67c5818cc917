"""What a check on a GPU found: one row a claim."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    claim: str
    measured: str
    expected: str
    ok: bool


class Table:
    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, claim: str, measured: object, expected: object, ok: bool) -> None:
        self.rows.append(Row(claim, str(measured), str(expected), ok))

    def within(self, claim: str, measured: float, expected: float, share: float, unit: str = "ms") -> None:
        """Whether `measured` is `expected`, up to this share of it."""
        ok = abs(measured - expected) <= share * abs(expected)
        self.add(claim, f"{measured:.3f} {unit}", f"{expected:.3f} {unit} ± {share:.0%}", ok)

    def at_most(self, claim: str, measured: float, most: float, unit: str = "ms") -> None:
        self.add(claim, f"{measured:.3f} {unit}", f"at most {most:g} {unit}", measured <= most)

    def at_least(self, claim: str, measured: float, least: float, unit: str = "ms") -> None:
        self.add(claim, f"{measured:.3f} {unit}", f"at least {least:g} {unit}", measured >= least)

    @property
    def missed(self) -> list[Row]:
        return [row for row in self.rows if not row.ok]

    def __str__(self) -> str:
        rows = [("claim", "measured", "expected", ""), *(
            (row.claim, row.measured, row.expected, "ok" if row.ok else "MISSED") for row in self.rows
        )]  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )
