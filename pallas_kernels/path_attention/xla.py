"""Path attention for any device, written for XLA: tiles of keys, a running softmax."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import layout, running_softmax
from pallas_kernels.running_softmax import RunningSoftmax

TILE_TOKENS = 64  # at absolute positions, whatever the page size


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
    sinks: Array | None = None,  # f32[heads]
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Array:
    """See `path_attention`. Work follows the longest prefix.

    Tiles that a token does not see change none of its bits, so neighbours with
    longer prefixes do not matter.
    """
    precision = running_softmax.precision_of(q.dtype)
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

    def tile(index: Array, state: RunningSoftmax) -> RunningSoftmax:
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
        scores = jnp.einsum("thgd,tkhd->thgk", queries, k, precision=precision)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        is_visible = is_visible[:, None, None, :]
        return running_softmax.add_tile(state, "thgk,tkhd->thgd", scores, is_visible, v, precision)

    first = jnp.int32(0)
    if window is not None:
        oldest = jnp.where(last >= 0, last - window + 1, jnp.iinfo(jnp.int32).max)
        first = jnp.maximum(oldest.min(), 0) // TILE_TOKENS
    end = (last.max() + TILE_TOKENS) // TILE_TOKENS
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, kv_heads, heads // kv_heads, 1)
    state = running_softmax.start(queries.shape, sinks)
    out = running_softmax.finish(lax.fori_loop(first, end, tile, state))
    return out.reshape(q.shape).astype(q.dtype)
