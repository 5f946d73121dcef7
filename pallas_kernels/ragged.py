"""Rows laid end to end: which row each flat token belongs to, and which tokens each row has."""

import jax.numpy as jnp
from jax import Array

_MOST_ROWS_COMPARED = 256


def rows_of(row_starts: Array, num_tokens: int) -> Array:
    """Returns the row of each flat token, i32[num_tokens]; `rows` past row_starts[-1].

    Args:
      row_starts: i32[rows + 1], non-decreasing; row r owns the flat tokens
        row_starts[r] up to row_starts[r + 1] - 1.
    """
    # Comparing with all rows is one operation, which XLA does once for all layers, but
    # of rows * num_tokens comparisons.
    rows = row_starts.shape[0] - 1
    method = "compare_all" if rows <= _MOST_ROWS_COMPARED else "scan"
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(row_starts[1:], index, side="right", method=method)
    return row.astype(jnp.int32)


def tokens_of(row_starts: Array, num_tokens: int, width: int) -> Array:
    """Returns the flat index of each row's first tokens, i32[rows, width].

    Those that a row does not have are other rows' or padding, and exist: at most
    num_tokens - 1.
    """
    token = row_starts[:-1, None] + jnp.arange(width)[None]
    return jnp.minimum(token, num_tokens - 1)
