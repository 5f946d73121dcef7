"""K by batch size, in the format of vLLM's `num_speculative_tokens_per_batch_size`.

    [[1, 64, 3], [65, 128, 1], [129, 512, 0]]      K = 3 up to 64 rows, 1 up to 128, then none

Entries are [first, last, K], both ends included. A gap takes the K before it; batch sizes
past the last entry take the last K.
"""

from __future__ import annotations

import bisect
import itertools
from typing import Any, NamedTuple

NAME = "num_speculative_tokens_per_batch_size"


class Entry(NamedTuple):
    """A range of batch sizes, both ends included, and its K."""

    first: int
    last: int
    num_speculative_tokens: int


def parse(table: Any) -> tuple[Entry, ...]:
    """Returns the entries of a table in order.

    Raises:
      ValueError: not a list of [first, last, K]; a size below 1 or a K below 0; an entry
        that ends before it begins; two that overlap; or no entry that begins at 1.

    Source: the rules of vLLM's dynamic speculative decoding.
    """
    if not isinstance(table, list | tuple) or not table:
        raise ValueError(
            f"{NAME}={table!r} must be a list of [first, last, K] with one entry at least."
        )
    entries = sorted(map(_entry, table))
    if entries[0].first != 1:
        raise ValueError(f"{NAME} must begin at batch size 1, got {entries[0].first}.")
    for before, after in itertools.pairwise(entries):
        if after.first <= before.last:
            raise ValueError(
                f"{NAME}: {list(before)} and {list(after)} overlap; let one end before the other "
                f"begins."
            )
    return tuple(entries)


def look_up(table: tuple[Entry, ...], batch_size: int) -> int:
    """Returns K at a batch size of at least 1."""
    place = bisect.bisect_right(table, batch_size, key=lambda entry: entry.first)
    return table[place - 1].num_speculative_tokens


def most(table: tuple[Entry, ...]) -> int:
    """Returns the largest K of a table."""
    return max(entry.num_speculative_tokens for entry in table)


def at_most(table: tuple[Entry, ...], most: int) -> tuple[Entry, ...]:
    """Returns the table with no K above `most`."""
    return tuple(
        entry._replace(num_speculative_tokens=min(entry.num_speculative_tokens, most))
        for entry in table
    )


def _entry(given: Any) -> Entry:
    if not isinstance(given, list | tuple) or len(given) != 3:
        raise ValueError(f"{NAME}: {given!r} must be [first, last, K].")
    try:
        entry = Entry(*map(int, given))
    except (TypeError, ValueError):
        raise ValueError(f"{NAME}: {given!r} must be three whole numbers.") from None
    if not 1 <= entry.first <= entry.last:
        raise ValueError(f"{NAME}: {list(entry)} must have 1 <= first <= last batch size.")
    if entry.num_speculative_tokens < 0:
        raise ValueError(f"{NAME}: {list(entry)} must have a K of at least 0.")
    return entry
