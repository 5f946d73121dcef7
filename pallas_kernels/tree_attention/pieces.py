"""Cuts rows with many new tokens into pieces, a few of which are computed at a time.

Rows of one prompt batch may have one new token or all of them. An implementation whose work is
rows * max_tokens_per_row would compute mostly padding:

    row 0  [t t t t t t t]        pieces of 4  [t t t t] [t t t .]
    row 1  [t t . . . . .]                     [t t . .]
    row 2  [. . . . . . .]

A piece sees what its row sees: its tokens begin where those of the piece before it end, and the
keys and values of all of them are written before attention reads any.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.ragged import rows_of

PIECE_TOKENS = 64  # most new tokens of a piece
PIECES_AT_ONCE = 2


def pays(rows: int, max_tokens_per_row: int) -> bool:
    """Returns whether rows of so many new tokens are cut: not few ones, nor short ones."""
    return rows > PIECES_AT_ONCE and max_tokens_per_row >= PIECE_TOKENS


def in_pieces(
    attend: Callable[..., Array], q: Array, block_table: Array, row_starts: Array, lengths: Array
) -> Array:
    """Returns attention of causal rows, computed PIECES_AT_ONCE pieces at a time.

    Args:
      attend: (q, block_table, row_starts, lengths, *, width) -> attention of a few rows of at
        most `width` new tokens, here pieces.
      q: [num_tokens, heads, head_dim].
      block_table, row_starts, lengths: as of `tree_attention`.
    """
    rows, num_tokens = lengths.shape[0], q.shape[0]
    num_new = row_starts[1:] - row_starts[:-1]
    starts = jnp.pad(jnp.cumsum(-(-num_new // PIECE_TOKENS)), (1, 0)).astype(jnp.int32)
    # A row wastes less than one piece.
    most = rows + num_tokens // PIECE_TOKENS
    most = -(-most // PIECES_AT_ONCE) * PIECES_AT_ONCE
    row = jnp.minimum(rows_of(starts, most), rows - 1)
    piece = jnp.arange(most, dtype=jnp.int32)
    first = (piece - starts[row]) * PIECE_TOKENS
    count = jnp.where(piece < starts[-1], jnp.clip(num_new[row] - first, 0, PIECE_TOKENS), 0)
    at_once = PIECES_AT_ONCE * PIECE_TOKENS
    padded = jnp.pad(q, ((0, at_once), (0, 0), (0, 0)))

    def turn(group: Array, out: Array) -> Array:
        take = lambda each: lax.dynamic_slice_in_dim(each, group * PIECES_AT_ONCE, PIECES_AT_ONCE)
        own, own_first = take(row), take(first)
        # Pieces follow each other in the flat tokens, as their rows do.
        begin = row_starts[own[0]] + own_first[0]
        new = attend(
            lax.dynamic_slice_in_dim(padded, begin, at_once),
            block_table[own],
            jnp.pad(jnp.cumsum(take(count)), (1, 0)).astype(jnp.int32),
            lengths[own] + own_first,
            width=PIECE_TOKENS,
        )
        # What is written past the last piece is written again by the next turn, or is padding.
        return lax.dynamic_update_slice_in_dim(out, new, begin, 0)

    num_groups = -(-starts[-1] // PIECES_AT_ONCE)
    return lax.fori_loop(0, num_groups, turn, jnp.zeros_like(padded))[:num_tokens]
