"""Takes a trainer's tree of weights as it is: recognised, re-nested, or converted once."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from specjax import sharding
from specjax.layouts.converting import matching
from specjax.layouts.named import variants
from specjax.layouts.once import Once
from specjax.layouts.tables import Layout, Leaves, leaves_of, leaves_with_names, name_of
from specjax.models.base import ModelConfig, Params


class GivenWeights:
    """Turns trees of weights in one layout into specjax's tree.

    Arrays that both trees have alike are handed on. All others are converted by one jitted
    function, only if they differ from those of the last call; its result is kept until then, or
    until the trainer frees them.
    """

    def __init__(self, layout: str | Layout, config: ModelConfig, mesh: Mesh | None):
        """Raises ValueError or NotImplementedError for a layout that does not fit the config."""
        variants(layout, config)
        self._layout, self._config, self._mesh = layout, config, mesh
        self._ours = config.param_shapes()
        self._structure = jax.tree.structure(self._ours)
        # By the paths and shapes of a tree: the variant it is in, and what converts it.
        self._known: dict[Any, tuple[Layout, Once]] = {}
        self.num_traces = 0
        self.bytes_moved = 0  # of the last call

    def __call__(self, tree: Any) -> Params:
        """Returns specjax's tree.

        Raises:
          ValueError: the tree is not in the layout, or an array was deleted.
        """
        self.bytes_moved = 0
        if self._is_ours(tree):
            return tree
        leaves = leaves_of(tree)
        layout, converted = self._of(leaves)
        own = {name: layout.places[name] for name, _, _ in leaves_with_names(self._ours)}
        moved = {
            place.path_of(layer): leaves[place.path_of(layer)]
            for name, layer, _ in leaves_with_names(self._ours)
            if not (place := own[name]).is_as_ours
        }
        arrays: dict[Any, Any] = {}
        if moved:
            is_new = not converted.has(moved)
            if is_new:
                self.drop()  # what came of a tree of another form too
            arrays = converted(moved)
            if is_new:
                self.bytes_moved = sum(array.nbytes for array in arrays.values())

        def leaf(path: Any, _: Any) -> Any:
            name, layer = name_of(path)
            if own[name].is_as_ours:
                return leaves[own[name].path_of(layer)]
            return arrays[name, layer]

        return jax.tree_util.tree_map_with_path(leaf, self._ours)

    def drop(self) -> None:
        """Frees converted weights."""
        for _, converted in self._known.values():
            converted.drop()

    def _is_ours(self, tree: Any) -> bool:
        """Returns whether a tree is specjax's already."""
        if self._layout != "specjax" or jax.tree.structure(tree) != self._structure:
            return False
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(self._ours), strict=True)
        return all(getattr(leaf, "shape", None) == ours.shape for leaf, ours in pairs)

    def _of(self, leaves: Leaves) -> tuple[Layout, Once]:
        key = tuple((path, getattr(leaf, "shape", None)) for path, leaf in leaves.items())
        if key not in self._known:
            layout = matching(leaves, self._layout, self._config, "params")
            self._known[key] = layout, Once(functools.partial(self._converted, layout, {}))
        return self._known[key]

    def _converted(self, layout: Layout, compiled: dict[bool, Any], moved: Leaves) -> Any:
        """Returns the leaves of ours, by name and layer, that are made from moved arrays."""
        moved = {path: _automatic(array) for path, array in moved.items()}
        is_there = all(_lies_over(self._mesh, array) for array in moved.values())
        if is_there not in compiled:
            compiled[is_there] = self._compiled(layout, is_there)
        return compiled[is_there](moved)

    def _compiled(self, layout: Layout, is_there: bool) -> Any:
        """Returns the jitted conversion.

        Args:
          is_there: whether arrays lie on the decoder's mesh, so that the results can be split as
            steps have them at once.
        """
        names = [
            (name, layer)
            for name, layer, _ in leaves_with_names(self._ours)
            if not layout.places[name].is_as_ours
        ]

        def run(moved: dict[str, Any]) -> dict[Any, Any]:
            self.num_traces += 1
            return {key: layout.places[key[0]].to_ours(moved, key[1]) for key in names}

        if not is_there:
            return jax.jit(run)
        assert self._mesh is not None
        mesh = sharding.automatic(self._mesh)
        assert mesh is not None
        specs = sharding.shardings(sharding.param_specs(self._ours, mesh, self._config), mesh)
        by_name = {(name, layer): leaf for name, layer, leaf in leaves_with_names(specs)}
        return jax.jit(run, out_shardings={key: by_name[key] for key in names})


def bytes_copied(before: Any, after: Any) -> int:
    """Returns the bytes of arrays that were copied from the host, or over the devices of a mesh.

    Args:
      before, after: weights as given and as used; nothing of weights that are not used counts.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        return 0
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return sum(used.nbytes for given, used in pairs if not _is_in_place(given, used))


def _is_in_place(given: Any, used: Any) -> bool:
    if given is used or not isinstance(given, jax.Array):
        return given is used
    return given.sharding.is_equivalent_to(used.sharding, given.ndim)


def _lies_over(mesh: Mesh | None, array: Any) -> bool:
    """Returns whether an array lies over the devices of a mesh, in their order."""
    place = getattr(array, "sharding", None)
    if mesh is None or not isinstance(place, NamedSharding) or not isinstance(place.mesh, Mesh):
        return False
    return [*place.mesh.devices.flat] == [*mesh.devices.flat]


def _automatic(array: Any) -> Any:
    """Returns an array with automatic axes: those of type Explicit are part of an array's type."""
    place = getattr(array, "sharding", None)
    if not isinstance(place, NamedSharding):
        return array
    mesh = sharding.automatic(place.mesh if isinstance(place.mesh, Mesh) else None)
    return array if mesh is None else jax.device_put(array, NamedSharding(mesh, place.spec))
