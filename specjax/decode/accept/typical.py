"""Typical acceptance: accepts draft tokens of high enough target probability. Lossy."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import entr

from specjax.decode.accept.nodes import (
    accepted_up_to,
    at_node,
    check_choices,
    depths_of,
    node_tokens,
    parents_of,
    standing,
)
from specjax.sampling.vocabulary import WHOLE, Vocabulary
from specjax.types import Acceptance, Proposal


def accept_typical(
    proposal: Proposal,
    target_probs: Array,
    target_token_ids: Array,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
    vocabulary: Vocabulary = WHOLE,
) -> Acceptance:
    """Accepts the longest path of tokens that are typical of the target.

    A token is typical if target(x) > min(epsilon, delta * exp(-H(target))): likely, or
    not much less likely than an average token where the target is uncertain. The output
    is not distributed as the target. Among the longest paths, the one whose last node has
    the lowest index is accepted.

    Medusa differs: it decodes the first token of a step greedily and accepts it
    unconditionally. Here the token after the path is the row's own sampled choice, and
    every draft token is compared with the threshold.

    Args:
      target_probs: f32[rows, num_nodes, vocab], rows sum to 1; entry j follows node j.
      target_token_ids: i32[rows, num_nodes], the target's own choice after each node,
        which follows the accepted path.
      epsilon: upper bound of the threshold.
      delta: the threshold as a fraction of the average likelihood, exp(-entropy).
      vocabulary: how target_probs are split over devices.

    Raises:
      ValueError: shapes do not fit.

    Source: Cai et al. 2024, Medusa (arXiv:2401.10774v3), section 2.3.1.
    """
    check_choices(proposal, target_token_ids)
    if target_probs.shape[:2] != target_token_ids.shape:
        raise ValueError(f"{target_probs.shape=} does not fit {target_token_ids.shape=}.")
    entropy = vocabulary.sum(jnp.sum(entr(target_probs), axis=2))  # [rows, num_nodes]
    threshold = jnp.minimum(epsilon, delta * jnp.exp(-entropy))
    parents = jnp.maximum(parents_of(proposal), 0)
    row = jnp.arange(parents.shape[0])[:, None]
    likelihood = vocabulary.read(
        lambda index: target_probs[row, parents, index],
        node_tokens(proposal),
        target_probs.shape[2],
    )
    is_typical = standing(proposal) & (likelihood > jnp.take_along_axis(threshold, parents, axis=1))
    last = _deepest(proposal, parents, is_typical)
    return accepted_up_to(proposal, last, at_node(target_token_ids, last))


def _deepest(proposal: Proposal, parents: Array, stands: Array) -> Array:
    """Returns the first of the deepest nodes with `stands` true up to the root, i32[rows]."""
    is_root = jnp.arange(parents.shape[1])[None, :] == 0
    is_reached = jnp.broadcast_to(is_root, parents.shape)

    def extend(is_reached: Array, _: None) -> tuple[Array, None]:
        return is_root | (stands & jnp.take_along_axis(is_reached, parents, axis=1)), None

    is_reached, _ = lax.scan(extend, is_reached, length=proposal.max_depth)
    depths = jnp.where(is_reached, depths_of(proposal), -1)
    return jnp.argmax(depths, axis=1).astype(jnp.int32)
