"""Tree attention: the public function, its checks, and the choice of implementation."""

import functools

import jax.numpy as jnp
from jax import Array

from pallas_kernels import layout
from pallas_kernels.implementations import (
    call_best,
    if_named,
    named_for,
    needs_platform,
    target_platform,
    trusted_for,
)
from pallas_kernels.tree_attention.mosaic_gpu import tree_attention_mosaic_gpu
from pallas_kernels.tree_attention.mosaic_tpu import tree_attention_mosaic_tpu
from pallas_kernels.tree_attention.reference import tree_attention_reference
from pallas_kernels.tree_attention.xla import tree_attention_xla
from pallas_kernels.tree_attention.xla_gpu import tree_attention_xla_gpu


def tree_attention(
    q: Array,  # dtype[num_tokens, heads, head_dim]
    k_pages: Array,  # dtype[num_pages, kv_heads, page_size, head_dim], or in lanes
    v_pages: Array,  # same shape as k_pages
    block_table: Array,  # i32[rows, pages_per_row], NO_PAGE = -1 where none
    row_starts: Array,  # i32[rows + 1]
    lengths: Array,  # i32[rows]
    *,
    num_kv_heads: int | None = None,
    ancestor_bits: Array | None = None,  # u32[num_tokens, words]
    is_causal: Array | None = None,  # bool[rows]
    num_new_keys: Array | None = None,  # i32[rows]
    sinks: Array | None = None,  # f32[heads]
    k_scale: Array | None = None,  # f32[kv_heads]
    v_scale: Array | None = None,  # f32[kv_heads]
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    first_key: int = 0,
    max_tokens_per_row: int,
    implementation: str | None = None,
) -> Array:
    """Returns attention of every new token over its row's prefix and the new tokens before it.

    Row r owns the flat tokens row_starts[r] up to row_starts[r + 1] - 1, possibly
    none. The key and value of its new token i are at absolute position lengths[r] + i,
    already written: one call serves prefill, decoding, chains and trees. A tree may
    also be computed level by level: then the bits of this call's tokens include nodes
    that were written before, and `num_new_keys` counts all nodes.

    Without `ancestor_bits`, new token i sees positions up to lengths[r] + i, and with
    a window w only those above lengths[r] + i - w. With bits it sees the prefix,
    positions below lengths[r], and the new tokens j of its row whose bit j is set.

    Softmax and sums are float32. On the XLA path keys are summed in tiles at absolute
    positions, in page order, so that a token's result depends only on its keys: tiles of 64,
    and of 512 or more on a GPU, where keys and values are multiplied in their own dtype.

    Args:
      q: queries of all rows, laid end to end.
      k_pages: keys, from layout.init_pages.
      v_pages: values, from layout.init_pages.
      block_table: a row may hold any pages in any order. Pages and slots past the
        tokens written do not affect the result and may hold NaN.
      row_starts: non-decreasing. Flat tokens from row_starts[-1] on are padding, whose
        output is finite and meaningless.
      lengths: tokens whose keys and values were final before this step.
      num_kv_heads: key heads, for pages stored in lanes; None: the number in the pages.
      ancestor_bits: bit j of word w stands for new token 32 * w + j of the row; each
        token has its own bit set.
      is_causal: rows whose new tokens see each other in order, ignoring their bits, such as
        prompts beside trees. None: no row. Only together with ancestor_bits.
      num_new_keys: keys of a row from lengths[r] on that bits may refer to; None: those of
        its new tokens. Keys among them without a bit may hold NaN. Only together with
        ancestor_bits.
      sinks: for each head, the score of one extra key, whose value is 0 (Xiao et al. 2023,
        "Efficient Streaming Language Models with Attention Sinks", as in gpt-oss).
      k_scale: factor of each head's keys in int8 or fp8 (e4m3) pages; `layout.quantize`
        divides by it. Not for other pages.
      v_scale: the same for values.
      scale: multiplies the scores; usually head_dim ** -0.5.
      softcap: scores become softcap * tanh(score / softcap), after the scale (Gemma 2).
      window: number of keys that a token sees, itself included. A node of a tree counts from
        its depth; then the window must be wider than 32 * words.
      first_key: position of the first key that any token sees. Keys before it are not counted,
        and may hold NaN; a token before it sees none, and its result is 0.
      max_tokens_per_row: static bound on any row's new tokens; what is returned for tokens
        past it means nothing.
      implementation: "mosaic_tpu", "mosaic_gpu", "xla" or "reference"; None picks the best
        for this case. "mosaic_gpu" is among them only within `implementations.trusting`,
        which is for devices where `self_test` passed.

    Returns:
      dtype[num_tokens, heads, head_dim].

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: no implementation covers the case.
    """
    size = q.shape[-1]
    if num_kv_heads is not None:
        q = layout.in_lines(q, num_kv_heads, k_pages, v_pages)
    _validate(q, k_pages, v_pages, block_table, row_starts, lengths, ancestor_bits)
    layout.validate_scales(k_scale, v_scale, num_kv_heads or layout.kv_heads(k_pages), k_pages)
    if max_tokens_per_row < 1 or (window is not None and window < 1):
        raise ValueError(f"{max_tokens_per_row=} and {window=} must be at least 1.")
    if first_key < 0:
        raise ValueError(f"{first_key=} must be at least 0.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{softcap=} must be above 0.")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"{sinks.shape=} must be one of each head, ({q.shape[1]},).")
    if is_causal is not None and (
        ancestor_bits is None or is_causal.shape != lengths.shape or is_causal.dtype != jnp.bool_
    ):
        raise ValueError(
            f"{is_causal.shape=} {is_causal.dtype=} must be bool{lengths.shape}, and needs "
            "ancestor_bits."
        )
    if num_new_keys is not None and (ancestor_bits is None or num_new_keys.shape != lengths.shape):
        raise ValueError(f"{num_new_keys.shape=} must be {lengths.shape}, and needs ancestor_bits.")
    if num_new_keys is not None:
        layout.validate_int32(num_new_keys=num_new_keys)
    if 0 in (q.shape[0], lengths.shape[0]):
        return jnp.zeros((q.shape[0], q.shape[1], size), q.dtype)
    arguments = (q, k_pages, v_pages, block_table, row_starts, lengths)
    options = dict(
        ancestor_bits=ancestor_bits,
        is_causal=is_causal,
        num_new_keys=num_new_keys,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        scale=scale,
        softcap=softcap,
        window=window,
        first_key=first_key,
        max_tokens_per_row=min(max_tokens_per_row, max(q.shape[0], 1)),
    )
    mosaic_tpu = functools.partial(tree_attention_mosaic_tpu, *arguments, **options)
    mosaic_gpu = functools.partial(tree_attention_mosaic_gpu, *arguments, **options)
    xla = tree_attention_xla_gpu if target_platform() == "gpu" else tree_attention_xla
    implementation = named_for("tree_attention", implementation)
    tried = implementation or trusted_for("tree_attention")
    implementations = {
        "mosaic_tpu": needs_platform("tpu", mosaic_tpu),
        "mosaic_gpu": if_named("mosaic_gpu", tried, needs_platform("gpu", mosaic_gpu)),
        "xla": functools.partial(xla, *arguments, **options),
        "reference": functools.partial(tree_attention_reference, *arguments, **options),
    }
    out = call_best("tree_attention", implementations, implementation)
    if num_kv_heads is not None:
        out = layout.from_lines(out, num_kv_heads, size, k_pages)
    return out


def _validate(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Array,
    row_starts: Array,
    lengths: Array,
    ancestor_bits: Array | None,
) -> None:
    layout.validate_page_arrays(k_pages, v_pages)
    layout.validate_queries(q, k_pages)
    rows = lengths.shape[0] if lengths.ndim == 1 else None
    if (
        rows is None
        or row_starts.shape != (rows + 1,)
        or block_table.ndim != 2
        or block_table.shape[0] != rows
    ):
        raise ValueError(
            f"{block_table.shape=}, {row_starts.shape=}, {lengths.shape=} must be "
            "[rows, pages_per_row], [rows + 1], [rows]."
        )
    layout.validate_int32(block_table=block_table, row_starts=row_starts, lengths=lengths)
    if ancestor_bits is not None and (
        ancestor_bits.ndim != 2
        or ancestor_bits.shape[0] != q.shape[0]
        or ancestor_bits.dtype != jnp.uint32
    ):
        raise ValueError(
            f"{ancestor_bits.shape=} {ancestor_bits.dtype=} must be uint32[{q.shape[0]}, words]."
        )
