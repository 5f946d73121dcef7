"""Absorb: tells a drafter of the target's hidden states, for every token that was fed.

Only where the drafter's spec names `taps`. Token j is told with the token after it, and only
once both are committed: prompts as they are fed, roots and accepted drafts after commit, and
steps of K = 0 a window at a time. See `specjax.drafters.base.Drafter`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.decode.state import DecodeState
from specjax.decode.step_spec import StepSpec
from specjax.paged.forward import make_batch
from specjax.types import DecoderParams, TokenBatch

WINDOW = 8  # steps of K = 0, at most, whose hidden states wait to be absorbed together


class Committed(NamedTuple):
    """What one step fed and committed: each active row's root, and the drafts accepted after it."""

    roots: Array  # i32[rows], their positions
    counts: Array  # i32[rows], tokens committed; as many were fed before them
    places: Array  # i32[rows, max_depth + 1], of the root and the accepted path in the batch
    taps: tuple[Array, ...]  # [num_tokens, hidden_size] each, of the whole batch
    beside: tuple[Array, ...]  # likewise, of what ran beside it


def absorb_committed(
    spec: StepSpec, params: DecoderParams, state: DecodeState, committed: Committed
) -> DecodeState:
    """Tells the drafter of what a step committed; `state` is that after it."""
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
    """Hidden states of the steps of K = 0 since the last were absorbed."""

    roots: Array  # i32[rows], positions of the first tokens that wait
    taps: tuple[Array, ...]  # [steps, rows, hidden_size] each


def no_waiting(state: DecodeState, committed: Committed, num_steps: int) -> Waiting:
    """Returns room for so many steps; of `committed` shapes and dtypes are read."""
    taps = [jnp.zeros((num_steps, state.rows, *tap.shape[1:]), tap.dtype) for tap in committed.taps]
    return Waiting(state.cache.lengths, tuple(taps))


def wait(waiting: Waiting, step: Array, committed: Committed) -> Waiting:
    """Adds a step of K = 0, the step-th that waits, i32[]."""
    roots = committed.places[:, 0]
    taps = [
        jax.lax.dynamic_update_index_in_dim(own, tap[roots], step, 0)
        for own, tap in zip(waiting.taps, committed.taps, strict=True)
    ]
    return waiting._replace(taps=tuple(taps))


def absorb_waiting(
    spec: StepSpec, params: DecoderParams, state: DecodeState, waiting: Waiting
) -> DecodeState:
    """Tells the drafter of all that waits; `state` is that after the last step."""
    num_steps = waiting.taps[0].shape[0]
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
    """Tells the drafter of the tokens of a batch, whose rows are places; see `prefill`.

    Args:
      taps: [num_tokens, hidden_size] each.
      row_ids: i32[places], the row of each.
    """
    # A place that is not used has no tokens.
    place = jnp.minimum(batch.row_ids, row_ids.shape[0] - 1)
    row = jnp.minimum(row_ids[place], state.rows - 1)
    following = jnp.minimum(batch.positions + 1, state.history.shape[1] - 1)
    drafter = spec.drafter.absorb(
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
    """Returns the row of each place where all rows are places, i32[rows]."""
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
