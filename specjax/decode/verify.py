"""Verify: one forward of the target over every root and every draft token."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from specjax.cache.paged import PagedKVCache
from specjax.decode.accept import accept_by_equality
from specjax.decode.forward import forward, logits, make_batch, make_tree_batch
from specjax.decode.rules import Target, choose_by_row, decide
from specjax.decode.state import DecodeState
from specjax.decode.step_spec import StepSpec
from specjax.models.base import Params
from specjax.sampling import (
    LogProbs,
    TreeHistory,
    choose_and_score,
    process_logits,
    target_probs,
    token_logprobs,
)
from specjax.trees import draft_tree
from specjax.types import Acceptance, Proposal, TokenBatch


class Verification(NamedTuple):
    """What the target says of a proposal."""

    acceptance: Acceptance
    is_invalid: Array  # bool[rows, max_depth + 1]: the logits that gave this token were NaN, or nothing could be chosen
    logprobs: LogProbs  # of acceptance.token_ids, leading [rows, max_depth + 1]


def verify(
    spec: StepSpec, params: Params, state: DecodeState, proposal: Proposal
) -> tuple[PagedKVCache, Verification]:
    """Runs the target over each active row's root and drafts, and applies the row's rule.

    Returns:
      The cache with the keys and values of all nodes written, lengths unchanged.
    """
    batch = _make_batch(state, proposal)
    hidden, pages = forward(
        params,
        spec.config,
        state.cache.pages,
        batch,
        max_tokens_per_row=proposal.num_nodes,
        tensor_axis=spec.tensor_axis,
    )
    scores = logits(params, spec.config, hidden, spec.tensor_axis)
    where = _where(state, proposal, batch)
    choice, logprobs = choose_and_score(scores, *where, max_logprobs=spec.max_logprobs)
    flat = _nodes_by_row(batch, proposal.num_nodes)
    acceptance = accept_by_equality(proposal, choice.token_ids[flat])
    if spec.rules and proposal.max_depth:
        acceptance, logprobs = _with_rules(
            spec, state, proposal, scores, where, choice.token_ids, acceptance, flat
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
    place = state.history, cache.block_table, cache.lengths, counts
    if proposal.tree is None:
        return make_batch(
            *place,
            num_tokens=proposal.num_nodes * state.rows,
            page_size=cache.page_size,
            num_slots=cache.num_slots,
        )
    return make_tree_batch(
        *place,
        proposal.token_ids,
        proposal.tree,
        page_size=cache.page_size,
        num_slots=cache.num_slots,
    )


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


def _with_rules(
    spec: StepSpec,
    state: DecodeState,
    proposal: Proposal,
    scores: Array,
    where: tuple,
    choices: Array,
    acceptance: Acceptance,
    flat: Array,
) -> tuple[Acceptance, LogProbs]:
    """Replaces what rows under rules beyond equality accept, and all log-probabilities."""
    processed = process_logits(scores, *where)
    probs = target_probs(processed, state.sampling, where[1])[flat]
    target = Target(choices[flat], probs)
    for rule in spec.rules:
        own = decide(
            rule,
            spec.rule_options,
            proposal,
            target,
            state.sampling.seeds,
            state.cache.lengths,
        )
        acceptance = choose_by_row(
            state.rules, rule, state.sampling.temperature, own, acceptance
        )
    logprobs = token_logprobs(
        scores,
        _emitted_by_node(acceptance, flat, state.is_active, scores.shape[0]),
        *where,
        max_logprobs=spec.max_logprobs,
        processed=processed,
    )
    return acceptance, logprobs


def _emitted_by_node(
    acceptance: Acceptance, flat: Array, is_active: Array, num_tokens: int
) -> Array:
    """Returns the token that follows each flat node, i32[num_tokens]; 0 where none does."""
    path = jnp.take_along_axis(flat, nodes_on_path(acceptance), axis=1)
    is_emitted = jnp.arange(path.shape[1])[None, :] <= acceptance.num_accepted[:, None]
    # Other rows have no nodes: what stands for theirs is another row's.
    is_emitted &= is_active[:, None]
    path = jnp.where(is_emitted, path, num_tokens)
    following = jnp.zeros(num_tokens, jnp.int32)
    return following.at[path].set(acceptance.token_ids, mode="drop")


def _nodes_by_row(batch: TokenBatch, num_nodes: int) -> Array:
    """Returns the flat index of each row's nodes, i32[rows, num_nodes], clamped where there are none."""
    nodes = batch.row_starts[:-1, None] + jnp.arange(num_nodes)[None, :]
    return jnp.minimum(nodes, batch.token_ids.shape[0] - 1)
