"""Verify: one forward of the target over every root and every draft token."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from specjax.cache.paged import PagedKVCache
from specjax.decode.accept import accept_by_equality, accept_by_rejection
from specjax.decode.forward import forward, logits, make_batch
from specjax.decode.state import DecodeState
from specjax.models.base import ModelConfig, Params
from specjax.sampling import (
    LogProbs,
    choose_and_score,
    process_logits,
    target_probs,
    token_logprobs,
)
from specjax.seeded_noise import ACCEPT, RECOVER, uniforms
from specjax.types import REJECTION, Acceptance, Proposal, TokenBatch


class Verification(NamedTuple):
    """What the target says of a proposal."""

    acceptance: Acceptance
    is_invalid: Array  # bool[rows, K + 1]: the logits after this node were NaN, or nothing could be chosen
    logprobs: LogProbs  # of acceptance.token_ids, leading [rows, K + 1]


def verify(
    params: Params,
    config: ModelConfig,
    state: DecodeState,
    proposal: Proposal,
    *,
    max_logprobs: int,
    tensor_axis: str | None,
) -> tuple[PagedKVCache, Verification]:
    """Runs the target over each active row's root and drafts, and applies the row's rule.

    Returns:
      The cache with the keys and values of all nodes written, lengths unchanged.
    """
    cache = state.cache
    rows, depth = proposal.token_ids.shape
    batch = make_batch(
        state.history,
        cache.block_table,
        cache.lengths,
        jnp.where(state.is_active, proposal.num_tokens + 1, 0),
        num_tokens=rows * (depth + 1),
        page_size=cache.page_size,
        num_slots=cache.num_slots,
    )
    hidden, pages = forward(
        params,
        config,
        cache.pages,
        batch,
        max_tokens_per_row=depth + 1,
        tensor_axis=tensor_axis,
    )
    scores = logits(params, config, hidden, tensor_axis)
    where = (state.sampling, batch.row_ids, batch.positions, state.history)
    choice, logprobs = choose_and_score(scores, *where, max_logprobs=max_logprobs)
    nodes = _nodes_by_row(batch, depth)
    acceptance = accept_by_equality(proposal, choice.token_ids[nodes])
    if proposal.probs is not None:
        acceptance, logprobs = _with_rejection(
            scores, state, batch, proposal, acceptance, nodes, max_logprobs
        )
    by_row = LogProbs(*(field[nodes] for field in logprobs))
    verification = Verification(acceptance, choice.is_invalid[nodes], by_row)
    return dataclasses.replace(cache, pages=pages), verification


def _with_rejection(
    scores: Array,
    state: DecodeState,
    batch: TokenBatch,
    proposal: Proposal,
    by_equality: Acceptance,
    nodes: Array,
    max_logprobs: int,
) -> tuple[Acceptance, LogProbs]:
    """Replaces the acceptance of rows under `rejection`, and all log-probabilities."""
    cache = state.cache
    rows, depth = proposal.token_ids.shape
    where = (state.sampling, batch.row_ids, batch.positions, state.history)
    processed = process_logits(scores, *where)
    probs = target_probs(processed, state.sampling, batch.row_ids)[nodes]
    in_law = accept_by_rejection(_rejection_noise(state, depth), proposal, probs)
    is_rejection = state.rules == REJECTION
    acceptance = Acceptance(
        jnp.where(is_rejection[:, None], in_law.token_ids, by_equality.token_ids),
        jnp.where(is_rejection, in_law.num_accepted, by_equality.num_accepted),
    )
    row = jnp.minimum(batch.row_ids, rows - 1)
    offset = jnp.clip(batch.positions - cache.lengths[row], 0, depth)
    logprobs = token_logprobs(
        scores,
        acceptance.token_ids[row, offset],
        *where,
        max_logprobs=max_logprobs,
        processed=processed,
    )
    return acceptance, logprobs


def _nodes_by_row(batch: TokenBatch, depth: int) -> Array:
    """Returns the flat index of each row's nodes, i32[rows, depth + 1], clamped where there are none."""
    nodes = batch.row_starts[:-1, None] + jnp.arange(depth + 1)[None, :]
    return jnp.minimum(nodes, batch.token_ids.shape[0] - 1)


def _rejection_noise(state: DecodeState, depth: int) -> Array:
    """Returns f32[rows, depth + 1, 2]: by (seed, position, role), so no draw is used twice."""
    positions = state.cache.lengths[:, None] + jnp.arange(depth + 1)[None, :]
    seeds = jnp.repeat(state.sampling.seeds, depth + 1, axis=0)
    draws = [
        uniforms(seeds, positions.reshape(-1), role, 1)[:, 0]
        for role in (ACCEPT, RECOVER)
    ]
    return jnp.stack(draws, axis=-1).reshape(*positions.shape, 2)
