"""Operations on arrays whose mesh has axes of type Explicit, where the spec of each result is said.

spec of theirs -> each operation's rule -> spec of ours; the operations run over automatic axes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, auto_axes

from specjax.models import partition
from specjax.models.layouts.operations import Operation, Shape, Spec

Direction = Literal["to_ours", "to_theirs"]


def explicit_sharding(x: Any) -> NamedSharding | None:
    """Returns the sharding that is part of an array's type; None without axes of type Explicit."""
    place = getattr(jax.typeof(x), "sharding", None)
    if place is None or AxisType.Explicit not in place.mesh.axis_types:
        return None
    return place


def applied(x: Array, operations: Sequence[Operation], direction: Direction) -> Array:
    """Returns the array after operations, in their order.

    Where x is split over axes of type Explicit, the result is split as the operations' own
    `spec_to_ours` or `spec_to_theirs` say. After an operation without them, or along an axis that
    cannot be split so, it is whole.
    """
    place = explicit_sharding(x)
    steps = [getattr(operation, direction) for operation in operations]
    if place is None or not steps:
        return _chained(steps, x)
    spec, mesh = _padded(tuple(place.spec), x.ndim), place.mesh
    abstract: Any = jax.ShapeDtypeStruct(x.shape, x.dtype)
    for operation, step in zip(operations, steps, strict=True):
        rule = getattr(operation, f"spec_{direction}", None)
        spec = rule(spec, abstract.shape) if rule else ()
        abstract = jax.eval_shape(step, abstract)
        spec = _dividing(_padded(spec, abstract.ndim), abstract.shape, mesh.shape)
    out = NamedSharding(mesh, PartitionSpec(*spec))
    if isinstance(x, Tracer):
        automatic: Any = auto_axes(lambda x: _chained(steps, x), out_sharding=out)
        return automatic(x)
    # Outside jit the same without tracing: the array is taken for one over automatic axes.
    given = x.sharding
    assert isinstance(given, NamedSharding)
    assert isinstance(given.mesh, Mesh)
    over_mesh = partition.automatic(given.mesh)
    assert over_mesh is not None
    with jax.sharding.use_abstract_mesh(over_mesh.abstract_mesh):
        own = _chained(steps, jax.device_put(x, NamedSharding(over_mesh, given.spec)))
    return jax.device_put(own, NamedSharding(given.mesh, out.spec))


def alike(arrays: Sequence[Array]) -> list[Array]:
    """Returns arrays that are split as the first is, so that they can be stacked."""
    place = explicit_sharding(arrays[0])
    if place is None:
        return list(arrays)
    return [
        x if jax.typeof(x).sharding == place else jax.sharding.reshard(x, place) for x in arrays
    ]


def _chained(steps: Sequence[Callable[[Array], Array]], x: Array) -> Array:
    for step in steps:
        x = step(x)
    return x


def _padded(spec: Sequence[Any], ndim: int) -> Spec:
    return (*spec, *(None,) * (ndim - len(spec)))


def _dividing(spec: Spec, shape: Shape, sizes: Any) -> Spec:
    """Returns the spec without mesh axes that do not divide the array's."""

    def kept(names: Any, size: int) -> Any:
        number = 1
        for name in (names,) if isinstance(names, str) else names or ():
            number *= sizes[name]
        return names if size % number == 0 else None

    return tuple(kept(names, size) for names, size in zip(spec, shape, strict=True))
