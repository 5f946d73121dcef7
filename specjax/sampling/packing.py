"""Many small arrays as one, so that a gather or an update is one operation instead of many.

On an accelerator an operation on a few hundred bytes takes a microsecond, whatever it does.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def pack(values: Any) -> Array:
    """Returns the bits of all leaves side by side, i32[n, width].

    Args:
      values: a pytree of arrays of int32, uint32, float32 or bool, each with leading [n].
    """
    leaves = jax.tree.leaves(values)
    flat = lambda leaf: leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
    return jnp.concatenate([flat(_as_integers(leaf)) for leaf in leaves], axis=1)


def unpack(packed: Array, like: Any) -> Any:
    """Undoes `pack`, of any number of packed arrays.

    Args:
      packed: i32[..., width].
      like: the pytree that was packed, or its shapes and dtypes.

    Returns:
      The pytree; its leaves have packed's leading axes in place of [n].
    """
    leaves, tree = jax.tree.flatten(like)
    widths = [math.prod(leaf.shape[1:]) for leaf in leaves]
    ends = [sum(widths[: place + 1]) for place in range(len(widths))]
    parts = jnp.split(packed, ends[:-1], axis=-1)
    return tree.unflatten(
        _from_integers(part.reshape(*packed.shape[:-1], *leaf.shape[1:]), leaf.dtype)
        for part, leaf in zip(parts, leaves, strict=True)
    )


def take(values: Any, index: Array) -> Any:
    """Returns leaf[index] of every leaf, by one gather.

    Args:
      values: as for `pack`.
      index: i32[...], which exist.
    """
    return unpack(pack(values)[index], values)


def _as_integers(leaf: Array) -> Array:
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.int32)
    assert leaf.dtype.itemsize == 4, f"{leaf.dtype} has other bits than int32"
    return lax.bitcast_convert_type(leaf, jnp.int32)


def _from_integers(leaf: Array, dtype: Any) -> Array:
    if dtype == jnp.bool_:
        return leaf != 0
    return lax.bitcast_convert_type(leaf, dtype)
