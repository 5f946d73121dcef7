"""Loads a folder in Hugging Face format as a Model.

Every name and shape is checked before a weight is read. Then one slice at a time is read from
the memory map, cast in host memory, and put on the devices that keep it: a device never holds
more than its share of the weights, and the host never more than one slice. The model's family
gives the source of each leaf (`Family.sources`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from pallas_kernels.implementations import default_device
from specjax.config.keywords import keyword_check
from specjax.config.names import DEMO_FOLDERS
from specjax.models import int8_config, partition
from specjax.models.abstract import abstract_weights
from specjax.models.base import Model, ModelConfig, Params
from specjax.models.families import family_of
from specjax.models.int8_reading import Int8Matrix
from specjax.models.mesh_axes import MeshAxisMap, mapped, param_shardings
from specjax.models.opened_folders import open_model
from specjax.models.tensor_checks import check_sources
from specjax.models.weight_files import open_folder
from specjax.runtime.jax_settings import entrance
from specjax.runtime.model_files import find_file, read_json
from specjax.runtime.stack_level import of_the_caller

_DEMO_WEIGHTS = Path(__file__).resolve().parents[1] / "demo" / "weights"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_ALIASES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float": "float32",
}
FIRST_WITH_BFLOAT16 = 8  # NVIDIA's compute capability of Ampere


@entrance("specjax.load_model", keyword_check)
def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    name: str | None = None,
    mesh: Mesh | None = None,
    mesh_axes: MeshAxisMap | None = None,
    num_shards: int | None = None,
) -> Model:
    """Loads a model of the llama, qwen2, qwen3, mimo, mistral, granite, gpt2 or gpt_bigcode family.

    It also loads families added with `specjax.models.register`. Matrices that are stored in int8,
    as `save_pretrained(stored="int8")` and compressed-tensors ("int-quantized") write them, are
    multiplied out to `dtype`.

    Args:
      path: a folder with config.json and weights; "demo" or "demo-draft", the
        small models inside the package; else a name on the Hugging Face Hub, which
        needs huggingface_hub.
      dtype: of every weight, float32, bfloat16 or float16, or "fp32", "bf16" or "fp16"; by
        default bfloat16 where the default device computes it, and float32 on CPU and on GPUs
        older than Ampere, such as the T4. There bfloat16 is computed in float32 all the same.
      name: name of the model in messages and reports; by default the last part of `path`.
      mesh: devices to split the weights over, axes "data" and "tensor", as `generate` takes it.
        Each device gets its slices straight from the file. None: the default device.
      mesh_axes: what axes of other names split, as for `generate`; weights then lie on that mesh
        under its own names.
      num_shards: devices of the mesh's tensor axis that share the weights, a number that divides
        it, for a draft model: 1 puts all weights on every device. By default the whole axis.

    Returns:
      The model; `tokenizer` is None without tokenizer.json.

    Raises:
      FileNotFoundError: the folder, its config.json or a weight file is absent.
      ValueError: a file is corrupt, the model is not supported, tensors are missing, of
        another shape, or left over in a layer, or the mesh cannot split the model.
    """
    if dtype is not None:
        dtype = weight_dtype(dtype)
    mapped(mesh, mesh_axes)
    if mesh is None and num_shards is not None:
        raise ValueError(
            f"{num_shards=} is for a mesh, and there is none; pass mesh=, or leave it out."
        )
    folder = resolve_folder(path)
    model, tensors, notes = open_model(folder, name or Path(path).name or folder.resolve().name)
    for note in notes:
        warnings.warn(note, stacklevel=of_the_caller())
    params = load_params(
        *(folder, model.config, tensors),
        dtype=dtype,
        mesh=mesh,
        mesh_axes=mesh_axes,
        num_shards=num_shards,
    )
    return dataclasses.replace(model, params=params)


def load_params(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    mesh_axes: MeshAxisMap | None = None,
    num_shards: int | None = None,
) -> Params:
    """Returns a folder's weights as the pytree of `config`'s family; arguments as `load_model`.

    Args:
      tensors: of the folder; None: they are opened.
    """
    dtype = default_dtype(mesh) if dtype is None else weight_dtype(dtype)
    _warn_of_bfloat16(dtype, mesh)
    places = places_of(config, mesh, mesh_axes, num_shards)
    folder = Path(folder)
    tensors = open_folder(folder) if tensors is None else tensors
    warn_of_activations(folder, tensors)
    sources = family_of(config).sources(config, tensors)
    check_sources(sources, tensors, config, folder)
    if places is None:
        return jax.tree.map(lambda source: jax.device_put(source.read(tensors, dtype)), sources)
    return jax.tree.map(
        lambda source, leaf, place: read_onto(
            place, leaf.shape, functools.partial(source.read, tensors, dtype)
        ),
        sources,
        abstract_weights(config, dtype),
        places,
    )


def warn_of_activations(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Warns if a folder's files are made for few bits of what is computed, beside weights."""
    if not any(isinstance(tensor, Int8Matrix) for tensor in tensors.values()):
        return
    path = find_file(folder, "config.json")
    text = None if path is None else int8_config.warning_of(read_json(path), path)
    if text is not None:
        warnings.warn(text, stacklevel=of_the_caller())


