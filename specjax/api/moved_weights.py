"""Weights of a trainer where steps need them: handed on in place, or moved once per version."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from specjax.models.layouts.once import Once
from specjax.models.layouts.tables import Leaves

# What is done for a leaf.
KEPT = "kept"  # its array is handed on
SHARED = "shared"  # each device has its slice already, under a sharding that says it otherwise
COPIED = "copied"  # from the host, or from other devices
MADE = "made"  # by a jitted function on the devices of its array: converted, cast or resharded


class Source(NamedTuple):
    """How a leaf of specjax's tree comes from a trainer's arrays."""

    path: str  # of the array that it is, or comes from
    make: Callable[[Leaves], Any] | None  # the leaf from arrays by path; None: it is the array
    dtype: Any  # of the leaf
    place: NamedSharding | None  # where steps have it; None: where its array is
    view: Callable[[Any], Any] | None = None  # what steps see of it; None: the leaf itself

    def way_of(self, array: Any) -> str:
        """Returns what is done for the leaf, given its array."""
        if self.make is not None or needs_cast(array, self.dtype):
            return MADE
        if is_in_place(array, self.place):
            return KEPT
        if self.place is None or not isinstance(array, jax.Array) or not _is_on_device(array):
            return COPIED
        places = array.sharding, self.place
        own, steps = (place.devices_indices_map(array.shape) for place in places)
        if own == steps:
            return SHARED
        return MADE if _devices_of(array.sharding) == _devices_of(self.place) else COPIED


class WeightMover:
    """Makes leaves from a trainer's arrays.

    What is made or copied is kept while it is called with the same arrays, or until one of them
    is freed. Arrays of numpy may change in place, so they are copied each time.

    Attributes:
      bytes_moved, seconds: of the last call. They count what was made or copied; the seconds
        count neither compiling nor the wait until the arrays are computed.
    """

    def __init__(self, sources_of: Callable[[Leaves], Sequence[Source]]):
        """Takes the function that returns the source of each leaf.

        It is called once for arrays with the same paths, shapes, dtypes and shardings.
        """
        self._sources_of = sources_of
        self._forms: dict[Any, _Form] = {}
        self.bytes_moved, self.seconds = 0, 0.0

    def __call__(self, arrays: Leaves) -> list[jax.Array]:
        """Returns the leaves.

        Raises:
          ValueError: as the function of sources, or an array was deleted.
        """
        described = lambda array: (getattr(array, field, None) for field in _OF_A_FORM)
        key = tuple((path, *described(x), _place_of(x)) for path, x in arrays.items())
        if key not in self._forms:
            self._forms[key] = _Form(self._sources_of(arrays), arrays)
        form = self._forms[key]
        if form.has(arrays):
            self.bytes_moved, self.seconds = 0, 0.0
            return form(arrays)
        self.drop()  # what came of arrays of another form too
        leaves = form(arrays)
        self.bytes_moved, self.seconds = form.bytes_moved, form.seconds
        return leaves

    def drop(self) -> None:
        """Frees what is kept."""
        self.bytes_moved, self.seconds = 0, 0.0
        for form in self._forms.values():
            form.once.drop()

    @property
    def num_traces(self) -> int:
        """How many functions were traced."""
        return sum(form.num_traces for form in self._forms.values())

    @property
    def kept(self) -> list[jax.Array]:
        """What was made or copied, and is kept."""
        return [leaf for form in self._forms.values() for leaf in form.once.result or ()]


_OF_A_FORM = "shape", "dtype", "weak_type"


class _Form:
    """Makes leaves from arrays with the same paths, shapes, dtypes and shardings."""

    def __init__(self, sources: Sequence[Source], arrays: Leaves):
        ways = [(source, source.way_of(arrays[source.path])) for source in sources]
        self._sources = ways
        self._moved = [source for source, way in ways if way != KEPT]
        self._ways = [way for _, way in ways if way != KEPT]
        self._compiled: dict[Any, Callable[..., list[Any]]] = {}
        self.once = Once(self._move)
        self.num_traces = self.bytes_moved = 0
        self.seconds = 0.0

    def __call__(self, arrays: Leaves) -> list[jax.Array]:
        moved = {source.path: arrays[source.path] for source in self._moved}
        results = iter(self.once(moved) if moved else ())
        leaves = (
            arrays[source.path] if way == KEPT else next(results) for source, way in self._sources
        )
        return [
            source.view(leaf) if source.view else leaf
            for leaf, (source, _) in zip(leaves, self._sources, strict=True)
        ]

    def has(self, arrays: Leaves) -> bool:
        """Returns whether what is kept was made from these arrays."""
        return self.once.has({source.path: arrays[source.path] for source in self._moved})

    def _move(self, arrays: Leaves) -> list[jax.Array]:
        """Returns the leaves that are not handed on, in their order."""
        arrays = jax.block_until_ready({path: _usable(x) for path, x in arrays.items()})
        groups: dict[Any, list[int]] = {}
        for index, (source, way) in enumerate(zip(self._moved, self._ways, strict=True)):
            if way == MADE:
                place = getattr(arrays[source.path], "sharding", None)
                groups.setdefault(_devices_of(place), []).append(index)
        for devices, group in groups.items():
            if devices not in self._compiled:
                self._compiled[devices] = self._compile(devices, group, arrays)
        begin = time.perf_counter()
        leaves = [arrays[source.path] for source in self._moved]
        for devices, group in groups.items():
            made = self._compiled[devices](self._inputs(group, arrays))
            for index, leaf in zip(group, made, strict=True):
                leaves[index] = leaf
        placed = [*map(_placed, leaves, self._moved, self._ways)]
        jax.block_until_ready(placed)
        self.seconds = time.perf_counter() - begin
        pairs = zip(placed, self._ways, strict=True)
        self.bytes_moved = sum(leaf.nbytes for leaf, way in pairs if way != SHARED)
        return placed

    def _compile(self, devices: Any, group: list[int], arrays: Leaves) -> Callable[..., list[Any]]:
        """Returns the function of a group's arrays that makes its leaves.

        Where the arrays are on the devices of steps, or on the host, the leaves are split at once
        as steps have them.
        """
        sources = [self._moved[index] for index in group]
        places = [source.place for source in sources]
        is_there = None not in places and (
            devices is None or all(devices == _devices_of(place) for place in places)
        )

        def make(arrays: Leaves) -> list[Any]:
            self.num_traces += 1
            return [_made(source, arrays) for source in sources]

        jitted = jax.jit(make, out_shardings=places if is_there else None)
        return jitted.lower(self._inputs(group, arrays)).compile()

    def _inputs(self, group: list[int], arrays: Leaves) -> Leaves:
        paths = (self._moved[index].path for index in group)
        return {path: arrays[path] for path in paths}


def is_in_place(array: Any, place: NamedSharding | None) -> bool:
    """Returns whether an array lies where steps need it."""
    if not isinstance(array, jax.Array) or not _is_on_device(array):
        return False
    return place is None or array.sharding.is_equivalent_to(place, array.ndim)


def needs_cast(leaf: Any, dtype: Any) -> bool:
    """Returns whether an array has more digits than weights of 16 bits, and is cast to them."""
    own = getattr(leaf, "dtype", None)
    if (
        own is None
        or own == dtype
        or not all(jnp.issubdtype(each, jnp.floating) for each in (own, dtype))
    ):
        return False
    return jnp.finfo(own).nmant > jnp.finfo(dtype).nmant and jnp.dtype(dtype).itemsize == 2


def _made(source: Source, arrays: Leaves) -> Any:
    leaf = arrays[source.path] if source.make is None else source.make(arrays)
    return leaf.astype(source.dtype) if needs_cast(leaf, source.dtype) else leaf


def _placed(leaf: Any, source: Source, way: str) -> jax.Array:
    """Returns a leaf where steps need it."""
    place = source.place
    if place is None:
        # A copy of an array of numpy, which the trainer may change in place.
        return leaf if isinstance(leaf, jax.Array) else jnp.array(leaf, copy=True)
    if way == SHARED:
        parts = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, place, parts)
    return leaf if is_in_place(leaf, place) else jax.device_put(leaf, place)


def _devices_of(place: Any) -> tuple[Any, ...] | None:
    """Returns the devices of a sharding, those of a mesh in its order; None: on the host."""
    if place is None:
        return None
    if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
        return tuple(place.mesh.devices.flat)
    return tuple(sorted(place.device_set, key=lambda device: device.id))


def _usable(array: Any) -> Any:
    """Returns an array in the memory of its devices, with automatic axes.

    Axes of type Explicit are part of an array's type.
    """
    place = getattr(array, "sharding", None)
    if place is None:
        return array
    if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
        place = NamedSharding(Mesh(place.mesh.devices, place.mesh.axis_names), place.spec)
    elif _is_on_device(array):
        return array
    else:
        place = place.with_memory_kind(_memory_of(place))
    return jax.device_put(array, place)


def _place_of(array: Any) -> Any:
    """Returns the sharding of an array, spelled in one way: P("a") and P("a", None) are equal."""
    place = getattr(array, "sharding", None)
    if not isinstance(place, NamedSharding):
        return place
    spec = [*place.spec]
    while spec and spec[-1] is None:
        spec.pop()
    return place.mesh, tuple(spec), place.memory_kind


def _is_on_device(array: jax.Array) -> bool:
    """Returns whether an array is in the memory of its devices, not in that of the host."""
    return _is_of_devices(array.sharding)


@functools.lru_cache(maxsize=1024)  # asked for every weight in every call
def _is_of_devices(place: Any) -> bool:
    return place.memory_kind in (None, _memory_of(place))


def _memory_of(place: Any) -> str:
    """Returns the kind of memory that a sharding's devices compute in."""
    return next(iter(place.device_set)).default_memory().kind
