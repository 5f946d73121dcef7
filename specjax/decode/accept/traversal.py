"""Traversal verification: accepts or rejects a tree's nodes from the leaves to the root."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from specjax.decode.accept.block import capped_ratio
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
    standing,
)
from specjax.sampling.vocabulary import WHOLE, Vocabulary
from specjax.types import Acceptance, Proposal


def accept_by_traversal(
    noise: Array,
    proposal: Proposal,
    target_probs: Array,
    *,
    vocabulary: Vocabulary = WHOLE,
) -> Acceptance:
    """Accepts a path of each draft, deepest first, so that the output is distributed as the target.

    The survival of a node is min(1, survival of its parent * target(x) / draft(x)). The
    first leaf is accepted with a probability of its survival, together with the path to
    it. Otherwise it is deleted: its draft distribution is subtracted from the target after
    its parent, whose survival falls, and the traversal goes on to the parent's next child
    or, when none is left, to the parent itself. The root is always accepted. The token
    after the accepted node is drawn from the remainder of the target there.

    On a chain this is block verification, which is proven to accept at least as many
    tokens as `accept_by_rejection` in expectation (arXiv:2403.10444). On trees this is
    not proven; exact enumeration of small trees has found no counterexample
    (tests/specjax/decode/test_accept_in_law.py).

    Whether num_tokens includes a draft token may depend on tokens drawn before it,
    never on itself or on tokens drawn later.

    Args:
      noise, proposal, target_probs, vocabulary: as for `accept_by_rejection`; noise [j, 0] accepts
        or deletes draft token j once it is a leaf.

    Raises:
      ValueError: the proposal has no probs, or shapes do not fit.

    Source: Weng et al. 2025 (arXiv:2505.12398).
    """
    check_probs(noise, proposal, target_probs, vocabulary)
    parents, token_ids = parents_of(proposal), node_tokens(proposal)
    rows, num_nodes = parents.shape
    row = jnp.arange(rows)
    may_follow = standing(proposal) & first_of_their_kind(proposal)

    def visit(walk: _Traversal) -> _Traversal:
        """Enters the node's next child, or accepts or deletes the node where none is left."""
        is_entering = ~walk.is_done & (walk.child < num_nodes)
        node = jnp.where(is_entering, walk.child, walk.at)
        parent = jnp.maximum(at_node(parents, node), 0)
        draft = law_of_draft(proposal, parents, node, vocabulary)
        token = at_node(token_ids, node)
        target = at_node(walk.target_probs, parent)
        survival = at_node(walk.survival, parent)

        draw = at_node(noise[:, :, 0], node - 1)
        stands = (node == 0) | (draw < at_node(walk.survival, node))
        is_done = walk.is_done | (~is_entering & stands)
        is_deleted = ~is_entering & ~is_done
        p, q = (at_token(probs, token, vocabulary) for probs in (target, draft))
        entered = capped_ratio(survival, p, q)
        rest, excess = subtract_deleted(survival, target, draft, vocabulary)

        # num_nodes, one past the end, where nothing changes: the write is dropped.
        changed = jnp.where(is_entering, node, jnp.where(is_deleted, parent, num_nodes))
        left = survival_after_deletion(excess, survival)
        new_survival = jnp.where(is_entering, entered, left)
        gone = jnp.where(is_deleted, parent, num_nodes)
        at = jnp.where(is_deleted, parent, node)
        return _Traversal(
            at=at,
            child=next_child(parents, may_follow, at, node),
            survival=walk.survival.at[row, changed].set(new_survival, mode="drop"),
            target_probs=walk.target_probs.at[row, gone].set(rest, mode="drop"),
            is_done=is_done,
        )

    root = jnp.zeros(rows, jnp.int32)
    start = _Traversal(
        at=root,
        child=next_child(parents, may_follow, root, root),
        survival=jnp.ones((rows, num_nodes), target_probs.dtype),
        target_probs=target_probs,
        is_done=jnp.zeros(rows, bool),
    )
    walk = lax.while_loop(lambda walk: ~jnp.all(walk.is_done), visit, start)
    rest = at_node(walk.target_probs, walk.at)
    token = draw_token(at_node(noise[:, :, 1:], walk.at), rest, vocabulary)
    return accepted_up_to(proposal, walk.at, token)


class _Traversal(NamedTuple):
    """Each row's place in its tree, with survivals and target updated for deleted nodes."""

    at: Array  # i32[rows], the current node; the accepted one where is_done
    child: Array  # i32[rows], its first child not deleted; num_nodes where none is left
    survival: Array  # f32[rows, num_nodes], valid on the path to `at`
    target_probs: Array  # f32[rows, num_nodes, vocab], valid on the path to `at`
    is_done: Array  # bool[rows]


def subtract_deleted(
    survival: Array, target: Array, draft: Array, vocabulary: Vocabulary
) -> tuple[Array, Array]:
    """Returns norm(max(survival * target - draft, 0)), f32[rows, vocab], and its mass, f32[rows].

    Where the mass is 0 the distribution is the target itself.
    """
    rest = jnp.maximum(survival[:, None] * target - draft, 0.0)
    excess = vocabulary.sum(jnp.sum(rest, axis=1))
    has_rest = (excess > 0)[:, None]
    return jnp.where(has_rest, rest / excess[:, None], target), excess


def survival_after_deletion(excess: Array, survival: Array) -> Array:
    """Returns the survival of a node, given that its first child was deleted."""
    ratio = excess / jnp.where(excess > 0, excess + (1.0 - survival), 1.0)
    return jnp.where(excess > 0, ratio, 0.0)
