"""Rejection with lenience: longer acceptance, bounded distortion. Lossy."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax.decode.accept.nodes import check_probs
from specjax.decode.accept.rejection import accept_by_rejection, reject_in_tree
from specjax.types import Acceptance, Proposal


def accept_leniently(
    noise: Array, proposal: Proposal, target_probs: Array, lenience: Array
) -> Acceptance:
    """Accepts as `accept_by_rejection` does with every draft probability made smaller.

    Draft token x survives with probability min(1, target(x) / (lenience * draft(x))).
    The output is not distributed as the target: no token is emitted with more than
    target(x) / lenience, and nothing bounds it from below. At 1 it is rejection.

    Args:
      noise, proposal, target_probs: as for `accept_by_rejection`.
      lenience: f32[rows], in (0, 1].

    Raises:
      ValueError: lenience is not one number per row, or as for `accept_by_rejection`.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), appendix A.5.
    """
    check_probs(noise, proposal, target_probs)
    lenience = jnp.asarray(lenience, target_probs.dtype)
    if lenience.shape != proposal.num_tokens.shape:
        raise ValueError(f"{lenience.shape=}; expected one per row, {proposal.num_tokens.shape}.")
    if proposal.tree is not None:
        return reject_in_tree(noise, proposal, target_probs, lenience)
    assert proposal.probs is not None
    smaller = dataclasses.replace(proposal, probs=lenience[:, None, None] * proposal.probs)
    return accept_by_rejection(noise, smaller, target_probs)
