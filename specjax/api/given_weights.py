"""Takes a trainer's tree of weights as it is: recognised, re-nested, or converted once."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from specjax import sharding
from specjax.layouts.converting import matching
from specjax.layouts.named import variants
from specjax.layouts.once import Once
from specjax.layouts.tables import Layout, Leaves, Place, leaves_of, leaves_with_names
from specjax.models.base import ModelConfig, Params


class _Form(NamedTuple):
    """What is known of trees with the same paths and shapes."""

    paths: tuple[str, ...]  # for each leaf of ours, the array that it is or comes from
    is_moved: tuple[bool, ...]  # for each leaf of ours, whether it is converted
    converted: Once  # from arrays by path to a list of the leaves that are moved


class GivenWeights:
    """Turns trees of weights in one layout into specjax's tree.

    Arrays that both trees have alike are handed on. All others, and those of more digits than the
    decoder computes with (float32 masters of weights in bfloat16), are converted by one jitted
    function, only if they differ from those of the last call; its result is kept until then, or
    until the trainer frees them.
    """

    def __init__(
        self, layout: str | Layout, config: ModelConfig, mesh: Mesh | None, shapes: Params
    ):
        """Takes the shapes and dtypes of specjax's tree, a jax.ShapeDtypeStruct at each leaf.

        Raises:
          ValueError, NotImplementedError: the layout does not fit the config.
        """
        variants(layout, config)
        self.layout, self._config, self._mesh = layout, config, mesh
        self._ours = shapes
        self._structure = jax.tree.structure(self._ours)
        self._forms: dict[Any, _Form] = {}
        self.num_traces = 0
        self.bytes_moved = 0  # of the last call

    def __call__(self, tree: Any) -> Params:
        """Returns specjax's tree.

        Raises:
          ValueError: the tree is not in the layout, or an array was deleted.
        """
        self.bytes_moved = 0
        if self._is_ours(tree):
            self.drop()
            return tree
        leaves = leaves_of(tree)
        form = self._form_of(leaves)
        moved = {path: leaves[path] for path, is_moved in zip(*form[:2]) if is_moved}
        if not moved:
            self.drop()
        results = iter(self._results(form, moved) if moved else ())
        ours = [next(results) if m else leaves[path] for path, m in zip(*form[:2])]
        return jax.tree.unflatten(self._structure, ours)

    def drop(self) -> None:
        """Frees converted weights."""
        for form in self._forms.values():
            form.converted.drop()

    def _results(self, form: _Form, moved: Leaves) -> list[jax.Array]:
        if form.converted.has(moved):
            return form.converted(moved)
        self.drop()  # what came of a tree of another form too
        results = form.converted(moved)
        self.bytes_moved = sum(array.nbytes for array in results)
        return results

    def _is_ours(self, tree: Any) -> bool:
        """Returns whether a tree is specjax's already."""
        if self.layout != "specjax" or jax.tree.structure(tree) != self._structure:
            return False
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(self._ours), strict=True)
        return all(
            getattr(leaf, "shape", None) == ours.shape and not _is_master(leaf, ours.dtype)
            for leaf, ours in pairs
        )

    def _form_of(self, leaves: Leaves) -> _Form:
        described = lambda leaf: (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
        key = tuple((path, *described(leaf)) for path, leaf in leaves.items())
        if key not in self._forms:
            layout = matching(leaves, self.layout, self._config, "params")
            places = [(layout.places[name], n) for name, n, _ in leaves_with_names(self._ours)]
            paths = tuple(place.path_of(layer) for place, layer in places)
            dtypes = [leaf.dtype for leaf in jax.tree.leaves(self._ours)]
            is_moved = tuple(
                not place.is_as_ours or _is_master(leaves[path], dtype)
                for (place, _), path, dtype in zip(places, paths, dtypes, strict=True)
            )
            moved = [(*each, d) for each, d, m in zip(places, dtypes, is_moved) if m]
            convert = functools.partial(self._converted, moved, is_moved, {})
            self._forms[key] = _Form(paths, is_moved, Once(convert))
        return self._forms[key]

    def _converted(
        self,
        places: list[tuple[Place, int | None, Any]],
        is_moved: tuple[bool, ...],
        compiled: dict[bool, Any],
        moved: Leaves,
    ) -> list[jax.Array]:
        """Returns the leaves of ours at places, from the arrays of theirs.

        Args:
          places: and the numbers of their layers, and dtypes of ours.
          is_moved: of all leaves of ours.
          compiled: what was compiled for these places, by whether the arrays lie on the mesh.
        """
        moved = {path: _automatic(array) for path, array in moved.items()}
        # Then the results are split at once as steps have them.
        is_there = all(_lies_over(self._mesh, array) for array in moved.values())

        def run(moved: Leaves) -> list[Any]:
            self.num_traces += 1
            ours = ((place.to_ours(moved, layer), dtype) for place, layer, dtype in places)
            return [x.astype(dtype) if _is_master(x, dtype) else x for x, dtype in ours]

        if is_there not in compiled:
            split = self._shardings(is_moved) if is_there else None
            compiled[is_there] = jax.jit(run, out_shardings=split)
        results = compiled[is_there](moved)
        if self._mesh is None or is_there:
            return results
        return jax.device_put(results, self._shardings(is_moved))

    def _shardings(self, is_moved: tuple[bool, ...]) -> list[NamedSharding]:
        mesh = sharding.automatic(self._mesh)
        assert mesh is not None
        all_of_them = jax.tree.leaves(sharding.param_shardings(self._config, mesh))
        return [place for place, m in zip(all_of_them, is_moved, strict=True) if m]


def bytes_copied(before: Any, after: Any) -> int:
    """Returns the bytes of arrays that were copied from the host, or over the devices of a mesh.

    Args:
      before, after: weights as given and as used; nothing of weights that are not used counts.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        return 0
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return sum(used.nbytes for given, used in pairs if not _is_in_place(given, used))


def _is_master(leaf: Any, dtype: Any) -> bool:
    """Returns whether an array has more digits than weights of a dtype, and is cast to it."""
    own = getattr(leaf, "dtype", None)
    if own is None or not all(jnp.issubdtype(each, jnp.floating) for each in (own, dtype)):
        return False
    return jnp.finfo(own).nmant > jnp.finfo(dtype).nmant and jnp.dtype(dtype).itemsize == 2


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
