"""Finds the best fixed tree for measured acceptance; host side.

The measurement is conditional[i]: how often sibling number i is accepted where the
earlier ones were rejected, on real traffic at the temperature served. A node is
reached when its path is accepted, and its i-th child is then accepted with probability

    taken[i] = (1 - conditional[0]) * ... * (1 - conditional[i - 1]) * conditional[i]

so a tree commits 1 + (sum over nodes of the product of `taken` on the path) tokens
on average, and the best nodes are found depth by depth from the bottom.

Source: Sequoia (arXiv:2402.12374), tree construction; its acceptance vector is `taken`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specjax.trees.static_shapes import TreeShape, from_rank_paths


class BestTree(NamedTuple):
    """A shape, and its expected committed tokens."""

    shape: TreeShape
    num_committed: float  # expected tokens per step, the target's own included


def taken_probabilities(conditional: ArrayLike, max_depth: int) -> np.ndarray:
    """Returns f64[max_depth, num_siblings]: acceptance probability of each child of a reached node.

    Args:
      conditional: [num_siblings], or [depths, num_siblings] if acceptance differs by
        depth; deeper nodes use the last depth given.

    Raises:
      ValueError: not one or two axes, an axis is empty, or a value is outside [0, 1].
    """
    values = np.asarray(conditional, np.float64)
    if values.ndim not in (1, 2) or 0 in values.shape:
        raise ValueError(
            f"conditional has shape {list(values.shape)}; expected [num_siblings] or "
            "[depths, num_siblings], no axis empty."
        )
    if not np.all((values >= 0) & (values <= 1)):
        raise ValueError(
            f"conditional lies in [{values.min()}, {values.max()}]; expected "
            "probabilities in [0, 1]."
        )
    values = np.atleast_2d(values)
    values = values[np.minimum(np.arange(max_depth), len(values) - 1)]
    rejected = np.cumprod(1 - values, axis=1)
    return np.concatenate([values[:, :1], rejected[:, :-1] * values[:, 1:]], axis=1)


def expected_committed(shape: TreeShape, conditional: ArrayLike) -> float:
    """Returns the tokens a step with this tree commits on average, at least 1.

    Siblings past those measured count as never accepted.
    """
    taken = taken_probabilities(conditional, shape.max_depth)
    reached = [1.0]
    for parent, rank, depth in zip(shape.parents[1:], shape.ranks[1:], shape.depths[1:]):
        is_measured = rank < taken.shape[1]
        chance = taken[depth - 1, rank] if is_measured else 0.0
        reached.append(reached[parent] * chance)
    return float(sum(reached))


def best_tree(conditional: ArrayLike, *, num_nodes: int, max_depth: int) -> BestTree:
    """Returns the tree of at most num_nodes that commits the most tokens on average.

    Nodes of no gain are left out, so it may have fewer. No node has more children than
    siblings were measured.

    Args:
      conditional: as for `taken_probabilities`.
      num_nodes: nodes verified, the root included, at least 1.
      max_depth: most draft tokens on a path, at least 0.

    Cost: max_depth * num_siblings * num_nodes ** 2 / 2 operations, vectorised over
    the last factor: some 50 ms for 64 nodes, 10 siblings, depth 8.

    Raises:
      ValueError: num_nodes or max_depth is too small, or as `taken_probabilities`.
    """
    taken = _checked(conditional, num_nodes, max_depth)
    return _read_tree(taken, _best_splits(taken, num_nodes - 1), num_nodes - 1)


def _checked(conditional: ArrayLike, num_nodes: int, max_depth: int) -> np.ndarray:
    if num_nodes < 1 or max_depth < 0:
        raise ValueError(f"{num_nodes=} must be at least 1, the root, and {max_depth=} at least 0.")
    return taken_probabilities(conditional, max_depth)


class _Splits(NamedTuple):
    """Best splits of n nodes among the children, from rank r on, of a node at depth d."""

    values: np.ndarray  # f64[d, r, n], expected accepted tokens below it
    sizes: np.ndarray  # i64[d, r, n], nodes in child r's subtree; 0: no more children


def _best_splits(taken: np.ndarray, num_drafts: int) -> _Splits:
    """Fills the table from the deepest nodes up and from the last siblings down.

    values[d, r, n] = max over y of
        taken[d, r] * (1 + values[d + 1, 0, y - 1]) + values[d, r + 1, n - y]
    """
    max_depth, num_siblings = taken.shape
    values = np.zeros((max_depth + 1, num_siblings + 1, num_drafts + 1))
    sizes = np.zeros(values.shape, np.int64)
    for depth in reversed(range(max_depth)):
        for rank in reversed(range(num_siblings)):
            # Entry y - 1: the child's subtree of y nodes.
            child = taken[depth, rank] * (1 + values[depth + 1, 0, :-1])
            rest = values[depth, rank + 1]
            for n in range(1, num_drafts + 1):
                totals = child[:n] + rest[:n][::-1]
                most = np.argmax(totals)
                if totals[most] > 0:
                    values[depth, rank, n] = totals[most]
                    sizes[depth, rank, n] = most + 1
    return _Splits(values, sizes)


def _read_tree(taken: np.ndarray, splits: _Splits, num_drafts: int) -> BestTree:
    """Returns the tree of num_drafts draft tokens from the table."""
    rank_paths: list[tuple[int, ...]] = []
    open_nodes: list[tuple[tuple[int, ...], int]] = [((), num_drafts)]
    while open_nodes:
        path, left = open_nodes.pop()
        for rank in range(taken.shape[1]):
            size = int(splits.sizes[len(path), rank, left])
            if size == 0:
                break
            rank_paths.append((*path, rank))
            open_nodes.append(((*path, rank), size - 1))
            left -= size
    accepted = float(splits.values[0, 0, num_drafts])
    return BestTree(from_rank_paths(rank_paths), 1 + accepted)
