"""Nodes of a draft: which may be tried, their children, and the law each was drawn from.

A rule that walks a tree tries one node per row and round. The last node tried is all
that a walk must remember: a parent comes before its children and siblings come in the
order in which they were drawn, so the next node to try is the first child past it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from specjax.decode.accept.drawing import num_draws
from specjax.sampling.vocabulary import Vocabulary
from specjax.types import Acceptance, Proposal


def check_probs(
    noise: Array, proposal: Proposal, target_probs: Array, vocabulary: Vocabulary
) -> None:
    """Raises ValueError unless the arguments of a rule that compares laws fit each other."""
    if proposal.probs is None:
        raise ValueError(
            "this rule needs proposal.probs; a deterministic proposal is verified by equality."
        )
    rows, num_drafts, vocab = proposal.probs.shape
    expected = (rows, num_drafts + 1, vocab)
    if target_probs.shape != expected:
        raise ValueError(
            f"{target_probs.shape=} does not fit {proposal.probs.shape=}; {expected=}."
        )
    expected = (rows, num_drafts + 1, 1 + num_draws(vocabulary.size(vocab)))
    if noise.shape != expected:
        raise ValueError(f"{noise.shape=} does not fit the proposal; {expected=}.")


def check_choices(proposal: Proposal, target_token_ids: Array) -> None:
    """Raises ValueError unless there is one choice of the target per node."""
    rows, num_drafts = proposal.token_ids.shape
    expected = (rows, num_drafts + 1)
    if target_token_ids.shape != expected:
        raise ValueError(f"{target_token_ids.shape=} does not fit the proposal; {expected=}.")


def at_node(values: Array, nodes: Array) -> Array:
    """Returns each row's entry of values [rows, n, ...] at its node, i32[rows]; zero if n is 0."""
    if values.shape[1] == 0:
        return jnp.zeros((values.shape[0], *values.shape[2:]), values.dtype)
    nodes = jnp.clip(nodes, 0, values.shape[1] - 1)
    return values[jnp.arange(values.shape[0]), nodes]


def at_token(values: Array, token_ids: Array, vocabulary: Vocabulary) -> Array:
    """Returns each row's entry of values [rows, vocab] at its token, i32[rows]."""
    return vocabulary.take(values, token_ids[:, None])[:, 0]


def node_tokens(proposal: Proposal) -> Array:
    """Returns the token of each node, i32[rows, num_nodes]; 0 for the root."""
    return jnp.pad(proposal.token_ids, ((0, 0), (1, 0)))


def parents_of(proposal: Proposal) -> Array:
    """Returns the parent of each node, i32[rows, num_nodes]; -1, 0, 1, ... for a chain."""
    if proposal.tree is not None:
        return proposal.tree.parents
    rows, num_drafts = proposal.token_ids.shape
    return jnp.broadcast_to(jnp.arange(-1, num_drafts)[None, :], (rows, num_drafts + 1))


def depths_of(proposal: Proposal) -> Array:
    """Returns the edges from each node to the root, i32[rows, num_nodes]."""
    if proposal.tree is not None:
        return proposal.tree.depths
    rows, num_drafts = proposal.token_ids.shape
    return jnp.broadcast_to(jnp.arange(num_drafts + 1)[None, :], (rows, num_drafts + 1))


def standing(proposal: Proposal) -> Array:
    """Returns which nodes may be tried, bool[rows, num_nodes]: drafts within num_tokens."""
    index = jnp.arange(proposal.token_ids.shape[1] + 1)[None, :]
    return (index > 0) & (index <= proposal.num_tokens[:, None])


def first_of_their_kind(proposal: Proposal) -> Array:
    """Returns which nodes equal no earlier sibling, bool[rows, num_nodes].

    Skipping repeated siblings is exact, also for siblings drawn with replacement: a sibling
    that differs from those before it was drawn from the rest of the distribution.
    """
    parents, token_ids = parents_of(proposal), node_tokens(proposal)
    index = jnp.arange(parents.shape[1])
    is_earlier = (index[:, None] > index[None, :]) & (index[None, :] > 0)
    is_repeated = (
        (parents[:, :, None] == parents[:, None, :])
        & (token_ids[:, :, None] == token_ids[:, None, :])
        & is_earlier[None]
    )
    return ~jnp.any(is_repeated, axis=2)


