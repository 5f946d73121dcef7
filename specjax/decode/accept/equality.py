"""Equality: accepts draft tokens that are the target's own choice."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from specjax.decode.accept.nodes import (
    check_choices,
    next_child,
    node_tokens,
    parents_of,
    standing,
)
from specjax.types import Acceptance, Proposal


def accept_by_equality(proposal: Proposal, target_token_ids: Array) -> Acceptance:
    """Accepts the longest path from the root that equals the target's own choices.

    `greedy`, `seeded` and `delta` are all this rule; they differ in how the target
    chooses (argmax, or argmax of log p plus noise that depends on seed and position
    alone) and in whether the drafter uses the same noise. Whatever is drafted, the
    emitted tokens are those that plain decoding would choose. Among equal siblings
    the one of the lowest index is accepted.

    Args:
      target_token_ids: i32[rows, num_nodes], the target's choice after each node; entry
        0 follows the root. Entries past a row's num_tokens are ignored.

    Raises:
      ValueError: target_token_ids has another shape.

    Source: Daliri, Musco and Suresh 2024 (arXiv:2408.07978) for shared noise.
    """
    check_choices(proposal, target_token_ids)
    if proposal.tree is not None:
        return _equality_in_tree(proposal, target_token_ids)
    depth = proposal.token_ids.shape[1]
    stands = proposal.token_ids == target_token_ids[:, :depth]
    stands &= jnp.arange(depth)[None, :] < proposal.num_tokens[:, None]
    num_accepted = jnp.sum(jnp.cumprod(stands, axis=1), axis=1, dtype=jnp.int32)
    # An accepted draft token equals the target's choice, so the output is the target's choices.
    return Acceptance(target_token_ids, num_accepted)


def _equality_in_tree(proposal: Proposal, target_token_ids: Array) -> Acceptance:
    """Applies equality to trees: descends to the child that the target chooses, while it exists."""
    parents = parents_of(proposal)
    root = jnp.zeros(parents.shape[0], jnp.int32)
    chosen = jnp.take_along_axis(target_token_ids, jnp.maximum(parents, 0), axis=1)
    is_right = standing(proposal) & (node_tokens(proposal) == chosen)

    def descend(at: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        child = next_child(parents, is_right, at, at)
        is_accepted = child < parents.shape[1]
        at = jnp.where(is_accepted, child, at)
        return at, (at, is_accepted)

    _, (nodes, is_accepted) = lax.scan(descend, root, length=proposal.max_depth)
    path = jnp.concatenate([root[None], nodes]).T
    tokens = jnp.take_along_axis(target_token_ids, path, axis=1)
    return Acceptance(tokens, jnp.sum(is_accepted, axis=0, dtype=jnp.int32), nodes.T)
