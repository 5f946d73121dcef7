"""Tree shapes that are fixed before drafting; host side, plain numbers.

    from_widths((2, 1))      0        from_rank_paths([(0,), (1,), (0, 0)])     0
                            / \\                                               / \\
                           1   2                                             1   2
                           |   |                                             |
                           3   4                                             3
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from specjax.types import NO_PARENT, DraftTree


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """A tree's parents as a hashable constant: a jit static argument, a key of compiled steps.

    Siblings are in draw order, which determines the rank of each node.

    Raises:
      ValueError: node 0 has a parent, or a parent does not come before its children.
    """

    parents: tuple[int, ...]  # NO_PARENT at node 0, the root

    def __post_init__(self):
        if not self.parents or self.parents[0] != NO_PARENT:
            raise ValueError(f"{self.parents=} must begin with {NO_PARENT}, the root's entry.")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"{node=} has {parent=}; expected 0 to {node - 1}. Put parents "
                    "before their children."
                )

    @property
    def num_nodes(self) -> int:
        """Returns the nodes verified, root included."""
        return len(self.parents)

    @property
    def num_drafts(self) -> int:
        """Returns the draft tokens: all nodes but the root."""
        return len(self.parents) - 1

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """Returns each node's index in draw order among its siblings, from 0; 0 for the root."""
        before = [0] * self.num_nodes
        ranks = [0]
        for parent in self.parents[1:]:
            ranks.append(before[parent])
            before[parent] += 1
        return tuple(ranks)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Returns each node's edges to the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """Returns the most draft tokens on one path."""
        return max(self.depths)

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Returns the most children of any node at depth 0, 1, ..., max_depth - 1."""
        widths = [0] * self.max_depth
        for depth, rank in zip(self.depths[1:], self.ranks[1:]):
            widths[depth - 1] = max(widths[depth - 1], rank + 1)
        return tuple(widths)

    def nodes_at(self, depth: int) -> tuple[int, ...]:
        """Returns the nodes at a depth, in order."""
        return tuple(node for node, at in enumerate(self.depths) if at == depth)

    def parents_at(self, depth: int) -> tuple[int, ...]:
        """Returns the nodes at a depth that have children, in order."""
        return tuple(node for node in self.nodes_at(depth) if node in self.parents)

    def cut(self, max_depth: int) -> TreeShape:
        """Returns the shape without its nodes deeper than max_depth."""
        kept = [node for node, at in enumerate(self.depths) if at <= max_depth]
        index = {node: place for place, node in enumerate(kept)} | {NO_PARENT: NO_PARENT}
        return TreeShape(tuple(index[self.parents[node]] for node in kept))

    @functools.cached_property
    def rank_paths(self) -> tuple[tuple[int, ...], ...]:
        """Returns the ranks on the path to each node; empty for the root."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:]):
            paths.append((*paths[parent], rank))
        return tuple(paths)

    def draft_tree(self, rows: int) -> DraftTree:
        """Returns this shape in every row, as constant arrays."""
        in_rows = lambda values: jnp.tile(jnp.array(values, jnp.int32)[None], (rows, 1))
        return DraftTree(
            parents=in_rows(self.parents),
            depths=in_rows(self.depths),
            max_depth=self.max_depth,
        )


def from_widths(widths: Sequence[int]) -> TreeShape:
    """Returns the tree in which each node at depth d has widths[d] children.

    Nodes come breadth first; (1, 1, 1) is a chain and () the root alone. There are
    1 + widths[0] + widths[0] * widths[1] + ... nodes.

    Raises:
      ValueError: a width is below 1.
    """
    if any(width < 1 for width in widths):
        raise ValueError(f"{widths=} must all be at least 1; cut the list at a 0.")
    parents, level = [NO_PARENT], [0]
    for width in widths:
        first = len(parents)
        parents += [parent for parent in level for _ in range(width)]
        level = range(first, len(parents))
    return TreeShape(tuple(parents))


def from_rank_paths(rank_paths: Iterable[Sequence[int]]) -> TreeShape:
    """Returns the tree of listed nodes, each given by the ranks on the path to it.

    (0, 2) is the third child of the root's first child. Nodes come breadth first
    and siblings by rank, in any order of the list; the root may be left out.

    Raises:
      ValueError: a path is listed twice, or its parent or an earlier sibling is not
        listed. A tree may not skip a draw: verified by rejection it would be biased.

    Source: Medusa (arXiv:2401.10774), whose sparse trees are such lists.
    """
    listed: list[tuple[int, ...]] = [tuple(path) for path in rank_paths]
    if len(set(listed)) != len(listed):
        raise ValueError(f"{listed} lists a node twice; list each once.")
    ordered: list[tuple[int, ...]] = sorted({(), *listed}, key=lambda p: (len(p), p))
    index = {path: node for node, path in enumerate(ordered)}
    parents = [NO_PARENT]
    for path in ordered[1:]:
        needed = [path[:-1]]
        if path[-1] != 0:
            needed.append((*path[:-1], path[-1] - 1))
        for other in needed:
            if other not in index:
                raise ValueError(
                    f"{path} needs {other}, which is not listed; list its parent and "
                    "its earlier siblings too."
                )
        parents.append(index[path[:-1]])
    return TreeShape(tuple(parents))
