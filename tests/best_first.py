"""Finds the best tree for parallel drafters, which give every position's distribution at once.

The probability of a path is then the product of its tokens' marginals, so the tree of n
nodes with the highest expected length consists of the n paths of the largest products; a
heap would pop them one by one.

    position 1:  a .7  b .3     paths  a .7  ac .42  b .3  ad .28  bc .18  bd .12
    position 2:  c .6  d .4
                                num_drafts = 4         root
                                                      /    \\
                                                     a      b
                                expected tokens     / \\
                                1 + .7 + .42       c   d
                                  + .3 + .28
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.trees.draft_tree import GrownTree
from specjax.trees.ranking import best_nodes


def best_first(probs: Array, token_ids: Array, *, num_drafts: int) -> GrownTree:
    """Returns the num_drafts nodes of the largest path products, exactly, on the device.

    Nodes are in order of probability, the likeliest first, so parents precede children,
    and lowering num_tokens gives the best smaller tree. Ties go to the lower depth, then
    to the child of the parent that comes first, then to the lower rank. Nodes of
    probability 0 are left out: num_tokens may be below num_drafts.

    Args:
      probs: f32[rows, max_depth, m], the m largest probabilities at each position,
        in descending order. NaN counts as 0.
      token_ids: i32[rows, max_depth, m], distinct at each position.

    Cost: instead of a heap's num_drafts steps one after the other, max_depth + 1 of
    top_k. A depth's best num_drafts nodes include all that are kept there, and the
    child of rank r of parent number b comes after those of ranks 0 to r of parents 0
    to b, and after these parents: fewer than num_drafts * (1 + log(num_drafts))
    candidates per depth and row, then max_depth * num_drafts for the last.

    Raises:
      ValueError: shapes disagree, an axis is empty, or num_drafts is below 1.

    Source: OPT-Tree (arXiv:2406.17276), whose algorithm 1 also takes the best
    num_drafts of each layer and then the best num_drafts of all; DDTree
    (arXiv:2604.12989), which pops the same nodes from a heap.
    """
    if probs.ndim != 3 or token_ids.shape != probs.shape or 0 in probs.shape:
        raise ValueError(
            f"{probs.shape=} and {token_ids.shape=} must both be [rows, max_depth, m], "
            "no axis empty."
        )
    if num_drafts < 1:
        raise ValueError(f"{num_drafts=} must be at least 1.")
    rows, max_depth, num_ranks = probs.shape
    probs = jnp.where(probs > 0, jnp.minimum(probs, 1.0), 0.0)
    level, first_node = jnp.ones((rows, 1), jnp.float32), 0  # the root
    levels = []
    for depth in range(max_depth):
        above, ranks = _undominated(depth, level.shape[1], num_ranks, num_drafts)
        if not len(above):
            break
        products = level[:, above] * probs[:, depth, ranks]
        best, chosen = lax.top_k(products, min(num_drafts, len(above)))
        rank = jnp.asarray(ranks)[chosen]
        tokens = jnp.take_along_axis(token_ids[:, depth], rank, axis=1)
        levels.append((best, tokens, first_node + jnp.asarray(above)[chosen]))
        first_node += level.shape[1]
        level = best
    products, tokens, parents = (jnp.concatenate(a, axis=1) for a in zip(*levels))
    scores = jnp.where(products > 0, products, -jnp.inf)
    grown = best_nodes(scores, tokens, parents, num_drafts=num_drafts, max_depth=max_depth)
    assert grown.path_probability is not None
    return grown._replace(path_probability=jnp.maximum(grown.path_probability, 0.0))


def _undominated(
    depth: int, size: int, num_ranks: int, num_drafts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns parents and ranks of the nodes that may be among the best num_drafts.

    They are in the order that breaks ties: by parent, then by rank.

    Args:
      depth: depth of the parents; 0 for the root, which is no draft token.
      size: number of parents.
    """
    above, ranks = np.divmod(np.arange(size * num_ranks, dtype=np.int32), num_ranks)
    num_before = (above + 1) * (ranks + 1) - 1 + (above + 1) * (depth > 0)
    may_be_kept = num_before < num_drafts
    return above[may_be_kept], ranks[may_be_kept]
