"""Finds the best few scores of a row, at distinct indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.implementations import by_platform
from specjax.sampling.argmax import (
    SMALL,
    Score,
    are_few,
    empty_blocks,
    first_argmax,
    indices_of_few,
    is_short,
    search_blocks,
)

NOT_FOUND = -1

# Next(indices found so far, i32[n, count]) -> the best of the other indices, and its score.
Next: TypeAlias = Callable[[Array], tuple[Array, Array]]


def best_distinct(
    values: Array,
    score: Score,
    bounds: Callable[[], Array],
    count: int,
    *,
    may_be_sparse: Array | bool,
) -> tuple[Array, Array]:
    """Returns the indices of the `count` best scores in order, i32[n, count], and the scores.

    Of equal scores the lowest index comes first; the index of a score of -inf is
    meaningless. NaN counts as +inf. On a CPU bounds are computed once, and scores only
    where they can win, or only for values above -inf if these are few.

    Args:
      values: f32[n, size].
      score: as for `bounded_argmax`.
      bounds: computes the `block_bounds`.
      may_be_sparse: bool[], whether to check if few values are above -inf.
    """

    def all_scores(values: Array) -> tuple[Array, Array]:
        return _in_turn(lambda found: first_argmax(values, without(score, found)))

    def bounded(values: Array) -> tuple[Array, Array]:
        # Bounds include indices already found: their blocks are searched again, needlessly.
        of_blocks = bounds()
        return _in_turn(lambda found: search_blocks(of_blocks, values, without(score, found)))

    def few_or_bounded(values: Array) -> tuple[Array, Array]:
        if values.shape[1] <= SMALL:
            return all_scores(values)
        if is_short(values):
            return bounded(values)

        def of_few() -> tuple[Array, Array]:
            index = indices_of_few(empty_blocks(values), values.shape[1])
            scores = score(jnp.take_along_axis(values, index, axis=1), index)

            def best(found: Array) -> tuple[Array, Array]:
                left = without(lambda scores, _: scores, found)(scores, index)
                offset, largest = first_argmax(left)
                at = jnp.take_along_axis(index, offset[:, None], axis=1)
                return at[:, 0], largest

            return _in_turn(best)

        is_sparse = lax.cond(
            may_be_sparse,
            lambda: are_few(empty_blocks(values)),
            lambda: jnp.array(False),
        )
        return lax.cond(is_sparse, of_few, lambda: bounded(values))

    def _in_turn(best: Next) -> tuple[Array, Array]:
        shape = values.shape[0], count

        def find(place: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            found, scores = state
            index, largest = best(found)
            is_here = jnp.arange(count)[None, :] == place
            return (
                jnp.where(is_here, index[:, None], found),
                jnp.where(is_here, largest[:, None], scores),
            )

        nothing = jnp.full(shape, NOT_FOUND), jnp.full(shape, -jnp.inf)
        return lax.fori_loop(0, count, find, nothing)

    return by_platform(values, cpu=few_or_bounded, default=all_scores)


def without(score: Score, found: Array) -> Score:
    """Returns a score function that gives -inf at the indices found, i32[n, count]."""

    def of_others(values: Array, index: Array) -> Array:
        is_found = jnp.any(index[:, :, None] == found[:, None, :], axis=2)
        return jnp.where(is_found, -jnp.inf, score(values, index))

    return of_others
