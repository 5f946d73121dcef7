"""Heads that defer: they store something of each token, and run over it when a row drafts.

What is stored of a token lies in the token's own slot and depends on no token after it. So pages
are shared by their tokens, also those over which the head has not run yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.config.checks import CAPTURED
from specjax.drafters.base import CATCH_UP_WIDTH, LEAST_CATCH_UP, MOST_CATCH_UP, DrafterContext
from specjax.drafters.token_by_token import batch_of_rows
from specjax.paged import kv_cache
from specjax.types import DecoderParams, TokenBatch

State = TypeVar("State")

FEATURES = "features"


def stored_widths(config: Any, stores: str | None) -> tuple[int, ...]:
    """Returns the width of each vector that a head stores per token.

    Args:
      config: of an EAGLE, EAGLE-3 or DFlash head.
      stores: as of `Deferring`.
    """
    captured = (config.target_hidden_size,) * len(config.aux_layers)
    return {None: (), FEATURES: (config.hidden_size,), CAPTURED: captured}[stores]


@dataclasses.dataclass(frozen=True)
class Deferring:
    """A head over the target that may store something of each token.

    Its state has a field `stored`, a tuple of [num_pages, page_size, width], one for each vector
    that it stores per token.

    Attributes:
      stores: FEATURES, what its layers read; CAPTURED, the target's hidden states, from which
        features are computed: more numbers and no work; None: nothing.
    """

    config: Any
    context: DrafterContext
    stores: str | None = dataclasses.field(default=None, kw_only=True)

    def features(self, params: DecoderParams, taps: Sequence[Array]) -> Array:
        """Returns what its layers read of tokens, [num_tokens, hidden_size]."""
        raise NotImplementedError

    def init_stored(self, num_pages: int, page_size: int) -> tuple[Array, ...]:
        """Returns what is stored of no token."""
        widths, dtype = stored_widths(self.config, self.stores), self.context.dtype
        return tuple(jnp.zeros((num_pages, page_size, width), dtype) for width in widths)

    def defer(
        self,
        params: DecoderParams,
        state: Any,
        fed: TokenBatch,
        next_token_ids: Array,
        taps: tuple[Array, ...],
        row_ids: Array,
        max_tokens_per_row: int,
    ) -> Any:
        """Stores what absorbing would read of the tokens that were fed; see `Drafter.defer`."""
        del next_token_ids, row_ids, max_tokens_per_row
        return self.store(params, state, fed, taps)[0]

    def store(
        self, params: DecoderParams, state: Any, fed: TokenBatch, taps: tuple[Array, ...]
    ) -> tuple[Any, Array]:
        """Returns the state with what is stored of the tokens that were fed, and their features.

        The features are those that are read from what is stored: [num_tokens, hidden_size].
        """
        new = taps if self.stores == CAPTURED else (self.features(params, taps),)
        new = tuple(vector.astype(self.context.dtype) for vector in new)
        stored = new if self.stores else ()
        written = (
            _by_slot(pages).at[fed.slot_mapping].set(vector, mode="drop").reshape(pages.shape)
            for pages, vector in zip(state.stored, stored, strict=True)
        )
        return state._replace(stored=tuple(written)), self._features_of(params, new)

    def features_at(
        self,
        params: DecoderParams,
        state: Any,
        decode_state: Any,
        row_ids: Array,
        positions: Array,
    ) -> Array:
        """Returns the features of tokens that are stored, [num_tokens, hidden_size]; of padding,
        those of any token.

        Args:
          row_ids, positions: i32[num_tokens].
        """
        cache = decode_state.cache
        sizes = {"page_size": cache.page_size, "num_slots": cache.num_slots}
        slots = kv_cache.slots(cache.block_table, row_ids, positions, **sizes)
        slots = jnp.minimum(slots, cache.num_slots - 1)
        return self._features_of(params, tuple(_by_slot(pages)[slots] for pages in state.stored))

    def _features_of(self, params: DecoderParams, stored: tuple[Array, ...]) -> Array:
        """Returns the features of tokens, from the vectors of each, [num_tokens, width]."""
        if self.stores == CAPTURED:
            return self.features(params, stored).astype(self.context.dtype)
        (features,) = stored
        return features


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
    num_tokens = min(max(decode_state.rows * CATCH_UP_WIDTH, LEAST_CATCH_UP), MOST_CATCH_UP)

    def run_next(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, num_run = carry
        left = counts - num_run
        now = jnp.clip(num_tokens - (jnp.cumsum(left) - left), 0, left)
        batch = batch_of_rows(decode_state, first + num_run, now, num_tokens)
        return run(state, batch), num_run + now

    is_behind = lambda carry: jnp.any(carry[1] < counts)
    state, _ = jax.lax.while_loop(is_behind, run_next, (state, jnp.zeros_like(counts)))
    return state


def _by_slot(pages: Array) -> Array:
    """Returns vectors that are stored, [num_slots, width]."""
    return pages.reshape(-1, pages.shape[-1])
