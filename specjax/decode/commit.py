"""Commit: accepted tokens become part of the prefix, as far as stop rules let them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from pallas_kernels.move_kv import move_kv
from specjax.cache import paged
from specjax.decode.draft import write_tokens
from specjax.decode.state import DecodeState
from specjax.decode.verify import Verification
from specjax.drafters.base import Draft, Drafter
from specjax.types import (
    INVALID_LOGITS,
    OUT_OF_LENGTH,
    RUNNING,
    STOPPED,
    Acceptance,
    Proposal,
    StepInfo,
)


def commit(
    state: DecodeState, drafter: Drafter, draft: Draft, verification: Verification
) -> tuple[DecodeState, StepInfo]:
    """Commits num_accepted + 1 tokens per active row, less what a stop rule cuts.

    A stop token is committed and ends its row; so does the last token of its
    length. A row whose logits were NaN ends before the token they would have given.
    The accepted path of a tree moves to where a chain would have stood.
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

    state = _move_path(state, drafter, acceptance)
    cache = paged.commit(state.cache, num_committed)
    written = _written(draft, acceptance)
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
        num_drafted=jnp.where(state.is_active, draft.proposal.num_tokens, 0),
        draft_depth=jnp.where(state.is_active, _depth(draft.proposal), 0),
        finish=finish,
        logprobs=logprobs,
    )
    return new_state, info


def _move_path(
    state: DecodeState, drafter: Drafter, acceptance: Acceptance
) -> DecodeState:
    """Moves keys and values of a tree's accepted nodes into the slots that follow the root."""
    if acceptance.nodes is None:
        return state
    cache = state.cache
    rows, depth = acceptance.nodes.shape
    place = jnp.arange(1, depth + 1)[None, :]
    moves = (place <= acceptance.num_accepted[:, None]) & (acceptance.nodes != place)
    row_ids = jnp.repeat(jnp.arange(rows), depth)
    source, target = (
        paged.slots(
            cache.block_table,
            row_ids,
            jnp.where(moves, cache.lengths[:, None] + node, -1).reshape(-1),
            page_size=cache.page_size,
            num_slots=cache.num_slots,
        )
        for node in (acceptance.nodes, place)
    )
    pages = tuple(move_kv(keys, values, source, target) for keys, values in cache.pages)
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(cache, pages=pages),
        drafter=drafter.move(state.drafter, source, target),
    )


def _written(draft: Draft, acceptance: Acceptance) -> Array:
    """Returns how far the drafter's cache holds what was accepted, i32[rows]."""
    if draft.is_fed is None or acceptance.nodes is None:
        return draft.written
    nodes = jnp.maximum(acceptance.nodes, 0)
    is_fed = jnp.take_along_axis(draft.is_fed, nodes, axis=1)
    ahead = jnp.arange(acceptance.nodes.shape[1])[None, :]
    is_fed &= ahead < acceptance.num_accepted[:, None]
    return draft.written + jnp.sum(jnp.cumprod(is_fed, axis=1), axis=1, dtype=jnp.int32)


def _depth(proposal: Proposal) -> Array:
    """Returns the depth of each row's draft, i32[rows]."""
    if proposal.tree is None:
        return proposal.num_tokens
    stands = jnp.arange(proposal.num_nodes)[None, :] <= proposal.num_tokens[:, None]
    return jnp.max(jnp.where(stands, proposal.tree.depths, 0), axis=1)


def _first(mask: Array) -> Array:
    """Returns the index of the first True along the last axis, i32[rows]; past any index if none."""
    index = jnp.arange(mask.shape[1])[None, :]
    return jnp.min(jnp.where(mask, index, 2**30), axis=1).astype(jnp.int32)
