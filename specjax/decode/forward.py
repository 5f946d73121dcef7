"""The flat step's forward: attention over pages under any model."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.tree_attention import tree_attention
from specjax.cache import paged
from specjax.cache.paged import Pages
from specjax.models.architectures import architecture_of
from specjax.models.base import ModelConfig, Params
from specjax.types import TokenBatch, lay_out


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
        slot_mapping=paged.slots(
            block_table, row_ids, positions, page_size=page_size, num_slots=num_slots
        ),
        row_starts=row_starts,
        lengths=lengths,
        block_table=block_table,
    )


def forward(
    params: Params,
    config: ModelConfig,
    pages: tuple[Pages, ...],
    batch: TokenBatch,
    *,
    max_tokens_per_row: int,
    tensor_axis: str | None = None,
) -> tuple[Array, tuple[Pages, ...]]:
    """Runs a model over flat tokens, writing their keys and values into the pages.

    Every layer writes before it reads, so a token sees itself and the pool is
    updated in place.

    Returns:
      hidden [num_tokens, hidden_size] after the final norm, and the pages.
    """

    def attend(
        layer: int, q: Array, k: Array, v: Array, pages: Pages
    ) -> tuple[Array, Pages]:
        pages = paged.write(pages, k, v, batch.slot_mapping)
        out = tree_attention(
            q,
            *pages,
            batch.block_table,
            batch.row_starts,
            batch.lengths,
            scale=config.scale,
            window=config.window(layer),
            max_tokens_per_row=max_tokens_per_row,
        )
        return out, pages

    return architecture_of(config).forward(
        params, config, batch.token_ids, batch.positions, attend, pages, tensor_axis
    )


def logits(
    params: Params, config: ModelConfig, hidden: Array, tensor_axis: str | None = None
) -> Array:
    """Returns f32[num_tokens, vocab]."""
    return architecture_of(config).logits(params, config, hidden, tensor_axis)
