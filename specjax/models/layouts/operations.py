"""Invertible operations between an array of another tree and the leaf of specjax's tree.

`to_ours` and `to_theirs` are traceable, differentiable, and inverse of one another. Those that
only move values are so to the last bit. Of numpy arrays those below make numpy arrays.

What an operation need not have:

- `bounds_of_theirs(bounds, shape)` says which part of their array a part of ours, of this shape, is
  made of; None: of the whole. Reading from files needs it.
- `spec_to_ours(spec, shape)` and `spec_to_theirs(spec, shape)` say over which mesh axes the result
  is split, where the argument has this spec and shape. Meshes with axes of type Explicit need it;
  without, the result is whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax

Bounds = tuple[tuple[int, int], ...]  # first and past the last, per axis
Shape = tuple[int, ...]
Spec = tuple[Any, ...]  # of an array: per axis a mesh axis, several, or None


class Operation(Protocol):
    """One step between an array of theirs and one of ours."""

    def to_ours(self, x: Array) -> Array: ...

    def to_theirs(self, x: Array) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Transposed:
    """Theirs [..., in, out], ours [..., out, in]."""

    def to_ours(self, x: Array) -> Array:
        return x.swapaxes(-1, -2)

    to_theirs = to_ours

    def bounds_of_theirs(self, bounds: Bounds, shape: Shape) -> Bounds:
        del shape
        return (*bounds[:-2], bounds[-1], bounds[-2])

    def spec_to_ours(self, spec: Spec, shape: Shape) -> Spec:
        del shape
        return (*spec[:-2], spec[-1], spec[-2])

    spec_to_theirs = spec_to_ours


@dataclasses.dataclass(frozen=True)
class Heads:
    """Theirs has two axes, heads and head_dim, where ours has one, heads * head_dim.

    Attributes:
      axis: of the heads; head_dim is the next.
    """

    axis: int
    head_dim: int

    def to_ours(self, x: Array) -> Array:
        before, after = x.shape[: self.axis], x.shape[self.axis + 2 :]
        return x.reshape(*before, -1, *after)

    def to_theirs(self, x: Array) -> Array:
        before, after = x.shape[: self.axis], x.shape[self.axis + 1 :]
        return x.reshape(*before, -1, self.head_dim, *after)

    def bounds_of_theirs(self, bounds: Bounds, shape: Shape) -> Bounds | None:
        """Returns the bounds in their array; None for a part that cuts a head."""
        del shape
        first, end = bounds[self.axis]
        if first % self.head_dim or end % self.head_dim:
            return None
        heads = (first // self.head_dim, end // self.head_dim)
        before, after = bounds[: self.axis], bounds[self.axis + 1 :]
        return (*before, heads, (0, self.head_dim), *after)

    def spec_to_ours(self, spec: Spec, shape: Shape) -> Spec:
        """Returns the heads' axes for both; heads of which each device has a part become whole."""
        del shape
        before, after = spec[: self.axis], spec[self.axis + 2 :]
        heads, head_dim = spec[self.axis : self.axis + 2]
        return (*before, heads if head_dim is None else None, *after)

    def spec_to_theirs(self, spec: Spec, shape: Shape) -> Spec:
        del shape
        return (*spec[: self.axis + 1], None, *spec[self.axis + 1 :])


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Theirs rotates entries 2j and 2j + 1 of a head together, ours j and j + head_dim / 2.

    The last axis is head_dim, so this comes before `Heads` in a chain from theirs to ours.
    """

    def to_ours(self, x: Array) -> Array:
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        return pairs.swapaxes(-1, -2).reshape(x.shape)

    def to_theirs(self, x: Array) -> Array:
        halves = x.reshape(*x.shape[:-1], 2, -1)
        return halves.swapaxes(-1, -2).reshape(x.shape)

    def bounds_of_theirs(self, bounds: Bounds, shape: Shape) -> Bounds | None:
        """Returns the same bounds; None for a part of a head."""
        return bounds if bounds[-1] == (0, shape[-1]) else None

    def spec_to_ours(self, spec: Spec, shape: Shape) -> Spec:
        del shape
        return spec

    spec_to_theirs = spec_to_ours


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Theirs is ours times a factor, computed in float32.

    There and back gives equal bits where the factor is a power of two, otherwise a relative
    error of one or two units in the last place.
    """

    factor: float

    def to_ours(self, x: Array) -> Array:
        return _in_float32(x, 1 / self.factor)

    def to_theirs(self, x: Array) -> Array:
        return _in_float32(x, self.factor)

    def bounds_of_theirs(self, bounds: Bounds, shape: Shape) -> Bounds:
        del shape
        return bounds

    def spec_to_ours(self, spec: Spec, shape: Shape) -> Spec:
        del shape
        return spec

    spec_to_theirs = spec_to_ours


@dataclasses.dataclass(frozen=True)
class Offset:
    """Theirs is ours plus a number, such as the weight 1 + w of a norm, computed in float32."""

    offset: float

    def to_ours(self, x: Array) -> Array:
        return (x.astype(jnp.float32) - self.offset).astype(x.dtype)

    def to_theirs(self, x: Array) -> Array:
        return (x.astype(jnp.float32) + self.offset).astype(x.dtype)

    def bounds_of_theirs(self, bounds: Bounds, shape: Shape) -> Bounds:
        del shape
        return bounds

    def spec_to_ours(self, spec: Spec, shape: Shape) -> Spec:
        del shape
        return spec

    spec_to_theirs = spec_to_ours


@dataclasses.dataclass(frozen=True)
class OfLayer:
    """Theirs holds all layers, along an axis; ours is the array of one of them.

    Attributes:
      axis: of the layers.
      layer: its number.
    """

    axis: int
    layer: int

    def to_ours(self, x: Array) -> Array:
        return lax.index_in_dim(x, self.layer, self.axis, keepdims=False)

    def to_theirs(self, x: Array) -> Array:
        raise NotImplementedError("one layer does not make the array of all.")

    def spec_to_ours(self, spec: Spec, shape: Shape) -> Spec:
        del shape
        return (*spec[: self.axis], *spec[self.axis + 1 :])


def _in_float32(x: Array, factor: float) -> Array:
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
