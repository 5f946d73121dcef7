"""Commit: accepted tokens become part of the prefix, as far as stop rules let them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax.cache import paged
from specjax.decode.draft import write_tokens
from specjax.decode.state import DecodeState
from specjax.decode.verify import Verification
from specjax.types import (
    INVALID_LOGITS,
    OUT_OF_LENGTH,
    RUNNING,
    STOPPED,
    Proposal,
    StepInfo,
)


def commit(
    state: DecodeState, proposal: Proposal, verification: Verification, written: Array
) -> tuple[DecodeState, StepInfo]:
    """Commits num_accepted + 1 tokens per active row, less what a stop rule cuts.

    A stop token is committed and ends its row; so does the last token of its
    length. A row whose logits were NaN ends before the token they would have given.

    Args:
      written: i32[rows], Draft.written.
    """
    acceptance, is_invalid, logprobs = verification
    token_ids, num_accepted = acceptance.token_ids, acceptance.num_accepted
    ahead = jnp.arange(token_ids.shape[1])[None, :]
    root = state.cache.lengths
    reached = ahead <= num_accepted[:, None]
    is_stop = jnp.any(
        token_ids[:, :, None] == state.sampling.stop_token_ids[:, None, :], axis=2
    )
    num_before_stop = _first(is_stop & reached) + 1
    num_before_invalid = _first(is_invalid & reached)
    room = state.max_lengths - root - 1
    num_committed = jnp.minimum(
        num_accepted + 1, jnp.minimum(num_before_stop, num_before_invalid)
    )
    num_committed = jnp.where(state.is_active, jnp.minimum(num_committed, room), 0)

    finish = jnp.full_like(root, RUNNING)
    finish = jnp.where(num_committed >= room, OUT_OF_LENGTH, finish)
    finish = jnp.where(num_committed == num_before_stop, STOPPED, finish)
    # What already ended the row left the invalid node unasked.
    ends_before = jnp.minimum(num_before_stop, room)
    finish = jnp.where(
        (num_before_invalid <= num_accepted) & (num_before_invalid < ends_before),
        INVALID_LOGITS,
        finish,
    )
    finish = jnp.where(state.is_active, finish, RUNNING)

    cache = paged.commit(state.cache, num_committed)
    new_state = dataclasses.replace(
        state,
        cache=cache,
        history=write_tokens(state.history, root + 1, token_ids, num_committed),
        drafter_lengths=jnp.minimum(written, cache.lengths),
        is_active=state.is_active & (finish == RUNNING),
    )
    info = StepInfo(
        token_ids=token_ids,
        num_committed=num_committed,
        num_accepted=jnp.minimum(num_accepted, num_committed),
        num_drafted=jnp.where(state.is_active, proposal.num_tokens, 0),
        finish=finish,
        logprobs=logprobs,
    )
    return new_state, info


def _first(mask: Array) -> Array:
    """Returns the index of the first True along the last axis, i32[rows]; past any index if none."""
    index = jnp.arange(mask.shape[1])[None, :]
    return jnp.min(jnp.where(mask, index, 2**30), axis=1).astype(jnp.int32)
