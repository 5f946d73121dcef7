"""What the values of a draft tree must be; the device checks none of it."""

from __future__ import annotations

import numpy as np
from jax import Array

from specjax.types import NO_PARENT, DraftTree


def validate_values(
    tree: DraftTree, num_tokens: Array | None = None, token_ids: Array | None = None
) -> None:
    """Checks a tree's values on the host; reads the arrays back.

    Args:
      num_tokens: i32[rows], valid draft tokens; None: all.
      token_ids: i32[rows, num_nodes - 1]; where given, siblings must be distinct.

    Raises:
      ValueError: a root has a parent or a depth, a parent does not come before its
        child, a depth is not its parent's plus one, lies past max_depth, or two
        siblings carry the same token.
    """
    parents, depths = np.asarray(tree.parents), np.asarray(tree.depths)
    if parents.ndim != 2 or parents.shape != depths.shape:
        raise ValueError(f"{parents.shape=} and {depths.shape=} must be [rows, nodes].")
    rows, num_nodes = parents.shape
    counts = np.full(rows, num_nodes - 1) if num_tokens is None else num_tokens
    for row, count in enumerate(np.asarray(counts).tolist()):
        if not 0 <= count < num_nodes:
            raise ValueError(
                f"{row=} has num_tokens={count}; expected 0 to {num_nodes - 1}, "
                "since the root is no draft token."
            )
        tokens = None if token_ids is None else np.asarray(token_ids)[row].tolist()
        _validate_row(
            row,
            parents[row, : count + 1].tolist(),
            depths[row, : count + 1].tolist(),
            tree.max_depth,
            tokens,
        )


def _validate_row(
    row: int, parents: list[int], depths: list[int], max_depth: int, tokens: list[int] | None
) -> None:
    if (parents[0], depths[0]) != (NO_PARENT, 0):
        raise ValueError(
            f"{row=}: node 0 has parent {parents[0]} and depth {depths[0]}; expected "
            f"{NO_PARENT} and 0. Node 0 is the root."
        )
    seen = {}
    for node, (parent, depth) in enumerate(zip(parents, depths)):
        if node == 0:
            continue
        if not 0 <= parent < node:
            raise ValueError(
                f"{row=} {node=} has {parent=}; expected 0 to {node - 1}. "
                "Put parents before their children."
            )
        if depth != depths[parent] + 1:
            raise ValueError(
                f"{row=} {node=} has {depth=}; expected {depths[parent] + 1}, its "
                f"parent's depth plus one. Make depths with from_parents."
            )
        if depth > max_depth:
            raise ValueError(f"{row=} {node=} has {depth=} above {max_depth=}; raise max_depth.")
        if tokens is not None:
            edge = (parent, tokens[node - 1])
            if edge in seen:
                raise ValueError(
                    f"{row=}: nodes {seen[edge]} and {node} are siblings with the same "
                    f"token {edge[1]}; expected distinct tokens. Merge them."
                )
            seen[edge] = node
