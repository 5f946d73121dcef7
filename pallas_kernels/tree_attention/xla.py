"""Tree attention for any device, written for XLA: blocks of keys, a running softmax."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import layout, running_softmax
from pallas_kernels.ragged import rows_of, tokens_of
from pallas_kernels.running_softmax import RunningSoftmax
from pallas_kernels.tree_attention import pieces
from pallas_kernels.tree_attention.reference import check_window, depths

# Keys are summed in blocks of this many tokens at absolute positions, whatever the
# page size, so that a token's result does not depend on the rest of the step.
BLOCK_TOKENS = 64


# jit keeps the trace, which the layers of a model share.
@functools.partial(
    jax.jit,
    static_argnames=("scale", "softcap", "window", "first_key", "max_tokens_per_row"),
    inline=True,
)
def tree_attention_xla(
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
    """See `tree_attention`. Work follows the longest row's pages in use; rows with many new
    tokens are cut into pieces, of which it follows the longest at hand."""
    check_window(window, ancestor_bits)
    if ancestor_bits is None and pieces.pays(lengths.shape[0], max_tokens_per_row):
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        keys = {"scale": scale, "softcap": softcap, "window": window, "sinks": sinks, **scales}
        keys["first_key"] = first_key
        attend = lambda q, *rows, width: tree_attention_xla(
            q, k_pages, v_pages, *rows, max_tokens_per_row=width, **keys
        )
        return pieces.in_pieces(attend, q, block_table, row_starts, lengths)
    precision = running_softmax.precision_of(q.dtype)
    pages_per_row = block_table.shape[1]
    kv_heads = layout.kv_heads(k_pages)
    page_size = layout.page_size(k_pages)
    pages_per_block = max(1, BLOCK_TOKENS // page_size)
    block_tokens = pages_per_block * page_size
    num_new = row_starts[1:] - row_starts[:-1]  # [rows]
    seen = num_new if num_new_keys is None else num_new_keys
    if is_causal is not None:
        seen = jnp.where(is_causal, num_new, seen)
    ends = jnp.where(num_new > 0, lengths + seen, 0)
    token = tokens_of(row_starts, q.shape[0], max_tokens_per_row)
    # A key's scale multiplies its scores, a value's the result: pages are read as they are.
    scaled = q.astype(jnp.float32) * scale * by_query_head(k_scale, q)
    queries = _queries_by_head(scaled[token], kv_heads)
    bits = None if ancestor_bits is None else ancestor_bits[token]
    own = jnp.arange(max_tokens_per_row)[None]
    is_token = own < num_new[:, None]
    padding = -pages_per_row % pages_per_block
    table = jnp.pad(jnp.maximum(block_table, 0), ((0, 0), (0, padding)))

    def body(block: Array, state: RunningSoftmax) -> RunningSoftmax:
        ids = lax.dynamic_slice_in_dim(table, block * pages_per_block, pages_per_block, 1)
        positions = block * block_tokens + jnp.arange(block_tokens)[None]
        is_visible = visible(positions, lengths, ends, own, bits, is_causal, window, first_key)
        # A masked value has weight 0, but 0 * NaN is NaN, and unwritten slots may be:
        # past the end, before the first key, and where a level of a tree skips nodes.
        is_used = (positions < ends[:, None]) & (positions >= first_key)
        if bits is not None:
            # Places past a row's tokens hold the next row's bits.
            is_used &= jnp.any(is_visible & is_token[:, :, None], axis=1)
        v = jnp.where(is_used[:, None, :, None], gather_tile(v_pages, ids, jnp.float32), 0.0)
        group = queries.shape[2] // max_tokens_per_row
        is_visible = jnp.tile(is_visible[:, None], (1, 1, group, 1))
        scores = jnp.einsum(
            "rhqd,rhkd->rhqk", queries, gather_tile(k_pages, ids, jnp.float32), precision=precision
        )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        return running_softmax.add_tile(state, "rhqk,rhkd->rhqd", scores, is_visible, v, precision)

    first = jnp.int32(first_key // block_tokens)
    if window is not None:
        oldest = jnp.where(num_new > 0, lengths - window + 1, jnp.iinfo(jnp.int32).max)
        first = jnp.maximum(oldest.min(), first_key) // block_tokens
    last = -(-ends.max() // block_tokens)
    if sinks is not None:
        # Queries of a key head: its query heads, and of each all tokens.
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, -1)
        sinks = jnp.repeat(sinks, max_tokens_per_row, axis=1)[..., None]
    state = running_softmax.start(queries.shape, sinks)
    out = running_softmax.finish(lax.fori_loop(first, last, body, state))
    out = _lay_flat(out, row_starts, q) * by_query_head(v_scale, q)
    return out.astype(q.dtype)


def by_query_head(scale: Array | None, q: Array) -> Array | float:
    """Returns the scale of each query head's key head, f32[1, heads, 1]; 1 without."""
    if scale is None:
        return 1.0
    per_head = q.shape[1] // scale.shape[0]
    return jnp.repeat(scale.astype(jnp.float32), per_head)[None, :, None]


