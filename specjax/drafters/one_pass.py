"""What drafters have in common that say all draft tokens of a step in one forward.

Tokens are drawn one after the other all the same (`token_by_token`), each with its own noise and
after the sampling parameters of the request have seen the ones before it. What is fed between two
draws is nothing: the next token's logits are already there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from specjax.paged import kv_cache

MOST_LOGIT_BYTES = 2**28  # of all draft tokens of a step, to read the head's matrix once


class Drafting(NamedTuple):
    """What is kept while a step drafts."""

    pages: tuple[kv_cache.Pages, ...]
    # [rows, K, width], of each draft token: its logits where those of all fit, else hidden states
    said: Array


def fits(rows: int, num_speculative_tokens: int, vocab_size: int) -> bool:
    """Returns whether the logits of all draft tokens of a step are kept at once."""
    count = rows * num_speculative_tokens * vocab_size
    return count * jnp.dtype(jnp.float32).itemsize <= MOST_LOGIT_BYTES


def of_all(hidden: Array, logits: Callable[[Array], Array]) -> Array:
    """Returns logits [rows, K, vocab] of hidden [rows, K, width], the head's matrix read once.

    Args:
      logits: from hidden [n, width] to f32[n, vocab].
    """
    rows, count, width = hidden.shape
    return logits(hidden.reshape(rows * count, width)).reshape(rows, count, -1)


def said_after(said: Array, positions: Array, roots: Array) -> Array:
    """Returns what was said of the token after a position of each row, [rows, width].

    Args:
      said: [rows, K, width].
      positions, roots: i32[rows].
    """
    ahead = jnp.clip(positions - roots, 0, said.shape[1] - 1)
    return jnp.take_along_axis(said, ahead[:, None, None], axis=1)[:, 0]
