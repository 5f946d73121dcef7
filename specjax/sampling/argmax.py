"""Argmax with the lowest index on ties: of values, of scores, and of scores with a cheap bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.implementations import by_platform
from pallas_kernels.seeded_sample.xla import first_best

BLOCK = 128  # 64 to 256 cost the same on x86-64 with jax 0.10.2

# Up to this many values all scores are computed: little could be skipped, and the code to
# skip it is compiled in every step.
SMALL = 4 * BLOCK

# Number and width of the blocks that are gathered, those with the largest values or with any
# above -inf. Enough for top_k = 50, whose tokens are in at most 50 blocks; other sizes were
# not compared. benchmarks.noise measures the cost of filters with these, on x86-64 with
# jax 0.10.2 and 0.12.0: docs/benchmarks/seeded-noise.md.
FEW, FEW_BLOCK = 64, 32

# Score(values f32[n, m], indices i32[n or 1, m]) -> scores f32[n, m]; elementwise, and
# -inf for a value of -inf.
Score: TypeAlias = Callable[[Array, Array], Array]


def as_it_is(values: Array, index: Array | None = None) -> Array:
    """Returns the values unchanged: the score function of a plain argmax."""
    return values


def first_argmax(values: Array, score: Score = as_it_is) -> tuple[Array, Array]:
    """Returns the lowest index of each row's best score, i32[n], and the score, f32[n].

    Scores are computed in the pass that compares them and never stored. NaN counts as +inf.

    Args:
      values: f32[n, size].
    """
    return by_platform(
        values,
        cpu=lambda values: _argmax_of_blocks(values, score),
        default=lambda values: _argmax_in_one_pass(values, score),
    )


def _argmax_of_blocks(values: Array, score: Score) -> tuple[Array, Array]:
    """Returns `first_argmax` as a CPU is fast at it.

    It takes the maximum of each block, then an argmax over blocks and one inside the
    best block: a plain maximum is vectorised on CPU and an argmax is not.
    """
    largest = block_maxima(values, _nan_as_inf(score))
    block = jnp.argmax(largest, axis=1).astype(jnp.int32)
    # Not compared with the maximum found before: recomputed scores may differ from it in the
    # last bit.
    return _argmax_inside(values, block, score)


def _argmax_in_one_pass(values: Array, score: Score) -> tuple[Array, Array]:
    """Returns `first_argmax` as accelerators are fast at it: each score is computed once, and no
    copy of the values is laid out in blocks."""
    scores = _nan_as_inf(score)(values, jnp.arange(values.shape[1])[None, :])
    best, index = first_best(scores)
    return index, best


class _Search(NamedTuple):
    """The best score so far, and the bounds of blocks not searched yet."""

    bounds: Array  # f32[n, num_blocks], -inf for a searched block
    next_block: Array  # i32[n], the first block with the largest bound
    next_bound: Array  # f32[n]
    index: Array  # i32[n], the lowest index of the best score
    best: Array  # f32[n]

    @property
    def is_open(self) -> Array:
        """Whether the next block could hold a better score, or an equal one before it."""
        is_before = BLOCK * self.next_block < self.index
        is_equal = self.next_bound == self.best
        # Once all blocks are searched every bound is -inf, and the search ends.
        is_left = self.next_bound > -jnp.inf
        return is_left & ((self.next_bound > self.best) | (is_equal & is_before))


def bounded_argmax(values: Array, score: Score, bound: Score) -> tuple[Array, Array]:
    """Returns `first_argmax`, computing scores only in blocks that can still win.

    Blocks are searched in descending order of their bounds until none that is left can
    reach the best score so far. With a tight bound that takes one or two blocks; with a
    loose one it searches all, which costs only time.

    Args:
      values: f32[n, size].
      bound: never below the score, and equal to it where that is not finite.
    """
    if values.shape[1] <= SMALL:
        return first_argmax(values, score)
    return search_blocks(block_bounds(values, bound), values, score)


def block_bounds(values: Array, bound: Score) -> Array:
    """Returns an upper bound of the scores of each block, f32[n, num_blocks]; +inf for NaN."""
    return block_maxima(values, _nan_as_inf(bound))


def search_blocks(bounds: Array, values: Array, score: Score) -> tuple[Array, Array]:
    """Returns `bounded_argmax`, given the bounds of the blocks."""
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
    # In a row of only -inf no block is searched, and index 0 is among the best.
    return jnp.where(end.best == -jnp.inf, 0, end.index), end.best


def sparse_argmax(
    values: Array, score: Score, otherwise: Callable[[Array], tuple[Array, Array]]
) -> tuple[Array, Array]:
    """Returns `first_argmax`, computing scores only in the few blocks with a value above -inf.

    NaN in a block of -inf may be missed.

    Args:
      values: f32[n, size].
      otherwise: maps values to indices and scores; used if some row has more than FEW such
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
    """Returns which blocks of FEW_BLOCK hold only -inf, bool[n, num_blocks]."""
    return block_maxima(values, width=FEW_BLOCK) == -jnp.inf


def are_few(is_empty: Array) -> Array:
    """Returns whether no row has more than FEW blocks that are not empty, bool[]."""
    num_left = jnp.sum((~is_empty).astype(jnp.float32), axis=1)
    return jnp.all(num_left <= FEW)


def indices_of_few(is_empty: Array, size: int) -> Array:
    """Returns the indices of FEW blocks that hold all values above -inf.

    They are ascending, so that the first of equal scores has the lowest index.
    """
    num_blocks = is_empty.shape[1]
    place = num_blocks - jnp.arange(num_blocks, dtype=jnp.float32)[None, :]
    _, blocks = top_few(jnp.where(is_empty, 0.0, place))
    return block_indices(blocks, size)


def is_short(values: Array) -> bool:
    """Returns whether FEW blocks are at least half of a row."""
    return values.shape[1] <= 2 * FEW * FEW_BLOCK


def top_few(values: Array) -> tuple[Array, Array]:
    """Returns the FEW largest of each row, in order, and their indices.

    The barriers keep XLA from slicing the result before it recognises a top_k: it would
    sort all values instead, which takes ten times as long. There is one for each of the two:
    XLA would take one of both for that of the operation's tuple, which ends the process where
    its pass TopkDecomposer meets it (jax 0.10.2, CPU, vocabularies over several devices).
    """
    best, index = lax.top_k(values, FEW)
    return lax.optimization_barrier(best), lax.optimization_barrier(index)


def block_indices(blocks: Array, size: int) -> Array:
    """Returns the indices inside blocks of FEW_BLOCK, i32[n, count * FEW_BLOCK].

    Args:
      blocks: i32[n, count].
      size: length of a row; indices past its end are replaced by the last one.
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
    """Returns the score with NaN as +inf: on a CPU a maximum of many values may drop NaN.

    (More than some thousand values, jax 0.10.2 to 0.12.0, whose reduction library has its
    own maximum. The select also keeps XLA from passing the reduction to that library and
    storing the scores for it, which takes twice as long for a bound.)
    """

    def without_nan(values: Array, index: Array) -> Array:
        scores = score(values, index)
        return jnp.where(jnp.isnan(scores), jnp.inf, scores)

    return without_nan
