"""Opens the weights in a folder: safetensors, or what torch.save wrote; sharded or not."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specjax.models import safetensors, torch_files
from specjax.models.base import Json
from specjax.models.int8_reading import multiplied_out
from specjax.runtime.model_files import find_file, read_json

# Files that hold all weights or an index of files, the first that is there counts.
FILE_NAMES = ("model.safetensors", "pytorch_model.bin")
TORCH_SUFFIXES = (".bin", ".pt", ".pth")


def open_folder(folder: str | Path) -> dict[str, np.ndarray]:
    """Returns every tensor of a folder with weights, sharded or not, as read-only views.

    Of `model.safetensors` and `pytorch_model.bin` the first that is there is read. With an index
    (`model.safetensors.index.json`) only the files that it lists are opened. Matrices in int8 are
    each an `int8_reading.Int8Matrix`, which is read as an array of float32 is.

    Raises:
      FileNotFoundError: no weights in the folder, or a shard is absent.
      ValueError: the index or a file is corrupt, or weights are in few bits in another way than
        config.json says or than is read.
    """
    folder = Path(folder)
    for name in FILE_NAMES:
        if index := find_file(folder, f"{name}.index.json"):
            return _open_shards(folder, index)
        if path := find_file(folder, name):
            return open_weights(path)
    raise FileNotFoundError(
        f"{folder} holds no weights: neither {FILE_NAMES[0]} nor {FILE_NAMES[1]}, nor an index of "
        "several; give a folder in Hugging Face format."
    )


def open_weights(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the tensors of one file, matrices in int8 as `open_folder` has them.

    Raises:
      ValueError: as of `open_folder`.
    """
    path = Path(path)
    return multiplied_out(open_file(path), _config_of(path.parent), lambda name: path)


def _config_of(folder: Path) -> Callable[[], Json]:
    """Returns what reads a folder's config.json, {} where it has none."""

    def read() -> Json:
        path = find_file(folder, "config.json")
        return {} if path is None else read_json(path)

    return read


def open_file(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the tensors of one file, whose name tells its format, as read-only views.

    Raises:
      ValueError: the file is corrupt, or holds something else.
    """
    is_of_torch = Path(path).suffix in TORCH_SUFFIXES
    return torch_files.open_file(path) if is_of_torch else safetensors.open_file(path)


def _open_shards(folder: Path, index_path: Path) -> dict[str, np.ndarray]:
    index = read_json(index_path)
    try:
        weight_map = index["weight_map"]
        shards = sorted(set(weight_map.values()))
        is_inside = all(Path(shard).name == shard for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index_path} is corrupt ({reprlib.repr(error)}); expected JSON with a "
            "weight_map from tensor to file name. Fetch the file again."
        ) from error
    if not is_inside:
        raise ValueError(
            f"{index_path} names files outside its folder; expected plain file names "
            "in weight_map. Fetch the file again."
        )
    paths = {shard: find_file(folder, shard) for shard in shards}
    missing = [shard for shard, path in paths.items() if path is None]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of the {len(shards)} files that "
            f"{index_path.name} names: {_listed(missing)}. Fetch them again."
        )
    files = {shard: open_file(path) for shard, path in paths.items() if path}
    absent = [name for name, shard in weight_map.items() if name not in files[shard]]
    if absent:
        raise ValueError(
            f"{index_path.name} places {len(absent)} tensors in files of {folder} that do "
            f"not hold them: {_listed(absent)}. Index and files are of "
            "different exports; fetch them again."
        )
    tensors = {name: files[shard][name] for name, shard in weight_map.items()}
    return multiplied_out(tensors, _config_of(folder), lambda name: folder / weight_map[name])


def _listed(names: list[str]) -> str:
    return ", ".join(name[:200] for name in names[:10])
