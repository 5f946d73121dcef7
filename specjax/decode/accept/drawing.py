"""A token drawn from weights by one uniform number."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def draw_token(draw: Array, weights: Array) -> Array:
    """Returns a token i32[rows] per uniform draw f32[rows], by inverting the cumulative sum.

    Args:
      weights: f32[rows, vocab], not negative, of any positive total.
    """
    cumulative = jnp.cumsum(weights, axis=1)
    level = draw[:, None] * cumulative[:, -1:]
    # A parallel sum rounds each entry by itself: it may rise, or fall, at a token
    # without weight, and its end may not exceed the level.
    is_past = (cumulative > level) & (weights > 0)
    last = weights.shape[1] - 1 - jnp.argmax(jnp.flip(weights > 0, axis=1), axis=1)
    chosen = jnp.where(jnp.any(is_past, axis=1), jnp.argmax(is_past, axis=1), last)
    return chosen.astype(jnp.int32)
