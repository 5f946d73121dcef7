"""The first of the largest: of values, of scores, and of scores that a cheap bound precedes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 128  # 64 to 256 cost the same on x86-64 with jax 0.10.2

# Up to this many values all scores are computed: there is little to leave out, and the
# code for leaving it out is compiled in every step.
SMALL = 4 * BLOCK

# Of the blocks with the largest values, or with any at all: how many are worth
# gathering, and how wide they are. Enough for top_k = 50, whose tokens lie in 50 blocks
# at most; other sizes were not compared. What filters cost with these is measured by
# specjax.bench.noise, on x86-64 with jax 0.10.2 and 0.12.0: docs/benchmarks/seeded-noise.md.
FEW, FEW_BLOCK = 64, 32

# Values f32[n, m] and their indices i32[n or 1, m] to scores f32[n, m]; elementwise,
# and -inf for -inf.
Score: TypeAlias = Callable[[Array, Array], Array]


def as_it_is(values: Array, index: Array | None = None) -> Array:
    """Returns the values: the score of an argmax of what is there."""
    return values


def first_argmax(values: Array, score: Score = as_it_is) -> tuple[Array, Array]:
    """Returns the lowest index of each row's best score, i32[n], and the score, f32[n].

    The best of each block, then an argmax over blocks and one inside the best
    block: a plain maximum is vectorised on CPU and jnp.argmax is not. Scores are
    computed in the pass that takes the maximum and again for the one block, never
    stored. NaN counts as +inf.

    Args:
      values: f32[n, size].
    """
    largest = block_maxima(values, _nan_as_inf(score))
    block = jnp.argmax(largest, axis=1).astype(jnp.int32)
    # No comparison with the maximum found before: what is computed again may differ
    # from it in the last bit.
    return _argmax_inside(values, block, score)


class _Search(NamedTuple):
    """The best score seen, and what the blocks not yet seen could still hold."""

    bounds: Array  # f32[n, num_blocks], -inf where a block was seen
    next_block: Array  # i32[n], the first with the largest bound
    next_bound: Array  # f32[n]
    index: Array  # i32[n], the lowest of the best score
    best: Array  # f32[n]

    @property
    def is_open(self) -> Array:
        """Whether the next block could hold a better score, or an equal one before it."""
        is_before = BLOCK * self.next_block < self.index
        is_equal = self.next_bound == self.best
        # Once all are seen every bound is -inf: nothing can keep the search going.
        is_left = self.next_bound > -jnp.inf
        return is_left & ((self.next_bound > self.best) | (is_equal & is_before))


def bounded_argmax(values: Array, score: Score, bound: Score) -> tuple[Array, Array]:
    """`first_argmax` that computes scores only in the blocks that can still win.

    Blocks are seen in the order of their largest bounds until none that is left can
    reach the best score so far. A tight bound needs one block, or two; one that is
    no help sees them all, and nothing but time is lost.

    Args:
      values: f32[n, size].
      bound: never below the score, and equal to it where that is not finite.
    """
    if values.shape[1] <= SMALL:
        return first_argmax(values, score)
    return search_blocks(block_bounds(values, bound), values, score)


def block_bounds(values: Array, bound: Score) -> Array:
    """Returns what no score of a block exceeds, f32[n, num_blocks]; +inf for NaN."""
    return block_maxima(values, _nan_as_inf(bound))


def search_blocks(bounds: Array, values: Array, score: Score) -> tuple[Array, Array]:
    """`bounded_argmax`, given the bounds of the blocks."""
    index = jnp.full(values.shape[0], values.shape[1], jnp.int32)
    start = _Search(bounds, *first_argmax(bounds), index, jnp.full_like(bounds[:, 0], -jnp.inf))

    def see(search: _Search) -> _Search:
        index, largest = _argmax_inside(values, search.next_block, score)
        is_first = index < search.index
        is_equal = (largest == search.best) & is_first
        is_better = (largest > search.best) | is_equal
        blocks = jnp.arange(bounds.shape[1])[None, :]
        left = jnp.where(blocks == search.next_block[:, None], -jnp.inf, search.bounds)
        return _Search(
            left,
            *first_argmax(left),
            jnp.where(is_better, index, search.index),
            jnp.where(is_better, largest, search.best),
        )

    end = lax.while_loop(lambda search: jnp.any(search.is_open), see, start)
    # Nothing was seen of a row of -inf: all of it is the best there is.
    return jnp.where(end.best == -jnp.inf, 0, end.index), end.best


def sparse_argmax(
    values: Array, score: Score, otherwise: Callable[[Array], tuple[Array, Array]]
) -> tuple[Array, Array]:
    """`first_argmax` that computes scores for the few blocks with anything but -inf.

    NaN in a block of -inf may go unseen.

    Args:
      values: f32[n, size].
      otherwise: values to indices and scores, where some row has more than FEW such
        blocks of FEW_BLOCK.
    """
    if is_short(values):
        return otherwise(values)
    is_empty = empty_blocks(values)

    def of_few() -> tuple[Array, Array]:
        index = indices_of_few(is_empty, values.shape[1])
        within = jnp.take_along_axis(values, index, axis=1)
        offset, best = first_argmax(score(within, index))
        return jnp.take_along_axis(index, offset[:, None], axis=1)[:, 0], best

    return lax.cond(are_few(is_empty), of_few, lambda: otherwise(values))


def empty_blocks(values: Array) -> Array:
    """Returns which blocks of FEW_BLOCK hold nothing but -inf, bool[n, num_blocks]."""
    return block_maxima(values, width=FEW_BLOCK) == -jnp.inf


def are_few(is_empty: Array) -> Array:
    """Returns whether no row has more than FEW blocks that are not empty, bool[]."""
    num_left = jnp.sum((~is_empty).astype(jnp.float32), axis=1)
    return jnp.all(num_left <= FEW)


def indices_of_few(is_empty: Array, size: int) -> Array:
    """Returns the indices inside FEW blocks that hold all that is not -inf, ascending.

    In the order of their indices, so that the first of equals is the lowest.
    """
    num_blocks = is_empty.shape[1]
    place = num_blocks - jnp.arange(num_blocks, dtype=jnp.float32)[None, :]
    _, blocks = top_few(jnp.where(is_empty, 0.0, place))
    return block_indices(blocks, size)


def is_short(values: Array) -> bool:
    """Whether few blocks would be most of a row."""
    return values.shape[1] <= 2 * FEW * FEW_BLOCK


def top_few(values: Array) -> tuple[Array, Array]:
    """Returns the FEW largest of each row, in order, and their indices.

    The barrier keeps XLA from slicing the result before it has recognised what it
    has a routine for: it would sort everything, which takes ten times as long.
    """
    return lax.optimization_barrier(tuple(lax.top_k(values, FEW)))


def block_indices(blocks: Array, size: int) -> Array:
    """Returns the indices inside blocks of FEW_BLOCK, i32[n, count * FEW_BLOCK].

    Args:
      blocks: i32[n, count].
      size: past the last index; the last block repeats the last one.
    """
    index = FEW_BLOCK * blocks[:, :, None] + jnp.arange(FEW_BLOCK)[None, None, :]
    return jnp.minimum(index, size - 1).reshape(blocks.shape[0], -1)


def block_maxima(values: Array, score: Score = as_it_is, *, width: int = BLOCK) -> Array:
    """Returns the best score of each block of a row, f32[n, num_blocks]; NaN may be lost."""
    size = values.shape[1]
    width = min(width, size)
    num_blocks = -(-size // width)
    padding = ((0, 0), (0, num_blocks * width - size))
    padded = jnp.pad(values, padding, constant_values=-jnp.inf)
    scores = score(padded, jnp.arange(num_blocks * width)[None, :])
    return jnp.max(scores.reshape(-1, num_blocks, width), axis=2)


def _argmax_inside(values: Array, block: Array, score: Score) -> tuple[Array, Array]:
    """Returns the lowest index of the best score in one block of each row, and the score."""
    start = BLOCK * block
    index = start[:, None] + jnp.arange(min(BLOCK, values.shape[1]))[None, :]
    index = jnp.minimum(index, values.shape[1] - 1)
    inside = _nan_as_inf(score)(jnp.take_along_axis(values, index, axis=1), index)
    offset = jnp.argmax(inside, axis=1).astype(jnp.int32)
    return start + offset, jnp.max(inside, axis=1)


def _nan_as_inf(score: Score) -> Score:
    """Keeps NaN in sight: a maximum of more than some thousand values on CPU drops it.

    (jax 0.10.2 to 0.12.0, whose library for reductions has a maximum of its own. The
    select also keeps XLA from handing the reduction to that library and storing the
    scores for it, which takes twice as long for a bound.)
    """

    def without_nan(values: Array, index: Array) -> Array:
        scores = score(values, index)
        return jnp.where(jnp.isnan(scores), jnp.inf, scores)

    return without_nan
