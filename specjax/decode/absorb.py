"""Absorb: passes the target's hidden states to a drafter, for every token that was fed.

It runs only where the drafter's spec names `taps`. The drafter gets token j together with the
token after it, and only once both are committed: prompt tokens as they are fed, roots and
accepted drafts after commit, and the tokens of K = 0 steps a window at a time. A drafter that
defers only stores what it is given at K = 0, and absorbs it when the row drafts. See
`specjax.drafters.base.Drafter`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.decode.state import DecodeState
from specjax.decode.step_spec import StepSpec
from specjax.drafters.base import Draft
from specjax.paged.forward import make_batch
from specjax.types import DecoderParams, TokenBatch

# Most K = 0 steps whose hidden states wait and are absorbed together. A window reads the drafter's
# weights once. At 32 rows it has 512 tokens: with more, arithmetic takes longer than reading these
# weights (TPU v5e from 240 tokens on, v6e from 560). It is the same for any number of rows, so that
# memory is linear in rows, as plans take it to be.
WINDOW = 16
# A burst that ends after so few steps, as each of `stream` does, absorbs a window of these.
FEW_STEPS = 2


def absorbing_rows(spec: StepSpec, state: DecodeState, draft: Draft) -> Array | None:
    """Returns the rows whose drafter absorbs what a step commits, bool[rows]; None: none does.

    A drafter that defers absorbs the tokens of rows that are not behind, in steps that draft.

    Args:
      state: the state before the commit.
    """
    if not spec.taps:
        return None
    if spec.drafter.defer is None:
        return jnp.ones(state.rows, bool)
    if not spec.num_speculative_tokens:
        return jnp.zeros(state.rows, bool)
    assert draft.written is not None
    return draft.written >= state.cache.lengths


class Committed(NamedTuple):
    """Tokens that one step fed and committed: each active row's root and its accepted drafts."""

    roots: Array  # i32[rows], positions of the roots
    counts: Array  # i32[rows], tokens committed; the step fed the same number, from the root on
    places: Array  # i32[rows, max_depth + 1], batch index of the root and of the accepted path
    # [num_tokens, hidden_size] each, of the whole batch, of the layers that the drafter absorbs.
    taps: tuple[Array, ...]
    # The same for the prompt tokens that ran beside the batch, of all layers of `spec.read`.
    beside: tuple[Array, ...]


def absorb_committed(
    spec: StepSpec, params: DecoderParams, state: DecodeState, committed: Committed
) -> DecodeState:
    """Returns the state after the drafter absorbed, or deferred, the tokens that a step committed.

    Args:
      state: the state after that step.
    """
    if not spec.taps:
        return state
    # A tree has more nodes than a path can commit.
    num_tokens = min(committed.taps[0].shape[0], committed.places.size)
    batch = _batch(state, committed.roots, committed.counts, num_tokens)
    row = jnp.minimum(batch.row_ids, state.rows - 1)
    ahead = jnp.clip(batch.positions - committed.roots[row], 0, committed.places.shape[1] - 1)
    place = committed.places[row, ahead]
    taps = tuple(tap[place] for tap in committed.taps)
    most = committed.places.shape[1]
    return absorb(spec, params, state, batch, taps, _all_rows(state), most)


class Waiting(NamedTuple):
    """Hidden states of the K = 0 steps that the drafter has not absorbed yet."""

    num_steps: Array  # i32[], steps that wait
    roots: Array  # i32[rows], positions of the first tokens that wait
    taps: tuple[Array, ...]  # [most steps, rows, hidden_size] each


def no_waiting(state: DecodeState, committed: Committed, num_steps: int) -> Waiting:
    """Returns empty room for num_steps steps; only shapes and dtypes of `committed` are read."""
    taps = [jnp.zeros((num_steps, state.rows, *tap.shape[1:]), tap.dtype) for tap in committed.taps]
    return Waiting(jnp.int32(0), state.cache.lengths, tuple(taps))


