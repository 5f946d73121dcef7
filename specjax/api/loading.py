"""Loads the models of a call onto its devices, and splits the drafter over them."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax.checkpoints.any_model import load_any_model
from specjax.config.engine import EngineConfig
from specjax.config.names import check_drafter
from specjax.config.speculation import SpeculationConfig
from specjax.configs.devices import of_kind
from specjax.drafters.base import DrafterSpec
from specjax.drafters.spec import ModelDrafter
from specjax.heads.loading import (
    DrafterSource,
    LoadedDrafter,
    is_head,
    load_drafter,
    model_path,
)
from specjax.models import sharding
from specjax.models.base import Model
from specjax.models.hf_config import read_config
from specjax.models.loading import default_dtype, load_model, resolve_folder, weight_dtype
from specjax.planning.drafter_split import TABLE_CONTEXT, draft_token_s, split_drafter
from specjax.runtime.stack_level import of_the_caller


def load_target(target: Any, mesh: Mesh | None = None) -> Model:
    """Returns a loaded model from a model, a folder, a hub name or "demo"."""
    if isinstance(target, str | os.PathLike):
        return load_any_model(target, mesh=mesh)
    if not isinstance(target, Model):
        raise TypeError(f"target must be a Model, a folder or a name, got {type(target).__name__}.")
    return target


def load_draft_model(
    source: str | os.PathLike[str],
    target: Model,
    config: SpeculationConfig,
    *,
    engine: EngineConfig,
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
) -> Model:
    """Returns a draft model, each of whose slices lies on the devices that keep it.

    Args:
      source: a folder, a hub name, "demo" or "demo-draft".
      dtype: of its weights, as for `load_model`.
    """
    check_drafter(source)
    path = model_path(source)
    assert path is not None, source
    if mesh is None:
        return load_model(path, dtype=dtype)
    own, _ = read_config(resolve_folder(path))
    own = dataclasses.replace(own, vocab_size=target.config.vocab_size)  # as it will be
    weights = default_dtype(mesh) if dtype is None else weight_dtype(dtype)
    spec, _ = _split(ModelDrafter(own), target, config, engine, mesh, weights)
    return load_model(path, dtype=dtype, mesh=mesh, num_shards=spec.num_shards)


def load_split_drafter(
    source: DrafterSource,
    target: Model,
    config: SpeculationConfig,
    *,
    engine: EngineConfig,
    mesh: Mesh | None = None,
) -> LoadedDrafter:
    """Returns a drafter for a target, with the number of shards that it has on the mesh.

    It warns where draft_tensor_parallel_size is not possible.
    """
    is_name = isinstance(source, str | os.PathLike)
    if mesh is not None and is_name and model_path(source) and not is_head(source):
        source = load_draft_model(source, target, config, engine=engine, mesh=mesh)
    loaded = load_drafter(source, target, config)
    if config.depth == 0:
        return loaded
    leaves = jax.tree.leaves(loaded.params)
    dtype = dtype_of(loaded.params) or dtype_of(target.params)
    count = sum(leaf.size for leaf in leaves) or None
    spec, note = _split(loaded.spec, target, config, engine, mesh, dtype, count)
    if note:
        warnings.warn(note, stacklevel=of_the_caller())
    return loaded if spec == loaded.spec else dataclasses.replace(loaded, spec=spec)


def dtype_of(params: Any) -> Any:
    """Returns the dtype of the first leaf of floating-point numbers; None if there is none.

    A drafter may keep token ids among its weights.
    """
    dtypes = (leaf.dtype for leaf in jax.tree.leaves(params))
    return next((dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)), None)


def _split(
    spec: DrafterSpec,
    target: Model,
    config: SpeculationConfig,
    engine: EngineConfig,
    mesh: Mesh | None,
    dtype: Any,
    num_weights: int | None = None,
) -> tuple[DrafterSpec, str | None]:
    """Returns the spec as it is split over the mesh, and a note on what was not possible."""
    figures = None if mesh is None else of_kind(mesh.devices.flat[0].device_kind)
    most = min(engine.max_context or TABLE_CONTEXT, target.config.max_position_embeddings)

    def seconds(split: DrafterSpec) -> float:
        assert figures is not None
        return draft_token_s(
            split,
            target.config,
            dtype,
            figures.per_device(),
            rows=engine.max_rows,
            context=min(most, TABLE_CONTEXT),
            num_speculative_tokens=config.depth,
            num_weights=num_weights,
        )

    return split_drafter(
        spec,
        config.draft_tensor_parallel_size,
        sharding.axis_size(mesh, sharding.TENSOR),
        None if figures is None else seconds,
    )
