"""The cases of path attention: those of tree attention that it covers, token by token."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.tree_attention.example_inputs import Example


def is_covered(example: Example) -> bool:
    """Returns whether path attention has the case: no rows in order beside trees, no scales."""
    return not (example.causal or example.nodes or example.page_dtype)


def by_token(example: Example, num_tokens: int) -> tuple[Array, Array, Array | None]:
    """Returns row_ids i32[num_tokens], positions i32[num_tokens], and path_offsets.

    path_offsets is i32[num_tokens, depth + 1], or None for an example without a tree.

    Args:
      num_tokens: flat tokens, padding included.
    """
    rows = len(example.lengths)
    row_ids, positions, offsets = [], [], []
    for row, (length, count) in enumerate(zip(example.lengths, example.num_new)):
        for node in range(count):
            path = [node]
            if example.parents is None:
                path = list(range(node + 1))
            else:
                while example.parents[path[0]] >= 0:
                    path.insert(0, example.parents[path[0]])
            row_ids.append(row)
            positions.append(length + len(path) - 1)
            offsets.append(path)
    padding = num_tokens - len(row_ids)
    row_ids += [rows] * padding
    positions += [0] * padding
    offsets += [[0]] * padding
    deepest = max(map(len, offsets), default=1)
    offsets = [path + [0] * (deepest - len(path)) for path in offsets]
    return (
        jnp.asarray(row_ids, jnp.int32),
        jnp.asarray(positions, jnp.int32),
        None
        if example.parents is None
        else jnp.asarray(offsets, jnp.int32).reshape(len(row_ids), deepest),
    )
