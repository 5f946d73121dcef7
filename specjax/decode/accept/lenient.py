"""Rejection with lenience: more accepted tokens, at a bounded distortion. Lossy."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax.decode.accept.nodes import check_probs
from specjax.decode.accept.rejection import accept_by_rejection, reject_in_tree
from specjax.sampling.vocabulary import WHOLE, Vocabulary
from specjax.types import Acceptance, Proposal


def accept_leniently(
    noise: Array,
    proposal: Proposal,
    target_probs: Array,
    lenience: Array,
    *,
    vocabulary: Vocabulary = WHOLE,
) -> Acceptance:
    """Accepts as `accept_by_rejection` does, with draft probabilities multiplied by lenience.

    Draft token x is accepted with probability min(1, target(x) / (lenience * draft(x))).
    The output is not distributed as the target: the probability of a token is at most
    target(x) / lenience, and has no lower bound. Lenience 1 is `accept_by_rejection`.

    Args:
      noise, proposal, target_probs, vocabulary: as for `accept_by_rejection`.
      lenience: f32[rows], in (0, 1].

    Raises:
      ValueError: lenience is not one number per row, or as for `accept_by_rejection`.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), appendix A.5.
    """
    check_probs(noise, proposal, target_probs, vocabulary)
    lenience = jnp.asarray(lenience, target_probs.dtype)
    if lenience.shape != proposal.num_tokens.shape:
        raise ValueError(f"{lenience.shape=}; expected one per row, {proposal.num_tokens.shape}.")
    if proposal.tree is not None:
        return reject_in_tree(noise, proposal, target_probs, vocabulary, lenience)
    assert proposal.probs is not None
    smaller = dataclasses.replace(proposal, probs=lenience[:, None, None] * proposal.probs)
    return accept_by_rejection(noise, smaller, target_probs, vocabulary=vocabulary)
