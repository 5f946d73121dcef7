"""Synthetic acceptance at given rates, to measure speed with random weights. Lossy."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from specjax.decode.accept.nodes import (
    accepted_up_to,
    at_node,
    check_choices,
    next_child,
    parents_of,
    standing,
)
from specjax.types import Acceptance, Proposal


def accept_synthetic(
    noise: Array, proposal: Proposal, target_token_ids: Array, rates: Array
) -> Acceptance:
    """Accepts draft tokens at given rates, whatever the tokens are.

    The draft token at depth d + 1 is accepted with probability rates[d], given that those
    before it were; in a tree the path is that of first children. The token after the path
    is the target's own choice. The output is not distributed as the target.

    Args:
      noise: f32[rows, max_depth], uniform in (0, 1).
      target_token_ids: i32[rows, num_nodes], the target's choice after each node.
      rates: f32[max_depth], each in [0, 1].

    Raises:
      ValueError: shapes do not fit.
    """
    check_choices(proposal, target_token_ids)
    depth = proposal.max_depth
    if noise.shape != (target_token_ids.shape[0], depth) or rates.shape != (depth,):
        raise ValueError(
            f"{noise.shape=} and {rates.shape=} do not fit; expected "
            f"{(target_token_ids.shape[0], depth)} and {(depth,)}."
        )
    parents, may_follow = parents_of(proposal), standing(proposal)
    is_lucky = jnp.cumprod(noise < rates[None, :], axis=1, dtype=bool)

    def descend(at: Array, is_lucky: Array) -> tuple[Array, None]:
        child = next_child(parents, may_follow, at, at)
        return jnp.where(is_lucky & (child < parents.shape[1]), child, at), None

    root = jnp.zeros(parents.shape[0], jnp.int32)
    last, _ = lax.scan(descend, root, is_lucky.T)
    return accepted_up_to(proposal, last, at_node(target_token_ids, last))
