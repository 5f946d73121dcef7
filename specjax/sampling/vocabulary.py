"""The vocabulary as one device holds it: whole, or a slice beside the slices of other devices.

Under a mesh's tensor axis every device computes the logits of its own slice. What sampling
and verification rules need of the others are a few numbers per token: maxima, sums, the best
(score, id), values at given ids. The functions here exchange those. `whole` alone moves an array
of the whole vocabulary, for drafters that keep distributions or rank their likeliest tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax.sampling.argmax import Score


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """How the last axis of arrays [..., vocab] is split over devices.

    With an axis, each of its shards holds an equal slice of `width` tokens, in the order of
    their ids. Methods take the slices, and return the same array on every shard unless said
    otherwise. They must be called by all shards alike: under a `lax.cond` or in a
    `lax.while_loop` only if the predicate is equal on all shards.

    Without an axis a device holds the vocabulary whole, and every method is the plain
    operation, with no communication.

    Token ids are those of the whole vocabulary; an index counts from the start of a slice.
    """

    axis: str | tuple[str, ...] | None = None  # mesh axis of the slices; several in order

    @classmethod
    def of_width(
        cls, width: int, vocab_size: int, axis: str | tuple[str, ...] | None
    ) -> Vocabulary:
        """Returns how a device with `width` of the vocabulary's tokens holds it: slices, or whole.

        Args:
          axis: mesh axis that the vocabulary is split over, where it divides vocab_size.
        """
        return cls(axis) if width != vocab_size else WHOLE

    @property
    def is_split(self) -> bool:
        return self.axis is not None

    @property
    def is_whole(self) -> bool:
        """Whether arrays hold every token, its id the index."""
        return self.axis is None

    def size(self, width: int) -> int:
        """Returns the number of tokens of all slices; static."""
        return width if self.axis is None else width * lax.axis_size(self.axis)

    def first_id(self, width: int) -> int | Array:
        """Returns the token id of index 0, which differs between shards."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * width

    def index(self, token_ids: Array, width: int) -> Array:
        """Returns the index of each token, which differs between shards.

        It is `width` where another shard holds the token, and where a token id is outside
        the vocabulary: `.at[index].set(mode="drop")` drops it. A whole vocabulary returns
        token_ids unchanged.
        """
        if self.axis is None:
            return token_ids
        index = token_ids - self.first_id(width)
        return jnp.where((index >= 0) & (index < width), index, width)

    def by_index(self, score: Score, width: int) -> Score:
        """Returns a function of (values, index), from `score`, one of (values, token_ids)."""
        if self.axis is None:
            return score
        first = self.first_id(width)
        return lambda values, index: score(values, index + first)

    def sum(self, partial: Array) -> Array:
        """Returns the sum over shards of what each summed over its slice."""
        return partial if self.axis is None else lax.psum(partial, self.axis)

    def max(self, partial: Array) -> Array:
        """Returns the maximum over shards of what each found in its slice; NaN may be lost."""
        return partial if self.axis is None else lax.pmax(partial, self.axis)

    def any(self, partial: Array) -> Array:
        """Returns whether any shard's flag is set, bool like partial."""
        return partial if self.axis is None else lax.pmax(partial.astype(jnp.int32), self.axis) > 0

    def read(self, at: Callable[[Array], Array], token_ids: Array, width: int) -> Array:
        """Returns what the shard that holds each token reads there, shaped like token_ids.

        Ids outside the vocabulary read 0 if it is split.

        Args:
          at: maps indices, inside the slice where the vocabulary is split, to values.
        """
        if self.is_whole:
            return at(token_ids)
        index = self.index(token_ids, width)
        return self.sum(jnp.where(index < width, at(jnp.minimum(index, width - 1)), 0))

    def take(self, values: Array, token_ids: Array) -> Array:
        """Returns values [..., width] at token ids [..., n], as `jnp.take_along_axis` does."""
        at = lambda index: jnp.take_along_axis(values, index, axis=-1)
        return self.read(at, token_ids, values.shape[-1])

    def best(self, index: Array, score: Array, width: int) -> tuple[Array, Array]:
        """Returns the token id of the best score, i32[n], and the score, f32[n].

        The lowest id wins a tie.

        Args:
          index: i32[n], the lowest index of the best score in this shard's slice.
          score: f32[n], that score, never NaN (see `first_argmax`).
        """
        if self.axis is None:
            return index, score
        # One collective of both, as bits.
        pair = jnp.stack([lax.bitcast_convert_type(score, jnp.int32), index + self.first_id(width)])
        bits, ids = jnp.moveaxis(lax.all_gather(pair, self.axis), 1, 0)  # [shards, n] each
        scores = lax.bitcast_convert_type(bits, jnp.float32)
        # The first of equal scores is of the lowest shard, whose ids are the lowest.
        winner = jnp.argmax(scores, axis=0)[None, :]
        at_winner = lambda each: jnp.take_along_axis(each, winner, axis=0)[0]
        return at_winner(ids), at_winner(scores)

    def best_few(self, index: Array, scores: Array, width: int, count: int) -> tuple[Array, Array]:
        """Returns token ids of the best scores in order, i32[n, count], and scores f32[n, count].

        Of equal scores the lowest id comes first.

        Args:
          index: i32[n, m], indices of the best of this shard's slice, in that order; m is
            `count`, or the whole slice if that is less.
          scores: f32[n, m]; where it is -inf the index may be any.
        """
        if self.axis is None:
            return index, scores
        ids = index + self.first_id(width)
        # In the order of shards, and so of ids among equal scores, which top_k keeps.
        ids, scores = lax.all_gather((ids, scores), self.axis, axis=1, tiled=True)
        best, place = lax.top_k(scores, count)
        return jnp.take_along_axis(ids, place, axis=1), best

    def top(self, values: Array, count: int) -> tuple[Array, Array]:
        """Returns token ids of the largest values in order, i32[n, count], and the values.

        Args:
          values: f32[n, width].
          count: static, at most the tokens of all slices.
        """
        width = values.shape[1]
        best, index = lax.top_k(values, min(count, width))
        return self.best_few(index, best, width, count)

    def one_hot(self, token_ids: Array, width: int) -> Array:
        """Returns this shard's slice of one-hot rows, f32[n, width]."""
        return jax.nn.one_hot(self.index(token_ids, width), width, dtype=jnp.float32)

    def softmax(self, logits: Array) -> Array:
        """Returns this shard's slice of the softmax of logits f32[n, width]."""
        if self.axis is None:
            return jax.nn.softmax(logits, axis=1)
        weights = jnp.exp(logits - self.max(jnp.max(logits, axis=1, keepdims=True)))
        return weights / self.sum(jnp.sum(weights, axis=1, keepdims=True))

    def log_softmax(self, logits: Array) -> Array:
        """Returns this shard's slice of the log-softmax of logits f32[n, width]."""
        if self.axis is None:
            return jax.nn.log_softmax(logits, axis=1)
        shifted = logits - self.max(jnp.max(logits, axis=1, keepdims=True))
        total = self.sum(jnp.sum(jnp.exp(shifted), axis=1, keepdims=True))
        return shifted - jnp.log(total)

    def whole(self, values: Array) -> Array:
        """Returns logits [..., vocab], from slices [..., width]."""
        if self.axis is None:
            return values
        return lax.all_gather(values, self.axis, axis=values.ndim - 1, tiled=True)

    def slice_of(self, whole: Array, width: int, axis: int = -1) -> Array:
        """Returns this shard's slice [..., width] of an array [..., vocab] that it holds whole.

        An array that is a slice already is returned unchanged.

        Args:
          axis: of the vocabulary in the array.
        """
        if self.axis is None or whole.shape[axis] == width:
            return whole
        return lax.dynamic_slice_in_dim(whole, self.first_id(width), width, axis)


WHOLE = Vocabulary()
