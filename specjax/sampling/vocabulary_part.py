"""A part of a vocabulary: the tokens that a head can say."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax.sampling.argmax import Score
from specjax.sampling.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VocabularyPart(Vocabulary):
    """Some tokens of a vocabulary, in arrays [..., width] that every device holds whole.

    What is drawn from it is what the whole draws where all other tokens have logit -inf: noise and
    sampling parameters go by token ids. Only, of equal scores the lowest index wins, and top_p adds
    its sums of probabilities in another order. `take` and `read` give 0 at tokens outside the part,
    which is their probability, where logits and log-probabilities of the whole are -inf.

    Attributes:
      token_ids: i32[width], of each index; distinct.
      vocab_size: tokens of the whole.
    """

    token_ids: Array
    vocab_size: int

    @property
    def is_whole(self) -> bool:
        return False

    def first_id(self, width: int) -> int | Array:
        raise NotImplementedError("tokens of a part of a vocabulary do not follow one another.")

    def index(self, token_ids: Array, width: int) -> Array:
        inside = jnp.arange(width, dtype=jnp.int32)
        table = jnp.full(self.vocab_size, width, jnp.int32).at[self.token_ids].set(inside)
        is_token = (token_ids >= 0) & (token_ids < self.vocab_size)
        return jnp.where(is_token, table.at[token_ids].get(mode="clip"), width)

    def slice_of(self, whole: Array, width: int, axis: int = -1) -> Array:
        """Returns what an array [..., vocab] says of the tokens of the part, [..., width].

        An array of width `width` is about the part already, and returned unchanged.
        """
        return whole if whole.shape[axis] == width else jnp.take(whole, self.token_ids, axis)

    def by_index(self, score: Score, width: int) -> Score:
        del width
        return lambda values, index: score(values, self._at(index))

    def best(self, index: Array, score: Array, width: int) -> tuple[Array, Array]:
        del width
        return self._at(index), score

    def best_few(self, index: Array, scores: Array, width: int, count: int) -> tuple[Array, Array]:
        del width, count
        return self._at(index), scores

    def whole(self, values: Array) -> Array:
        """Returns logits f32[n, vocab] from those of the part; all others are -inf."""
        empty = jnp.full((values.shape[0], self.vocab_size), -jnp.inf)
        return empty.at[:, self.token_ids].set(values, unique_indices=True)

    def _at(self, index: Array) -> Array:
        """Returns the tokens at indices; padding past the part counts as its last."""
        return self.token_ids.at[index].get(mode="clip")
