"""Path attention for any device, written for XLA: tiles of keys, a running softmax."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import layout

TILE_TOKENS = 64  # at absolute positions, whatever the page size
_MASKED = -1e30  # finite, so that masked minus masked is 0 and not NaN


def path_attention_xla(
    q: Array,  # dtype[num_tokens, heads, head_dim]
    k_pages: Array,  # as layout.init_pages makes them
    v_pages: Array,
    block_table: Array,  # i32[rows, pages_per_row]
    row_ids: Array,  # i32[num_tokens]
    lengths: Array,  # i32[rows]
    positions: Array,  # i32[num_tokens]
    *,
    path_offsets: Array | None = None,  # i32[num_tokens, max_depth + 1]
    scale: float,
    window: int | None = None,
) -> Array:
    """See `path_attention`. Work follows the longest prefix.

    A tile that a token does not see changes none of its bits: the maximum stays,
    what there is is multiplied by exp(0), and 0 is added. So neighbours with longer
    prefixes do not matter.
    """
    rows, pages_per_row = block_table.shape
    num_tokens, heads, head_dim = q.shape
    kv_heads, page_size = layout.kv_heads(k_pages), layout.page_size(k_pages)
    row = jnp.minimum(row_ids, rows - 1)
    root = lengths[row][:, None]
    table = jnp.maximum(block_table, 0)[row]
    last = jnp.where(row_ids < rows, positions, -1)
    queries = (q.astype(jnp.float32) * scale).reshape(
        num_tokens, kv_heads, heads // kv_heads, head_dim
    )

    def tile(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        top, total, acc = carry
        seen = index * TILE_TOKENS + jnp.arange(TILE_TOKENS)[None, :]
        is_visible = seen <= last[:, None]
        if window is not None:
            is_visible &= seen > last[:, None] - window
        place = jnp.broadcast_to(seen, is_visible.shape)
        if path_offsets is not None:
            depth = jnp.clip(seen - root, 0, path_offsets.shape[1] - 1)
            moved = root + jnp.take_along_axis(path_offsets, depth, axis=1)
            place = jnp.where(seen >= root, moved, seen)
        entry = jnp.clip(place // page_size, 0, pages_per_row - 1)
        page = jnp.take_along_axis(table, entry, axis=1)
        slots = page * page_size + place % page_size
        k = layout.read_slots(k_pages, slots).astype(jnp.float32)
        v = layout.read_slots(v_pages, slots).astype(jnp.float32)
        # 0 * NaN is NaN, and slots that hold no key may hold that.
        v = jnp.where(is_visible[:, :, None, None], v, 0.0)
        is_visible = is_visible[:, None, None, :]
        scores = jnp.einsum("thgd,tkhd->thgk", queries, k)
        scores = jnp.where(is_visible, scores, _MASKED)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights = jnp.where(is_visible, jnp.exp(scores - new_top), 0.0)
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(-1, keepdims=True)
        return new_top, total, acc * decay + jnp.einsum("thgk,tkhd->thgd", weights, v)

    one = (*queries.shape[:3], 1)
    carry = jnp.full(one, _MASKED), jnp.zeros(one), jnp.zeros(queries.shape)
    first = jnp.int32(0)
    if window is not None:
        oldest = jnp.where(last >= 0, last - window + 1, jnp.iinfo(jnp.int32).max)
        first = jnp.maximum(oldest.min(), 0) // TILE_TOKENS
    end = (last.max() + TILE_TOKENS) // TILE_TOKENS
    _, total, acc = lax.fori_loop(first, end, tile, carry)
    out = acc / jnp.where(total == 0.0, 1.0, total)
    return out.reshape(q.shape).astype(q.dtype)