def next_child(parents: Array, may_follow: Array, at: Array, after: Array) -> Array:
    """Returns the first child of node `at` past node `after`; num_nodes where there is none.

    Args:
      parents: i32[rows, num_nodes].
      may_follow: bool[rows, num_nodes], the children to choose from.
      at, after: i32[rows].
    """
    num_nodes = parents.shape[1]
    index = jnp.arange(num_nodes)[None, :]
    is_next = may_follow & (parents == at[:, None]) & (index > after[:, None])
    return jnp.min(jnp.where(is_next, index, num_nodes), axis=1)


def accepted_up_to(proposal: Proposal, last: Array, token_ids: Array) -> Acceptance:
    """Returns the acceptance of the path to node `last` i32[rows], then token_ids i32[rows]."""
    depth = proposal.max_depth
    if proposal.tree is None:
        nodes, num_accepted = None, last
        drafted = jnp.pad(proposal.token_ids, ((0, 0), (0, 1)))
    else:
        nodes, num_accepted = (
            path_to(proposal, last),
            at_node(proposal.tree.depths, last),
        )
        drafted = jnp.take_along_axis(node_tokens(proposal), nodes, axis=1)
        drafted = jnp.pad(drafted, ((0, 0), (0, 1)))
    is_drafted = jnp.arange(depth + 1)[None, :] < num_accepted[:, None]
    tokens = jnp.where(is_drafted, drafted, token_ids[:, None])
    return Acceptance(tokens, num_accepted, nodes)


def path_to(proposal: Proposal, last: Array) -> Array:
    """Returns the nodes after the root on the way to `last`, i32[rows, max_depth], then `last`."""
    assert proposal.tree is not None
    tree = proposal.tree

    def ascend(node: Array, depth: Array) -> tuple[Array, Array]:
        is_here = at_node(tree.depths, node) == depth
        return jnp.where(is_here, at_node(tree.parents, node), node), node

    depths = jnp.arange(tree.max_depth, 0, -1)
    _, nodes = lax.scan(ascend, last, depths)
    return jnp.flip(nodes, axis=0).T


def renormalise(weights: Array, vocabulary: Vocabulary) -> Array:
    """Returns weights f32[rows, vocab] scaled to sum 1; rows of zeros stay zero."""
    total = vocabulary.sum(jnp.sum(weights, axis=1, keepdims=True))
    return weights / jnp.where(total > 0, total, 1.0)


def without_replacement(
    probs: Array, token_ids: Array, is_drawn: Array, vocabulary: Vocabulary
) -> Array:
    """Returns the distribution of the next draw without replacement, f32[rows, vocab].

    It is zero at drawn tokens, and renormalised; uniform over the other tokens where
    they have no probability (Sequoia). Rows without a drawn token keep probs.

    Args:
      probs: f32[rows, vocab], the distribution of the first draw.
      token_ids: i32[rows, n], tokens that were drawn where is_drawn, bool[rows, n].

    Source: Chen et al. 2024 (arXiv:2402.12374), which also has the uniform draw.
    """
    rows, vocab = probs.shape
    where = jnp.where(is_drawn, vocabulary.index(token_ids, vocab), vocab)
    is_gone = jnp.zeros((rows, vocab), bool)
    is_gone = is_gone.at[jnp.arange(rows)[:, None], where].set(True, mode="drop")
    left = jnp.where(is_gone, 0.0, probs)
    has_mass = vocabulary.sum(jnp.sum(left, axis=1, keepdims=True)) > 0
    left = jnp.where(has_mass, left, (~is_gone).astype(left.dtype))
    is_first = ~jnp.any(is_drawn, axis=1, keepdims=True)
    return jnp.where(is_first, probs, renormalise(left, vocabulary))


def law_of_draft(proposal: Proposal, parents: Array, nodes: Array, vocabulary: Vocabulary) -> Array:
    """Returns the distribution that each row's node i32[rows] was drawn from, f32[rows, vocab]."""
    assert proposal.probs is not None
    probs = at_node(proposal.probs, at_node(parents, nodes))
    if proposal.tree is None:
        return probs
    index = jnp.arange(parents.shape[1])[None, :]
    is_sibling = parents == at_node(parents, nodes)[:, None]
    is_drawn = is_sibling & (index > 0) & (index < nodes[:, None])
    return without_replacement(probs, node_tokens(proposal), is_drawn, vocabulary)
