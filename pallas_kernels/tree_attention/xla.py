"""Tree attention for any device, written for XLA: blocks of keys, a running softmax."""

import math

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import layout

# Keys are summed in blocks of this many tokens at absolute positions, whatever the
# page size, so that a token's result does not depend on the rest of the step.
BLOCK_TOKENS = 64
_MASKED = -1e30  # finite, so that masked minus masked is 0 and not NaN


def tree_attention_xla(
    q: Array,  # dtype[num_tokens, heads, head_dim]
    k_pages: Array,  # as layout.init_pages makes them
    v_pages: Array,
    block_table: Array,  # i32[rows, pages_per_row]
    row_starts: Array,  # i32[rows + 1]
    lengths: Array,  # i32[rows]
    *,
    ancestor_bits: Array | None = None,  # u32[num_tokens, words]
    scale: float,
    window: int | None = None,
    max_tokens_per_row: int,
) -> Array:
    """See `tree_attention`. Work follows the longest row's pages in use."""
    if window is not None and ancestor_bits is not None:
        raise NotImplementedError(f"{window=} together with ancestor_bits.")
    num_tokens, heads, head_dim = q.shape
    rows = block_table.shape[0]
    kv_heads = layout.kv_heads(k_pages)
    group = heads // kv_heads
    page_size = layout.page_size(k_pages)
    pages_per_block = max(1, BLOCK_TOKENS // page_size)
    block_tokens = pages_per_block * page_size
    num_new = row_starts[1:] - row_starts[:-1]  # [rows]
    ends = jnp.where(num_new > 0, lengths + num_new, 0)

    # [rows, T]: the flat index of each new token of each row
    token = row_starts[:-1, None] + jnp.arange(max_tokens_per_row)[None]
    token = jnp.minimum(token, num_tokens - 1)
    grouped = q[token].astype(jnp.float32) * scale
    grouped = grouped.reshape(rows, max_tokens_per_row, kv_heads, group, head_dim)
    # [rows, kv_heads, group * T, head_dim]: one matmul for all that share a key head
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, head_dim)
    bits = None if ancestor_bits is None else ancestor_bits[token]
    num_blocks = math.ceil(block_table.shape[1] / pages_per_block)
    padding = num_blocks * pages_per_block - block_table.shape[1]
    table = jnp.pad(jnp.maximum(block_table, 0), ((0, 0), (0, padding)))

    def gather(pages: Array, ids: Array) -> Array:
        # One index per page and head puts each head's tokens in order as it copies.
        by_head = pages.reshape(-1, page_size, head_dim)
        ids = ids[:, None] * kv_heads + jnp.arange(kv_heads)[None, :, None]
        block = by_head.at[ids].get(mode="promise_in_bounds")
        block = block.reshape(rows, kv_heads, block_tokens, head_dim)
        return block.astype(jnp.float32)

    def visible(positions: Array) -> Array:
        new = positions - lengths[:, None]  # [rows, block]
        own = jnp.arange(max_tokens_per_row)[None, :, None]
        if bits is None:
            is_visible = new[:, None] <= own
        else:
            is_visible = (new < 0)[:, None] | _has_bit(bits, new)
        if window is not None:
            is_visible &= new[:, None] > own - window
        is_visible &= (positions < ends[:, None])[:, None]  # [rows, T, block]
        return jnp.tile(is_visible[:, None], (1, 1, group, 1))

    def body(block: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        top, total, acc = carry
        ids = lax.dynamic_slice_in_dim(
            table, block * pages_per_block, pages_per_block, 1
        )
        positions = block * block_tokens + jnp.arange(block_tokens)[None]
        # A masked value has weight 0, but 0 * NaN is NaN, and unwritten slots may be.
        is_used = (positions < ends[:, None])[:, None, :, None]
        v = jnp.where(is_used, gather(v_pages, ids), 0.0)
        is_visible = visible(positions)
        scores = jnp.einsum("rhqd,rhkd->rhqk", grouped, gather(k_pages, ids))
        scores = jnp.where(is_visible, scores, _MASKED)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights = jnp.where(is_visible, jnp.exp(scores - new_top), 0.0)
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(-1, keepdims=True)
        return new_top, total, acc * decay + jnp.einsum("rhqk,rhkd->rhqd", weights, v)

    shape = grouped.shape[:3]
    carry = (
        jnp.full((*shape, 1), _MASKED),
        jnp.zeros((*shape, 1)),
        jnp.zeros((*shape, head_dim)),
    )
    first = jnp.int32(0)
    if window is not None:
        oldest = jnp.where(num_new > 0, lengths - window + 1, jnp.iinfo(jnp.int32).max)
        first = jnp.maximum(oldest.min(), 0) // block_tokens
    last = -(-ends.max() // block_tokens)
    _, total, acc = lax.fori_loop(first, last, body, carry)
    out = acc / jnp.where(total == 0.0, 1.0, total)
    out = out.reshape(rows, kv_heads, group, max_tokens_per_row, head_dim)
    out = out.transpose(0, 3, 1, 2, 4).reshape(
        rows, max_tokens_per_row, heads, head_dim
    )
    row = jnp.searchsorted(row_starts, jnp.arange(num_tokens), side="right") - 1
    row = jnp.clip(row, 0, rows - 1)
    own = jnp.clip(jnp.arange(num_tokens) - row_starts[row], 0, max_tokens_per_row - 1)
    is_token = jnp.arange(num_tokens) < row_starts[-1]
    return jnp.where(is_token[:, None, None], out[row, own], 0.0).astype(q.dtype)


def _has_bit(bits: Array, new: Array) -> Array:
    """Returns [rows, T, block]: bit new[row, block] of bits[row, T], False outside."""
    words = bits.shape[-1]
    word = jnp.clip(new // 32, 0, words - 1)[:, None]
    word = jnp.broadcast_to(word, (*bits.shape[:2], new.shape[1]))
    bit = jnp.take_along_axis(bits, word, axis=2) >> (new % 32)[:, None].astype(
        jnp.uint32
    )
    return ((bit & 1) == 1) & (new >= 0)[:, None] & (new < 32 * words)[:, None]
