"""Commit: accepted tokens become part of the prefix, up to the first stop condition."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from pallas_kernels.move_kv import move_kv
from specjax.decode.draft import write_tokens
from specjax.decode.state import DecodeState
from specjax.decode.verify import Verification
from specjax.drafters.base import NOT_KEPT, Draft, Drafter
from specjax.paged import kv_cache
from specjax.types import (
    INVALID_LOGITS,
    NO_FAULT,
    OUT_OF_LENGTH,
    RUNNING,
    STOPPED,
    Acceptance,
    Proposal,
    StepInfo,
)


def commit(
    state: DecodeState,
    drafter: Drafter,
    draft: Draft,
    verification: Verification,
    absorbing: Array | None = None,
) -> tuple[DecodeState, StepInfo]:
    """Commits num_accepted + 1 tokens per active row, less those that a stop condition cuts.

    A stop token is committed and ends its row; the token that reaches max_lengths does too.
    A row whose logits were NaN ends before the token that they would have given.
    Keys and values of a tree's accepted path move to the slots that a chain would use.

    Args:
      absorbing: bool[rows], rows whose drafter absorbs every token that is committed here; it knows
        no more of the others than before. None: it absorbs nothing.
    """
    acceptance, is_invalid = verification.acceptance, verification.is_invalid
    logprobs = verification.logprobs
    token_ids, num_accepted = acceptance.token_ids, acceptance.num_accepted
    ahead = jnp.arange(token_ids.shape[1])[None, :]
    root = state.cache.lengths
    reached = ahead <= num_accepted[:, None]
    is_stop = jnp.any(token_ids[:, :, None] == state.sampling.stop_token_ids[:, None, :], axis=2)
    num_before_stop = _first(is_stop & reached) + 1
    num_before_invalid = _first(is_invalid & reached)
    room = state.max_lengths - root - 1
    num_committed = jnp.minimum(num_accepted + 1, jnp.minimum(num_before_stop, num_before_invalid))
    num_committed = jnp.where(state.is_active, jnp.minimum(num_committed, room), 0)

    finish = jnp.full_like(root, RUNNING)
    finish = jnp.where(num_committed >= room, OUT_OF_LENGTH, finish)
    finish = jnp.where(num_committed == num_before_stop, STOPPED, finish)
    # Invalid logits count only where no stop token or length limit ended the row before them.
    ends_before = jnp.minimum(num_before_stop, room)
    finish = jnp.where(
        (num_before_invalid <= num_accepted) & (num_before_invalid < ends_before),
        INVALID_LOGITS,
        finish,
    )
    finish = jnp.where(state.is_active, finish, RUNNING)

    state = _move_path(state, drafter, draft, acceptance)
    cache = kv_cache.commit(state.cache, num_committed)
    if absorbing is None:
        written = _written(draft, acceptance, cache.lengths)
    else:
        written = jnp.where(absorbing, cache.lengths, state.drafter_lengths)
    new_state = dataclasses.replace(
        state,
        cache=cache,
        history=write_tokens(state.history, root + 1, token_ids, num_committed),
        # In rows still being prefilled this counts tokens of shared pages: left as it is.
        drafter_lengths=jnp.where(
            state.is_active, jnp.minimum(written, cache.lengths), state.drafter_lengths
        ),
        is_active=state.is_active & (finish == RUNNING),
    )
    depth = jnp.where(state.is_active, longest_path(draft.proposal), 0)
    info = StepInfo(
        token_ids=token_ids,
        num_committed=num_committed,
        num_accepted=jnp.minimum(num_accepted, num_committed),
        num_drafted=jnp.where(state.is_active, draft.proposal.num_tokens, 0),
        draft_depth=depth,
        proposed_depth=depth,
        finish=finish,
        drafter_lengths=new_state.drafter_lengths,
        drafter_fault=jnp.full_like(root, NO_FAULT) if draft.fault is None else draft.fault,
        logprobs=logprobs,
    )
    return new_state, info


def _move_path(
    state: DecodeState, drafter: Drafter, draft: Draft, acceptance: Acceptance
) -> DecodeState:
    """Moves keys and values of a tree's accepted nodes into the slots that follow the root."""
    if acceptance.nodes is None:
        return state
    place = jnp.arange(1, acceptance.nodes.shape[1] + 1)[None, :]
    is_accepted = place <= acceptance.num_accepted[:, None]

    def moves(offsets: Array) -> tuple[Array, Array]:
        """Returns source slots, root + offsets i32[rows, max_depth], and those of a chain."""
        is_moved = is_accepted & (offsets != place) & (offsets > 0)
        source, target = (
            _slots(state, jnp.where(is_moved, offset, -1))
            for offset in (offsets, jnp.broadcast_to(place, offsets.shape))
        )
        return source, target

    cache = state.cache
    source, target = moves(acceptance.nodes)
    pages = move_kv(cache.pages, source, target)
    drafter_state = state.drafter
    if draft.kept_at is not None:
        drafter_state = drafter.move(drafter_state, *moves(_kept(draft, acceptance)))
    return dataclasses.replace(
        state, cache=dataclasses.replace(cache, pages=pages), drafter=drafter_state
    )


def _slots(state: DecodeState, offsets: Array) -> Array:
    """Returns the slots of positions root + offsets, i32[rows * n]; `num_slots` for offset -1."""
    cache = state.cache
    rows, width = offsets.shape
    positions = jnp.where(offsets < 0, -1, cache.lengths[:, None] + offsets)
    return kv_cache.slots(
        cache.block_table,
        jnp.repeat(jnp.arange(rows), width),
        positions.reshape(-1),
        page_size=cache.page_size,
        num_slots=cache.num_slots,
    )


def _kept(draft: Draft, acceptance: Acceptance) -> Array:
    """Returns draft.kept_at of the accepted nodes, i32[rows, max_depth]."""
    assert draft.kept_at is not None
    assert acceptance.nodes is not None
    nodes = jnp.maximum(acceptance.nodes, 0)
    return jnp.take_along_axis(draft.kept_at, nodes, axis=1)


def _written(draft: Draft, acceptance: Acceptance, lengths: Array) -> Array:
    """Returns how many tokens of each row have final KV in the drafter's cache, i32[rows].

    Args:
      lengths: i32[rows], tokens of the row after the commit.
    """
    if draft.written is None:
        # Without keys and values there is nothing to catch up with.
        return lengths
    if draft.kept_at is None or acceptance.nodes is None:
        return draft.written
    ahead = jnp.arange(acceptance.nodes.shape[1])[None, :]
    is_kept = _kept(draft, acceptance) != NOT_KEPT
    is_kept &= ahead < acceptance.num_accepted[:, None]
    in_order = jnp.cumprod(is_kept, axis=1)
    return draft.written + jnp.sum(in_order, axis=1, dtype=jnp.int32)


def longest_path(proposal: Proposal) -> Array:
    """Returns the tokens on the longest path of each row's draft, i32[rows]."""
    if proposal.tree is None:
        return proposal.num_tokens
    stands = jnp.arange(proposal.num_nodes)[None, :] <= proposal.num_tokens[:, None]
    return jnp.max(jnp.where(stands, proposal.tree.depths, 0), axis=1)


def _first(mask: Array) -> Array:
    """Returns the index of the first True along the last axis, i32[rows]; 2**30 if none."""
    index = jnp.arange(mask.shape[1])[None, :]
    return jnp.min(jnp.where(mask, index, 2**30), axis=1).astype(jnp.int32)
