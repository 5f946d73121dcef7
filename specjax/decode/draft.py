"""Draft: asks the drafter for tokens after each row's root."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax.decode.state import DecodeState
from specjax.drafters.base import Draft, Drafter
from specjax.paged import kv_cache
from specjax.types import (
    NO_FAULT,
    NOT_A_NUMBER,
    NOT_A_TOKEN,
    OUTSIDE_VOCABULARY,
    DecoderParams,
    Proposal,
)


def draft(
    drafter: Drafter,
    params: DecoderParams,
    state: DecodeState,
    depth: int,
    vocab_size: int,
    least_root: int = 0,
) -> tuple[DecodeState, Draft]:
    """Runs the drafter, and writes the draft tokens of a chain into `history`.

    The depth of a row's draft is at most its cap, and at most the tokens that the row may
    still emit less the one that the target always adds. Faulty draft tokens are not
    verified, and their row drafts no more: see `_without_faults`.

    Args:
      depth: static, K.
      least_root: static; rows whose root stands before this position draft nothing.
    """
    root = state.cache.lengths
    room = state.max_lengths - root - 2
    if drafter.max_positions is not None:
        # Drafting feeds the root and all but the last draft token.
        room = jnp.minimum(room, drafter.max_positions - root)
    room = jnp.where(state.is_active, jnp.maximum(room, 0), 0)
    if least_root:
        room = jnp.where(root >= least_root, room, 0)
    caps = jnp.minimum(jnp.minimum(state.draft_caps, depth), room)
    drafted = drafter.draft(params, state.drafter, state, caps)
    proposal = drafted.proposal
    # A node without a slot would read another's key.
    num_slots = kv_cache.num_held(state.cache) * state.cache.page_size
    most = jnp.minimum(_num_within(proposal, caps), num_slots - root - 1)
    proposal = dataclasses.replace(
        proposal, num_tokens=jnp.clip(proposal.num_tokens, 0, jnp.maximum(most, 0))
    )
    proposal, fault = _without_faults(proposal, vocab_size)
    cache = state.cache
    if drafted.pages is not None:
        cache = dataclasses.replace(cache, pages=drafted.pages)
    state = dataclasses.replace(
        state,
        cache=cache,
        drafter=drafted.state,
        draft_caps=jnp.where(fault == NO_FAULT, state.draft_caps, 0),
    )
    if proposal.tree is None:
        history = write_tokens(state.history, root + 1, proposal.token_ids, proposal.num_tokens)
        state = dataclasses.replace(state, history=history)
    return state, drafted._replace(proposal=proposal, fault=fault)


def _num_within(proposal: Proposal, caps: Array) -> Array:
    """Returns how many draft tokens stand before the first one deeper than caps i32[rows]."""
    if proposal.tree is None:
        return caps
    is_deeper = proposal.tree.depths[:, 1:] > caps[:, None]
    return jnp.sum(~is_deeper.cumsum(axis=1).astype(bool), axis=1, dtype=jnp.int32)


def _without_faults(proposal: Proposal, vocab_size: int) -> tuple[Proposal, Array]:
    """Cuts each row before its first faulty token; returns the row's fault too, i32[rows].

    A cut must tell rules by law nothing about tokens drawn at or after it. Whether
    probabilities hold NaN follows from the path to the node whose children they are
    for, so that the cut before these children is exact; a cut of the whole row would
    judge earlier tokens by later ones. An id outside the vocabulary was not drawn from
    probabilities over the vocabulary, and no rule can be exact for it. It costs one draw
    at most: the caller drafts no more for the row. NaN in confidences does not cut, since
    path_probability must not influence a rule by law; `submit` ranks NaN last.
    """
    num_drafts = proposal.token_ids.shape[1]
    place = jnp.arange(num_drafts)[None, :]
    token_ids = proposal.token_ids
    is_nan = token_ids == NOT_A_TOKEN
    probs = proposal.probs
    if probs is not None:
        is_bad_law = ~jnp.isfinite(jnp.sum(probs, axis=2))
        above = jnp.broadcast_to(place, token_ids.shape)
        if proposal.tree is not None:
            above = jnp.clip(proposal.tree.parents[:, 1:], 0, num_drafts - 1)
        is_nan |= jnp.take_along_axis(is_bad_law, above, axis=1)
        # A rule multiplies unused probabilities by 0, and 0 times NaN is NaN.
        probs = jnp.where(is_bad_law[:, :, None], 0.0, probs)
    is_outside = (token_ids < 0) | (token_ids >= vocab_size)
    fault = jnp.where(is_outside, OUTSIDE_VOCABULARY, NO_FAULT)
    fault = jnp.where(is_nan, NOT_A_NUMBER, fault)
    stands = place < proposal.num_tokens[:, None]
    num_right = jnp.sum(jnp.cumprod(fault == NO_FAULT, axis=1), axis=1)
    for figure in (proposal.prior_confidence, proposal.path_probability):
        if figure is not None:
            fault = jnp.where(jnp.isnan(figure), NOT_A_NUMBER, fault)
    proposal = dataclasses.replace(
        proposal,
        token_ids=jnp.where(is_outside, 0, token_ids),
        num_tokens=jnp.minimum(proposal.num_tokens, num_right.astype(jnp.int32)),
        probs=probs,
    )
    fault = jnp.where(stands, fault, NO_FAULT)
    return proposal, jnp.max(fault, axis=1, initial=NO_FAULT).astype(jnp.int32)


def write_tokens(history: Array, starts: Array, token_ids: Array, counts: Array) -> Array:
    """Writes the first counts[row] of token_ids i32[rows, n] from starts[row] on."""
    rows, width = token_ids.shape
    ahead = jnp.arange(width)[None, :]
    target = jnp.where(ahead < counts[:, None], starts[:, None] + ahead, history.shape[1])
    return history.at[jnp.arange(rows)[:, None], target].set(token_ids, mode="drop")
