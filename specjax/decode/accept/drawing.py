"""Draws a token in proportion to weights, from a few uniform numbers."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

WAYS = 16  # 8 and 32 cost the same on x86-64 with jax 0.10.2


def num_draws(vocab: int) -> int:
    """Returns how many uniform numbers `draw_token` needs per token."""
    return len(_sizes(vocab)) - 1


def draw_token(draws: Array, weights: Array) -> Array:
    """Returns a token i32[rows] in proportion to its weight, from uniform draws f32[rows, n].

    The first draw picks one of at most WAYS parts of the vocabulary, the next a part
    of that, the last a token. A single draw would be limited by the resolution of a
    float32 cumulative sum: 1e-3 of total variation over 128,000 even weights, where
    this has less than 1e-6.

    Args:
      draws: n is `num_draws` of the vocabulary.
      weights: f32[rows, vocab], not negative, of any positive total.
    """
    levels = column_sums(weights)
    row = jnp.arange(weights.shape[0])
    token = jnp.zeros(weights.shape[0], jnp.int32)
    for draw, level in zip(draws.T, reversed(levels[:-1]), strict=True):
        columns = _in_columns(level)
        way = draw_way(draw, columns[row, :, token])
        token = way * columns.shape[2] + token
    return token


def column_sums(weights: Array) -> list[Array]:
    """Returns weights f32[rows, n], then sums of WAYS of them at a time, down to one sum.

    Weight i belongs to column i mod the number of columns, so that a sum adds whole
    vectors.
    """
    levels = [weights]
    for _ in range(num_draws(weights.shape[1])):
        levels.append(jnp.sum(_in_columns(levels[-1]), axis=1))
    return levels


def draw_way(draw: Array, weights: Array) -> Array:
    """Returns the index i32[rows] that inverts the cumulative sum in ascending order.

    The smallest weights come first, where floats are densest: a draw near 0 has 32
    random bits. The sums have few terms, all positive, and adding a weight of zero
    does not change them.

    Args:
      draw: f32[rows].
      weights: f32[rows, n], n at most WAYS.
    """
    # [rows, i, j]: whether j comes no later than i in ascending order; ties keep their order.
    other, own = weights[:, None, :], weights[:, :, None]
    index = jnp.arange(weights.shape[1])
    is_first = (index[None, :] <= index[:, None])[None]
    is_within = (other < own) | ((other == own) & is_first)
    cumulative = jnp.sum(jnp.where(is_within, other, 0.0), axis=2)
    is_past = cumulative > draw[:, None] * jnp.max(cumulative, axis=1, keepdims=True)
    # With NaN weights no index is past, and argmin gives 0, a valid index.
    return jnp.argmin(jnp.where(is_past, cumulative, jnp.inf), axis=1).astype(jnp.int32)


def _sizes(size: int) -> list[int]:
    sizes = [size]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // WAYS))
    return sizes


def _in_columns(weights: Array) -> Array:
    """Returns f32[rows, at most WAYS, num_columns], zero past the end."""
    rows, size = weights.shape
    num_columns = -(-size // WAYS)
    num_ways = -(-size // num_columns)
    missing = num_ways * num_columns - size
    padded = jnp.pad(weights, ((0, 0), (0, missing)))
    return padded.reshape(rows, num_ways, num_columns)
