"""Noise as a function of (seed, position, role, token id), without keys or state to carry.

A draw depends on the position of its token, never on the step, the batch or the
draft, so that plain decoding and speculative decoding use the same draws.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32

from pallas_kernels import counter_noise
from pallas_kernels.counter_noise import BOUND_SLACK as BOUND_SLACK
from pallas_kernels.counter_noise import random_bits as random_bits

# Purpose of a draw. Draws of one (seed, position) under two roles are independent.
# The target and a drafter that imitates it share TARGET_TOKEN on purpose.
TARGET_TOKEN, ACCEPT, RECOVER, DRAFT = range(4)
NUM_ROLES = 4


def node_role(role: int, node: int | Array) -> int | Array:
    """Returns a distinct role for each node of a draft, for draws at one position."""
    return role + NUM_ROLES * node


def token_keys(seeds: Array, positions: Array, role: int | Array) -> Array:
    """Returns a key per flat token, u32[num_tokens, 2]: Threefry-2x32 of (position, role).

    Args:
      seeds: u32[num_tokens, 2].
      positions: i32[num_tokens].
      role: one of the module's roles, or i32[num_tokens]; for a node from `node_role`.
    """
    roles = jnp.broadcast_to(jnp.asarray(role, jnp.int32), positions.shape)
    counts = jnp.stack([positions, roles], axis=-1).astype(jnp.uint32)
    seeds = seeds.astype(jnp.uint32)
    return jax.vmap(lambda seed, count: threefry_2x32((seed[0], seed[1]), count))(seeds, counts)


def uniforms(seeds: Array, positions: Array, role: int | Array, count: int) -> Array:
    """Returns uniform draws f32[num_tokens, count], strictly inside (0, 1).

    Args:
      seeds: u32[num_tokens, 2].
      positions: i32[num_tokens].
      role: one of the module's roles, or i32[num_tokens].
    """
    return counter_noise.open_unit(random_bits(token_keys(seeds, positions, role), count))


def gumbel_noise(keys: Array, token_ids: int | Array) -> Array:
    """Returns standard Gumbel draws f32[num_tokens, n], finite."""
    return counter_noise.gumbel(random_bits(keys, token_ids))


def gumbel_bound(keys: Array, token_ids: int | Array) -> Array:
    """Returns upper bounds of `gumbel_noise` of the same ids, f32[num_tokens, n], cheaper."""
    return counter_noise.gumbel_bound(random_bits(keys, token_ids))
