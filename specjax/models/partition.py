"""How a mesh splits a model's weights: logical axes of arrays to axes of the mesh.

A mesh has an axis "data" (rows, and each shard's own pages), an axis "tensor" (heads, MLP and
vocabulary), or both. A family gives the logical axes of its weights: `Family.axes`. An axis that
the mesh does not divide evenly stays whole on every device, such as a vocabulary of 50,257.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models.base import MeshAxes, ModelConfig
from specjax.models.families import family_of
from specjax.models.quantised import Quantised, is_quantised
from specjax.models.views import View, is_view

DATA, TENSOR = "data", "tensor"

RULES = {
    "rows": DATA,
    "pages": DATA,
    "steps": None,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "vocab": TENSOR,
    "experts": None,  # every shard has all experts, each split along "mlp"
    "embed": None,
    None: None,
}


# The two factors of a tensor axis, see `factored`.
COPIES, PART = "tensor_copies", "tensor_part"


def axis_size(mesh: Mesh | None, name: str) -> int:
    """Returns the size of a mesh axis; 1 if there is none."""
    if mesh is None:
        return 1
    axes = _axes_named(mesh, name)
    return math.prod(mesh.shape[axis] for axis in axes)


def factored(mesh: Mesh | None, num_shards: int) -> Mesh | None:
    """Returns the mesh on which one model may be split over part of the tensor axis.

    Device i of the tensor axis then holds shard i % num_shards, and belongs to copy
    i // num_shards. Axes keep their names where the model has one shard, or is split over all.

    Raises:
      ValueError: num_shards does not divide the tensor axis.
    """
    size = axis_size(mesh, TENSOR)
    if size % num_shards:
        raise ValueError(
            f"a drafter over {num_shards} devices does not fit a tensor axis of {size}; expected "
            "a number that divides it. Change draft_tensor_parallel_size."
        )
    if mesh is None or num_shards in (1, size) or TENSOR not in mesh.axis_names:
        return mesh
    place = mesh.axis_names.index(TENSOR)
    before, after = mesh.axis_names[:place], mesh.axis_names[place + 1 :]
    shape = mesh.devices.shape
    devices = mesh.devices.reshape(*shape[:place], -1, num_shards, *shape[place + 1 :])
    return Mesh(devices, (*before, COPIES, PART, *after))


def tensor_axes(mesh: Mesh | None, num_shards: int | None = None) -> MeshAxes | None:
    """Returns the mesh axes that heads are split over, and sums run over; None if they are not.

    Args:
      num_shards: of a model that is split over part of the tensor axis of a `factored` mesh, or
        of one device; None: a model over all of it.
    """
    size = axis_size(mesh, TENSOR)
    num_shards = size if num_shards is None else num_shards
    if mesh is None or num_shards == 1:
        return None
    if num_shards == size:
        return TENSOR if TENSOR in mesh.axis_names else (COPIES, PART)
    assert mesh.shape.get(PART) == num_shards, (mesh.shape, num_shards)
    return PART


def copies_axis(mesh: Mesh | None) -> str | None:
    """Returns the axis of a `factored` mesh along which devices hold the same; None without."""
    return COPIES if mesh is not None and COPIES in mesh.axis_names else None


def _axes_named(mesh: Mesh, name: str) -> tuple[str, ...]:
    axes = (COPIES, PART) if name == TENSOR and COPIES in mesh.axis_names else (name,)
    return tuple(axis for axis in axes if axis in mesh.axis_names)


def automatic(mesh: Mesh | None) -> Mesh | None:
    """Returns the mesh with axes of type Auto, as shard_map needs them.

    jax.make_mesh makes axes of type Explicit, whose shardings are part of an array's type.
    """
    return None if mesh is None else Mesh(mesh.devices, mesh.axis_names)


def check_mesh(mesh: Any) -> None:
    """Raises ValueError for what is no mesh of the axes "data" and "tensor", and not None."""
    if mesh is None:
        return
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh={mesh!r:.200} must be a jax.sharding.Mesh with the axes {DATA!r} and "
            f"{TENSOR!r} or one of them, as jax.make_mesh returns, or None."
        )
    unknown = set(mesh.axis_names) - {DATA, TENSOR, COPIES, PART}
    if unknown:
        raise ValueError(
            f"mesh axes {sorted(unknown)} are unknown; name them {DATA!r} and {TENSOR!r}."
        )


def validate(config: ModelConfig, mesh: Mesh) -> None:
    """Raises ValueError when a model cannot be split over the mesh."""
    check_mesh(mesh)
    check_divides(config, axis_size(mesh, TENSOR))


def check_divides(config: ModelConfig, size: int) -> None:
    """Raises ValueError when a model cannot be split over a tensor axis of `size` devices."""
    if (field := undivided(config, size)) is not None:
        possible = [n for n in range(1, size) if undivided(config, n) is None]
        raise ValueError(
            f"{field}={getattr(config, field)} is not divisible by the mesh's tensor axis of "
            f"{size}; possible sizes below it are {', '.join(map(str, possible))}."
        )


def split_for(config: ModelConfig, mesh: Mesh, num_shards: int | None = None) -> Mesh:
    """Returns the mesh, its axes automatic, on which a model is split over num_shards devices.

    Args:
      num_shards: as for `tensor_axes`.

    Raises:
      ValueError: the model cannot be split so.
    """
    own = automatic(mesh)
    assert own is not None
    if num_shards is None:
        validate(config, own)
        return own
    if (field := undivided(config, num_shards)) is not None:
        raise ValueError(
            f"{field}={getattr(config, field)} is not divisible by {num_shards=}; use fewer."
        )
    split = factored(own, num_shards)
    assert split is not None
    return split


def undivided(config: ModelConfig, num_shards: int) -> str | None:
    """Returns the first field of a config that forbids so many shards; None if none does."""
    fields = "num_heads", "num_kv_heads", "intermediate_size"
    return next((field for field in fields if getattr(config, field) % num_shards), None)


def param_specs(params: Any, mesh: Mesh, config: ModelConfig, num_shards: int | None = None) -> Any:
    """Returns a PartitionSpec per parameter, by the axes that the config's family gives it.

    Args:
      params: weights, or anything that has their shapes.
      num_shards: as for `tensor_axes`.

    Raises:
      ValueError: the family has no such parameter.
    """
    axes = {_place(path): leaf_axes for path, leaf_axes in _axes_by_path(config)}

    def spec(path: Any, leaf: Any) -> PartitionSpec | View | Quantised:
        own = axes.get(_place(path))
        if own is None:
            raise ValueError(
                f"parameter {'.'.join(_place(path))} is none of a {config.family} model with "
                f"{config.num_layers} layers; give params of this config."
            )
        if is_quantised(leaf):  # groups are of inputs
            out, size = own
            values = dividing_spec((size, out, None), leaf.values.shape, mesh, num_shards)
            return Quantised(
                values, dividing_spec((size, out), leaf.scales.shape, mesh, num_shards)
            )
        split = dividing_spec(own, leaf.shape, mesh, num_shards)
        return leaf.of(leaf.split(split)) if isinstance(leaf, View) else split

    is_matrix = lambda node: is_view(node) or is_quantised(node)
    return jax.tree_util.tree_map_with_path(spec, params, is_leaf=is_matrix)


def dividing_spec(
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    mesh: Mesh,
    num_shards: int | None = None,
) -> PartitionSpec:
    """Returns the spec of an array's logical axes; those that do not divide evenly stay whole.

    Args:
      num_shards: as for `tensor_axes`.
    """

    def name_of(axis: str | None, size: int) -> MeshAxes | None:
        rule = RULES[axis]
        if rule == TENSOR:
            num_parts = axis_size(mesh, TENSOR) if num_shards is None else num_shards
            # A mesh axis of one device keeps its name.
            whole = TENSOR if num_shards is None and TENSOR in mesh.axis_names else None
            name = tensor_axes(mesh, num_shards) or whole
        else:
            num_parts = axis_size(mesh, rule) if rule else 1
            name = rule if rule in mesh.axis_names else None
        return name if size % num_parts == 0 else None

    return PartitionSpec(*map(name_of, axes, shape))


def shardings(specs: Any, mesh: Mesh) -> Any:
    """Returns the sharding of each spec."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _axes_by_path(config: ModelConfig) -> list[tuple[Any, tuple[str | None, ...]]]:
    is_axes = lambda node: isinstance(node, tuple) and not any(isinstance(n, dict) for n in node)
    axes = family_of(config).axes(config)
    return jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_axes)[0]


def _place(path: Any) -> tuple[str, ...]:
    """Returns the path of a leaf as strings."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
