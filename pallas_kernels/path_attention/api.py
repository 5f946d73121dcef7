"""Path attention: the public function, its checks, and the choice of implementation."""

import functools

import jax.numpy as jnp
from jax import Array

from pallas_kernels import layout
from pallas_kernels.implementations import call_best, named_for
from pallas_kernels.path_attention.reference import path_attention_reference
from pallas_kernels.path_attention.xla import path_attention_xla


def path_attention(
    q: Array,  # dtype[num_tokens, heads, head_dim]
    k_pages: Array,  # dtype[num_pages, kv_heads, page_size, head_dim], or in lanes
    v_pages: Array,  # same shape as k_pages
    block_table: Array,  # i32[rows, pages_per_row], NO_PAGE = -1 where none
    row_ids: Array,  # i32[num_tokens]
    lengths: Array,  # i32[rows]
    positions: Array,  # i32[num_tokens]
    *,
    num_kv_heads: int | None = None,
    path_offsets: Array | None = None,  # i32[num_tokens, max_depth + 1]
    sinks: Array | None = None,  # f32[heads]
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    implementation: str | None = None,
) -> Array:
    """Returns attention of every token over its prefix and its own path, in path order.

    Token t of row r sees the keys of positions 0 to positions[t]. Keys of positions below
    lengths[r] are in their own slots. Keys of the path, lengths[r] + i, are in the slot of
    position lengths[r] + path_offsets[t, i], or without offsets, for a chain, in their own
    slots. All of them are already written.

    It computes the same as `tree_attention`, but token by token, reading a row's keys once
    per token: a token's sums have one shape and one order, whatever its row, its
    neighbours, the number of drafts, and the places of its ancestors in a tree. Softmax
    and sums are float32; on the XLA path keys are summed in tiles of 64 positions, in
    order.

    Args:
      block_table: a row may hold any pages in any order; slots without a key of the
        path do not affect the result and may hold NaN.
      row_ids: the row of each token; `rows` or more is padding, whose output is 0.
      lengths: tokens whose keys and values were final before this step.
      num_kv_heads: key heads, for pages stored in lanes; None: the number in the pages.
      path_offsets: entry i is the offset of the ancestor at depth i of the tree whose root
        is at position lengths[r]; the token's own offset is at its depth.
      sinks: for each head, the score of one extra key, whose value is 0: see `tree_attention`.
      scale: multiplies the scores; usually head_dim ** -0.5.
      softcap: scores become softcap * tanh(score / softcap), after the scale (Gemma 2).
      window: number of keys that a token sees, itself included.
      implementation: "xla" or "reference"; None picks the best for this case.

    Returns:
      dtype[num_tokens, heads, head_dim].

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: pages hold int8 or fp8.
    """
    size = q.shape[-1]
    if num_kv_heads is not None:
        q = layout.in_lines(q, num_kv_heads, k_pages, v_pages)
    layout.validate_page_arrays(k_pages, v_pages)
    layout.validate_queries(q, k_pages)
    if layout.is_quantized(k_pages):
        raise NotImplementedError(f"pages of {k_pages.dtype}; tree_attention takes their scales.")
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{softcap=} must be above 0.")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"{sinks.shape=} must be one of each head, ({q.shape[1]},).")
    _validate_integers(q.shape[0], block_table, row_ids, lengths, positions)
    if path_offsets is not None and (
        path_offsets.ndim != 2
        or path_offsets.shape[0] != q.shape[0]
        or path_offsets.dtype != jnp.int32
    ):
        raise ValueError(
            f"{path_offsets.shape=} {path_offsets.dtype=} must be int32[{q.shape[0]}, "
            "max_depth + 1]."
        )
    if 0 in (q.shape[0], lengths.shape[0]):
        return jnp.zeros((q.shape[0], q.shape[1], size), q.dtype)
    arguments = (q, k_pages, v_pages, block_table, row_ids, lengths, positions)
    options = dict(
        path_offsets=path_offsets, sinks=sinks, scale=scale, softcap=softcap, window=window
    )
    implementation = named_for("path_attention", implementation)
    implementations = {
        "xla": functools.partial(path_attention_xla, *arguments, **options),
        "reference": functools.partial(path_attention_reference, *arguments, **options),
    }
    out = call_best("path_attention", implementations, implementation)
    if num_kv_heads is not None:
        out = layout.from_lines(out, num_kv_heads, size, k_pages)
    return out


def _validate_integers(
    num_tokens: int,
    block_table: Array,
    row_ids: Array,
    lengths: Array,
    positions: Array,
) -> None:
    if row_ids.shape != (num_tokens,) or positions.shape != (num_tokens,):
        raise ValueError(f"{row_ids.shape=} and {positions.shape=} must be {(num_tokens,)}.")
    if lengths.ndim != 1 or block_table.shape[:1] != lengths.shape:
        raise ValueError(
            f"{block_table.shape=} and {lengths.shape=} must be [rows, pages_per_row] and [rows]."
        )
    layout.validate_int32(
        block_table=block_table, row_ids=row_ids, lengths=lengths, positions=positions
    )
