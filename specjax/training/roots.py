"""The tokens of texts that drafts are learned after."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax.training.texts import TextBatch

FIRST_ROOT = 1  # a prompt has a token, and the target itself says what follows it


def after_first(text: TextBatch) -> tuple[Array, Array]:
    """Returns every token of the texts as a root, but the first of each.

    Returns:
      roots i32[rows, length], positions, and bool[rows, length], whether there is one.
    """
    positions = jnp.broadcast_to(jnp.arange(text.token_ids.shape[1]), text.token_ids.shape)
    return positions, (positions >= FIRST_ROOT) & text.is_text


def sampled(key: Array, text: TextBatch, depth: int, count: int) -> tuple[Array, Array]:
    """Returns roots that are drawn among those with something to learn among their draft tokens.

    Args:
      depth: draft tokens of a root.
      count: roots of each text, at most; all of fewer that there are.

    Returns:
      roots i32[rows, count], different positions of each text in any order, 0 where there are
      no more, and bool[rows, count], whether there is one.
    """
    positions, is_root = after_first(text)
    up_to = jnp.cumsum(text.is_learned & text.is_text, axis=1)
    is_root &= jnp.pad(up_to, ((0, 0), (0, depth)), mode="edge")[:, depth:] > up_to
    order = jnp.where(is_root, jax.random.uniform(key, is_root.shape), -1.0)
    drawn, roots = jax.lax.top_k(order, min(count, positions.shape[1]))
    is_drawn = drawn >= 0
    return jnp.where(is_drawn, roots, 0), is_drawn
