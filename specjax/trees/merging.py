"""Merges several continuations of one text into a tree that shares their beginnings.

    to be or | not to be               0
             | sleep in         _______|_______
             | not to die      1       4       7
             | go to          not    sleep     go
                               |       |       |
                               2       5       8
                              to       in      to
                             /  \\
                            3    6
                           be   die        with num_drafts = 6 "go to" is left out
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from specjax.trees.draft_tree import GrownTree, from_parents


def merge(continuations: Array, lengths: Array, *, num_drafts: int) -> GrownTree:
    """Merges each row's continuations into a tree, the preferred first.

    Continuations are added one after the other, each from its first token on, until the
    tree has num_drafts tokens; a token whose whole path is already in the tree is shared.
    So a parent comes before its children, siblings are in order of preference with
    distinct tokens, and lowering num_tokens gives the tree of a smaller budget.

    Args:
      continuations: i32[rows, num_continuations, max_depth], in order of preference.
      lengths: i32[rows, num_continuations], in [0, max_depth]: valid tokens of each; the
        rest is ignored.
      num_drafts: most draft tokens of a row, at least 0.

    Returns:
      num_tokens[row] = distinct beginnings of the row's continuations, at most
      num_drafts. Entries past it are token 0 under the root. No path_probability.

    Cost: num_continuations ** 2 * max_depth comparisons per row, two scatters of
    num_continuations * max_depth, max_depth gathers of num_drafts.

    Raises:
      ValueError: shapes disagree or num_drafts is negative.

    Source: the trie of REST (arXiv:2311.08252), which keeps the most frequent
    branches; this one keeps the preferred.
    """
    _validate(continuations, lengths, num_drafts)
    rows, _, max_depth = continuations.shape
    ahead = jnp.arange(max_depth)[None, None, :]
    owner = _first_with_same_beginning(continuations, lengths)  # [rows, n, max_depth]
    stands = ahead < lengths[:, :, None]
    own = jnp.arange(continuations.shape[1], dtype=jnp.int32)[None, :, None]
    is_new = stands & (owner == own)

    # Nodes are numbered from 1 in reading order: a parent's number is the smaller.
    numbers = jnp.cumsum(is_new.reshape(rows, -1), axis=1, dtype=jnp.int32)
    num_found = numbers[:, -1]
    numbers = jnp.take_along_axis(numbers.reshape(is_new.shape), owner, axis=1)
    parents = jnp.pad(numbers[:, :, :-1], ((0, 0), (0, 0), (1, 0)))

    # Node num_drafts + 1, one past the end, is dropped, like all after it.
    place = jnp.where(is_new, numbers, num_drafts + 1).reshape(rows, -1)
    row = jnp.arange(rows)[:, None]

    def lay(values: Array, root: int) -> Array:
        nodes = jnp.zeros((rows, num_drafts + 1), jnp.int32).at[:, 0].set(root)
        return nodes.at[row, place].set(values.reshape(rows, -1), mode="drop")

    return GrownTree(
        token_ids=lay(continuations, 0)[:, 1:],
        num_tokens=jnp.minimum(num_found, num_drafts),
        tree=from_parents(lay(parents, -1), max_depth),
    )


def _first_with_same_beginning(continuations: Array, lengths: Array) -> Array:
    """Returns i32[rows, n, max_depth]: the first continuation that agrees up to each token.

    That is the continuation itself if none before it agrees; past its length the value is
    meaningless.
    """
    num_continuations, max_depth = continuations.shape[1:]
    ahead = jnp.arange(max_depth)[None, None, None, :]
    # [rows, n, other, max_depth]
    agrees = continuations[:, :, None, :] == continuations[:, None, :, :]
    agrees &= ahead < lengths[:, None, :, None]
    has_same = jnp.cumprod(agrees, axis=3, dtype=jnp.int32) > 0
    index = jnp.arange(num_continuations, dtype=jnp.int32)
    own = index[None, :, None, None]
    first = jnp.where(has_same, index[None, None, :, None], own)
    return jnp.min(first, axis=2)


def _validate(continuations: Array, lengths: Array, num_drafts: int) -> None:
    if continuations.ndim != 3 or lengths.shape != continuations.shape[:2]:
        raise ValueError(
            f"{continuations.shape=} and {lengths.shape=} must be [rows, "
            "num_continuations, max_depth] and [rows, num_continuations]."
        )
    if 0 in continuations.shape[1:]:
        raise ValueError(
            f"{continuations.shape=} leaves nothing to merge; give at least one "
            "continuation of one token, with length 0 where there is none."
        )
    if continuations.dtype != jnp.int32 or lengths.dtype != jnp.int32:
        raise ValueError(f"{continuations.dtype=} and {lengths.dtype=} must both be int32.")
    if num_drafts < 0:
        raise ValueError(f"{num_drafts=} must be at least 0.")
