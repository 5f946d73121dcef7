"""A trainer's mesh, whose axes have names of its own, as one of axes "data" and "tensor"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models.base import ModelConfig
from specjax.models.partition import DATA, TENSOR, check_mesh, param_specs, validate

MeshAxisMap = Mapping[str, str]  # a trainer's axis to "data" or "tensor"

_SPLITS_HEADS = re.compile(r"tp|mp|model|.*tensor.*")  # for a message alone


def mapped(mesh: Mesh | None, mesh_axes: MeshAxisMap | None = None) -> Mesh | None:
    """Returns the mesh of axes "data" and "tensor" over a trainer's devices.

    Axes that are mapped to one name are one axis, the first of them outermost. Axes of one device
    need no name. A mesh that has the two names, and no mapping, is returned as it is.

    Args:
      mesh: with any axes; None: none.
      mesh_axes: what each axis splits: "data", rows and their pages, or "tensor", heads, MLP and
        vocabulary. Axes of these two names need no entry.

    Raises:
      ValueError: an axis of more than one device has no such name, or the mapping has other axes
        or names.
    """
    if mesh is None or not isinstance(mesh, Mesh):
        if mesh is None and mesh_axes is not None:
            raise ValueError(f"{mesh_axes=} is for a mesh, and there is none; pass mesh= too.")
        check_mesh(mesh)
        return None
    groups = axes_by_name(mesh, mesh_axes)
    if all(axes == (name,) for name, axes in groups.items()) and len(mesh.shape) == len(groups):
        return mesh
    axes = [mesh.axis_names.index(axis) for group in groups.values() for axis in group]
    rest = [place for place in range(mesh.devices.ndim) if place not in axes]
    sizes = [int(np.prod([mesh.shape[axis] for axis in group])) for group in groups.values()]
    devices = np.transpose(mesh.devices, [*axes, *rest])
    return Mesh(devices.reshape(sizes or [1]), tuple(groups) or (DATA,))


def axes_by_name(mesh: Mesh, mesh_axes: MeshAxisMap | None = None) -> dict[str, tuple[str, ...]]:
    """Returns the trainer's axes that are "data", and those that are "tensor", as they first come.

    Raises:
      ValueError: as `mapped`.
    """
    names = _checked(mesh, mesh_axes)
    groups: dict[str, tuple[str, ...]] = {}
    for axis in mesh.axis_names:
        if axis in names:
            groups[names[axis]] = (*groups.get(names[axis], ()), axis)
    return groups


def on_mesh(spec: PartitionSpec, mesh: Mesh, mesh_axes: MeshAxisMap | None = None) -> NamedSharding:
    """Returns the sharding over a trainer's mesh of a spec with the names "data" and "tensor"."""
    groups = axes_by_name(mesh, mesh_axes)

    def own(name: Any) -> Any:
        axes = groups.get(name, ())
        return axes if len(axes) > 1 else (axes[0] if axes else None)

    return NamedSharding(mesh, PartitionSpec(*map(own, spec)))


def param_shardings(config: ModelConfig, mesh: Mesh, mesh_axes: MeshAxisMap | None = None) -> Any:
    """Returns the tree of weights with the sharding at each leaf that steps on a mesh use.

    Weights that are sharded so are used in place.

    Args:
      mesh: the mesh that is given to `build_decoder`, `Engine` or `generate`.
      mesh_axes: what its axes split, as there; shardings have the mesh's own names.

    Raises:
      ValueError: the model cannot be split over this mesh, or an axis has no known name.
    """
    own = mapped(mesh, mesh_axes)
    assert own is not None
    validate(config, own)
    specs = param_specs(config.param_shapes(), own, config)
    return jax.tree.map(lambda spec: on_mesh(spec, mesh, mesh_axes), specs)


def _checked(mesh: Mesh, mesh_axes: MeshAxisMap | None) -> dict[str, str]:
    """Returns "data" or "tensor" for each axis that has a name or is mapped to one."""
    given = {} if mesh_axes is None else dict(mesh_axes)
    if unknown := [axis for axis in given if axis not in mesh.axis_names]:
        raise ValueError(
            f"mesh_axes names {', '.join(map(repr, unknown))}, and the mesh has the axes "
            f"{', '.join(map(repr, mesh.axis_names))}; leave out what it does not have."
        )
    for axis, name in given.items():
        if name not in (DATA, TENSOR):
            raise ValueError(
                f"mesh_axes[{axis!r}]={name!r:.200} must be {DATA!r}, which splits rows, or "
                f"{TENSOR!r}, which splits heads, MLP and vocabulary."
            )
    own = {name: name for name in (DATA, TENSOR) if name in mesh.axis_names}
    names = own | given
    unnamed = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in names]
    if unnamed:
        likely = {each: TENSOR if _SPLITS_HEADS.fullmatch(each) else DATA for each in unnamed}
        sizes = ", ".join(f"{each!r} ({mesh.shape[each]} devices)" for each in unnamed)
        raise ValueError(
            f"the mesh has axes of unknown names, {sizes}; say what each splits, {DATA!r} (rows) "
            f"or {TENSOR!r} (heads, MLP and vocabulary), such as mesh_axes={given | likely}."
        )
    return names
