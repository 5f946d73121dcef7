"""Tree attention, defined: loops over rows and tokens. Slow, and right everywhere."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import layout


def tree_attention_reference(
    q: Array,  # dtype[num_tokens, heads, head_dim]
    k_pages: Array,  # as layout.init_pages makes them
    v_pages: Array,
    block_table: Array,  # i32[rows, pages_per_row]
    row_starts: Array,  # i32[rows + 1]
    lengths: Array,  # i32[rows]
    *,
    ancestor_bits: Array | None = None,  # u32[num_tokens, words]
    is_causal: Array | None = None,  # bool[rows]
    num_new_keys: Array | None = None,  # i32[rows]
    sinks: Array | None = None,  # f32[heads]
    k_scale: Array | None = None,  # f32[key heads in the pages]
    v_scale: Array | None = None,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    first_key: int = 0,
    max_tokens_per_row: int,
) -> Array:
    """See `tree_attention`; what only bounds the work is not used here."""
    del max_tokens_per_row, num_new_keys
    check_window(window, ancestor_bits)
    num_tokens, heads, _ = q.shape
    rows, pages_per_row = block_table.shape
    page_size = layout.page_size(k_pages)
    group = heads // layout.kv_heads(k_pages)
    positions = jnp.arange(pages_per_row * page_size)

    def attend_row(row: Array | int, out: Array) -> Array:
        pages = block_table[row]
        slots = pages[positions // page_size] * page_size + positions % page_size
        has_page = pages[positions // page_size] != layout.NO_PAGE
        slots = jnp.where(has_page, slots, layout.num_slots(k_pages))
        k = layout.read_slots(k_pages, slots).astype(jnp.float32)
        v = layout.read_slots(v_pages, slots).astype(jnp.float32)
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        if k_scale is not None and v_scale is not None:
            k *= jnp.repeat(k_scale, heads // k_scale.shape[0])[None, :, None]
            v *= jnp.repeat(v_scale, heads // v_scale.shape[0])[None, :, None]

        def attend_token(token: Array, out: Array) -> Array:
            new = positions - lengths[row]  # which new token has its key here
            own = token - row_starts[row]
            if ancestor_bits is None:
                is_visible = new <= own
            else:
                bits = ancestor_bits[token]
                own = depths(bits)
                # A negative or too large index is masked below or is no ancestor.
                word = jnp.clip(new // 32, 0, bits.shape[0] - 1)
                bit = (bits[word] >> (new % 32).astype(jnp.uint32)) & 1
                is_ancestor = (bit == 1) & (new < 32 * bits.shape[0])
                is_visible = (new < 0) | is_ancestor
                if is_causal is not None:
                    in_order = token - row_starts[row]
                    is_visible = jnp.where(is_causal[row], new <= in_order, is_visible)
                    own = jnp.where(is_causal[row], in_order, own)
            if window is not None:
                is_visible &= new > own - window
            is_visible = (is_visible & has_page & (positions >= first_key))[:, None]
            scores = jnp.sum(q[token][None].astype(jnp.float32) * k, -1) * scale
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            scores = jnp.where(is_visible, scores, -jnp.inf)  # [positions, heads]
            sink = -jnp.inf if sinks is None else sinks.astype(jnp.float32)
            top = jnp.maximum(scores.max(0), sink)
            top = jnp.where(top > -jnp.inf, top, 0.0)  # of a token that sees nothing
            weights = jnp.where(is_visible, jnp.exp(scores - top[None]), 0.0)
            values = jnp.where(is_visible[..., None], v, 0.0)
            total = weights.sum(0) + jnp.exp(sink - top)
            total = jnp.where(total == 0.0, 1.0, total)
            attended = jnp.sum(weights[..., None] * values, 0) / total[:, None]
            return out.at[token].set(attended.astype(q.dtype))

        return lax.fori_loop(row_starts[row], row_starts[row + 1], attend_token, out)

    return lax.fori_loop(0, rows, attend_row, jnp.zeros((num_tokens, heads, q.shape[2]), q.dtype))


def depths(bits: Array) -> Array:
    """Returns the depth of each node of ancestor bits [..., words]: its ancestors, i32[...]."""
    return jnp.sum(lax.population_count(bits), axis=-1).astype(jnp.int32) - 1


def check_window(window: int | None, ancestor_bits: Array | None) -> None:
    """Raises NotImplementedError where a window might hide a node's own ancestors."""
    if window is None or ancestor_bits is None:
        return
    most_nodes = 32 * ancestor_bits.shape[1]
    if window <= most_nodes:
        raise NotImplementedError(
            f"{window=} together with ancestor_bits of up to {most_nodes} nodes; a wider "
            "window is covered."
        )
