"""Restores weights from a stored tree: straight into a layout, a dtype and shardings.

One stored array is in host memory at a time, or the part of it that the process's devices keep.
The largest comes first: what reading it takes beside the weights is then taken while most of the
weights are not there yet.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import Array
from jax.typing import DTypeLike

from specjax.checkpoints.stored_tree import StoredArray, StoredTree, listed, open_tree
from specjax.checkpoints.tree_root import find_root, shown
from specjax.models.base import ModelConfig, Params
from specjax.models.layouts.converting import matching
from specjax.models.layouts.named import variants
from specjax.models.layouts.operations import Bounds
from specjax.models.layouts.tables import Layout, LayoutName, Place, name_of
from specjax.models.loading import read_onto, weight_dtype
from specjax.runtime.host_memory import aligned_copy, give_back

_LARGE_BYTES = 2**20  # of arrays after which memory is given back
_REMEDY = "load_orbax(..., layout={name}) reads it."


def restore_model(
    folder: epath.Path,
    layout: LayoutName | Layout,
    config: ModelConfig,
    *,
    root: str | None = None,
    places: Any = None,
    dtype: DTypeLike | None = None,
    may_mix: bool = False,
) -> Params:
    """Returns the weights of a model, of a tree that may hold anything else beside them.

    Args:
      folder: of the tree.
      root: path of the weights in the tree, "" for its top; None: it is looked for.
      places: a sharding for each weight; None: the default device.
      dtype: None: the stored one.
      may_mix: whether arrays of several dtypes keep them where none is named. Otherwise they are
        an error: a trainer's may be parts of different trees.

    Raises:
      ValueError: names or shapes differ from the layout's, arrays are of several dtypes, or they
        cannot be read.
      NotImplementedError: the layout has no models like this config.
    """
    tree = open_tree(folder)
    possible = variants(layout, config)
    names = {path for variant in possible for path in variant.expected(config)}
    found = find_root(tree, [variant.expected(config) for variant in possible], root)
    arrays = _weights_of(tree.open(tree.paths_below(found)), names)
    what = f"the tree of {tree.folder}" + (f" below {shown(found)}" if found else "")
    chosen = matching(arrays, layout, config, what, remedy=_REMEDY)
    _check_floating(arrays, tree)
    if dtype is None and not may_mix:
        _check_one_dtype(arrays, tree)
    dtype_of = lambda array: weight_dtype(array.dtype.name if dtype is None else dtype)
    return _read_all(arrays, chosen, config, dtype_of, places)


def restore_tree(
    folder: epath.Path, expected: Any, *, sharding: Any = None, dtype: DTypeLike | None = None
) -> Any:
    """Returns a tree of arrays under the names of `expected`, such as the weights of a head.

    Args:
      folder: of the tree; it need not be there where nothing is expected.
      expected: jax.ShapeDtypeStruct at each leaf; leaves of integers keep the stored dtype.
      sharding: of every leaf; None: the default device.
      dtype: of floating-point leaves; None: the stored one.

    Raises:
      ValueError: names or shapes differ.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(expected)
    if not leaves:
        return expected
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    wanted = {name(path): leaf for path, leaf in leaves}
    tree = open_tree(folder)
    arrays = tree.open(tree.paths_below())
    wrong = sorted(wanted.keys() ^ arrays.keys())
    wrong += [path for path in wanted.keys() & arrays if arrays[path].shape != wanted[path].shape]
    if wrong:
        raise ValueError(
            f"{folder} holds other weights than its description says: {listed(wrong)} are missing, "
            "unknown or of another shape. Files were changed; copy or save the checkpoint again."
        )

    def read(path: str, leaf: Any) -> Array:
        is_cast = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
        target = weight_dtype(dtype) if is_cast else arrays[path].dtype
        stored = arrays[path]
        whole = lambda _: stored.read() if stored.dtype == target else stored.read().astype(target)
        return _put(sharding, leaf.shape, whole)

    return jax.tree.unflatten(structure, [read(path, leaf) for path, leaf in wanted.items()])


def _weights_of(arrays: Mapping[str, StoredArray], names: set[str]) -> dict[str, StoredArray]:
    """Returns the arrays without counters and keys of random numbers, which are no weights."""
    is_number = lambda array: jnp.issubdtype(array.dtype, jnp.floating)
    return {path: each for path, each in arrays.items() if path in names or is_number(each)}


def _check_floating(arrays: Mapping[str, StoredArray], tree: StoredTree) -> None:
    wrong = [
        f"{path} is {array.dtype}"
        for path, array in arrays.items()
        if not jnp.issubdtype(array.dtype, jnp.floating)
    ]
    if wrong:
        raise ValueError(
            f"{tree.folder} holds weights that are not floating point: {listed(wrong)}. Quantised "
            "weights are not read; save them as bfloat16, float16 or float32."
        )


def _check_one_dtype(arrays: Mapping[str, StoredArray], tree: StoredTree) -> None:
    dtypes = sorted({array.dtype.name for array in arrays.values()})
    if len(dtypes) > 1:
        raise ValueError(
            f"{tree.folder} holds weights of several dtypes, {listed(dtypes)}; say which one they "
            "are to have by dtype=."
        )


def _read_all(
    arrays: Mapping[str, StoredArray],
    layout: Layout,
    config: ModelConfig,
    dtype_of: Callable[[StoredArray], np.dtype],  # of the weights in a stored array
    places: Any,
) -> Params:
    leaves, structure = jax.tree_util.tree_flatten_with_path(config.param_shapes("float32"))
    shardings = [None] * len(leaves) if places is None else jax.tree.leaves(places)
    by_array: dict[str, list[int]] = {}
    for index, (path, _) in enumerate(leaves):
        name, layer = name_of(path)
        by_array.setdefault(layout.places[name].path_of(layer), []).append(index)
    results: list[Any] = [None] * len(leaves)
    for stored in sorted(by_array, key=lambda path: arrays[path].num_bytes, reverse=True):
        read = functools.cache(arrays[stored].read)  # all layers of a stack are of the same parts
        dtype = dtype_of(arrays[stored])
        for index in by_array[stored]:
            path, leaf = leaves[index]
            name, layer = name_of(path)
            part = _Part(layout.places[name], layer, leaf.shape, arrays[stored].shape, dtype, read)
            results[index] = _put(shardings[index], leaf.shape, part)
        read.cache_clear()
        if arrays[stored].num_bytes > _LARGE_BYTES:
            give_back()
    return jax.tree.unflatten(structure, results)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Reads slices of one of our leaves from an array in another layout."""

    place: Place
    layer: int | None
    shape: tuple[int, ...]  # of the leaf
    stored_shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Bounds | None], np.ndarray]  # of the stored array

    def __call__(self, index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, self.shape))
        theirs, axis = self.place.bounds_of_theirs(bounds, self.shape), self.place.stack_axis
        if theirs is not None and axis is not None:
            theirs = (*theirs[:axis], (0, self.stored_shape[axis]), *theirs[axis:])
        x: Any = self.read(theirs)
        x = x if axis is None else np.moveaxis(x, axis, 0)[self.layer]
        for operation in self.place.operations:
            x = operation.to_ours(x)
        x = np.asarray(x)
        x = x[index] if theirs is None else x
        if axis is None and x.dtype == self.dtype and x.flags.c_contiguous:
            return x
        return aligned_copy(x, self.dtype)  # a view of a stack would keep all of it


def _put(
    sharding: Any, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], np.ndarray]
) -> Array:
    if sharding is None:
        return jax.device_put(read(tuple(slice(0, size) for size in shape)))
    return read_onto(sharding, shape, read)
