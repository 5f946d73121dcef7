"""What drafters have in common that say all draft tokens of a step in one forward.

Tokens are drawn one after the other all the same (`token_by_token`), each with its own noise and
after the sampling parameters of the request have seen the ones before it. What is fed between two
draws is nothing: the next token's logits are already there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from specjax.drafters.token_by_token import Fed, TokenByToken
from specjax.paged import kv_cache
from specjax.sampling.vocabulary import Vocabulary
from specjax.types import DecoderParams

MOST_LOGIT_BYTES = 2**28  # of all draft tokens of a step, to read the head's matrix once


class Asked(NamedTuple):
    """What a step begins with, where masks are fed for the tokens that each row is asked for."""

    state: Any
    num_tokens: Array  # i32[rows]


class Drafting(NamedTuple):
    """What is kept while a step drafts."""

    pages: tuple[kv_cache.Pages, ...]
    # [K, rows, width], of each draft token: this device's slice of its logits where those of all
    # fit, else hidden states. By draft token first, so that what is read for one lies together.
    said: Array
    # [K, rows, width], of each draft token: the hidden states, where more than the head reads them
    hidden: Array | None = None
    # [rows, numbers], what is handed on from one draft token to the next, beside the text. It does
    # not stand among the logits: they would be copied with it for each draft token.
    carried: Array | None = None


def fits(rows: int, num_speculative_tokens: int, vocab_size: int) -> bool:
    """Returns whether the logits of all draft tokens of a step are kept at once."""
    count = rows * num_speculative_tokens * vocab_size
    return count * jnp.dtype(jnp.float32).itemsize <= MOST_LOGIT_BYTES


def of_all(hidden: Array, logits: Callable[[Array], Array]) -> Array:
    """Returns logits [K, rows, n] of hidden [K, rows, width], the head's matrix read once.

    Args:
      logits: from hidden [num_tokens, width] to f32[num_tokens, n], of a device's slice.
    """
    count, rows, width = hidden.shape
    return logits(hidden.reshape(count * rows, width)).reshape(count, rows, -1)


def said_after(said: Array, depth: int | Array) -> Array:
    """Returns what was said of the token after that of a depth, [rows, width].

    Args:
      said: [K, rows, width].
      depth: i32[], of the same draft token in all rows; that of the root is 0.
    """
    return lax.dynamic_index_in_dim(said, depth, keepdims=False)


class OverMasks(TokenByToken):
    """A model that is fed masks in place of draft tokens, and no draft token.

    Stands before the class that says how logits are read from hidden states.
    """

    @property
    def num_drafts(self) -> int:
        """K, the most draft tokens of a row."""
        raise NotImplementedError

    def keep(self, params: DecoderParams, hidden: Array) -> Array:
        """Returns what is kept of hidden [K, rows, width], the model's output for draft tokens."""
        if not self._fits(hidden.shape[1]):
            return hidden
        # Of the class behind this one: here, logits are what was kept.
        return of_all(hidden, lambda flat: super(OverMasks, self).own_logits(params, flat, 0)[0])

    def vocabulary_of(self, params: DecoderParams, width: int) -> Vocabulary:
        """Returns which tokens logits of a width are about, as `own_logits` does."""
        raise NotImplementedError

    def feed(self, params: DecoderParams, state: Drafting, fed: Fed) -> tuple[Array, Drafting]:
        """Returns what was said of the next token: this one is not read."""
        del params
        return said_after(state.said, fed.depth), state

    def own_logits(
        self, params: DecoderParams, hidden: Array, depth: int | Array
    ) -> tuple[Array, Vocabulary]:
        if self._fits(hidden.shape[0]):
            return hidden, self.vocabulary_of(params, hidden.shape[1])
        return super().own_logits(params, hidden, depth)

    def _fits(self, rows: int) -> bool:
        """Returns whether the logits of all draft tokens of a step are kept at once."""
        return fits(rows, self.num_drafts, self.vocab_size)
