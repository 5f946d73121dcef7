"""How a mesh splits the decode state; `specjax.models.partition` says how it splits weights.

Everything runs under `shard_map`: a shard sees its own rows, its own page pool with local page
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
    compiler_platform,
    lowered_for,
    target_kind,
    target_platform,
)
from specjax.models.base import MeshAxes, ModelConfig
from specjax.models.partition import DATA as DATA
from specjax.models.partition import RULES as RULES
from specjax.models.partition import TENSOR as TENSOR
from specjax.models.partition import automatic as automatic
from specjax.models.partition import axis_size as axis_size
from specjax.models.partition import copies_axis as copies_axis
from specjax.models.partition import dividing_spec as dividing_spec
from specjax.models.partition import factored as factored
from specjax.models.partition import param_specs as param_specs
from specjax.models.partition import shardings as shardings
from specjax.models.partition import tensor_axes as tensor_axes
from specjax.models.partition import validate as validate
from specjax.runtime.jax_settings import own_settings
from specjax.types import DecoderParams

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
    # Of the kept hidden states: each data shard has its own windows.
    "states": ("pages", None, None),
    "windows": ("rows",),
    "starts": ("rows",),
}


@contextlib.contextmanager
def lowered(mesh: Mesh | None) -> Iterator[None]:
    """Context for tracing: ops and page shapes are for the mesh's devices; None: the default.

    Steps are traced under specjax's own jax settings, not those of the program.
    """
    platform, kind, compiler = target_platform(), target_kind(), compiler_platform()
    if mesh is not None:
        device = mesh.devices.flat[0]
        platform, kind, compiler = device.platform, device.device_kind, None
    with own_settings(), lowered_for(platform, kind, compiler):
        yield


def tensor_axis(mesh: Mesh | None) -> MeshAxes | None:
    """Returns the mesh axes to sum partial results over, None if heads are not split."""
    return tensor_axes(mesh)


def replicated_specs(tree: Any) -> Any:
    """Returns a replicated spec for each leaf: every shard holds the whole array."""
    return jax.tree.map(lambda _: PartitionSpec(), tree)


def state_specs(
    state: Any, mesh: Mesh, drafter_axes: Any, drafter_shards: int | None = None
) -> Any:
    """Returns a PartitionSpec per leaf of a DecodeState, by STATE_AXES.

    Args:
      drafter_axes: a PartitionSpec of logical names for each leaf of `state.drafter`, from
        `Drafter.state_axes`.
      drafter_shards: devices over which the drafter's heads are split; None: those of the
        target's.
    """

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        axes = next(STATE_AXES[name] for name in names if name in STATE_AXES)
        return dividing_spec(axes, leaf.shape, mesh)

    drafter = jax.tree.map(
        lambda leaf, axes: dividing_spec(tuple(axes), leaf.shape, mesh, drafter_shards),
        state.drafter,
        drafter_axes,
    )
    bare = dataclasses.replace(state, drafter=())
    specs = jax.tree_util.tree_map_with_path(spec, bare)
    return dataclasses.replace(specs, drafter=drafter)


def weight_specs(params: Any, mesh: Mesh, config: ModelConfig, drafter: Any) -> DecoderParams:
    """Returns a PartitionSpec per leaf of DecoderParams.

    Args:
      mesh: `factored` for the drafter.
      config: of the target.
      drafter: a DrafterSpec, whose weights are split over its num_shards.
    """
    target = param_specs(params.target, mesh, config)
    if drafter.made_by is not None:
        return DecoderParams(target, param_specs(params.drafter, mesh, config))
    if drafter.num_shards == 1:
        return DecoderParams(target, replicated_specs(params.drafter))
    (draft_config, *_) = drafter.configs
    own = param_specs(params.drafter, mesh, draft_config, drafter.num_shards)
    return DecoderParams(target, own)


def spec_of(axes: tuple[str, ...], mesh: Mesh) -> PartitionSpec:
    """Returns the spec of leading logical axes, whose sizes must divide evenly."""
    names = [RULES[axis] for axis in axes]
    return PartitionSpec(*(n if n in mesh.axis_names else None for n in names))


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Puts arrays onto the mesh."""
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, specs
    )
