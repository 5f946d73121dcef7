"""Computes properties of a tree from `parents`: depths, ancestors, paths, leaves, siblings.

    parents = [-1, 0, 0, 1, 2, 2]      0          paths, max_depth 2:
                                      / \\         node 0: -1 -1     node 3:  1  3
                                     1   2        node 1:  1 -1     node 4:  2  4
                                     |   |\\       node 2:  2 -1     node 5:  2  5
                                     3   4 5

Every function takes all rows at once. Node j > 0 is valid ("stands") in a row when
j <= num_tokens[row], the root always; results for other nodes are meaningless.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from specjax.types import NO_PARENT, DraftTree

NO_NODE = -1  # padding among node indices and path tokens
BITS_PER_WORD = 32


class GrownTree(NamedTuple):
    """Draft tokens with their tree, as in Proposal, and the figures that ranked them."""

    token_ids: Array  # i32[rows, num_drafts]; draft token j is node j + 1
    num_tokens: Array  # i32[rows], in [0, num_drafts]: how many of them are valid
    tree: DraftTree  # num_drafts + 1 nodes
    # f32[rows, num_drafts], 0 past num_tokens; None without probabilities of a drafter.
    # It depends on the tokens: for `greedy`, `seeded` and `delta` only.
    path_probability: Array | None = None
    # i32[rows, num_drafts], the candidate of each draft token; None unless the tree was
    # grown from candidates.
    candidates: Array | None = None


def from_parents(parents: Array, max_depth: int, *, rows: int = 1) -> DraftTree:
    """Returns the tree of given parents, its depths computed.

    Args:
      parents: i32[rows, num_nodes], or i32[num_nodes] for one shape in all `rows`.
        NO_PARENT at node 0; a parent comes before its children.
      max_depth: static bound on depth; a deeper node gets depth max_depth.
      rows: number of rows if parents is i32[num_nodes].

    Cost: max_depth gathers of rows * num_nodes.

    Raises:
      ValueError: parents is not int32, has another rank or no root; max_depth < 0.
    """
    parents = jnp.asarray(parents)
    is_listed = parents.ndim in (1, 2) and parents.shape[-1] > 0
    if not is_listed or parents.dtype != jnp.int32:
        raise ValueError(
            f"parents is {parents.dtype}{list(parents.shape)}; expected int32[num_nodes] "
            "or int32[rows, num_nodes] with at least the root."
        )
    if max_depth < 0:
        raise ValueError(f"{max_depth=} must be at least 0.")
    if parents.ndim == 1:
        parents = jnp.broadcast_to(parents[None, :], (rows, parents.shape[0]))
    node = parents
    depths = jnp.zeros_like(parents)
    for _ in range(max_depth):
        depths += node >= 0
        node = _follow(parents, node)
    return DraftTree(parents=parents, depths=depths, max_depth=max_depth)


def chain(rows: int, num_drafts: int) -> DraftTree:
    """Returns the tree in which each draft token follows the one before it."""
    parents = jnp.arange(num_drafts + 1, dtype=jnp.int32) - 1
    return from_parents(parents, num_drafts, rows=rows)


def ancestor_bits(tree: DraftTree) -> Array:
    """Returns u32[rows, num_nodes, words]: bit j is set when node j is the node or its ancestor.

    Bit j % 32 of word j // 32 stands for node j; words = ceil(num_nodes / 32). Laid end to
    end, the nodes of all rows are the ancestor_bits of `tree_attention`.

    Cost: max_depth + 1 passes over rows * num_nodes * words.
    """
    rows, num_nodes = tree.parents.shape
    words = jnp.arange(-(-num_nodes // BITS_PER_WORD))
    bits = jnp.zeros((rows, num_nodes, words.shape[0]), jnp.uint32)
    for node in _upwards(tree):
        bit = (jnp.uint32(1) << (node % BITS_PER_WORD).astype(jnp.uint32))[:, :, None]
        # The parent of the root is NO_PARENT: its word is -1, which matches no word.
        is_word = (node // BITS_PER_WORD)[:, :, None] == words[None, None, :]
        bits |= jnp.where(is_word, bit, jnp.uint32(0))
    return bits


def paths(tree: DraftTree, num_tokens: Array) -> Array:
    """Returns i32[rows, num_nodes, max_depth]: a node's ancestors from depth 1, then itself.

    NO_NODE after the node, and everywhere for the root and for invalid nodes.

    Args:
      num_tokens: i32[rows], valid draft tokens.

    Cost: max_depth + 1 gathers of rows * num_nodes, and one of max_depth times that.
    """
    ahead = jnp.arange(tree.max_depth)[None, None, :]
    # The ancestor at depth d stands depth - d steps up.
    steps = tree.depths[:, :, None] - 1 - ahead
    upwards = jnp.stack(_upwards(tree), axis=2)
    nodes = jnp.take_along_axis(upwards, jnp.maximum(steps, 0), axis=2)
    is_padding = (steps < 0) | ~is_standing(tree, num_tokens)[:, :, None]
    return jnp.where(is_padding, NO_NODE, nodes)


def path_token_ids(tree: DraftTree, token_ids: Array) -> Array:
    """Returns i32[rows, num_nodes, max_depth]: the draft tokens on the path to each node.

    The node's own token comes last, then NO_NODE. The root's path is empty, as its token
    is no draft token.

    Args:
      token_ids: i32[rows, num_nodes - 1]; draft token j is node j + 1.

    Raises:
      ValueError: token_ids and the tree differ in rows or nodes.
    """
    rows, num_nodes = tree.parents.shape
    if token_ids.shape != (rows, num_nodes - 1):
        raise ValueError(
            f"{token_ids.shape=} must be [rows, num_nodes - 1] = [{rows}, {num_nodes - 1}]; "
            "the root has no draft token."
        )
    everywhere = jnp.full(rows, num_nodes - 1, jnp.int32)
    nodes = paths(tree, everywhere)
    # Entry 0 is never read; it makes a node's index that of its token.
    of_node = jnp.pad(token_ids, ((0, 0), (1, 0)))
    read = jnp.maximum(nodes, 0).reshape(rows, -1)
    found = jnp.take_along_axis(of_node, read, axis=1).reshape(nodes.shape)
    return jnp.where(nodes == NO_NODE, NO_NODE, found)


def is_standing(tree: DraftTree, num_tokens: Array) -> Array:
    """Returns bool[rows, num_nodes]: the root, and the first num_tokens nodes after it."""
    return jnp.arange(tree.num_nodes)[None, :] <= num_tokens[:, None]


def is_leaf(tree: DraftTree, num_tokens: Array) -> Array:
    """Returns bool[rows, num_nodes]: valid nodes without a valid child.

    Cost: rows * num_nodes ** 2.
    """
    stands = is_standing(tree, num_tokens)
    nodes = jnp.arange(tree.num_nodes)
    follows = tree.parents[:, :, None] == nodes[None, None, :]
    return stands & ~jnp.any(follows & stands[:, :, None], axis=1)


def sibling_ranks(tree: DraftTree) -> Array:
    """Returns i32[rows, num_nodes]: how many siblings were drawn before each node.

    Cost: rows * num_nodes ** 2.
    """
    nodes = jnp.arange(tree.num_nodes)
    is_earlier = nodes[None, None, :] < nodes[None, :, None]
    is_sibling = tree.parents[:, :, None] == tree.parents[:, None, :]
    return jnp.sum(is_sibling & is_earlier, axis=2, dtype=jnp.int32)


def children(tree: DraftTree, num_tokens: Array, max_children: int) -> Array:
    """Returns i32[rows, num_nodes, max_children]: each node's children in draw order.

    NO_NODE after the last; children past max_children are left out.

    Cost: rows * num_nodes ** 2 * max_children.
    """
    nodes = jnp.arange(tree.num_nodes, dtype=jnp.int32)
    is_child = tree.parents[:, None, :] == nodes[None, :, None]
    is_child &= is_standing(tree, num_tokens)[:, None, :]
    # [rows, parent, rank, child]
    has_rank = sibling_ranks(tree)[:, None, :] == jnp.arange(max_children)[None, :, None]
    found = is_child[:, :, None, :] & has_rank[:, None, :, :]
    return jnp.max(jnp.where(found, nodes[None, None, None, :], NO_NODE), axis=3)


def _follow(parents: Array, nodes: Array) -> Array:
    """Returns the parent of each node, NO_PARENT of NO_PARENT."""
    # Entries past a row's last node may be any number, and are clipped.
    inside = jnp.clip(nodes, 0, parents.shape[1] - 1)
    return jnp.where(nodes < 0, NO_PARENT, jnp.take_along_axis(parents, inside, axis=1))


def _upwards(tree: DraftTree) -> list[Array]:
    """Returns the node itself, its parent, and so on: max_depth + 1 of i32[rows, num_nodes]."""
    nodes = jnp.broadcast_to(
        jnp.arange(tree.num_nodes, dtype=jnp.int32)[None, :], tree.parents.shape
    )
    steps = [nodes]
    for _ in range(tree.max_depth):
        steps.append(_follow(tree.parents, steps[-1]))
    return steps
