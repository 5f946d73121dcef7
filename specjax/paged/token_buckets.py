"""Computes tokens bucket by bucket: for invariant numerics, and where not all logits fit at once.

Under invariant numerics every token is computed in one fixed shape.
Rounding depends on the shape of a matmul, so a token computed beside seven drafts
may differ in its last bits from the same token computed alone, and a near-tie flips.
With a token bucket of 16 all forwards, of prompts, plain decoding and verification,
run on 16 tokens, however many there are:

    K = 0, one row      [r . . . . . . . . . . . . . . .]
    K = 7, three rows   [r d d d d d d d r d d d d d d d] [r d d d d d d d . . . . . . . .]

A token's bits then depend only on its own prefix, its path and the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

Carry = TypeVar("Carry")
Part = TypeVar("Part")
Result = TypeVar("Result")


def round_up(num_tokens: int, token_bucket: int | None) -> int:
    """Returns the least multiple of the bucket that holds num_tokens; with None, num_tokens."""
    if token_bucket is None:
        return num_tokens
    return -(-num_tokens // token_bucket) * token_bucket


def equal_chunk(num_tokens: int, most: int) -> int:
    """Returns the chunk size, at least 1, for the fewest equal chunks of at most `most` tokens."""
    num_chunks = -(-num_tokens // max(most, 1))
    return -(-num_tokens // num_chunks)


def in_buckets(
    run: Callable[[Carry, Part], tuple[Carry, Result]],
    carry: Carry,
    tokens: Part,
    size: int,
    num_used: Array,
) -> tuple[Carry, Result]:
    """Calls run(carry, part) -> (carry, result) on one bucket of `size` tokens after the other.

    The length of the loop is unknown to the compiler, so that it cannot unroll an
    iteration into the surrounding code and round it differently.

    Args:
      tokens: a pytree of arrays [num_tokens, ...], num_tokens a multiple of size.
      num_used: i32[], tokens that are no padding; results of buckets past them are zeros.

    Returns:
      The carry, and the results laid end to end, [num_tokens, ...] each.
    """
    num_tokens = jax.tree.leaves(tokens)[0].shape[0]
    if num_tokens % size:
        raise ValueError(f"{num_tokens=} must be a multiple of the bucket {size=}.")

    # jit keeps its trace: the shapes of the results and the loop take one trace together.
    run = jax.jit(run, inline=True)

    def take(index: Array | int) -> Part:
        part = lambda leaf: lax.dynamic_slice_in_dim(leaf, index * size, size)
        return jax.tree.map(part, tokens)

    def turn(index: Array, state: tuple[Carry, Result]) -> tuple[Carry, Result]:
        carry, results = state
        carry, part = lax.optimization_barrier((carry, take(index)))
        carry, result = lax.optimization_barrier(run(carry, part))
        put = lambda whole, new: lax.dynamic_update_slice_in_dim(whole, new, index * size, 0)
        return carry, jax.tree.map(put, results, result)

    shapes = jax.eval_shape(lambda: run(carry, take(0))[1])
    nothing = jax.tree.map(
        lambda leaf: jnp.zeros((num_tokens, *leaf.shape[1:]), leaf.dtype), shapes
    )
    num_buckets = jnp.minimum((num_used + size - 1) // size, num_tokens // size)
    return lax.fori_loop(0, num_buckets, turn, (carry, nothing))
