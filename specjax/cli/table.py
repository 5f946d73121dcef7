"""Tables for readers, on a terminal and in Markdown, and the numbers in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]  # from a column's head to what stands there


def as_text(rows: Iterable[Row]) -> str:
    """Returns rows under their heads."""
    return aligned(_lines(rows))


def as_markdown(rows: Iterable[Row]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    heads, *lines = _lines(rows)
    lines = [heads, ["---"] * len(heads), *lines]
    return ["| " + " | ".join(line) + " |" for line in lines]


def aligned(lines: Iterable[Sequence[Any]]) -> str:
    """Returns cells in columns as wide as they must be, the first to the left."""
    lines = [[*map(str, line)] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def _lines(rows: Iterable[Row]) -> list[list[str]]:
    """Returns the heads of all rows, and the cells of each; "-" where a row has none."""
    rows = list(rows)
    heads = list(dict.fromkeys(head for row in rows for head in row))
    return [heads, *[[str(row.get(head, "-")) for head in heads] for row in rows]]


def number(value: float | None, digits: int = 3) -> str:
    """Returns a number with so many significant digits, and thousands set apart; "-" for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")  # first: 999.6 is 1,000
    if 1e-3 <= abs(rounded) < 10**digits:
        return f"{rounded:#.{digits}g}".rstrip(".")
    return f"{value:,.0f}" if abs(value) >= 1 else f"{value:.1e}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
