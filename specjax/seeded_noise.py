"""Noise as a function of (seed, position, role, token id): no key to carry, no state.

What a step draws depends on where a token stands, never on the step, the batch or
the draft, so that plain decoding and every speculation see the same draws.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.random import threefry_2x32

from pallas_kernels import counter_noise
from pallas_kernels.counter_noise import random_bits as random_bits

# What a draw decides. Draws of one (seed, position) under two roles are independent.
# TARGET_TOKEN is shared on purpose by the target and a drafter that imitates it.
TARGET_TOKEN, ACCEPT, RECOVER, DRAFT = range(4)
NUM_ROLES = 4

# Above what rounding in `gumbel_bound` and in the logarithms of `gumbel_noise` can take
# away: a few units in the last place of numbers below 128.
BOUND_SLACK = 1e-3


def node_role(role: int, node: int | Array) -> int | Array:
    """Returns a role of its own for each node of a draft, among draws of one position."""
    return role + NUM_ROLES * node


def token_keys(seeds: Array, positions: Array, role: int | Array) -> Array:
    """Returns a key per flat token, u32[num_tokens, 2]: Threefry-2x32 of (position, role).

    Args:
      seeds: u32[num_tokens, 2].
      positions: i32[num_tokens].
      role: one of the module's roles, or i32[num_tokens]; of a node by `node_role`.
    """
    roles = jnp.broadcast_to(jnp.asarray(role, jnp.int32), positions.shape)
    counts = jnp.stack([positions, roles], axis=-1).astype(jnp.uint32)
    seeds = seeds.astype(jnp.uint32)
    return jax.vmap(lambda seed, count: threefry_2x32((seed[0], seed[1]), count))(
        seeds, counts
    )


def uniforms(seeds: Array, positions: Array, role: int | Array, count: int) -> Array:
    """Returns uniform draws f32[num_tokens, count], strictly inside (0, 1).

    Args:
      seeds: u32[num_tokens, 2].
      positions: i32[num_tokens].
      role: one of the module's roles, or i32[num_tokens].
    """
    return counter_noise.open_unit(
        random_bits(token_keys(seeds, positions, role), count)
    )


def exponential_noise(keys: Array, token_ids: int | Array) -> Array:
    """Returns exponential draws f32[num_tokens, n], positive and finite.

    Args:
      keys: u32[num_tokens, 2], from `token_keys`.
      token_ids: a vocabulary size, or the ids as for `random_bits`.
    """
    return counter_noise.exponential(random_bits(keys, token_ids))


def gumbel_noise(keys: Array, token_ids: int | Array) -> Array:
    """Returns standard Gumbel draws f32[num_tokens, n], finite; -log of the exponential ones."""
    return counter_noise.gumbel(random_bits(keys, token_ids))


def gumbel_bound(keys: Array, token_ids: int | Array) -> Array:
    """Returns f32[num_tokens, n] at or above `gumbel_noise` of the same ids, with no logarithm.

    The bits of a float read as an integer are its logarithm to base 2, up to 0.086
    too low, so -log u is at most this line through them; and -log of -log(1 - u),
    the noise, is at most -log u. Where the noise is large, and wins races, the two
    are equal and the bound is at most 0.06 + BOUND_SLACK too high. A word below 2**10,
    one in four million, loses much with its last bit: up to 1.1 too high, and safe.
    """
    # Half the bits fit an int32, whose conversion has an instruction of its own; 2**31 u
    # is at least half + 1/4.
    half = (random_bits(keys, token_ids) >> 1).astype(jnp.int32).astype(jnp.float32)
    as_integer = lax.bitcast_convert_type(half + jnp.float32(0.25), jnp.int32)
    log_2 = math.log(2)
    highest = (31 + 127) * log_2 + BOUND_SLACK
    slope = log_2 * 2.0**-23
    return jnp.float32(highest) - as_integer.astype(jnp.float32) * jnp.float32(slope)
