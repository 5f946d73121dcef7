"""Opens the weights in a folder: safetensors, or what torch.save wrote; sharded or not."""

from __future__ import annotations

import re
import reprlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specjax.models import safetensors, torch_files
from specjax.models.base import Json
from specjax.models.int8_reading import multiplied_out
from specjax.runtime.model_files import find_file, read_json, read_optional_json
from specjax.runtime.stack_level import of_the_caller

# Files that hold all weights or have an index of files; the first that is there counts, and of a
# file and its index the file, as in transformers.
FILE_NAMES = ("model.safetensors", "pytorch_model.bin")
ADAPTER = "adapter_config.json"  # of PEFT
TORCH_SUFFIXES = (".bin", ".pt", ".pth")
# Tensors that a model may leave unused: rotary tables and GPT-2's causal masks, which specjax
# computes, and scales of a quantised cache. TIED is stored or not where it is the embedding.
IDLE = re.compile(r"(rotary_emb\.\w+|attn\.(masked_)?bias|\.[kv]_scale)$")
TIED = "lm_head.weight"
_INDEX = ".index.json"
_COMPARED = 16  # numbers of a tensor that tell whether two files hold the same

Tensors = dict[str, np.ndarray]


def open_folder(
    folder: str | Path, own_names: Sequence[str] = (), *, compares: bool = True
) -> Tensors:
    """Returns every tensor of a folder with weights, sharded or not, as read-only views.

    Of the files that may hold the weights the first that is there is read. It warns of the others
    by name where they hold something else. With an index only the files that it lists are opened.
    Matrices in int8 are each an `int8_reading.Int8Matrix`, which is read as an array of float32 is.

    Args:
      own_names: of files that hold the weights, before the usual ones.
      compares: False: nothing is said of other files.

    Raises:
      FileNotFoundError: no weights in the folder, or a shard is absent.
      ValueError: the index or a file is corrupt, or weights are in few bits in another way than
        config.json says or than is read.
    """
    folder = Path(folder)
    own = _candidates(folder, own_names)
    found = own or _candidates(folder, FILE_NAMES)
    if not found:
        if find_file(folder, ADAPTER) is not None:
            raise FileNotFoundError(adapter_hint(folder))
        raise FileNotFoundError(
            f"{folder} holds no weights: neither {FILE_NAMES[0]} nor {FILE_NAMES[1]}, nor an index "
            "of several; give a folder in Hugging Face format."
        )
    tensors = _open(found[0])
    if compares and not own and (unnamed := _unnamed(folder, found)):
        warnings.warn(
            f"{folder} holds files of weights that no index names, which are not read: "
            f"{_listed(unnamed)}. Take them away, or fetch the index again.",
            stacklevel=of_the_caller(),
        )
    for other in found[1:] if compares else ():
        if difference := _difference(tensors, other):
            warnings.warn(
                f"{folder} holds its weights twice, in {found[0].name} and {other.name}, and "
                f"{difference}. {found[0].name} is read; take away what is not meant.",
                stacklevel=of_the_caller(),
            )
    return tensors


def adapter_hint(folder: Path) -> str:
    """Returns the message for a folder with an adapter in place of a model."""
    said = read_json(folder / ADAPTER)
    base = said.get("base_model_name_or_path")
    return (
        f"{folder} holds an adapter of PEFT over the model {base!r:.200}, which does not run by "
        "itself. Merge it: AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload() of "
        "peft gives the whole model, whose save_pretrained writes a folder that is loaded."
    )


def _candidates(folder: Path, names: Sequence[str]) -> list[Path]:
    """Returns the files and indexes of a folder that may hold all weights, best first."""
    found: list[Path] = []
    for name in names:
        whole, index = find_file(folder, name), find_file(folder, f"{name}{_INDEX}")
        # An index may name it as one of several, or as the only one.
        is_shard = whole is not None and index is not None and name in _weight_map(index).values()
        found += [path for path in (None if is_shard else whole, index) if path is not None]
    return found


