"""The fixed sizes of a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The static sizes of a decode state, over all shards."""

    rows: int
    page_size: int
    num_pages: int
    pages_per_row: int
    burst_steps: int
    # Slots of a row past its last token, which hold the nodes of a tree until a path is
    # accepted; 0 for chains.
    tree_slots: int = 0
    dtype: Any = jnp.float32  # of keys and values

    @property
    def max_length(self) -> int:
        """Most tokens that a row can hold."""
        return self.pages_per_row * self.page_size


PLACES = 8  # rows whose prompt tokens share one prefill call


def chunk_widths(prefill_tokens: int) -> tuple[int, int]:
    """Returns prompt tokens per row and call: where rows share the call, and for one row alone."""
    narrow = max(prefill_tokens // PLACES, 1)
    return narrow, max(prefill_tokens // 2, narrow)
