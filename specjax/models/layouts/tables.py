"""What a layout is: for each leaf of specjax's tree, its place in another tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from specjax.models.base import ModelConfig
from specjax.models.layouts.explicit import alike, applied
from specjax.models.layouts.operations import Bounds, OfLayer, Operation

LAYER = "{layer}"
ROOT = "params"  # what flax linen wraps its weights in

# Layouts that have a name here; see `layouts.named`.
LayoutName: TypeAlias = Literal["specjax", "nnx", "linen", "tunix", "maxtext"]
Leaves = Mapping[str, Any]  # arrays by path, "layers.0.q_proj.kernel"


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a leaf in another tree, and what makes its array ours.

    Attributes:
      path: names joined by dots; "{layer}" stands for the number of a layer.
      operations: from their array to ours, in order; the way back takes them in reverse.
      stack_axis: axis of layers in one array that holds those of all layers. The path then has
        no "{layer}", and operations apply to the array of one layer. None: an array per layer.
    """

    path: str
    operations: tuple[Operation, ...] = ()
    stack_axis: int | None = None

    @property
    def is_as_ours(self) -> bool:
        """Whether the other tree has the same array, so that nothing is computed or copied."""
        return not self.operations and self.stack_axis is None

    def path_of(self, layer: int | None) -> str:
        """Returns the path of the array of a layer."""
        return self.path.replace(LAYER, str(layer))

    def to_ours(self, leaves: Leaves, layer: int | None) -> Any:
        """Returns our leaf."""
        x = leaves[self.path_of(layer)]
        if self.is_as_ours:
            return x
        operations = self.operations
        if self.stack_axis is not None:
            assert layer is not None
            operations = (OfLayer(self.stack_axis, layer), *operations)
        return applied(jnp.asarray(x), operations, "to_ours")

    def bounds_of_theirs(self, bounds: Bounds, shape: tuple[int, ...]) -> Bounds | None:
        """Returns the part of the array of one layer that a part of our leaf is made of.

        Args:
          shape: of our leaf.

        Returns:
          Bounds per axis; None: the whole array, where an operation does not say which part.
        """
        ours, theirs = jax.ShapeDtypeStruct(shape, jnp.float32), bounds
        for operation in reversed(self.operations):
            part_of = getattr(operation, "bounds_of_theirs", None)
            found = part_of(theirs, ours.shape) if part_of else None
            if found is None:
                return None
            theirs, ours = found, jax.eval_shape(operation.to_theirs, ours)
        return theirs

    def to_theirs(self, x: Array) -> Array:
        """Returns the array of one layer from our leaf."""
        return applied(x, self.operations[::-1], "to_theirs")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How another tree holds the weights of a model.

    Attributes:
      name: for messages.
      places: by the name of our leaf, without the number of its layer: "embed_tokens",
        "layers.q_proj". docs/weights-layout.md has all names.
      is_wrapped: whether `convert_back` returns {"params": tree}, as flax linen has it. Trees
        are taken with and without.
    """

    name: str
    places: Mapping[str, Place]
    is_wrapped: bool = False

    def expected(self, config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape of every array of the other tree, by path.

        Raises:
          ValueError: the table lacks a leaf of this config.
        """
        return jax.eval_shape(lambda ours: self.to_theirs(ours, config), config.param_shapes())

    def to_ours(self, leaves: Leaves, config: ModelConfig) -> Any:
        """Returns our tree from the arrays of the other, which must be `expected`."""

        def leaf(path: Any, _: Any) -> Any:
            name, layer = name_of(path)
            return self.places[name].to_ours(leaves, layer)

        return jax.tree_util.tree_map_with_path(leaf, config.param_shapes())

    def to_theirs(self, ours: Any, config: ModelConfig) -> dict[str, Array]:
        """Returns the arrays of the other tree by path, from our tree."""
        theirs: dict[str, Any] = {}
        layers: dict[str, list[Array]] = {}
        for name, layer, leaf in leaves_with_names(ours):
            place = self.places.get(name)
            if place is None:
                raise ValueError(
                    f"layout {self.name!r} says no place of {name!r}, which a model of "
                    f"{config.family!r} with this config has; add it to `places`."
                )
            array = place.to_theirs(leaf)
            if place.stack_axis is not None and layer is None:
                raise ValueError(
                    f"layout {self.name!r} stacks {name!r}, which is not of a layer; leave "
                    "stack_axis out."
                )
            if place.stack_axis is None:
                self._put(theirs, place.path_of(layer), array)
            else:
                layers.setdefault(name, []).append(array)
        for name, arrays in layers.items():
            place = self.places[name]
            stacked = jnp.stack(alike(arrays), axis=place.stack_axis or 0)
            self._put(theirs, place.path, stacked)
        return theirs

    def _put(self, theirs: dict[str, Any], path: str, array: Array) -> None:
        if path in theirs:
            raise ValueError(
                f"layout {self.name!r} has two of our arrays at {path!r}; give each a path of its "
                f"own, with {LAYER!r} for the number of a layer, or a stack_axis."
            )
        theirs[path] = array


def name_of(path: Any) -> tuple[str, int | None]:
    """Returns the name of a leaf of our tree without its layer's number, and that number."""
    keys = [_key(entry) for entry in path]
    place = next((place for place, key in enumerate(keys) if isinstance(key, int)), None)
    layer = None if place is None else keys.pop(place)
    return ".".join(map(str, keys)), layer


def leaves_with_names(ours: Any) -> Iterator[tuple[str, int | None, Any]]:
    """Yields the name, the layer's number or None, and the leaf, of a tree of ours."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(ours)[0]:
        yield (*name_of(path), leaf)


def leaves_of(tree: Any) -> dict[str, Any]:
    """Returns the arrays of any tree by path: its own arrays, no copies.

    Lists count as tuples, what has a `value` (`nnx.Param`, linen's boxes) as that value, and
    {"params": tree} as the tree, once or more often: MaxText's training states hold it twice.
    """
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)[0]
    return unrooted(
        {".".join(str(_key(entry)) for entry in path): _unboxed(leaf) for path, leaf in flat}
    )


def unrooted(leaves: Leaves) -> dict[str, Any]:
    """Returns arrays by path without the {"params": ...} that all of them are in."""
    while leaves and all(path.startswith(f"{ROOT}.") for path in leaves):
        leaves = {path.removeprefix(f"{ROOT}."): leaf for path, leaf in leaves.items()}
    return dict(leaves)


def nested(leaves: Leaves) -> dict[Any, Any]:
    """Returns nested dicts from arrays by path; whole numbers become int keys, as nnx has them."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        *branches, last = (int(key) if key.isdecimal() else key for key in path.split("."))
        branch = tree
        for key in branches:
            branch = branch.setdefault(key, {})
        branch[last] = leaf
    return tree


def _key(entry: Any) -> Any:
    """Returns the name or number of an entry of a path of jax."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _is_box(node: Any) -> bool:
    if isinstance(node, Mapping | list | tuple | jax.Array):
        return False
    return hasattr(node, "get_value") or (hasattr(node, "value") and hasattr(node, "unbox"))


def _unboxed(leaf: Any) -> Any:
    if not _is_box(leaf):
        return leaf
    return leaf.get_value() if hasattr(leaf, "get_value") else leaf.value
