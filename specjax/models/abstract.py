"""Shapes and dtypes of weights, without loading any."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.base import ModelConfig
from specjax.models.families import family_of
from specjax.models.views import is_view


def abstract_weights(config: ModelConfig, dtype: Any) -> Any:
    """Returns shapes and dtypes of a model's weights."""
    shapes = _shapes(family_of(config).init, config, jnp.dtype(dtype))
    return jax.tree.map(lambda leaf: leaf, shapes)  # a caller may change its own


@functools.lru_cache(maxsize=32)
def _shapes(init: Callable[..., Any], config: ModelConfig, dtype: np.dtype) -> Any:
    shapes = jax.eval_shape(lambda key: init(key, config, dtype), jax.random.key(0))
    # Without the mesh that may be set here.
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)


def tree_difference(given: Any, expected: Any) -> str | None:
    """Returns how the names of two trees of weights differ; None where they do not.

    A `View` counts as the matrix that it is of.
    """
    if jax.tree.structure(given, is_leaf=is_view) == jax.tree.structure(expected):
        return None
    names, wanted = map(_names, (given, expected))
    missing, others = sorted(wanted - names), sorted(names - wanted)
    if missing or others:
        return f"missing {missing[:3]}, not expected {others[:3]}"
    return f"got {jax.tree.structure(given)}"[:200]


def shape_difference(given: Any, expected: Any) -> str | None:
    """Returns how the first weight of another shape differs, of two trees with the same names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(given)
    for (path, leaf), wanted in zip(leaves, jax.tree.leaves(expected), strict=True):
        if np.shape(leaf) != wanted.shape:
            return f"{jax.tree_util.keystr(path)} is of {np.shape(leaf)}, not {wanted.shape}"
    return None


def _names(tree: Any) -> set[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path) for path, _ in leaves}
