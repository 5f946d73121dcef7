"""Describes the weights of a family in one place: shape, axes, source, and random values.

A family defines one function from its config to a tree like its params with a `Weight` at each
leaf; `sources_of`, `axes_of` and `init_of` then give its `sources`, `axes` and `init`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from types import EllipsisType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from specjax.models.base import Params

Axes = tuple[str | None, ...]
Index = EllipsisType | tuple[slice, ...]


class AnySource(Protocol):
    """The place of a leaf in a checkpoint."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields name and shape of every tensor that is read from the file."""
        ...

    def read(
        self, tensors: Mapping[str, np.ndarray], dtype: np.dtype, index: Index = ...
    ) -> np.ndarray:
        """Returns a slice of the leaf, a new array in host memory that shares none with the file.

        Args:
          index: as numpy takes it, a slice per axis of the leaf; by default the whole leaf.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint, or some of its outputs."""

    name: str
    shape: tuple[int, ...]  # in the file
    is_transposed: bool = False  # stored [..., in, out]
    outputs: slice | None = None  # part of its outputs; None: all of them

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, self.shape

    @property
    def place(self) -> tuple[Any, ...]:
        """The index of the part of the tensor that is read."""
        if self.outputs is None:
            return (...,)
        return (..., self.outputs) if self.is_transposed else (self.outputs,)

    def view(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the part of the tensor that is read, as it is stored."""
        return tensors[self.name][self.place]

    def read(
        self, tensors: Mapping[str, np.ndarray], dtype: np.dtype, index: Index = ...
    ) -> np.ndarray:
        tensor = self.view(tensors)
        tensor = tensor.swapaxes(-1, -2) if self.is_transposed else tensor
        # Only the pages of the file that hold the slice are read. A view of the memory map would
        # let a later change of the file change the model.
        return tensor[index].astype(dtype, order="C", copy=True)


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Tensors of one shape, stacked along a new first axis, such as the experts of a layer."""

    parts: tuple[Source, ...]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for part in self.parts:
            yield from part.tensors()

    def read(
        self, tensors: Mapping[str, np.ndarray], dtype: np.dtype, index: Index = ...
    ) -> np.ndarray:
        parts, inner = self.parts, index
        if isinstance(index, tuple):
            parts, inner = parts[index[0]], index[1:]
        return np.stack([part.read(tensors, dtype, inner) for part in parts])


@dataclasses.dataclass(frozen=True)
class Weight:
    """Description of a leaf of params."""

    shape: tuple[int, ...]
    axes: Axes  # logical, one per axis of shape; see specjax.models.sharding.RULES
    source: AnySource
    mean: float = 0.0  # mean of its random values


def matrix(name: str, shape: tuple[int, int], axes: Axes) -> Weight:
    """Returns a matrix [out, in] that the file stores in the same layout."""
    return Weight(shape, axes, Source(name, shape))


def vector(name: str, size: int, axis: str | None, mean: float = 0.0) -> Weight:
    """Returns a bias; with mean 1, the weight of a norm."""
    return Weight((size,), (axis,), Source(name, (size,)), mean)


def map_weights(function: Callable[[Weight], Any], tree: Any) -> Any:
    """Returns a tree with function(weight) at each leaf, called in insertion order.

    jax.tree.map would visit dicts in the order of sorted names.
    """
    if isinstance(tree, Mapping):
        return {name: map_weights(function, branch) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_weights(function, branch) for branch in tree)
    return function(tree)


def axes_of(tree: Any) -> Any:
    """Returns the axes at each leaf."""
    return map_weights(lambda weight: weight.axes, tree)


def sources_of(tree: Any) -> Any:
    """Returns the source at each leaf."""
    return map_weights(lambda weight: weight.source, tree)


def init_of(tree: Any, key: Array, dtype: DTypeLike = jnp.float32, std: float = 0.02) -> Params:
    """Returns normal random values around each leaf's mean, with keys in insertion order."""
    keys = iter(jax.random.split(key, len(jax.tree.leaves(tree))))

    def fill(weight: Weight) -> Array:
        values = jax.random.normal(next(keys), weight.shape) * std
        return (weight.mean + values if weight.mean else values).astype(dtype)

    return map_weights(fill, tree)


def num_weights(tree: Any) -> int:
    """Returns how many numbers all leaves hold."""
    return sum(math.prod(weight.shape) for weight in jax.tree.leaves(tree))