def places_of(
    config: ModelConfig,
    mesh: Mesh | None,
    mesh_axes: MeshAxisMap | None = None,
    num_shards: int | None = None,
) -> Any:
    """Returns the tree of weights with the sharding at each leaf, None without a mesh.

    Arguments are as for `load_model`.

    Raises:
      ValueError: the mesh cannot split the model.
    """
    own = mapped(mesh, mesh_axes)
    if mesh is None or own is None:
        return None
    if own is not mesh and num_shards is None:
        return param_shardings(config, mesh, mesh_axes)
    mesh = partition.split_for(config, own, num_shards)
    shapes = abstract_weights(config, jnp.float32)
    return partition.shardings(partition.param_specs(shapes, mesh, config, num_shards), mesh)


def read_onto(
    place: Sharding, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], np.ndarray]
) -> Array:
    """Returns a leaf on the devices of a sharding, of which each gets its slice alone.

    Args:
      shape: of the leaf.
      read: read(index) returns a slice of it, a new array in host memory.
    """
    devices_of: dict[tuple, list[Any]] = {}
    for device, index in place.addressable_devices_indices_map(shape).items():
        assert index is not None
        devices_of.setdefault(_bounds(index, shape), []).append(device)
    parts: list[Array] = []
    for bounds, devices in devices_of.items():
        part = read(tuple(slice(*bound) for bound in bounds))
        parts += [jax.device_put(part, device) for device in devices]
        # A transfer that is under way holds the slice in host memory.
        jax.block_until_ready(parts[-len(devices) :])
    return jax.make_array_from_single_device_arrays(shape, place, parts)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Returns first and last bound per axis of a device's slice."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def default_dtype(mesh: Mesh | None = None) -> np.dtype:
    """Returns bfloat16 where the mesh's devices compute it, float32 on a CPU and older GPUs.

    Without a mesh the default device counts.
    """
    device = _device_of(mesh)
    is_fast = device.platform != "cpu" and _has_bfloat16(device)
    return jnp.dtype(jnp.bfloat16 if is_fast else jnp.float32)


def _device_of(mesh: Mesh | None) -> Any:
    return default_device() if mesh is None else mesh.devices.flat[0]


def _has_bfloat16(device: Any) -> bool:
    """Returns whether a device computes bfloat16; False for NVIDIA's GPUs before Ampere."""
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return not major.isdigit() or int(major) >= FIRST_WITH_BFLOAT16


def _warn_of_bfloat16(dtype: np.dtype, mesh: Mesh | None) -> None:
    """Warns if the devices compute weights of this dtype in another."""
    device = _device_of(mesh)
    if dtype == jnp.bfloat16 and not _has_bfloat16(device):
        warnings.warn(
            f"{device.device_kind} has no bfloat16: every product widens weights of "
            "dtype='bfloat16' to float32. Use dtype='float32', or dtype='float16' for half the "
            "bytes if the model's activations stay below 65,504.",
            stacklevel=of_the_caller(),
        )


def weight_dtype(dtype: Any) -> np.dtype:
    """Returns a dtype for weights, given by any of its names.

    Raises:
      ValueError: weights of this dtype are not supported.
    """
    name = _DTYPE_ALIASES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    try:
        found = jnp.dtype(name)
    except TypeError:
        found = None
    if found is None or found.name not in _WEIGHT_DTYPES:
        raise ValueError(
            f"dtype={dtype!r:.100} is none that weights can have; expected one of "
            f"{', '.join(_WEIGHT_DTYPES)}, or a short name ({', '.join(_DTYPE_ALIASES)})."
        )
    return found


def demo_name(folder: str | os.PathLike[str]) -> str | None:
    """Returns the name of a folder inside the package, as "demo"; None for other folders."""
    path = Path(folder).resolve()
    return next((n for n, own in DEMO_FOLDERS.items() if path == _DEMO_WEIGHTS / own), None)


def resolve_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the folder of a path, a demo name or a name on the Hub.

    Raises:
      FileNotFoundError: there is no such folder, and it cannot be fetched.
    """
    name = os.fspath(path)
    if name in DEMO_FOLDERS:
        folder = _DEMO_WEIGHTS / DEMO_FOLDERS[name]
        if folder.is_dir():
            return folder
        raise FileNotFoundError(
            f"the package holds no weights for {name!r} (expected {folder}); reinstall "
            f"specjax, or write ./{name} for a folder of that name."
        )
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise FileNotFoundError(
            f"{folder} is a file; give the folder that holds config.json and the weights."
        )
    if not _HUB_NAME.fullmatch(name):
        raise FileNotFoundError(
            f"there is no folder {name!r}; give a folder in Hugging Face format."
        )
    return _fetch(name)


def _fetch(name: str) -> Path:
    """Returns the local copy of a repository on the Hugging Face Hub."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise FileNotFoundError(
            f"there is no folder {name!r}, and fetching it from the Hugging Face Hub "
            "needs huggingface_hub: pip install huggingface_hub, or give a folder."
        ) from error
    try:
        fetch = functools.partial(
            snapshot_download, name, ignore_patterns=["original/*", "consolidated*"]
        )
        fetched = fetch(allow_patterns=["*.json", "*.jinja", "*.safetensors"])
        if not any(Path(fetched).glob("*.safetensors")):
            fetched = fetch(allow_patterns=["pytorch_model*.bin", "medusa_lm_head.pt"])
    except Exception as error:  # The library's errors share no base class.
        raise FileNotFoundError(
            f"there is no folder {name!r}, and fetching it from the Hugging Face Hub "
            f"failed ({type(error).__name__}: {error}); give a folder, or check name "
            "and network."
        ) from error
    return Path(fetched)
