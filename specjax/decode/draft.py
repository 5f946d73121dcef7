"""Draft: asks the drafter for tokens after each row's root."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.cache import paged
from specjax.decode.state import DecodeState
from specjax.drafters.base import Draft, Drafter
from specjax.types import Proposal


def draft(
    drafter: Drafter, params: Any, state: DecodeState, depth: int
) -> tuple[DecodeState, Draft]:
    """Asks for drafts; those of a chain are written into `history`.

    A row drafts no deeper than its cap, and no deeper than it may still emit less the
    one token that the target always adds.

    Raises:
      ValueError: probabilities come with a proposal that was not drawn from them.
    """
    root = state.cache.lengths
    room = state.max_lengths - root - 2
    if drafter.max_positions is not None:
        # Drafting feeds the root and all but the last draft token.
        room = jnp.minimum(room, drafter.max_positions - root)
    room = jnp.where(state.is_active, jnp.maximum(room, 0), 0)
    caps = jnp.minimum(jnp.minimum(state.draft_caps, depth), room)
    drafted = drafter.draft(params, state.drafter, state, caps)
    proposal = drafted.proposal
    if proposal.probs is not None and not drafter.draws_afresh:
        raise ValueError(
            "the drafter's proposal has probs, and the drafter does not say draws_afresh; "
            "expected the law that its tokens were drawn from in this step. Verification "
            "by probabilities stored with earlier rollouts would be biased: give probs=None, "
            "and rules by law run as delta, which is exact for tokens however chosen."
        )
    # A node without a slot would read another's key.
    num_slots = paged.num_held(state.cache) * state.cache.page_size
    most = jnp.minimum(_num_within(proposal, caps), num_slots - root - 1)
    most = jnp.maximum(most, 0)
    proposal = dataclasses.replace(
        proposal, num_tokens=jnp.minimum(proposal.num_tokens, most)
    )
    state = dataclasses.replace(state, drafter=drafted.state)
    if proposal.tree is None:
        history = write_tokens(
            state.history, root + 1, proposal.token_ids, proposal.num_tokens
        )
        state = dataclasses.replace(state, history=history)
    return state, drafted._replace(proposal=proposal)


def _num_within(proposal: Proposal, caps: Array) -> Array:
    """Returns how many draft tokens stand before the first one deeper than caps i32[rows]."""
    if proposal.tree is None:
        return caps
    is_deeper = proposal.tree.depths[:, 1:] > caps[:, None]
    return jnp.sum(~is_deeper.cumsum(axis=1).astype(bool), axis=1, dtype=jnp.int32)


def write_tokens(
    history: Array, starts: Array, token_ids: Array, counts: Array
) -> Array:
    """Writes the first counts[row] of token_ids i32[rows, n] from starts[row] on."""
    rows, width = token_ids.shape
    ahead = jnp.arange(width)[None, :]
    target = jnp.where(
        ahead < counts[:, None], starts[:, None] + ahead, history.shape[1]
    )
    return history.at[jnp.arange(rows)[:, None], target].set(token_ids, mode="drop")
