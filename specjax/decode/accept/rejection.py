"""Rejection sampling: accepts a draft token with probability target(x) / draft(x), at most 1."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from specjax.decode.accept.drawing import draw_token
from specjax.decode.accept.nodes import (
    accepted_up_to,
    at_node,
    at_token,
    check_probs,
    first_of_their_kind,
    law_of_draft,
    next_child,
    node_tokens,
    parents_of,
    renormalise,
    standing,
)
from specjax.sampling.vocabulary import WHOLE, Vocabulary
from specjax.types import Acceptance, Proposal


def accept_by_rejection(
    noise: Array,
    proposal: Proposal,
    target_probs: Array,
    *,
    vocabulary: Vocabulary = WHOLE,
) -> Acceptance:
    """Accepts a path of each draft so that the output is distributed as the target.

    Draft token x is accepted with probability min(1, target(x) / draft(x)). Where it is
    rejected, its draft distribution is subtracted from the target, and its next sibling
    is tried against the rest; siblings are drawn without replacement. When none is left,
    a recovered token is drawn from the rest; a path accepted to its end is followed by a
    bonus token from the target. Temperature, top-k and top-p are already applied.

    Whether num_tokens includes a draft token may depend on tokens drawn before it,
    never on itself or on tokens drawn later.

    Args:
      noise: f32[rows, num_nodes, 1 + num_draws(vocab)], uniform in (0, 1); entry
        [j, 0] accepts or rejects draft token j, which is node j + 1, and [j, 1:] draw
        the token after node j. An argument so that tests can enumerate it.
      proposal: with probs f32[rows, num_nodes - 1, vocab], rows sum to 1; entry j is the
        distribution that the first child of node j was drawn from.
      target_probs: f32[rows, num_nodes, vocab], rows sum to 1; entry j follows node j.
      vocabulary: how proposal.probs and target_probs are split over devices, both alike.

    Returns:
      token_ids i32[rows, max_depth + 1], valid up to and including entry num_accepted.

    Raises:
      ValueError: the proposal has no probs, or shapes do not fit.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1, and Chen et al. 2023
    (arXiv:2302.01318) for chains; SpecInfer (arXiv:2305.09781) for trying siblings
    against what is left of the target; Jeon et al. 2024 (arXiv:2402.14160) and Chen et
    al. 2024 (arXiv:2402.12374) for siblings without replacement.
    """
    check_probs(noise, proposal, target_probs, vocabulary)
    if proposal.tree is not None:
        return reject_in_tree(noise, proposal, target_probs, vocabulary)
    drafted = jnp.pad(proposal.token_ids, ((0, 0), (0, 1)))
    position = jnp.arange(drafted.shape[1])[None, :]
    is_drafted = position < proposal.num_tokens[:, None]  # [rows, K + 1]
    draft_probs = padded_draft_probs(proposal)
    p, q = (
        vocabulary.take(probs, drafted[:, :, None])[:, :, 0]
        for probs in (target_probs, draft_probs)
    )
    survives = is_accepted(noise[:, :, 0], p, q) & is_drafted
    num_accepted = jnp.sum(jnp.cumprod(survives, axis=1), axis=1, dtype=jnp.int32)
    rest = subtract_draft(
        at_node(target_probs, num_accepted), at_node(draft_probs, num_accepted), vocabulary
    )
    token_ids = draw_token(at_node(noise[:, :, 1:], num_accepted), rest, vocabulary)
    return accepted_up_to(proposal, num_accepted, token_ids)


def padded_draft_probs(proposal: Proposal) -> Array:
    """Returns the draft distribution after each node of a chain, f32[rows, K + 1, vocab].

    There is no draft token at or past num_tokens, so the probabilities are zero there and
    the residual is the target itself: a bonus token is a recovered token with nothing to
    subtract.
    """
    assert proposal.probs is not None
    probs = jnp.pad(proposal.probs, ((0, 0), (0, 1), (0, 0)))
    is_drafted = jnp.arange(probs.shape[1])[None, :] < proposal.num_tokens[:, None]
    return jnp.where(is_drafted[:, :, None], probs, 0.0)


def is_accepted(draw: Array, target_prob: Array, draft_prob: Array) -> Array:
    """Returns whether draw < target_prob / draft_prob, by a product instead of a division.

    The comparison is strict: a token of target probability 0 is never accepted.
    """
    return draw * draft_prob < target_prob


def subtract_draft(target: Array, draft: Array, vocabulary: Vocabulary) -> Array:
    """Returns max(target - draft, 0), f32[rows, vocab]; the target where that is all zero.

    It is all zero where both agree to rounding: a rejection there has probability zero,
    but float32 does reach it.
    """
    rest = jnp.maximum(target - draft, 0.0)
    total = vocabulary.sum(jnp.sum(rest, axis=1, keepdims=True))
    return jnp.where(total > 0, rest, target)


class _Walk(NamedTuple):
    """Each row's place in its tree."""

    at: Array  # i32[rows], the last accepted node
    trying: Array  # i32[rows], a child of it; num_nodes where no more are left
    rest: Array  # f32[rows, vocab], the target after `at` less the drafts of rejected children


def reject_in_tree(
    noise: Array,
    proposal: Proposal,
    target_probs: Array,
    vocabulary: Vocabulary,
    lenience: Array | None = None,
) -> Acceptance:
    """Applies rejection to trees: each round tries one node of every row that has one left.

    Args:
      lenience: f32[rows], factor of the draft probabilities; None: 1.
    """
    parents, token_ids = parents_of(proposal), node_tokens(proposal)
    num_nodes = parents.shape[1]
    may_follow = standing(proposal) & first_of_their_kind(proposal)

    def try_one(walk: _Walk) -> _Walk:
        node = jnp.minimum(walk.trying, num_nodes - 1)
        is_trying = walk.trying < num_nodes
        draft = law_of_draft(proposal, parents, node, vocabulary)
        draft = draft if lenience is None else lenience[:, None] * draft
        token = at_node(token_ids, node)
        survives = is_trying & is_accepted(
            at_node(noise[:, :, 0], node - 1),
            at_token(walk.rest, token, vocabulary),
            at_token(draft, token, vocabulary),
        )
        rejected = renormalise(subtract_draft(walk.rest, draft, vocabulary), vocabulary)
        rest = jnp.where(is_trying[:, None], rejected, walk.rest)
        rest = jnp.where(survives[:, None], at_node(target_probs, node), rest)
        at = jnp.where(survives, node, walk.at)
        return _Walk(at, next_child(parents, may_follow, at, walk.trying), rest)

    root = jnp.zeros(parents.shape[0], jnp.int32)
    first = next_child(parents, may_follow, root, root)
    walk = lax.while_loop(
        lambda walk: jnp.any(walk.trying < num_nodes),
        try_one,
        _Walk(root, first, target_probs[:, 0]),
    )
    token = draw_token(at_node(noise[:, :, 1:], walk.at), walk.rest, vocabulary)
    return accepted_up_to(proposal, walk.at, token)
