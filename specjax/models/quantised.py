"""Matrices of few bits, which products read as they lie: int8 or int4 numbers, and their scales.

The inputs of a matrix are cut into groups of equal size. Each output has one scale per group, and
numbers are symmetric: the largest of a group is 127 or 7. One group gives a scale per output.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.models.views import View

# By bits: dtype of the numbers, and the largest of them.
INTEGERS = {8: (jnp.int8, 127), 4: (jnp.int4, 7)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """A matrix [out, in] of few bits; a node of the tree of weights.

    Groups lead, so that a product over each of them needs no copy in another order: with
    [out, groups, size], XLA copies the matrix first on a TPU.

    Attributes:
      values: int8 or int4 [groups, out, size], with groups * size = in.
      scales: f32[groups, out]; a number of the matrix is value * scale.
    """

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        groups, out, size = self.values.shape
        return out, groups * size

    def matrix(self, dtype: Any) -> Array:
        """Returns the matrix that it stands for, dtype[out, in]; traceable."""
        wide = self.values.astype(dtype) * self.scales.astype(dtype)[..., None]
        return jnp.moveaxis(wide, 0, 1).reshape(self.shape)

    def times(self, tokens: Array, dtype: Any = None) -> Array:
        """Returns tokens [n, in] times the transpose of the matrix, [n, out].

        Products are of the tokens' dtype and sums of float32.

        Args:
          dtype: of the result; None: that of the tokens.
        """
        groups, _, size = self.values.shape
        values = self.values.astype(tokens.dtype)  # part of the product on a TPU
        wide = {"preferred_element_type": jnp.float32}
        if groups == 1:
            out = jax.lax.dot(tokens, values[0].T, **wide) * self.scales
        else:
            by_group = tokens.reshape(-1, groups, size)
            inputs_then_groups = ((2,), (2,)), ((1,), (0,))
            sums = jax.lax.dot_general(by_group, values, inputs_then_groups, **wide)
            out = jnp.sum(sums * self.scales[:, None], axis=0)
        return out.astype(tokens.dtype if dtype is None else dtype)


def num_bytes(leaf: Any) -> float:
    """Returns the bytes of an array, or of a shape with a dtype; two int4 numbers take one."""
    size = 0.5 if leaf.dtype == jnp.int4 else jnp.dtype(leaf.dtype).itemsize
    return math.prod(leaf.shape) * size


def is_quantised(node: Any) -> bool:
    """Returns whether a node of a tree of weights is of few bits."""
    return isinstance(node, Quantised)


def quantise(matrix: Array | View, bits: int, num_groups: int) -> Quantised:
    """Returns a matrix [out, in] in few bits; traceable.

    A group that holds NaN or an infinity becomes NaN.

    Args:
      bits: 8 or 4.
      num_groups: a divisor of `in`.
    """
    dtype, largest = INTEGERS[bits]
    whole = matrix.matrix() if isinstance(matrix, View) else matrix
    out, own = whole.shape
    grouped = jnp.moveaxis(whole.reshape(out, num_groups, own // num_groups), 1, 0)
    grouped = grouped.astype(jnp.float32)
    scales = jnp.max(jnp.abs(grouped), axis=2) / largest
    scales = jnp.where(jnp.isinf(scales), jnp.nan, scales)
    # A group of zeros has scale 0.
    safe = jnp.where(scales > 0, scales, 1.0)
    return Quantised(nearest(grouped, safe[..., None]).astype(dtype), scales)


def nearest(numbers: Any, scales: Any) -> Any:
    """Returns how many scales are nearest to each number, ties to even; arrays of jax or numpy."""
    return (numbers / scales).round()


def num_groups(size: int, group_size: int | None, num_shards: int = 1) -> int:
    """Returns into how many groups the inputs of a matrix are cut.

    Args:
      size: inputs of the matrix.
      group_size: most inputs of a group; None: all.
      num_shards: devices that the inputs are split over; groups do not cross them.
    """
    own = size // num_shards
    most = own if group_size is None else min(group_size, own)
    divisor = next(n for n in range(most, 0, -1) if own % n == 0)
    return num_shards * (own // divisor)
