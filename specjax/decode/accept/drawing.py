"""Draws a token in proportion to weights, from a few uniform numbers."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from specjax.sampling.vocabulary import WHOLE, Vocabulary

WAYS = 16  # 8 and 32 cost the same on x86-64 with jax 0.10.2


def num_draws(vocab: int) -> int:
    """Returns how many uniform numbers `draw_token` needs per token."""
    return len(_sizes(vocab)) - 1


def draw_token(draws: Array, weights: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """Returns a token i32[rows] in proportion to its weight, from uniform draws f32[rows, n].

    The first draw picks one of at most WAYS parts of the vocabulary, the next a part
    of that, the last a token. A single draw would be limited by the resolution of a
    float32 cumulative sum: 1e-3 of total variation over 128,000 even weights, where
    this has less than 1e-6.

    Shards that each hold a slice of the weights exchange one sum per WAYS tokens. They draw
    the token that one device draws, unless sums that are added in another order round
    differently just where the draw falls.

    Args:
      draws: n is `num_draws` of the vocabulary.
      weights: f32[rows, vocab], not negative, of any positive total.
      vocabulary: how weights are split over devices.
    """
    levels = column_sums(weights, vocabulary)
    token = jnp.zeros(weights.shape[0], jnp.int32)
    for draw, level in zip(draws.T, reversed(levels[:-1]), strict=True):
        of_level = vocabulary if level is weights else WHOLE
        size = of_level.size(level.shape[1])
        ways = draw_way(draw, _column(level, token, of_level))
        token = ways * _num_columns(size) + token
    return token


def column_sums(weights: Array, vocabulary: Vocabulary = WHOLE) -> list[Array]:
    """Returns weights f32[rows, n], then sums of WAYS of them at a time, down to one sum.

    Weight i belongs to column i mod the number of columns, so that a sum adds whole
    vectors. All but the weights are whole on every device.
    """
    levels = [weights]
    for _ in range(num_draws(vocabulary.size(weights.shape[1]))):
        of_level = vocabulary if len(levels) == 1 else WHOLE
        levels.append(_sum_columns(levels[-1], of_level))
    return levels


def _sum_columns(weights: Array, vocabulary: Vocabulary) -> Array:
    """Returns the sum of each column, f32[rows, num_columns]."""
    if not vocabulary.is_split:
        return jnp.sum(_in_columns(weights), axis=1)
    width = weights.shape[1]
    num_columns = _num_columns(vocabulary.size(width))
    # A slice starts in the middle of the columns: what is summed as if it began at the first
    # one is turned to where it belongs.
    own = jnp.sum(_in_rows_of(num_columns, weights), axis=1)
    return vocabulary.sum(jnp.roll(own, vocabulary.first_id(width) % num_columns, axis=1))


def _column(weights: Array, column: Array, vocabulary: Vocabulary) -> Array:
    """Returns the weights in one column i32[rows] of each row, f32[rows, at most WAYS]."""
    row = jnp.arange(weights.shape[0])
    if not vocabulary.is_split:
        return _in_columns(weights)[row, :, column]
    size = vocabulary.size(weights.shape[1])
    num_columns = _num_columns(size)
    ways = jnp.arange(-(-size // num_columns))
    return vocabulary.take(weights, column[:, None] + num_columns * ways[None, :])


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
        sizes.append(_num_columns(sizes[-1]))
    return sizes


def _num_columns(size: int) -> int:
    return -(-size // WAYS)


def _in_columns(weights: Array) -> Array:
    """Returns f32[rows, at most WAYS, num_columns], zero past the end."""
    return _in_rows_of(_num_columns(weights.shape[1]), weights)


def _in_rows_of(num_columns: int, weights: Array) -> Array:
    """Returns weights f32[rows, n] as f32[rows, -1, num_columns], zero past the end."""
    rows, size = weights.shape
    num_ways = -(-size // num_columns)
    missing = num_ways * num_columns - size
    padded = jnp.pad(weights, ((0, 0), (0, missing)))
    return padded.reshape(rows, num_ways, num_columns)
