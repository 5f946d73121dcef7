"""Maps logical axes to mesh axes, and gives the logical axes of the decode state.

Logical axes of weights are given by their family: see `specjax.models.base.Family`.

A mesh has an axis "data" (rows, and each shard's own pages), an axis "tensor"
(heads, MLP and the output vocabulary of the target), or both. Everything runs
under `shard_map`: a shard sees its own rows, its own page pool with local page
ids, and its own heads. Partial sums and logits cross the mesh, pages never do.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.implementations import (
    lowered_for,
    target_kind,
    target_platform,
)
from specjax.models.base import ModelConfig
from specjax.models.families import family_of
from specjax.runtime.jax_settings import own_settings

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

# Logical axes of state by field name; among nested fields the outermost name here applies.
# `Drafter.state_axes` describes the drafter's own state.
STATE_AXES: dict[str, tuple[str | None, ...]] = {
    "pages": ("pages", "kv_heads", None, None),
    "block_table": ("rows", None),
    "lengths": ("rows",),
    "scales": (None, None, "kv_heads"),
    "drafter_lengths": ("rows",),
    "history": ("rows", None),
    "sampling": ("rows",),
    "max_lengths": ("rows",),
    "draft_caps": ("rows",),
    "rules": ("rows",),
    "is_active": ("rows",),
}


def axis_size(mesh: Mesh | None, name: str) -> int:
    """Returns the size of a mesh axis; 1 if there is none."""
    return mesh.shape.get(name, 1) if mesh is not None else 1


def automatic(mesh: Mesh | None) -> Mesh | None:
    """Returns the mesh with axes of type Auto, as shard_map needs them.

    jax.make_mesh makes axes of type Explicit, whose shardings are part of an array's type.
    """
    return None if mesh is None else Mesh(mesh.devices, mesh.axis_names)


@contextlib.contextmanager
def lowered(mesh: Mesh | None) -> Iterator[None]:
    """Context for tracing: ops and page shapes are for the mesh's devices; None: the default.

    Steps are traced under specjax's own jax settings, not those of the program.
    """
    platform, kind = target_platform(), target_kind()
    if mesh is not None:
        device = mesh.devices.flat[0]
        platform, kind = device.platform, device.device_kind
    with own_settings(), lowered_for(platform, kind):
        yield


def tensor_axis(mesh: Mesh | None) -> str | None:
    """Returns the mesh axis to sum partial results over, None if heads are not split."""
    return TENSOR if axis_size(mesh, TENSOR) > 1 else None


def param_specs(params: Any, mesh: Mesh, config: ModelConfig) -> Any:
    """Returns a PartitionSpec per parameter, by the axes that the config's family gives it.

    An axis that the mesh axis does not divide evenly stays whole, such as a vocabulary.

    Raises:
      ValueError: the family has no such parameter.
    """
    axes = {_place(path): leaf_axes for path, leaf_axes in _axes_by_path(config)}

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        own = axes.get(_place(path))
        if own is None:
            raise ValueError(
                f"parameter {'.'.join(_place(path))} is none of a {config.family} model with "
                f"{config.num_layers} layers; give params of this config."
            )
        return _spec(own, leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(spec, params)


def _axes_by_path(config: ModelConfig) -> list[tuple[Any, tuple[str | None, ...]]]:
    is_axes = lambda node: isinstance(node, tuple) and not any(isinstance(n, dict) for n in node)
    axes = family_of(config).axes(config)
    return jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_axes)[0]


def replicated_specs(tree: Any) -> Any:
    """Returns a replicated spec for each leaf: every shard holds the whole array."""
    return jax.tree.map(lambda _: PartitionSpec(), tree)


def state_specs(state: Any, mesh: Mesh, drafter_axes: Any) -> Any:
    """Returns a PartitionSpec per leaf of a DecodeState, by STATE_AXES.

    Args:
      drafter_axes: a PartitionSpec of logical names for each leaf of `state.drafter`, from
        `Drafter.state_axes`.
    """

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        axes = next(STATE_AXES[name] for name in names if name in STATE_AXES)
        return _spec(axes, leaf.shape, mesh)

    drafter = jax.tree.map(
        lambda leaf, axes: _spec(tuple(axes), leaf.shape, mesh), state.drafter, drafter_axes
    )
    bare = dataclasses.replace(state, drafter=())
    specs = jax.tree_util.tree_map_with_path(spec, bare)
    return dataclasses.replace(specs, drafter=drafter)


def spec_of(axes: tuple[str, ...], mesh: Mesh) -> PartitionSpec:
    """Returns the spec of leading logical axes, whose sizes must divide evenly."""
    names = [RULES[axis] for axis in axes]
    return PartitionSpec(*(n if n in mesh.axis_names else None for n in names))


def shardings(specs: Any, mesh: Mesh) -> Any:
    """Returns the sharding of each spec."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Puts arrays onto the mesh."""
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, specs
    )


def validate(config: ModelConfig, mesh: Mesh) -> None:
    """Raises ValueError when a model cannot be split over the mesh."""
    unknown = set(mesh.axis_names) - {DATA, TENSOR}
    if unknown:
        raise ValueError(
            f"mesh axes {sorted(unknown)} are unknown; name them {DATA!r} and {TENSOR!r}."
        )
    size = axis_size(mesh, TENSOR)
    for field in ("num_heads", "num_kv_heads", "intermediate_size"):
        value = getattr(config, field)
        if value % size:
            raise ValueError(
                f"{field}={value} is not divisible by the mesh's tensor axis of {size}; use a "
                f"smaller one."
            )


def _spec(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    names = [RULES[axis] for axis in axes]
    names = [name if name in mesh.axis_names else None for name in names]
    divides = [name is None or size % mesh.shape[name] == 0 for name, size in zip(names, shape)]
    return PartitionSpec(*(name if ok else None for name, ok in zip(names, divides)))


def _place(path: Any) -> tuple[str, ...]:
    """Returns the path of a leaf as strings."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
