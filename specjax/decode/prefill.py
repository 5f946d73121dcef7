"""Prefill: writes keys and values of prompt tokens, in chunks; needs no logits.

The last prompt token is left to the first step: it is that step's root.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax.decode.absorb import absorb
from specjax.decode.kept import keep_prompt
from specjax.decode.state import DecodeState, with_table
from specjax.decode.step_spec import StepSpec
from specjax.paged.forward import forward, make_batch
from specjax.paged.token_buckets import round_up
from specjax.types import DecoderParams, TokenBatch


def prefill(
    spec: StepSpec,
    params: DecoderParams,
    state: DecodeState,
    block_table: Array,
    row_ids: Array,
    counts: Array,
    *,
    num_tokens: int,
) -> DecodeState:
    """Feeds the next counts[i] tokens of row row_ids[i] to the target and to the drafter.

    Args:
      block_table: i32[rows, pages_per_row].
      row_ids: i32[n], distinct; `rows` for an unused place.
      counts: i32[n], num_tokens in all at most; 0 for an unused place.
      num_tokens: static; the token bucket, which the rows share in any proportion.
    """
    state = with_table(state, block_table)
    batch = prompt_batch(spec, state, row_ids, counts, num_tokens)
    _, pages, tapped = forward(
        params.target,
        spec.config,
        state.cache.pages,
        batch,
        max_tokens_per_row=num_tokens,
        token_bucket=spec.token_bucket,
        tensor_axis=spec.tensor_axis,
        kv_scales=state.cache.scales,
        taps=spec.read,
    )
    cache = dataclasses.replace(state.cache, pages=pages)
    state = dataclasses.replace(state, cache=cache)
    return take_prompt(spec, params, state, batch, row_ids, counts, num_tokens, taps=tapped.batch)


def prompt_batch(
    spec: StepSpec,
    state: DecodeState,
    row_ids: Array,
    counts: Array,
    num_tokens: int,
) -> TokenBatch:
    """Lays out the next counts[i] tokens of row row_ids[i], in num_tokens flat places."""
    cache = state.cache
    row = jnp.minimum(row_ids, state.rows - 1)
    batch = make_batch(
        state.history[row],
        cache.block_table[row],
        cache.lengths[row],
        counts,
        num_tokens=round_up(num_tokens, spec.token_bucket),
        page_size=cache.page_size,
        num_slots=cache.num_slots,
    )
    # The decoder's drafter, not the spec's: this holds after the drafter was turned off too.
    if not spec.decoder.drafter.taps:
        return batch
    # The last token of shared pages is fed again for its hidden states (see `Scheduler`). Its
    # keys and values are not written again: other rows read them.
    place = jnp.minimum(batch.row_ids, row_ids.shape[0] - 1)
    is_shared = batch.positions < state.drafter_lengths[row[place]]
    slots = jnp.where(is_shared, cache.num_slots, batch.slot_mapping)
    return dataclasses.replace(batch, slot_mapping=slots)


def take_prompt(
    spec: StepSpec,
    params: DecoderParams,
    state: DecodeState,
    batch: TokenBatch,
    row_ids: Array,
    counts: Array,
    max_tokens_per_row: int,
    *,
    taps: tuple[Array, ...] = (),
) -> DecodeState:
    """Feeds a batch that the target has processed to the drafter, and advances the lengths.

    Args:
      batch: from `prompt_batch`.
      taps: hidden states of the layers spec.read, [num_tokens, hidden_size] each.
    """
    if spec.kept:
        kept = keep_prompt(state.kept, batch, row_ids, spec.of_kept(taps))
        state = dataclasses.replace(state, kept=kept)
    if spec.taps:
        own = spec.absorbed(taps)
        state = absorb(spec, params, state, batch, own, row_ids, max_tokens_per_row)
    else:
        drafter = spec.drafter.prefill(params, state.drafter, batch, row_ids, max_tokens_per_row)
        state = dataclasses.replace(state, drafter=drafter)
    added = jnp.zeros(state.rows, jnp.int32).at[row_ids].add(counts, mode="drop")
    lengths = state.cache.lengths + added
    # A drafter that is behind lacks tokens before these: it catches up when the row drafts. One
    # that absorbs may be ahead by the token that is fed again.
    is_level = state.drafter_lengths >= state.cache.lengths
    drafter_lengths = jnp.where(is_level & (added > 0), lengths, state.drafter_lengths)
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, lengths=lengths),
        drafter_lengths=drafter_lengths,
    )
