"""Draft: asks the drafter for tokens after each row's root."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.decode.state import DecodeState
from specjax.drafters.base import Drafter
from specjax.types import Proposal


def draft(
    drafter: Drafter, params: Any, state: DecodeState, depth: int
) -> tuple[DecodeState, Proposal, Array]:
    """Returns the state with the drafts written into `history`, the proposal, and Draft.written.

    A row drafts no more than its cap, and no more than it may still emit less the
    one token that the target always adds.
    """
    root = state.cache.lengths
    room = state.max_lengths - root - 2
    if drafter.max_positions is not None:
        # Drafting feeds the root and all but the last draft token.
        room = jnp.minimum(room, drafter.max_positions - root)
    num_tokens = jnp.clip(jnp.minimum(state.draft_caps, room), 0, depth)
    num_tokens = jnp.where(state.is_active, num_tokens, 0)
    proposal, drafter_state, written = drafter.draft(
        params, state.drafter, state, num_tokens
    )
    proposal = dataclasses.replace(
        proposal, num_tokens=jnp.minimum(proposal.num_tokens, num_tokens)
    )
    history = write_tokens(
        state.history, root + 1, proposal.token_ids, proposal.num_tokens
    )
    return (
        dataclasses.replace(state, drafter=drafter_state, history=history),
        proposal,
        written,
    )


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