def wait(waiting: Waiting, committed: Committed) -> Waiting:
    """Stores the hidden states of one more K = 0 step."""
    roots = committed.places[:, 0]
    taps = [
        jax.lax.dynamic_update_index_in_dim(own, tap[roots], waiting.num_steps, 0)
        for own, tap in zip(waiting.taps, committed.taps, strict=True)
    ]
    return waiting._replace(num_steps=waiting.num_steps + 1, taps=tuple(taps))


def absorb_waiting(
    spec: StepSpec, params: DecoderParams, state: DecodeState, waiting: Waiting
) -> DecodeState:
    """Returns the state after the drafter absorbed, or deferred, all waiting hidden states.

    Where FEW_STEPS or fewer wait, the drafter runs on so many tokens per row alone.

    Args:
      state: the state after the last step.
    """
    most = waiting.taps[0].shape[0]
    if most <= FEW_STEPS:
        return _absorb_first(spec, params, state, waiting, most)
    is_few = waiting.num_steps <= FEW_STEPS

    def absorb_if(condition: Array, num_steps: int, drafter: Any) -> Any:
        # A loop of one turn or none: it updates pages in place, and a conditional may copy them.
        def turn(_: Array, drafter: Any) -> Any:
            before = dataclasses.replace(state, drafter=drafter)
            return _absorb_first(spec, params, before, waiting, num_steps).drafter

        return jax.lax.fori_loop(0, condition.astype(jnp.int32), turn, drafter)

    drafter = absorb_if(is_few, FEW_STEPS, state.drafter)
    drafter = absorb_if(~is_few, most, drafter)
    return dataclasses.replace(state, drafter=drafter)


def _absorb_first(
    spec: StepSpec, params: DecoderParams, state: DecodeState, waiting: Waiting, num_steps: int
) -> DecodeState:
    """Returns the state after the drafter absorbed what waits, of at most `num_steps` steps."""
    # A row commits one token with each step until it ends.
    counts = state.cache.lengths - waiting.roots
    batch = _batch(state, waiting.roots, counts, num_steps * state.rows)
    row = jnp.minimum(batch.row_ids, state.rows - 1)
    step = jnp.clip(batch.positions - waiting.roots[row], 0, num_steps - 1)
    taps = tuple(tap[step, row] for tap in waiting.taps)
    return absorb(spec, params, state, batch, taps, _all_rows(state), num_steps)


def absorb(
    spec: StepSpec,
    params: DecoderParams,
    state: DecodeState,
    batch: TokenBatch,
    taps: tuple[Array, ...],
    row_ids: Array,
    max_tokens_per_row: int,
) -> DecodeState:
    """Returns the state after the drafter absorbed the tokens of a batch, or deferred those of a
    step at K = 0.

    The batch is laid out by places, not rows; see `prefill`.

    Args:
      taps: [num_tokens, hidden_size] each.
      row_ids: i32[places], the row of each place.
    """
    # An unused place has no tokens.
    place = jnp.minimum(batch.row_ids, row_ids.shape[0] - 1)
    row = jnp.minimum(row_ids[place], state.rows - 1)
    following = jnp.minimum(batch.positions + 1, state.history.shape[1] - 1)
    take = spec.drafter.absorb
    if spec.drafter.defer is not None and not spec.num_speculative_tokens:
        take = spec.drafter.defer
    drafter = take(
        params,
        state.drafter,
        batch,
        state.history[row, following],
        taps,
        row_ids,
        max_tokens_per_row,
    )
    return dataclasses.replace(state, drafter=drafter)


def _all_rows(state: DecodeState) -> Array:
    """Returns row_ids for a batch in which every row has the place of its own index, i32[rows]."""
    return jnp.arange(state.rows, dtype=jnp.int32)


def _batch(state: DecodeState, roots: Array, counts: Array, num_tokens: int) -> TokenBatch:
    """Lays out the `counts` tokens of each row from `roots` on."""
    cache = state.cache
    return make_batch(
        state.history,
        cache.block_table,
        roots,
        counts,
        num_tokens=num_tokens,
        page_size=cache.page_size,
        num_slots=cache.num_slots,
    )
