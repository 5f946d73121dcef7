"""Block verification: accepts a prefix of a chain by the joint probability of its tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from specjax.decode.accept.drawing import draw_token
from specjax.decode.accept.nodes import accepted_up_to, at_node, check_probs
from specjax.decode.accept.rejection import padded_draft_probs, subtract_draft
from specjax.sampling.vocabulary import WHOLE, Vocabulary
from specjax.types import Acceptance, Proposal


def accept_by_blocks(
    noise: Array,
    proposal: Proposal,
    target_probs: Array,
    *,
    vocabulary: Vocabulary = WHOLE,
) -> Acceptance:
    """Accepts a prefix of each chain, of optimal expected length, distributed as the target.

    The prefix of i draft tokens has the joint survival P_i = min(1, P_{i-1} target(x_i)
    / draft(x_i)); a prefix of low survival may be accepted as part of a longer one. The
    longest prefix that its own draw accepts is the result. The expected number of
    accepted tokens is never below that of `accept_by_rejection`.

    Whether num_tokens includes a draft token may depend on tokens drawn before it,
    never on itself or on tokens drawn later.

    Args:
      noise, proposal, target_probs, vocabulary: as for `accept_by_rejection`; noise [j, 0]
        accepts or rejects the prefix that ends in draft token j.

    Raises:
      ValueError: the proposal is a tree (see `accept_by_traversal`), has no probs, or
        shapes do not fit.

    Source: Sun et al. 2024 (arXiv:2403.10444), algorithm 2.
    """
    if proposal.tree is not None:
        raise ValueError("block verification takes chains; accept_by_traversal takes trees.")
    check_probs(noise, proposal, target_probs, vocabulary)
    draft_probs = padded_draft_probs(proposal)
    survival = _prefix_survival(proposal, target_probs, draft_probs, vocabulary)  # [rows, K + 1]
    # After the last draft nothing is subtracted, so that h below is the survival itself.
    excess = jnp.maximum(survival[:, :, None] * target_probs - draft_probs, 0.0)
    excess = vocabulary.sum(jnp.sum(excess, axis=2))
    stands = is_prefix_accepted(noise[:, :-1, 0], excess[:, 1:], survival[:, 1:])
    length = jnp.arange(1, survival.shape[1])[None, :]
    stands &= length <= proposal.num_tokens[:, None]
    num_accepted = jnp.max(jnp.where(stands, length, 0), axis=1, initial=0)
    scale = at_node(survival, num_accepted)[:, None]
    rest = subtract_draft(
        scale * at_node(target_probs, num_accepted),
        at_node(draft_probs, num_accepted),
        vocabulary,
    )
    token_ids = draw_token(at_node(noise[:, :, 1:], num_accepted), rest, vocabulary)
    return accepted_up_to(proposal, num_accepted, token_ids)


def is_prefix_accepted(draw: Array, excess: Array, survival: Array) -> Array:
    """Returns whether draw < excess / (excess + 1 - survival), without division."""
    return draw * (excess + (1.0 - survival)) < excess


def capped_ratio(survival: Array, target_prob: Array, draft_prob: Array) -> Array:
    """Returns min(1, survival * target / draft); 0 where the target's probability is 0."""
    scaled = survival * target_prob
    is_surely = (scaled >= draft_prob) & (scaled > 0)
    ratio = scaled / jnp.where(draft_prob > 0, draft_prob, 1.0)
    return jnp.where(is_surely, 1.0, ratio)


def _prefix_survival(
    proposal: Proposal, target_probs: Array, draft_probs: Array, vocabulary: Vocabulary
) -> Array:
    """Returns P_0 = 1 to P_K, f32[rows, K + 1]."""
    drafted = proposal.token_ids[:, :, None]
    p, q = (
        vocabulary.take(probs[:, :-1], drafted)[:, :, 0].T for probs in (target_probs, draft_probs)
    )

    def extend(survival: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        survival = capped_ratio(survival, *at)
        return survival, survival

    empty = jnp.ones(proposal.token_ids.shape[0], target_probs.dtype)
    _, survival = lax.scan(extend, empty, (p, q))
    return jnp.concatenate([empty[None], survival]).T