def _unnamed(folder: Path, found: Sequence[Path]) -> list[str]:
    """Returns the shards of a folder that none of its indexes names."""
    named = {
        shard
        for path in found
        if path.name.endswith(_INDEX)
        for shard in _weight_map(path).values()
    }
    forms = [Path(name) for name in FILE_NAMES]
    shards = {path.name for form in forms for path in folder.glob(f"{form.stem}-*{form.suffix}")}
    return sorted(shards - named)


def _open(path: Path) -> Tensors:
    return _open_shards(path) if path.name.endswith(_INDEX) else open_weights(path)


def _difference(tensors: Tensors, other: Path) -> str | None:
    """Returns how another candidate differs, None where it does not as far as is compared."""
    try:
        others = _open(other)
    except FileNotFoundError:
        return f"files that {other.name} names are not there"
    except ValueError as error:
        return f"the latter cannot be read ({error!s:.200})"
    alone = tensors.keys() ^ others.keys()
    if names := sorted(name for name in alone if name != TIED and not IDLE.search(name)):
        return f"{len(names)} tensors are in one of them alone, such as {names[0][:200]}"
    both = [name for name in tensors if name in others and not IDLE.search(name)]
    changed = [name for name in both if _differ(tensors[name], others[name])]
    return f"{len(changed)} tensors differ, such as {changed[0][:200]}" if changed else None


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two tensors differ in shape or in their first numbers; dtypes may."""
    first = lambda tensor: np.asarray(
        tensor[(slice(0, 1),) * (tensor.ndim - 1)], np.float32
    ).ravel()
    if one.shape != other.shape:
        return True
    left, right = (first(tensor)[:_COMPARED] for tensor in (one, other))
    # A copy in another dtype is the same: bfloat16 has 8 bits.
    rounding = 0.0 if one.dtype == other.dtype else 2.0**-8
    return not np.allclose(left, right, rtol=rounding, atol=rounding * 1e-6, equal_nan=True)


def open_weights(path: str | Path) -> Tensors:
    """Returns the tensors of one file, matrices in int8 as `open_folder` has them.

    Raises:
      ValueError: as of `open_folder`.
    """
    path = Path(path)
    return multiplied_out(open_file(path), _config_of(path.parent), lambda name: path)


def _config_of(folder: Path) -> Callable[[], Json]:
    """Returns what reads a folder's config.json, {} where it has none."""
    return lambda: read_optional_json(folder, "config.json")


def open_file(path: str | Path) -> Tensors:
    """Returns the tensors of one file, whose name tells its format, as read-only views.

    Raises:
      ValueError: the file is corrupt, or holds something else.
    """
    is_of_torch = Path(path).suffix in TORCH_SUFFIXES
    return torch_files.open_file(path) if is_of_torch else safetensors.open_file(path)


def _weight_map(index_path: Path) -> dict[str, str]:
    """Returns the file of each tensor, by an index."""
    index = read_json(index_path)
    try:
        weight_map = index["weight_map"]
        is_inside = all(Path(shard).name == shard for shard in weight_map.values())
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
    return weight_map


def _open_shards(index_path: Path) -> Tensors:
    folder, weight_map = index_path.parent, _weight_map(index_path)
    shards = sorted(set(weight_map.values()))
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
    # A file may hold more than the index says.
    place_of = {name: shard for shard in shards for name in files[shard]} | weight_map
    twice = [
        name
        for shard, tensors in files.items()
        for name, tensor in tensors.items()
        if place_of[name] != shard and _differ(tensor, files[place_of[name]][name])
    ]
    if twice:
        warnings.warn(
            f"{folder} holds {len(twice)} tensors in two files that differ: {_listed(twice)}. "
            f"Those that {index_path.name} names are read.",
            stacklevel=of_the_caller(),
        )
    tensors = {name: files[shard][name] for name, shard in place_of.items()}
    return multiplied_out(tensors, _config_of(folder), lambda name: folder / place_of[name])


def _listed(names: list[str]) -> str:
    return ", ".join(name[:200] for name in names[:10])