def _queries_by_head(q: Array, kv_heads: int) -> Array:
    """Turns q [rows, T, heads, head_dim] to [rows, kv_heads, group * T, head_dim].

    One matmul then serves all query heads that share a key head.
    """
    rows, width, heads, head_dim = q.shape
    grouped = q.reshape(rows, width, kv_heads, heads // kv_heads, head_dim)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, head_dim)


def _lay_flat(out: Array, row_starts: Array, q: Array) -> Array:
    """Undoes `_queries_by_head` and lays rows end to end, in q's shape."""
    num_tokens, heads, head_dim = q.shape
    rows, kv_heads = out.shape[:2]
    out = out.reshape(rows, kv_heads, heads // kv_heads, -1, head_dim)
    out = out.transpose(0, 3, 1, 2, 4).reshape(rows, -1, heads, head_dim)
    flat = jnp.arange(num_tokens)
    row = jnp.minimum(rows_of(row_starts, num_tokens), rows - 1)
    own = jnp.clip(flat - row_starts[row], 0, out.shape[1] - 1)
    is_token = flat < row_starts[-1]
    return jnp.where(is_token[:, None, None], out[row, own], 0.0)


def gather_tile(pages: Array, ids: Array, dtype: jnp.dtype) -> Array:
    """Returns pages ids [rows, n] as dtype[rows, kv_heads, n * page_size, head_dim]."""
    kv_heads, head_dim = layout.kv_heads(pages), layout.head_dim(pages)
    # One index per page and head puts each head's tokens in order as it copies.
    by_head = pages.reshape(-1, layout.page_size(pages), head_dim)
    by_head_ids = ids[:, None] * kv_heads + jnp.arange(kv_heads)[None, :, None]
    block = by_head.at[by_head_ids].get(mode="promise_in_bounds")
    return block.reshape(ids.shape[0], kv_heads, -1, head_dim).astype(dtype)


def visible(
    positions: Array,  # i32[rows or 1, block]
    lengths: Array,  # i32[rows]
    ends: Array,  # i32[rows], one past a row's last key; 0 in a row without any
    own: Array,  # i32[rows or 1, T], which new token of its row each query is
    bits: Array | None,  # u32[rows, T, words]
    is_causal: Array | None,  # bool[rows]
    window: int | None,
    first_key: int = 0,
) -> Array:
    """Returns which positions each new token sees, bool[rows, T, block]."""
    new = positions - lengths[:, None]  # [rows, block]
    own = own[:, :, None]
    is_visible = new[:, None] <= own
    if bits is not None:
        is_tree = True if is_causal is None else ~is_causal[:, None, None]
        own = jnp.where(is_tree, depths(bits)[:, :, None], own)
        in_tree = (new < 0)[:, None] | _has_bit(bits, new)
        is_visible = jnp.where(is_tree, in_tree, is_visible)
    if window is not None:
        is_visible &= new[:, None] > own - window
    is_key = (positions < ends[:, None]) & (positions >= first_key)
    return is_visible & is_key[:, None]


def _has_bit(bits: Array, new: Array) -> Array:
    """Returns [rows, T, block]: bit new[row, block] of bits[row, T], False outside."""
    words = bits.shape[-1]
    word = jnp.clip(new // 32, 0, words - 1)[:, None]
    word = jnp.broadcast_to(word, (*bits.shape[:2], new.shape[1]))
    bit = jnp.take_along_axis(bits, word, axis=2) >> (new % 32)[:, None].astype(jnp.uint32)
    return ((bit & 1) == 1) & (new >= 0)[:, None] & (new < 32 * words)[:, None]
