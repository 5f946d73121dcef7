"""Path attention, defined: one token after the other, all its keys at once."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import layout


def path_attention_reference(
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
    """See `path_attention`."""
    rows, pages_per_row = block_table.shape
    page_size = layout.page_size(k_pages)
    group = q.shape[1] // layout.kv_heads(k_pages)
    every = jnp.arange(pages_per_row * page_size)

    def attend(token: Array) -> Array:
        row, position = jnp.minimum(row_ids[token], rows - 1), positions[token]
        place = every
        if path_offsets is not None:
            depth = jnp.clip(every - lengths[row], 0, path_offsets.shape[1] - 1)
            moved = lengths[row] + path_offsets[token, depth]
            place = jnp.where(every >= lengths[row], moved, every)
        page = block_table[row, jnp.clip(place // page_size, 0, pages_per_row - 1)]
        slots = page * page_size + place % page_size
        k, v = (
            jnp.repeat(layout.read_slots(pages, slots).astype(jnp.float32), group, 1)
            for pages in (k_pages, v_pages)
        )
        is_visible = (every <= position) & (row_ids[token] < rows)
        if window is not None:
            is_visible &= every > position - window
        scores = jnp.sum(q[token][None].astype(jnp.float32) * k, -1) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(is_visible[:, None], scores, -jnp.inf)
        top = jnp.max(scores, axis=0, where=is_visible[:, None], initial=-1e30)
        sink = -jnp.inf if sinks is None else sinks.astype(jnp.float32)
        top = jnp.maximum(top, sink)
        weights = jnp.exp(scores - top[None])
        total = jnp.maximum(weights.sum(0) + jnp.exp(sink - top), 1e-30)[:, None]
        values = jnp.where(is_visible[:, None, None], v, 0.0)
        return jnp.sum(weights[..., None] * values, axis=0) / total

    return lax.map(attend, jnp.arange(q.shape[0])).astype(q.dtype)
