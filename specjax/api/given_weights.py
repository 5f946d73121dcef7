"""Takes a trainer's tree of weights as it is: recognised, re-nested, or converted once."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding

from specjax.api.moved_weights import (
    KEPT,
    SHARED,
    Source,
    WeightMover,
    is_in_place,
    needs_cast,
)
from specjax.models.base import ModelConfig, Params
from specjax.models.layouts.converting import matching
from specjax.models.layouts.named import variants
from specjax.models.layouts.operations import Heads, Transposed
from specjax.models.layouts.tables import (
    Layout,
    LayoutName,
    Leaves,
    Place,
    leaves_of,
    leaves_with_names,
)
from specjax.models.views import View


class GivenWeights:
    """Turns trees of weights in one layout into specjax's tree, on the devices of steps.

    Arrays that both trees have alike, and that lie where steps need them, are handed on, as are
    matrices that steps multiply as they lie (`specjax.models.views`). All others, and those of
    more digits than the decoder computes with (float32 masters of weights in bfloat16), are made
    by a `WeightMover`.
    """

    def __init__(
        self,
        layout: LayoutName | Layout,
        config: ModelConfig,
        shapes: Params,
        places: Any = None,
        *,
        viewed: tuple[int | None, ...] = (),
    ):
        """Takes the shapes and dtypes of specjax's tree, a jax.ShapeDtypeStruct at each leaf.

        Args:
          places: the sharding at each leaf; None: steps run on one device.
          viewed: heads axes of the views that steps take.

        Raises:
          ValueError, NotImplementedError: the layout does not fit the config.
        """
        variants(layout, config)
        self.layout: LayoutName | Layout = layout
        self._config, self._viewed = config, viewed
        self._structure = jax.tree.structure(shapes)
        self._leaves = leaves_with_places(shapes, places)
        self._names = [(name, number) for name, number, _ in leaves_with_names(shapes)]
        self.mover = WeightMover(self._sources)

    def __call__(self, tree: Any) -> Params:
        """Returns specjax's tree.

        Raises:
          ValueError: the tree is not in the layout, or an array was deleted.
        """
        if self._is_ours(tree):
            self.mover.drop()
            return tree
        return jax.tree.unflatten(self._structure, self.mover(leaves_of(tree)))

    def _is_ours(self, tree: Any) -> bool:
        """Returns whether a tree is specjax's already, on the devices of steps."""
        if self.layout != "specjax" or jax.tree.structure(tree) != self._structure:
            return False
        return all(
            getattr(leaf, "shape", None) == ours.shape
            and not needs_cast(leaf, ours.dtype)
            and is_in_place(leaf, place)
            for leaf, (ours, place) in zip(jax.tree.leaves(tree), self._leaves, strict=True)
        )

    def _sources(self, arrays: Leaves) -> list[Source]:
        layout = matching(arrays, self.layout, self._config, "params")

        def source(name: str, layer: int | None, leaf: Any, place: Any) -> Source:
            own = layout.places[name]
            path = own.path_of(layer)
            view = _view_of(own)
            if view is not None and view.heads_axis in self._viewed:
                there = None if place is None else NamedSharding(place.mesh, view.split(place.spec))
                seen = Source(path, None, leaf.dtype, there, view.of)
                if seen.way_of(arrays[path]) in (KEPT, SHARED):  # else it is copied anyway
                    return seen
            make = None if own.is_as_ours else functools.partial(own.to_ours, layer=layer)
            return Source(path, make, leaf.dtype, place)

        pairs = zip(self._names, self._leaves, strict=True)
        return [source(*names, *of_leaf) for names, of_leaf in pairs]


def _view_of(own: Place) -> View | None:
    """Returns the view, of no array yet, as which products take an array; None: there is none."""
    if own.stack_axis is not None:
        return None
    match own.operations:
        case (Transposed(),):
            return View(None)
        case (Heads(axis=0 | 1 as axis), Transposed()):
            return View(None, axis)
    return None


def drafter_mover(shapes: Any, places: Any) -> WeightMover:
    """Returns what moves the weights of a drafter, whose tree has its own form always."""
    ours = leaves_with_places(shapes, places)

    def sources(arrays: Leaves) -> list[Source]:
        pairs = zip(arrays, ours, strict=True)
        return [Source(path, None, leaf.dtype, place) for path, (leaf, place) in pairs]

    return WeightMover(sources)


def leaves_with_places(shapes: Any, places: Any) -> list[tuple[Any, Any]]:
    """Returns each leaf of a tree with its sharding; None for all if places is None."""
    leaves = jax.tree.leaves(shapes)
    every = [None] * len(leaves) if places is None else jax.tree.leaves(places)
    return [*zip(leaves, every, strict=True)]
