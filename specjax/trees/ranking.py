"""Selects the best of many candidate nodes as a tree."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from specjax.trees.draft_tree import GrownTree, from_parents


def best_nodes(
    scores: Array,  # f32[rows, num_candidates], -inf where there is no candidate
    token_ids: Array,  # i32[rows, num_candidates]
    parents: Array,  # i32[rows, num_candidates]
    *,
    num_drafts: int,
    max_depth: int,
) -> GrownTree:
    """Keeps the num_drafts candidates of the highest score, renumbered in that order.

    Candidate c is node c + 1, and `parents` holds node numbers, 0 for the root. No
    candidate scores above its parent or has a lower number, and equal scores are
    ranked by number: so the parent of every kept candidate is kept before it, and any
    prefix of the result is the best tree of its size.

    Returns:
      num_tokens counts real candidates, possibly fewer than num_drafts. Entries past it
      are token 0 under the root. path_probability holds the scores, -inf past num_tokens;
      candidates holds the node numbers, 0 past num_tokens.

    Cost: a top_k of num_drafts among num_candidates and num_drafts ** 2 comparisons
    per row, max_depth gathers of num_drafts.

    Raises:
      ValueError: num_drafts is below 1.
    """
    if num_drafts < 1:
        raise ValueError(f"{num_drafts=} must be at least 1.")
    missing = max(num_drafts - scores.shape[1], 0)
    padded = jnp.pad(scores, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    best, chosen = lax.top_k(padded, num_drafts)
    is_real = best > -jnp.inf
    inside = jnp.minimum(chosen, scores.shape[1] - 1)
    above = jnp.take_along_axis(parents, inside, axis=1)
    # [rows, node, other]
    is_parent = above[:, :, None] == chosen[:, None, :] + 1
    number = jnp.argmax(is_parent, axis=2).astype(jnp.int32) + 1
    number = jnp.where(is_real & (above > 0), number, 0)
    kept = jnp.take_along_axis(token_ids, inside, axis=1)
    with_root = jnp.pad(number, ((0, 0), (1, 0)), constant_values=-1)
    return GrownTree(
        token_ids=jnp.where(is_real, kept, 0),
        num_tokens=jnp.sum(is_real, axis=1, dtype=jnp.int32),
        tree=from_parents(with_root, max_depth),
        path_probability=best,
        candidates=jnp.where(is_real, chosen + 1, 0),
    )
