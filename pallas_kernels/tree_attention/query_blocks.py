"""Rows of new tokens cut into blocks of queries, as the kernels take them.

A block is one row's next tokens; a grid step is one of them, with the keys of that row.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.ragged import rows_of


class Sizes(Protocol):
    """Static sizes of a call that its blocks follow from."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def group(self) -> int: ...  # query heads of a key head
    @property
    def head_dim(self) -> int: ...
    @property
    def queries(self) -> int: ...  # tokens of a block
    @property
    def num_blocks(self) -> int: ...
    @property
    def query_rows(self) -> int: ...  # of a key head's query matrix, padding included


class Blocks(NamedTuple):
    """Blocks of queries, those in use first; i32[blocks] each."""

    row: Array
    first: Array  # new token of the row that is its first
    count: Array  # tokens; 0 in a block that is not in use


def most_blocks(rows: int, num_tokens: int, max_tokens_per_row: int, queries: int) -> int:
    """Returns how many blocks of so many queries the tokens of all rows may take."""
    return rows + (num_tokens // queries if max_tokens_per_row > queries else 0)


def has_single_tokens(rows: int, num_tokens: int, sizes: Sizes) -> bool:
    """Whether every block is one flat token, in order: rows of one token, laid end to end."""
    return sizes.queries == 1 and sizes.num_blocks == rows == num_tokens


def blocks_of(num_new: Array, row_starts: Array, num_tokens: int, sizes: Sizes) -> Blocks:
    """Returns the blocks of all rows, in the order of rows."""
    rows = num_new.shape[0]
    index = jnp.arange(sizes.num_blocks, dtype=jnp.int32)
    if has_single_tokens(rows, num_tokens, sizes):
        row = jnp.minimum(rows_of(row_starts, num_tokens), rows - 1)
        is_used = index < row_starts[-1]
        return Blocks(row, jnp.zeros_like(row), is_used.astype(jnp.int32))
    per_row = -(-num_new // sizes.queries)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(per_row)])
    row = rows_of(starts.astype(jnp.int32), sizes.num_blocks)
    row = jnp.minimum(row, rows - 1)
    first = (index - starts[row]) * sizes.queries
    count = jnp.clip(num_new[row] - first, 0, sizes.queries)
    return Blocks(row, first.astype(jnp.int32), count.astype(jnp.int32))


def by_block(values: Array, blocks: Blocks, row_starts: Array, sizes: Sizes) -> Array:
    """Returns values [num_tokens, ...] of each block's tokens, [blocks, queries, ...].

    Places without a token repeat another's value.
    """
    num_tokens = values.shape[0]
    if has_single_tokens(row_starts.shape[0] - 1, num_tokens, sizes):
        return values[:, None]
    first = row_starts[blocks.row] + blocks.first
    token = first[:, None] + jnp.arange(sizes.queries, dtype=jnp.int32)[None]
    return values[jnp.clip(token, 0, num_tokens - 1)]


def queries_by_head(q: Array, sizes: Sizes) -> Array:
    """Turns q [blocks, queries, heads, head_dim] to [blocks, kv_heads, query_rows, head_dim].

    Row t * group + g of a key head is its query head g of token t.
    """
    num_blocks = q.shape[0]
    q = q.reshape(num_blocks, sizes.queries, sizes.kv_heads, sizes.group, -1)
    q = q.transpose(0, 2, 1, 3, 4).reshape(num_blocks, sizes.kv_heads, -1, sizes.head_dim)
    padding = sizes.query_rows - q.shape[2]
    return jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))


def by_query_row(values: Array, sizes: Sizes) -> Array:
    """Turns values [blocks, queries, ...] to [blocks, query_rows, ...]; 0 in the padding."""
    values = jnp.repeat(values, sizes.group, axis=1)
    padding = sizes.query_rows - values.shape[1]
    return jnp.pad(values, ((0, 0), (0, padding), *[(0, 0)] * (values.ndim - 2)))


def union_bits(bits: Array | None, row_starts: Array) -> Array:
    """Returns the new tokens that any of a row's tokens sees, i32[rows, words].

    Without bits, a placeholder i32[1, 1] that is not read.
    """
    rows = row_starts.shape[0] - 1
    if bits is None:
        return jnp.zeros((1, 1), jnp.int32)
    row = rows_of(row_starts, bits.shape[0])
    place = jnp.arange(32, dtype=jnp.uint32)[None, None]
    each = (bits[:, :, None] >> place) & 1
    any_of = jnp.zeros((rows, *each.shape[1:]), jnp.uint32)
    any_of = any_of.at[row].max(each, mode="drop")
    union = jnp.sum(any_of << place, axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(union, jnp.int32)


def lay_flat(out: Array, num_new: Array, row_starts: Array, q: Array, sizes: Sizes) -> Array:
    """Undoes `queries_by_head` and lays rows end to end, in q's shape.

    Args:
      num_new: i32[rows], tokens that have a place in a block.
    """
    num_tokens, heads, head_dim = q.shape
    out = out[:, :, : sizes.queries * sizes.group]
    out = out.reshape(sizes.num_blocks, sizes.kv_heads, sizes.queries, sizes.group, head_dim)
    out = out.transpose(0, 2, 1, 3, 4).reshape(-1, heads, head_dim)
    rows = row_starts.shape[0] - 1
    flat = jnp.arange(num_tokens, dtype=jnp.int32)
    if has_single_tokens(rows, num_tokens, sizes):
        return jnp.where((flat < row_starts[-1])[:, None, None], out, 0)
    row = jnp.minimum(rows_of(row_starts, num_tokens), rows - 1)
    per_row = -(-num_new // sizes.queries)
    first_block = jnp.cumsum(per_row) - per_row
    own = flat - row_starts[row]
    place = first_block[row] * sizes.queries + own
    is_token = (flat < row_starts[-1]) & (own < num_new[row])
    place = jnp.where(is_token, place, 0)
    return jnp.where(is_token[:, None, None], out[place], 0)
