"""Hybrid drafting: each row takes its draft from history, or from a draft model or a head.

Below, the model is either of the two. A match costs nothing and a model does, and each is accepted
more often on different text. So a row takes the proposal with more expected accepted tokens,
estimated from earlier proposals of the same kind; each call reads their acceptance from the row's
new length.

The choice depends on the length of the match, and so on the drafted tokens. Its proposals
therefore have no probabilities, and rules by law run as `delta`, with the same output law.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters import history
from specjax.drafters.base import Draft, Drafter, by_row
from specjax.drafters.history import HistoryState
from specjax.types import DecoderParams, Proposal, TokenBatch

# Kinds of proposal: matches of 1, of 2 or 3, of 4 to 7, ... tokens, and the draft model's.
NUM_MATCH_KINDS = history.LONGEST_MATCH.bit_length()
MODEL = NUM_MATCH_KINDS
NO_KIND = -1
# Prior of the mean accepted tokens of each kind, and how many observed steps it counts as.
PRIOR_STEPS = 4.0
PRIOR_OF_MODEL = 2.0
PRIOR_OF_MATCH = 0.5  # times the shortest match of the kind; the prior is at most the depth
KEPT = 0.98  # decay of a row's counts of a kind, per observed proposal of that kind


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridState:
    history: HistoryState
    pages: Any  # the model's state
    # Each row's last proposal: its kind, the root's position, and its number of tokens.
    kinds: Array  # i32[rows], NO_KIND for none
    roots: Array  # i32[rows]
    num_proposed: Array  # i32[rows]
    # Decayed counts of each row by kind of proposal, f32[rows, MODEL + 1].
    num_steps: Array
    num_accepted: Array


def drafter(
    model: Drafter, *, num_speculative_tokens: int, capacity: int, min_match: int
) -> Drafter:
    """Returns a drafter of chains; other arguments as for `history.drafter`.

    Args:
      model: a drafter of chains.
    """
    depth = num_speculative_tokens

    def init(rows: int, max_length: int, num_pages: int, page_size: int) -> HybridState:
        counts = jnp.zeros((rows, MODEL + 1))
        return HybridState(
            history=history.init(rows, max_length, capacity),
            pages=model.init(rows, max_length, num_pages, page_size),
            kinds=jnp.full(rows, NO_KIND, jnp.int32),
            roots=jnp.zeros(rows, jnp.int32),
            num_proposed=jnp.zeros(rows, jnp.int32),
            num_steps=counts,
            num_accepted=counts,
        )

    def prefill(
        params: DecoderParams,
        state: HybridState,
        batch: TokenBatch,
        row_ids: Array,
        max_tokens_per_row: int,
    ) -> HybridState:
        pages = model.prefill(params, state.pages, batch, row_ids, max_tokens_per_row)
        return dataclasses.replace(state, pages=pages)

    def absorb(params: DecoderParams, state: HybridState, *arguments: Any) -> HybridState:
        return dataclasses.replace(state, pages=model.absorb(params, state.pages, *arguments))

    def defer(params: DecoderParams, state: HybridState, *arguments: Any) -> HybridState:
        assert model.defer is not None
        return dataclasses.replace(state, pages=model.defer(params, state.pages, *arguments))

    def draft(
        params: DecoderParams, state: HybridState, decode_state: Any, num_tokens: Array
    ) -> Draft:
        takes_part = num_tokens > 0
        state = _learn(state, decode_state, takes_part)
        known = history.catch_up(state.history, decode_state, takes_part)
        found = history.find(known, decode_state, min_match, 1, depth)
        kind = _kind_of(found.lengths[:, 0])
        expected = _expected(state, depth)
        is_matched = (found.lengths[:, 0] > 0) & (expected[kind] >= expected[MODEL])
        by_model = model.draft(
            params, state.pages, decode_state, jnp.where(is_matched, 0, num_tokens)
        )
        read = jnp.minimum(found.counts[:, 0], num_tokens)
        proposal = Proposal(
            token_ids=jnp.where(
                is_matched[:, None], found.token_ids[:, 0], by_model.proposal.token_ids
            ),
            num_tokens=jnp.where(is_matched, read, by_model.proposal.num_tokens),
        )
        kinds = jnp.where(is_matched, kind, MODEL)
        state = dataclasses.replace(
            state,
            history=known,
            pages=by_model.state,
            kinds=jnp.where(takes_part, kinds, NO_KIND),
            roots=decode_state.cache.lengths,
            num_proposed=proposal.num_tokens,
        )
        # The model has not seen the matched tokens: it catches up when it drafts again.
        return Draft(proposal, state, by_model.written, pages=by_model.pages)

    def move(state: HybridState, source_slots: Array, target_slots: Array) -> HybridState:
        pages = model.move(state.pages, source_slots, target_slots)
        return dataclasses.replace(state, pages=pages)

    def remember(state: HybridState, pieces: history.Pieces) -> HybridState:
        return dataclasses.replace(
            state,
            history=history.remember(state.history, pieces),
            kinds=jnp.where(pieces.has_entered, NO_KIND, state.kinds),
        )

    def enter_rows(state: HybridState, row_ids: Array, drafter_lengths: Array) -> HybridState:
        return dataclasses.replace(
            state,
            history=history.enter_rows(state.history, row_ids, drafter_lengths),
            pages=model.enter_rows(state.pages, row_ids, drafter_lengths),
            kinds=state.kinds.at[row_ids].set(NO_KIND, mode="drop"),
        )

    def state_axes(state: HybridState) -> HybridState:
        return dataclasses.replace(
            by_row(state),
            history=history.state_axes(state.history),
            pages=model.state_axes(state.pages),
        )

    return model._replace(
        init=init,
        prefill=prefill,
        absorb=absorb,
        defer=None if model.defer is None else defer,
        draft=draft,
        enter_rows=enter_rows,
        move=move,
        remember=remember,
        state_axes=state_axes,
    )


def _kind_of(lengths: Array) -> Array:
    """Returns the kind of matches of some lengths, i32: the binary logarithm, rounded down."""
    return jnp.clip(31 - jax.lax.clz(lengths.astype(jnp.int32)), 0, MODEL - 1)


def _learn(state: HybridState, decode_state: Any, takes_part: Array) -> HybridState:
    """Adds the acceptance of each row's last proposal: tokens gained since, less one.

    A row that gained more than was proposed has decoded without drafts in between, and is
    not counted.
    """
    num_accepted = decode_state.cache.lengths - state.roots - 1
    has_come = takes_part & (state.kinds != NO_KIND) & (num_accepted >= 0)
    has_come &= num_accepted <= state.num_proposed
    own = has_come[:, None] & (state.kinds[:, None] == jnp.arange(MODEL + 1)[None, :])
    kept = jnp.where(own, KEPT, 1.0)
    accepted = jnp.where(own, num_accepted[:, None], 0)
    return dataclasses.replace(
        state,
        num_steps=kept * state.num_steps + own,
        num_accepted=kept * state.num_accepted + accepted,
    )


def _expected(state: HybridState, depth: int) -> Array:
    """Returns the expected accepted tokens of a proposal of each kind, f32[MODEL + 1]."""
    shortest = 2.0 ** jnp.arange(MODEL)
    prior = jnp.append(PRIOR_OF_MATCH * shortest, PRIOR_OF_MODEL)
    num_steps = jnp.sum(state.num_steps, axis=0)
    num_accepted = jnp.sum(state.num_accepted, axis=0)
    seen = num_accepted + PRIOR_STEPS * jnp.minimum(prior, depth)
    return seen / (num_steps + PRIOR_STEPS)
