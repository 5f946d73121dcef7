"""Verification rules for chains: which draft tokens stand, and what follows them."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from specjax.types import Acceptance, Proposal


def accept_by_equality(proposal: Proposal, target_token_ids: Array) -> Acceptance:
    """Accepts the longest prefix of each draft that equals what the target chooses.

    `greedy`, `seeded` and `delta` are this one rule; they differ in how the target
    chooses (argmax, or argmax of log p plus noise that depends on seed and position
    alone) and in whether the drafter looks at the same noise. Whatever was drafted,
    the tokens emitted are those that plain decoding would have chosen.

    Args:
      target_token_ids: i32[rows, K + 1], the target's choice after each node; entry
        0 follows the root. Entries past a row's num_tokens are ignored.

    Source: Daliri, Musco and Suresh 2024 (arXiv:2408.07978) for shared noise.
    """
    depth = proposal.token_ids.shape[1]
    stands = proposal.token_ids == target_token_ids[:, :depth]
    stands &= jnp.arange(depth)[None, :] < proposal.num_tokens[:, None]
    num_accepted = jnp.sum(jnp.cumprod(stands, axis=1), axis=1, dtype=jnp.int32)
    # An accepted draft token equals the target's choice, so the output is the target's choices.
    return Acceptance(target_token_ids, num_accepted)


def accept_by_rejection(
    noise: Array, proposal: Proposal, target_probs: Array
) -> Acceptance:
    """Accepts a prefix of each draft so that the output is distributed as the target.

    Draft token x survives with probability min(1, target(x) / draft(x)); the first
    that does not is replaced by a recovered token, and a fully accepted draft is
    followed by a bonus token. Temperature, top-k and top-p are already applied.

    Args:
      noise: f32[rows, K + 1, 2], uniform in (0, 1): one draw to accept, one to
        recover, per position; an argument so that tests can enumerate it.
      proposal: with probs f32[rows, K, vocab] that each token was drawn from.
      target_probs: f32[rows, K + 1, vocab], rows sum to 1; entry K follows the last draft.

    Returns:
      token_ids i32[rows, K + 1], right up to and including entry num_accepted.

    Raises:
      ValueError: the vocabularies differ, or target_probs lacks its K + 1 rows.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1.
    """
    if proposal.probs is None:
        raise ValueError(
            "rejection needs proposal.probs; a deterministic proposal is verified by equality."
        )
    rows, depth, vocab = proposal.probs.shape
    if target_probs.shape != (rows, depth + 1, vocab):
        raise ValueError(
            f"{target_probs.shape=} does not fit {proposal.probs.shape=}; expected {(rows, depth + 1, vocab)}."
        )
    position = jnp.arange(depth + 1)
    is_drafted = position[None, :] < proposal.num_tokens[:, None]  # [rows, K + 1]
    # No draft stands at or past num_tokens, so its probability is zero there and the
    # residual is the target itself: a bonus token is a recovered token with nothing
    # to subtract.
    draft_probs = jnp.pad(proposal.probs, ((0, 0), (0, 1), (0, 0)))
    draft_probs = jnp.where(is_drafted[:, :, None], draft_probs, 0.0)
    drafted = jnp.pad(proposal.token_ids, ((0, 0), (0, 1)))[:, :, None]
    p, q = (
        jnp.take_along_axis(probs, drafted, axis=2)[:, :, 0]
        for probs in (target_probs, draft_probs)
    )
    # Strict and without division: never accepts what the target cannot say.
    survives = (noise[:, :, 0] * q < p) & is_drafted
    num_accepted = jnp.sum(jnp.cumprod(survives, axis=1), axis=1, dtype=jnp.int32)
    at = num_accepted[:, None, None]
    target_row = jnp.take_along_axis(target_probs, at, axis=1)[:, 0]  # [rows, vocab]
    draft_row = jnp.take_along_axis(draft_probs, at, axis=1)[:, 0]
    residual = jnp.maximum(target_row - draft_row, 0.0)
    # Where target and draft agree to rounding, nothing is left to recover from: a
    # branch of probability zero that float32 does reach.
    residual = jnp.where(
        jnp.sum(residual, axis=1, keepdims=True) > 0, residual, target_row
    )
    draw = jnp.take_along_axis(noise[:, :, 1], num_accepted[:, None], axis=1)[:, 0]
    recovered = draw_token(draw, residual)
    tokens = jnp.where(
        position[None, :] < num_accepted[:, None], drafted[:, :, 0], recovered[:, None]
    )
    return Acceptance(tokens, num_accepted)


def draw_token(draw: Array, weights: Array) -> Array:
    """Returns a token i32[rows] per uniform draw f32[rows], by inverting the cumulative sum.

    Args:
      weights: f32[rows, vocab], not negative, of any positive total.
    """
    cumulative = jnp.cumsum(weights, axis=1)
    level = draw[:, None] * cumulative[:, -1:]
    # A parallel sum rounds each entry by itself: it may rise, or fall, at a token
    # without weight, and its end may not exceed the level.
    is_past = (cumulative > level) & (weights > 0)
    last = weights.shape[1] - 1 - jnp.argmax(jnp.flip(weights > 0, axis=1), axis=1)
    chosen = jnp.where(jnp.any(is_past, axis=1), jnp.argmax(is_past, axis=1), last)
    return chosen.astype(jnp.int32)
