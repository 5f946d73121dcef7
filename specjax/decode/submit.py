"""Which draft tokens are verified where not all of them may be: those likeliest to stand."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax.types import Proposal, is_by_law

# A drafter that says nothing of its tokens: each is as likely as not, given its parent.
_UNKNOWN = 0.5


def submit(proposal: Proposal, rules: Array, max_drafts: int) -> Proposal:
    """Keeps at most max_drafts draft tokens over all rows: the first ones of every row.

    A row under a rule by law is ranked by `prior_confidence`: whether token j is
    verified then follows from what was drawn before it. Ranked by a figure that knows
    token j, likely tokens would be verified more often than they are drawn, and the
    output be biased towards the unlikely ones. Other rows are ranked by
    `path_probability`. No token ranks above one that stands before it in its row, so
    that a row's tokens are cut from behind; among equals the lower node comes first,
    then the lower row.

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
    # NaN, of a drafter gone wrong, ranks last.
    ranked = jnp.where(stands & (ranked >= 0), ranked, -1.0)
    # The least figure so far.
    ranked = jnp.minimum.accumulate(ranked, axis=1)
    order = jnp.lexsort((node.reshape(-1), -ranked.reshape(-1)))
    # lexsort is stable: equal nodes of equal figures stay in the order of their rows.
    rank = (
        jnp.zeros(rows * num_drafts, jnp.int32)
        .at[order]
        .set(jnp.arange(rows * num_drafts, dtype=jnp.int32))
    )
    is_kept = stands & (rank.reshape(rows, num_drafts) < max_drafts)
    return dataclasses.replace(proposal, num_tokens=jnp.sum(is_kept, axis=1, dtype=jnp.int32))


def _figure(proposal: Proposal, figure: Array | None) -> Array:
    """Returns how likely each draft token is to stand, f32[rows, num_drafts]."""
    if figure is not None:
        return figure
    depths = jnp.arange(1, proposal.num_nodes)[None, :]
    if proposal.tree is not None:
        depths = proposal.tree.depths[:, 1:]
    return jnp.broadcast_to(_UNKNOWN ** depths.astype(jnp.float32), proposal.token_ids.shape)
