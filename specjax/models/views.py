"""Matrices that lie in memory as a trainer has them, and are multiplied so.

A matrix of specjax's tree is [out, in]. A trainer may have it as [in, out], perhaps with heads as
an axis of its own. Moving it first would need memory for a copy of all weights; a product takes it
either way.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """A matrix [out, in] that a trainer's array holds otherwise; a node of the tree of weights.

    Attributes:
      array: the trainer's, [in, out], or with heads and head_dim as two axes.
      heads_axis: 0: [heads, head_dim, out], 1: [in, heads, head_dim]; None: [in, out].
    """

    array: Any
    heads_axis: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        first, *rest = self.array.shape
        if self.heads_axis == 0:
            return rest[1], first * rest[0]
        return rest[0] * (rest[1] if self.heads_axis == 1 else 1), first

    @property
    def dtype(self) -> Any:
        """dtype of the numbers."""
        return self.array.dtype

    def of(self, array: Any) -> View:
        """Returns the same view of another array."""
        return View(array, self.heads_axis)

    def astype(self, dtype: Any) -> View:
        """Returns the view in another dtype; traceable."""
        return self.of(self.array.astype(dtype))

    def matrix(self) -> Array:
        """Returns the matrix, [out, in]; traceable."""
        out, own = self.shape
        return self.array.reshape(own, out).T

    def times(self, tokens: Array, dtype: Any = None) -> Array:
        """Returns tokens [n, in] times the transpose of the matrix, [n, out]."""
        out, own = self.shape
        return jax.lax.dot(tokens, self.array.reshape(own, out), preferred_element_type=dtype)

    def split(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns the spec of the array from that of the matrix."""
        out, own = (*spec, None, None)[:2]
        axes = [own, out]
        if self.heads_axis is not None:
            axes.insert(self.heads_axis + 1, None)
        return PartitionSpec(*axes)


def is_view(node: Any) -> bool:
    """Returns whether a node of a tree of weights is a View."""
    return isinstance(node, View)


def matrices_of(params: Any) -> list[Any]:
    """Returns the leaves of weights, of which a view is one."""
    return jax.tree.leaves(params, is_leaf=is_view)
