"""The rows of a batch: one by one, and as arrays for planning bursts. No jax."""

from __future__ import annotations

import dataclasses

import numpy as np

from specjax.engine.request import Request


@dataclasses.dataclass(eq=False)
class Row:
    """A request in its place in the batch."""

    index: int
    shard: int
    request: Request
    token_ids: list[int]  # prompt and output read back so far
    # Tokens with keys and values after the work sent so far; all of token_ids but the last
    # once the row decodes.
    num_prefilled: int
    num_drafter_final: int  # the same for the drafter's keys and values
    # Ids of the cached prefixes of its first pages.
    prefixes: list[int] = dataclasses.field(default_factory=list)
    num_drafter_remembered: int = 0  # cached prefixes that hold the drafter's keys and values
    # Whether some of its keys and values were computed under earlier weights.
    is_of_old_weights: bool = False

    @property
    def num_to_prefill(self) -> int:
        """Tokens to feed before it can decode; the last token is the first step's root."""
        return len(self.token_ids) - 1 - self.num_prefilled


class RowTable:
    """Figures of every row by its index, i64[rows] or bool[rows]; 0 for an empty row.

    Planning with a Python loop over hundreds of rows would take as long as a step.
    """

    def __init__(self, num_rows: int):
        # Copied from the request by `enter`.
        self.request_number, self.draft_cap, self.max_length = self._zeros(3, num_rows)
        self.expected_end = np.zeros(num_rows, np.int64)  # tokens; 0 if unknown
        self.is_streamed = np.zeros(num_rows, bool)
        # Copied from the row by `update`.
        self.num_tokens, self.num_drafter_final = self._zeros(2, num_rows)
        self.is_prefilled = np.zeros(num_rows, bool)  # and occupied
        # Kept only here: the most tokens that the work in flight adds, and the least unless the
        # row ends; its pages; whether it has begun to decode.
        self.flying_most, self.flying_least = self._zeros(2, num_rows)
        self.num_pages = np.zeros(num_rows, np.int64)
        self.is_occupied, self.is_decoding = np.zeros((2, num_rows), bool)

    def enter(self, row: Row) -> None:
        """Fills the entries of a newly occupied row."""
        self.clear(row.index)
        request = row.request
        self.request_number[row.index] = request.number
        self.draft_cap[row.index] = request.draft_cap
        self.max_length[row.index] = request.max_length
        self.is_streamed[row.index] = request.is_streamed
        if request.expected_length:
            end = len(request.prompt_token_ids) + request.expected_length
            self.expected_end[row.index] = min(end, request.max_length)
        self.is_occupied[row.index] = True
        self.update(row)

    def update(self, row: Row) -> None:
        """Copies a row's own figures."""
        self.num_tokens[row.index] = len(row.token_ids)
        self.num_drafter_final[row.index] = row.num_drafter_final
        self.is_prefilled[row.index] = not row.num_to_prefill

    def clear(self, index: int) -> None:
        """Zeroes the entries of a row."""
        for figures in vars(self).values():
            figures[index] = 0

    @property
    def most(self) -> np.ndarray:
        """Most tokens that each row can have after the work sent so far, i64[rows]."""
        return np.minimum(self.num_tokens + self.flying_most, self.max_length)

    @property
    def least(self) -> np.ndarray:
        """Least tokens that each row has after the work sent so far unless it ends, i64[rows]."""
        return self.num_tokens + self.flying_least

    @staticmethod
    def _zeros(count: int, num_rows: int) -> np.ndarray:
        return np.zeros((count, num_rows), np.int64)
