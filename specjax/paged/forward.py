"""The flat step's forward: attention over pages under any model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.path_attention import path_attention
from pallas_kernels.tree_attention import tree_attention
from specjax.models.architectures import architecture_of
from specjax.models.base import ModelConfig, Params
from specjax.paged import kv_cache
from specjax.paged.kv_cache import Pages
from specjax.paged.token_buckets import in_buckets
from specjax.trees import draft_tree
from specjax.types import DraftTree, TokenBatch, lay_out


class Part(NamedTuple):
    """Rows that are alike in how many tokens each has."""

    batch: TokenBatch
    max_tokens_per_row: int


def make_batch(
    history: Array,
    block_table: Array,
    lengths: Array,
    counts: Array,
    *,
    num_tokens: int,
    page_size: int,
    num_slots: int,
) -> TokenBatch:
    """Lays out the next `counts` tokens of each row, from position `lengths` on.

    Args:
      history: i32[rows, max_length], tokens by position.
      block_table: i32[rows, pages_per_row].
      lengths, counts: i32[rows].
      num_tokens: the token bucket, at least the sum of counts.
    """
    rows, max_length = history.shape
    row_starts, row_ids, offsets = lay_out(counts, num_tokens)
    row = jnp.minimum(row_ids, rows - 1)
    positions = jnp.where(row_ids < rows, lengths[row] + offsets, 0)
    return TokenBatch(
        token_ids=history[row, jnp.minimum(positions, max_length - 1)],
        positions=positions,
        row_ids=row_ids,
        slot_mapping=kv_cache.slots(
            block_table, row_ids, positions, page_size=page_size, num_slots=num_slots
        ),
        row_starts=row_starts,
        lengths=lengths,
        block_table=block_table,
    )


def make_tree_batch(
    history: Array,
    block_table: Array,
    lengths: Array,
    counts: Array,
    token_ids: Array,
    tree: DraftTree,
    *,
    num_tokens: int | None = None,
    page_size: int,
    num_slots: int,
    nodes: Sequence[int] | None = None,
    num_new_keys: Array | None = None,
    by_path: bool = False,
) -> TokenBatch:
    """Lays out the first `counts` nodes of each row's tree, or of some of its nodes.

    Node j has its key in the slot of position lengths + j, and the rotary position
    lengths + depth.

    Args:
      history: i32[rows, max_length], of which the root is read.
      counts: i32[rows], nodes with the root.
      token_ids: i32[rows, num_nodes - 1], of the nodes after the root.
      num_tokens: the token bucket; None is the nodes of all rows.
      nodes: which nodes, static; None is all. Their ancestors were fed before.
      num_new_keys: i32[rows], see tree_attention; needed with `nodes`.
      by_path: whether attention is told of each node's path, as `forward` with a
        token_bucket needs it, or of its ancestors' bits.
    """
    rows, max_length = history.shape
    chosen = jnp.array(tuple(range(tree.num_nodes)) if nodes is None else tuple(nodes))
    num_tokens = rows * chosen.size if num_tokens is None else num_tokens
    row_starts, row_ids, offset = lay_out(counts, num_tokens)
    row, offset = jnp.minimum(row_ids, rows - 1), jnp.clip(offset, 0, chosen.size - 1)
    node = chosen[offset]
    is_token = row_ids < rows
    root = jnp.minimum(lengths, max_length - 1)
    root_ids = jnp.take_along_axis(history, root[:, None], axis=1)
    ancestors = (
        {"path_offsets": _path_offsets(tree)[row, node]}
        if by_path
        else {"ancestor_bits": draft_tree.ancestor_bits(tree)[row, node]}
    )
    return TokenBatch(
        token_ids=jnp.concatenate([root_ids, token_ids], axis=1)[row, node],
        positions=jnp.where(is_token, lengths[row] + tree.depths[row, node], 0),
        row_ids=row_ids,
        slot_mapping=kv_cache.slots(
            block_table,
            row_ids,
            jnp.where(is_token, lengths[row] + node, 0),
            page_size=page_size,
            num_slots=num_slots,
        ),
        row_starts=row_starts,
        lengths=lengths,
        block_table=block_table,
        num_new_keys=num_new_keys,
        **ancestors,
    )


def _path_offsets(tree: DraftTree) -> Array:
    """Returns the nodes on the way from the root to each node, i32[rows, num_nodes, max_depth +
    1]."""
    rows, num_nodes = tree.parents.shape
    nodes = draft_tree.paths(tree, jnp.full(rows, num_nodes - 1, jnp.int32))
    return jnp.pad(jnp.maximum(nodes, 0), ((0, 0), (0, 0), (1, 0)))


def forward(
    params: Params,
    config: ModelConfig,
    pages: tuple[Pages, ...],
    batch: TokenBatch,
    *,
    max_tokens_per_row: int,
    token_bucket: int | None = None,
    tensor_axis: str | None = None,
    beside: Part | None = None,
) -> tuple[Array, tuple[Pages, ...]]:
    """Runs a model over flat tokens, writing their keys and values into the pages.

    Every layer writes before it reads, so a token sees itself and the pool is
    updated in place.

    Args:
      token_bucket: so many tokens at a time, each attended by itself: see buckets.
        The batch is a multiple of it. None: all tokens at once, row by row.
      beside: tokens of other rows, which run through the same matmuls and are attended
        apart. Neither reads what the other writes. Not with a token_bucket.

    Returns:
      hidden [num_tokens, hidden_size] of `batch` after the final norm, and the pages.
    """
    if token_bucket is not None:
        assert beside is None, "what runs beside has a shape of its own"
        return _forward_by_bucket(params, config, pages, batch, token_bucket, tensor_axis)
    parts = [Part(batch, max_tokens_per_row), *([] if beside is None else [beside])]
    ends = list(itertools.accumulate(p.batch.token_ids.shape[0] for p in parts))

    def along(name: str) -> Array:
        return jnp.concatenate([getattr(part.batch, name) for part in parts])

    slot_mapping = along("slot_mapping")

    def attend(layer: int, q: Array, k: Array, v: Array, pages: Pages) -> tuple[Array, Pages]:
        pages = kv_cache.write(pages, k, v, slot_mapping)
        outs = [
            tree_attention(
                own,
                *pages,
                part.batch.block_table,
                part.batch.row_starts,
                part.batch.lengths,
                num_kv_heads=k.shape[1],
                ancestor_bits=part.batch.ancestor_bits,
                num_new_keys=part.batch.num_new_keys,
                scale=config.scale,
                window=config.window(layer),
                max_tokens_per_row=part.max_tokens_per_row,
            )
            for own, part in zip(jnp.split(q, ends[:-1]), parts)
        ]
        return jnp.concatenate(outs), pages

    hidden, pages = architecture_of(config).forward(
        params,
        config,
        along("token_ids"),
        along("positions"),
        attend,
        pages,
        tensor_axis,
    )
    return hidden[: ends[0]], pages


def _forward_by_bucket(
    params: Params,
    config: ModelConfig,
    pages: tuple[Pages, ...],
    batch: TokenBatch,
    token_bucket: int,
    tensor_axis: str | None,
) -> tuple[Array, tuple[Pages, ...]]:
    """Runs `forward` on one bucket of tokens after the other; ancestors come before."""
    tokens = _BucketTokens(
        batch.token_ids,
        batch.positions,
        batch.row_ids,
        batch.slot_mapping,
        batch.path_offsets,
    )

    def run(pages: tuple[Pages, ...], part: _BucketTokens) -> tuple[tuple[Pages, ...], Array]:
        def attend(layer: int, q: Array, k: Array, v: Array, pages: Pages) -> tuple[Array, Pages]:
            pages = kv_cache.write(pages, k, v, part.slot_mapping)
            out = path_attention(
                q,
                *pages,
                batch.block_table,
                part.row_ids,
                batch.lengths,
                part.positions,
                num_kv_heads=k.shape[1],
                path_offsets=part.path_offsets,
                scale=config.scale,
                window=config.window(layer),
            )
            return out, pages

        hidden, pages = architecture_of(config).forward(
            params, config, part.token_ids, part.positions, attend, pages, tensor_axis
        )
        return pages, hidden

    num_used = batch.row_starts[-1]
    pages, hidden = in_buckets(run, pages, tokens, token_bucket, num_used)
    return hidden, pages


class _BucketTokens(NamedTuple):
    """What of a TokenBatch belongs to each token."""

    token_ids: Array
    positions: Array
    row_ids: Array
    slot_mapping: Array
    path_offsets: Array | None


def logits(
    params: Params, config: ModelConfig, hidden: Array, tensor_axis: str | None = None
) -> Array:
    """Returns f32[num_tokens, vocab], token by token in memory.

    On a CPU they come turned (see `linear`), and every branch of a lax.cond that reads them
    would turn them back for itself. Under jax 0.10's automatic partitioning a layout costs a
    gathering of what is sharded; the programs here are sharded by hand.
    """
    scores = architecture_of(config).logits(params, config, hidden, tensor_axis)
    by_token = lambda scores: with_layout_constraint(scores, Layout((0, 1)))
    return lax.platform_dependent(scores, cpu=by_token, default=lambda same: same)
