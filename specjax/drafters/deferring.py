"""Heads that defer: they store a feature per token, and run over these when a row drafts.

The feature of a token lies in the token's own slot and depends on no token after it. So pages are
shared by their tokens, also those over which the head has not run yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters.base import CATCH_UP_WIDTH, LEAST_CATCH_UP, MOST_CATCH_UP
from specjax.paged import kv_cache
from specjax.paged.forward import make_batch
from specjax.types import TokenBatch

State = TypeVar("State")


def stored(features: Array | None, fed: TokenBatch, new: Array) -> Array | None:
    """Returns the features that are stored, with those of the tokens that were fed.

    Args:
      features: [num_pages, page_size, hidden_size]; None: the head does not defer.
      new: [num_tokens, hidden_size], of `fed`.
    """
    if features is None:
        return None
    slots = _by_slot(features).at[fed.slot_mapping].set(new, mode="drop")
    return slots.reshape(features.shape)


def features_at(features: Array, decode_state: Any, row_ids: Array, positions: Array) -> Array:
    """Returns the features of tokens, [num_tokens, hidden_size]; of padding, those of any token.

    Args:
      features: [num_pages, page_size, hidden_size].
      row_ids, positions: i32[num_tokens].
    """
    cache = decode_state.cache
    sizes = {"page_size": cache.page_size, "num_slots": cache.num_slots}
    slots = kv_cache.slots(cache.block_table, row_ids, positions, **sizes)
    return _by_slot(features)[jnp.minimum(slots, cache.num_slots - 1)]


def catch_up(
    run: Callable[[State, TokenBatch], State],
    state: State,
    decode_state: Any,
    first: Array,
    counts: Array,
) -> State:
    """Returns the state of a head after it ran over the tokens that rows lack.

    A pass takes up to MOST_CATCH_UP of them, of the first rows that lack any.

    Args:
      run: runs the head over a batch of such tokens; its width bounds the tokens of a row.
      first: i32[rows], positions of the first tokens.
      counts: i32[rows]; 0: the row lacks none, or stays behind.
    """
    cache = decode_state.cache
    num_tokens = min(max(decode_state.rows * CATCH_UP_WIDTH, LEAST_CATCH_UP), MOST_CATCH_UP)

    def run_next(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, num_run = carry
        left = counts - num_run
        now = jnp.clip(num_tokens - (jnp.cumsum(left) - left), 0, left)
        batch = make_batch(
            decode_state.history,
            cache.block_table,
            first + num_run,
            now,
            num_tokens=num_tokens,
            page_size=cache.page_size,
            num_slots=cache.num_slots,
        )
        return run(state, batch), num_run + now

    is_behind = lambda carry: jnp.any(carry[1] < counts)
    state, _ = jax.lax.while_loop(is_behind, run_next, (state, jnp.zeros_like(counts)))
    return state


def _by_slot(features: Array) -> Array:
    """Returns the features that are stored, [num_slots, hidden_size]."""
    return features.reshape(-1, features.shape[-1])
