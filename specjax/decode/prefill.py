"""Prefill: writes keys and values of prompt tokens, in chunks; needs no logits.

The last prompt token is left to the first step: it is that step's root.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax.decode.buckets import round_up
from specjax.decode.forward import forward, make_batch
from specjax.decode.state import DecodeState
from specjax.decode.step_spec import StepSpec
from specjax.types import DecoderParams


def prefill(
    spec: StepSpec,
    params: DecoderParams,
    state: DecodeState,
    row_ids: Array,
    counts: Array,
    *,
    max_tokens_per_row: int,
) -> DecodeState:
    """Feeds the next counts[i] tokens of row row_ids[i] to the target and to the drafter.

    Args:
      row_ids: i32[n], distinct; `rows` for an unused place.
      counts: i32[n], at most max_tokens_per_row; 0 for an unused place.
      max_tokens_per_row: static; the token bucket is n times this.
    """
    cache = state.cache
    row = jnp.minimum(row_ids, state.rows - 1)
    batch = make_batch(
        state.history[row],
        cache.block_table[row],
        cache.lengths[row],
        counts,
        num_tokens=round_up(row_ids.shape[0] * max_tokens_per_row, spec.token_bucket),
        page_size=cache.page_size,
        num_slots=cache.num_slots,
    )
    _, pages = forward(
        params.target,
        spec.config,
        cache.pages,
        batch,
        max_tokens_per_row=max_tokens_per_row,
        token_bucket=spec.token_bucket,
        tensor_axis=spec.tensor_axis,
    )
    drafter_state = spec.drafter.prefill(
        params.drafter, state.drafter, batch, max_tokens_per_row
    )
    added = jnp.zeros(state.rows, jnp.int32).at[row_ids].add(counts, mode="drop")
    cache = dataclasses.replace(cache, pages=pages, lengths=cache.lengths + added)
    return dataclasses.replace(
        state,
        cache=cache,
        drafter=drafter_state,
        drafter_lengths=state.drafter_lengths + added,
    )
