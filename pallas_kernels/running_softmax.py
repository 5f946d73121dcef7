"""Softmax over keys that come in tiles, in order: Milakov and Gimelshein 2018, section 3.

Every implementation written for XLA sums its keys by these three functions. A tile
that a query does not see changes none of the query's bits: the largest score stays,
the sums are multiplied by exp(0), and 0 is added.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

_MASKED = -1e30  # finite, so that masked minus masked is 0 and not NaN


class RunningSoftmax(NamedTuple):
    """Running sums of queries [...] over the keys so far."""

    top: Array  # f32[..., 1], the largest score
    total: Array  # f32[..., 1], the sum of exp(score - top)
    values: Array  # f32[..., head_dim], the sum of exp(score - top) * value


def start(shape: tuple[int, ...], sinks: Array | None = None) -> RunningSoftmax:
    """Returns the state before the first tile, for queries of shape [..., head_dim].

    Args:
      sinks: f32, broadcasts to [..., 1]: the score of a key whose value is 0.
    """
    one = (*shape[:-1], 1)
    top, total = jnp.full(one, _MASKED), jnp.zeros(one)
    if sinks is not None:
        top, total = jnp.broadcast_to(sinks, one), jnp.ones(one)
    return RunningSoftmax(top, total, jnp.zeros(shape))


def precision_of(dtype: jnp.dtype) -> lax.Precision:
    """Returns the precision of products for queries of a dtype: full precision for float32.

    It matters on accelerators, where DEFAULT rounds factors to bfloat16 or TF32.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def add_tile(
    state: RunningSoftmax,
    equation: str,
    scores: Array,
    is_visible: Array,
    v: Array,
    precision: lax.Precision,
) -> RunningSoftmax:
    """Returns the state after one more tile.

    Args:
      equation: the einsum of weights, which are laid out as scores are, and v.
      scores: f32[..., keys].
      is_visible: bool, broadcasts to scores; invisible keys have weight 0.
      v: values; those that no query sees must be finite, because 0 * NaN is NaN. Weights are
        rounded to their dtype for the product, whose sums are float32.
    """
    scores = jnp.where(is_visible, scores, _MASKED)
    top = jnp.maximum(state.top, scores.max(-1, keepdims=True))
    weights = jnp.where(is_visible, jnp.exp(scores - top), 0.0)
    decay = jnp.exp(state.top - top)
    return RunningSoftmax(
        top,
        state.total * decay + weights.sum(-1, keepdims=True),
        state.values * decay
        + jnp.einsum(
            equation,
            weights.astype(v.dtype),
            v,
            precision=precision,
            preferred_element_type=jnp.float32,
        ),
    )


def merge(parts: RunningSoftmax, axis: int, sinks: Array | None = None) -> RunningSoftmax:
    """Returns the state over the keys of all parts, which lie along an axis.

    Args:
      sinks: f32, broadcasts to [..., 1] without that axis: the score of a key whose value is 0.
    """
    top = parts.top.max(axis)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    weights = jnp.exp(parts.top - jnp.expand_dims(top, axis))
    total = jnp.sum(parts.total * weights, axis)
    if sinks is not None:
        total += jnp.exp(sinks - top)
    return RunningSoftmax(top, total, jnp.sum(parts.values * weights, axis))


def finish(state: RunningSoftmax) -> Array:
    """Returns the weighted mean of values f32[..., head_dim]; 0 for a query without keys."""
    return state.values / jnp.where(state.total == 0.0, 1.0, state.total)
