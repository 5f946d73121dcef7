"""Submit: selects the draft tokens likeliest to be accepted, where not all can be verified."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax.types import Proposal, is_by_law

# Assumed acceptance probability of a token given its parent, where the drafter reports none.
_UNKNOWN = 0.5


def submit(proposal: Proposal, rules: Array, max_drafts: int) -> Proposal:
    """Keeps at most max_drafts draft tokens over all rows: a prefix of each row's tokens.

    A row under a rule by law is ranked by `prior_confidence`: whether token j is
    verified then follows from what was drawn before it. If the ranking knew token j,
    likely tokens would be verified more often than they are drawn, and the output would
    be biased towards unlikely ones. Other rows are ranked by `path_probability`. No
    token ranks above an earlier token of its row, so that a row loses its last tokens
    first; among equals the lower node comes first, then the lower row.

    Args:
      rules: i32[rows].

    Cost: a sort of rows * num_drafts.
    """
    rows, num_drafts = proposal.token_ids.shape
    ranked = jnp.where(
        is_by_law(rules)[:, None],
        _figure(proposal, proposal.prior_confidence),
        _figure(proposal, proposal.path_probability),
    )
    node = jnp.broadcast_to(jnp.arange(num_drafts)[None, :], (rows, num_drafts))
    stands = node < proposal.num_tokens[:, None]
    # NaN, from a faulty drafter, ranks last.
    ranked = jnp.where(stands & (ranked >= 0), ranked, -1.0)
    # The minimum over the row's tokens up to this one.
    ranked = jnp.minimum.accumulate(ranked, axis=1)
    order = jnp.lexsort((node.reshape(-1), -ranked.reshape(-1)))
    # lexsort is stable: entries of equal figure and node stay in row order.
    rank = (
        jnp.zeros(rows * num_drafts, jnp.int32)
        .at[order]
        .set(jnp.arange(rows * num_drafts, dtype=jnp.int32))
    )
    is_kept = stands & (rank.reshape(rows, num_drafts) < max_drafts)
    return dataclasses.replace(proposal, num_tokens=jnp.sum(is_kept, axis=1, dtype=jnp.int32))


def _figure(proposal: Proposal, figure: Array | None) -> Array:
    """Returns each draft token's estimated acceptance probability, f32[rows, num_drafts]."""
    if figure is not None:
        return figure
    depths = jnp.arange(1, proposal.num_nodes)[None, :]
    if proposal.tree is not None:
        depths = proposal.tree.depths[:, 1:]
    return jnp.broadcast_to(_UNKNOWN ** depths.astype(jnp.float32), proposal.token_ids.shape)
