"""Verify: one forward of the target over every root and every draft token."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.cache.paged import PagedKVCache
from specjax.decode.accept import accept_by_equality, accept_by_rejection
from specjax.decode.forward import forward, logits, make_batch, make_tree_batch
from specjax.decode.state import DecodeState
from specjax.models.base import ModelConfig, Params
from specjax.sampling import (
    LogProbs,
    TreeHistory,
    choose_and_score,
    process_logits,
    target_probs,
    token_logprobs,
)
from specjax.seeded_noise import ACCEPT, RECOVER, uniforms
from specjax.trees import draft_tree
from specjax.types import REJECTION, Acceptance, Proposal, TokenBatch


class Verification(NamedTuple):
    """What the target says of a proposal."""

    acceptance: Acceptance
    is_invalid: Array  # bool[rows, max_depth + 1]: the logits that gave this token were NaN, or nothing could be chosen
    logprobs: LogProbs  # of acceptance.token_ids, leading [rows, max_depth + 1]


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
    batch = _make_batch(state, proposal)
    num_nodes = proposal.num_nodes
    hidden, pages = forward(
        params,
        config,
        state.cache.pages,
        batch,
        max_tokens_per_row=num_nodes,
        tensor_axis=tensor_axis,
    )
    scores = logits(params, config, hidden, tensor_axis)
    where = _where(state, proposal, batch)
    choice, logprobs = choose_and_score(scores, *where, max_logprobs=max_logprobs)
    flat = _nodes_by_row(batch, num_nodes)
    acceptance = accept_by_equality(proposal, choice.token_ids[flat])
    if proposal.probs is not None:
        acceptance, logprobs = _with_rejection(
            scores, state, where, proposal, acceptance, flat, max_logprobs
        )
    path = jnp.take_along_axis(flat, nodes_on_path(acceptance), axis=1)
    by_row = LogProbs(*(field[path] for field in logprobs))
    verification = Verification(acceptance, choice.is_invalid[path], by_row)
    return dataclasses.replace(state.cache, pages=pages), verification


def nodes_on_path(acceptance: Acceptance) -> Array:
    """Returns the nodes after which acceptance.token_ids stand, i32[rows, max_depth + 1]."""
    rows, width = acceptance.token_ids.shape
    if acceptance.nodes is None:
        return jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    return jnp.pad(jnp.maximum(acceptance.nodes, 0), ((0, 0), (1, 0)))


def _make_batch(state: DecodeState, proposal: Proposal) -> TokenBatch:
    """Lays out each active row's root and draft tokens."""
    cache = state.cache
    counts = jnp.where(state.is_active, proposal.num_tokens + 1, 0)
    sizes = dict(page_size=cache.page_size, num_slots=cache.num_slots)
    place = state.history, cache.block_table, cache.lengths, counts
    if proposal.tree is not None:
        return make_tree_batch(*place, proposal.token_ids, proposal.tree, **sizes)
    return make_batch(*place, num_tokens=proposal.num_nodes * state.rows, **sizes)


def _where(state: DecodeState, proposal: Proposal, batch: TokenBatch) -> tuple:
    """Returns what says which row and prefix each flat token has, as sampling takes it."""
    history = state.history
    if proposal.tree is not None:
        row = jnp.minimum(batch.row_ids, state.rows - 1)
        node = jnp.arange(batch.row_ids.shape[0]) - batch.row_starts[row]
        node = jnp.clip(node, 0, proposal.num_nodes - 1)
        paths = draft_tree.path_token_ids(proposal.tree, proposal.token_ids)
        history = TreeHistory(history, state.cache.lengths[row], paths[row, node])
    return state.sampling, batch.row_ids, batch.positions, history


def _with_rejection(
    scores: Array,
    state: DecodeState,
    where: tuple,
    proposal: Proposal,
    by_equality: Acceptance,
    flat: Array,
    max_logprobs: int,
) -> tuple[Acceptance, LogProbs]:
    """Replaces the acceptance of rows under `rejection`, and all log-probabilities."""
    processed = process_logits(scores, *where)
    probs = target_probs(processed, state.sampling, where[1])[flat]
    noise = _rejection_noise(state, proposal.num_nodes)
    in_law = accept_by_rejection(noise, proposal, probs)
    is_rejection = state.rules == REJECTION
    acceptance = jax.tree.map(
        lambda law, equal: jnp.where(
            is_rejection.reshape(-1, *[1] * (law.ndim - 1)), law, equal
        ),
        in_law,
        by_equality,
    )
    # Which token follows each flat node, where one does.
    path = jnp.take_along_axis(flat, nodes_on_path(acceptance), axis=1)
    following = jnp.zeros(scores.shape[0], jnp.int32)
    is_emitted = jnp.arange(path.shape[1])[None, :] <= acceptance.num_accepted[:, None]
    path = jnp.where(is_emitted, path, scores.shape[0])
    following = following.at[path].set(acceptance.token_ids, mode="drop")
    logprobs = token_logprobs(
        scores, following, *where, max_logprobs=max_logprobs, processed=processed
    )
    return acceptance, logprobs


def _nodes_by_row(batch: TokenBatch, num_nodes: int) -> Array:
    """Returns the flat index of each row's nodes, i32[rows, num_nodes], clamped where there are none."""
    nodes = batch.row_starts[:-1, None] + jnp.arange(num_nodes)[None, :]
    return jnp.minimum(nodes, batch.token_ids.shape[0] - 1)


def _rejection_noise(state: DecodeState, num_nodes: int) -> Array:
    """Returns f32[rows, num_nodes, 2], uniform: by (seed, root's position, role, node).

    By the root's position and not by each node's own: a rule that looks at a whole
    path may refuse it for a draw at its end, and the next step must not meet that
    draw again.
    """
    draws = [
        uniforms(state.sampling.seeds, state.cache.lengths, role, num_nodes)
        for role in (ACCEPT, RECOVER)
    ]
    return jnp.stack(draws, axis=-1)
