"""Formats numbers for messages."""

from __future__ import annotations


def amount(number_of_bytes: float) -> str:
    """Returns a number of bytes as text with a unit, such as "1.50 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number_of_bytes >= size:
            return f"{number_of_bytes / size:,.2f} {unit}"
    return f"{number_of_bytes:.0f} bytes"
