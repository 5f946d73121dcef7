"""Grows trees with a draft model, depth by depth: expands the likeliest nodes, then reranks all.

    candidates, frontier = init(...), root_frontier(rows)
    for depth in range(max_depth):
        log_probs, token_ids = top_k of the model after each frontier node
        candidates, frontier = expand(candidates, frontier, log_probs, token_ids, depth=depth)
    grown = rerank(candidates, num_drafts=num_drafts)

width 2, top_k 2; path probabilities below, expanded nodes in brackets:

                     [root]                    rerank, num_drafts = 4:
                 /          \\
              [a .6]       [b .4]              a .6   b .4   ba .36   aa .30
              /   \\        /    \\
        [aa .30] ab .24 [ba .36] bb .04        ba before aa: it is the likelier

The ranking depends on the drawn tokens, which would bias `rejection` and other rules that
compare distributions: the tree is only for `greedy`, `seeded` and `delta`.

Source: EAGLE-2 (arXiv:2406.16858), the expansion and the reranking phase.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax.trees.draft_tree import GrownTree
from specjax.trees.ranking import best_nodes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """All nodes drafted so far, by depth, by the frontier node they follow, by rank.

    Entry (d, f, k) is node 1 + (d * width + f) * top_k + k and lies at depth d + 1.
    """

    token_ids: Array  # i32[rows, max_depth, width, top_k]
    parents: Array  # i32[rows, max_depth, width, top_k], nodes; 0 is the root
    log_probs: Array  # f32[rows, max_depth, width, top_k], of the path; -inf where none

    @property
    def max_depth(self) -> int:
        return self.token_ids.shape[1]

    @property
    def width(self) -> int:
        return self.token_ids.shape[2]

    @property
    def top_k(self) -> int:
        return self.token_ids.shape[3]


@dataclasses.dataclass(frozen=True)
class Growth:
    """Limits of a grown tree, as a hashable constant: part of the key of a compiled step.

    The nodes that are fed to the draft model are numbered depth by depth: the root,
    then `width` nodes for each depth that has children.
    """

    max_depth: int
    width: int  # nodes expanded per depth, and candidate children of each: EAGLE's top-k
    num_drafts: int  # draft tokens kept

    @property
    def num_nodes(self) -> int:
        """Returns the nodes verified, root included."""
        return self.num_drafts + 1

    @property
    def num_fed(self) -> int:
        """Returns the number of draft tokens that are fed to the draft model."""
        return (self.max_depth - 1) * self.width

    @property
    def num_candidates(self) -> int:
        """Returns the entries of `Candidates`."""
        return self.max_depth * self.width**2

    def nodes_at(self, depth: int) -> tuple[int, ...]:
        """Returns the numbers of the nodes expanded at a depth."""
        first = 1 + (depth - 1) * self.width
        return tuple(range(first, first + self.width)) if depth else (0,)

    def cut(self, max_depth: int) -> Growth:
        """Returns the growth limited to max_depth, with at most as many drafts as candidates."""
        depth = max(min(self.max_depth, max_depth), 1)
        most = self.width + (depth - 1) * self.width**2
        return Growth(depth, self.width, min(self.num_drafts, most))


class Frontier(NamedTuple):
    """The nodes to feed to the draft model next, the likeliest first."""

    nodes: Array  # i32[rows, size], node numbers among the candidates
    token_ids: Array  # i32[rows, size]; 0 for the root
    log_probs: Array  # f32[rows, size], of the path; -inf for an entry that is no node
    origins: Array  # i32[rows, size], the parent's entry in the previous frontier


def init(rows: int, *, max_depth: int, width: int, top_k: int) -> Candidates:
    """Returns an empty set of candidates, with room for those of max_depth expansions."""
    shape = rows, max_depth, width, top_k
    if min(shape) < 1:
        raise ValueError(f"{rows=}, {max_depth=}, {width=}, {top_k=} must be at least 1.")
    return Candidates(
        token_ids=jnp.zeros(shape, jnp.int32),
        parents=jnp.zeros(shape, jnp.int32),
        log_probs=jnp.full(shape, -jnp.inf, jnp.float32),
    )


def root_frontier(rows: int, *, size: int = 1) -> Frontier:
    """Returns a frontier of the root; if size is above 1, the other entries are no nodes."""
    nothing = jnp.zeros((rows, size), jnp.int32)
    log_probs = jnp.full((rows, size), -jnp.inf, jnp.float32).at[:, 0].set(0.0)
    return Frontier(nothing, nothing, log_probs, nothing)


def expand(
    candidates: Candidates,
    frontier: Frontier,
    log_probs: Array,  # f32[rows, size, top_k]
    token_ids: Array,  # i32[rows, size, top_k]
    *,
    depth: int | Array,
) -> tuple[Candidates, Frontier]:
    """Appends each frontier node's likeliest children and chooses the next frontier.

    Args:
      frontier: of any size up to width: 1 for the root.
      log_probs: natural logarithms given the path, likeliest first. Above 0 counts
        as 0 and NaN as -inf: a child never scores above its parent.
      token_ids: distinct among the children of one node.
      depth: of the frontier, 0 for the root; may be traced, in [0, max_depth).

    Returns:
      The candidates, and the `width` new ones of the highest path probability; ties go
      to the child of the earlier frontier node, then to the lower rank.

    Cost: a top_k of width among size * top_k per row.

    Raises:
      ValueError: shapes disagree, or the frontier is wider than the candidates allow.
    """
    rows, size, top_k = log_probs.shape
    width = candidates.width
    if frontier.nodes.shape != (rows, size) or token_ids.shape != log_probs.shape:
        raise ValueError(
            f"{log_probs.shape=}, {token_ids.shape=} and {frontier.nodes.shape=} must be "
            "[rows, size, top_k] twice and [rows, size]."
        )
    if size > width or top_k != candidates.top_k:
        raise ValueError(
            f"{size=} must be at most {width=}, and {top_k=} {candidates.top_k=}; "
            "give init the same numbers."
        )
    no_gain = jnp.where(jnp.isnan(log_probs), -jnp.inf, jnp.minimum(log_probs, 0.0))
    scores = _widen(frontier.log_probs[:, :, None] + no_gain, width, -jnp.inf)
    tokens = _widen(token_ids, width, 0)
    above = jnp.broadcast_to(frontier.nodes[:, :, None], log_probs.shape)
    candidates = Candidates(
        token_ids=_put(candidates.token_ids, tokens, depth),
        parents=_put(candidates.parents, _widen(above, width, 0), depth),
        log_probs=_put(candidates.log_probs, scores, depth),
    )
    return candidates, _next_frontier(scores, tokens, depth)


def rerank(candidates: Candidates, *, num_drafts: int) -> GrownTree:
    """Returns the num_drafts candidates of the highest path probability as a tree.

    Nodes are in order of probability, the likeliest first, so parents precede children,
    and lowering num_tokens gives the best smaller tree. Ties go to the lower depth, then
    to the candidate that comes first. With fewer candidates, num_tokens is below
    num_drafts.

    Cost: a top_k of num_drafts among max_depth * width * top_k, and num_drafts ** 2
    comparisons per row.
    """
    rows = candidates.token_ids.shape[0]
    grown = best_nodes(
        candidates.log_probs.reshape(rows, -1),
        candidates.token_ids.reshape(rows, -1),
        candidates.parents.reshape(rows, -1),
        num_drafts=num_drafts,
        max_depth=candidates.max_depth,
    )
    assert grown.path_probability is not None
    return grown._replace(path_probability=jnp.exp(grown.path_probability))


def _next_frontier(scores: Array, tokens: Array, depth: int | Array) -> Frontier:
    """Returns the best `width` of the children [rows, width, top_k] at a depth."""
    rows, width, top_k = scores.shape
    best, chosen = lax.top_k(scores.reshape(rows, -1), width)
    return Frontier(
        nodes=1 + depth * width * top_k + chosen,
        token_ids=jnp.take_along_axis(tokens.reshape(rows, -1), chosen, axis=1),
        log_probs=best,
        origins=chosen // top_k,
    )


def _widen(values: Array, width: int, filler: float) -> Array:
    missing = width - values.shape[1]
    return jnp.pad(values, ((0, 0), (0, missing), (0, 0)), constant_values=filler)


def _put(values: Array, level: Array, depth: int | Array) -> Array:
    return lax.dynamic_update_index_in_dim(values, level, depth, axis=1)
