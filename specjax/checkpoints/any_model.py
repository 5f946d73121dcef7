"""Models by what a command line names: folders in Hugging Face format, and of Orbax checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax.models.base import Model, ModelConfig
from specjax.models.hf_config import read_config
from specjax.models.loading import load_model, resolve_folder
from specjax.runtime.model_files import is_of_orbax


def load_any_model(
    path: str | os.PathLike[str], *, dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> Model:
    """Returns the model of a folder that `save_orbax` wrote, or of whatever `load_model` takes.

    Raises:
      ValueError: as of both, or the checkpoint holds a drafter.
    """
    if not is_of_orbax(Path(path).expanduser()):
        return load_model(path, dtype=dtype, mesh=mesh)
    # Imported where it is needed: Orbax takes a second to import.
    from specjax.checkpoints.loading import load_orbax

    loaded = load_orbax(path, dtype=dtype, mesh=mesh)
    if not isinstance(loaded, Model):
        raise ValueError(f"{path} holds the drafter {loaded.name!r}; name a model as the target.")
    return loaded


def config_of(path: str | os.PathLike[str]) -> ModelConfig:
    """Returns the config of what `load_any_model` would load; no weight is read."""
    if not is_of_orbax(Path(path).expanduser()):
        return read_config(resolve_folder(path))[0]
    from specjax.checkpoints.loading import config_in

    return config_in(path)
