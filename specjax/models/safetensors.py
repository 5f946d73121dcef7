"""Reads safetensors checkpoints through a memory map: no copy until a tensor is used.

A file is an 8-byte little-endian header length, that many bytes of JSON naming
dtype, shape and byte range of every tensor, then the bytes. Everything the header
claims is checked against the file's size before any tensor is handed out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX_NAME = "model.safetensors.index.json"
FILE_NAME = "model.safetensors"

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")


def open_folder(folder: str | Path) -> dict[str, np.ndarray]:
    """Returns every tensor of a checkpoint folder, sharded or not, as read-only views.

    Only what `model.safetensors.index.json` lists is opened when there is an index;
    else `model.safetensors`.

    Raises:
      FileNotFoundError: no safetensors in the folder, or a shard is absent.
      ValueError: the index or a file is corrupt.
    """
    folder = Path(folder)
    if (folder / INDEX_NAME).is_file():
        return _open_shards(folder)
    if (folder / FILE_NAME).is_file():
        return open_file(folder / FILE_NAME)
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise FileNotFoundError(
            f"{folder} holds pickled weights only ({', '.join(pickles[:3])}), which "
            f"are not read because unpickling runs code; expected {FILE_NAME}. Convert "
            "once with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
        )
    raise FileNotFoundError(
        f"{folder} holds neither {FILE_NAME} nor {INDEX_NAME}; give a folder with "
        "weights in Hugging Face format."
    )


def open_file(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the tensors of one file as read-only views of its memory map.

    Raises:
      ValueError: the file is truncated, or its header is not what safetensors writes.
    """
    path = Path(path)
    header, data_start = _read_header(path)
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))[data_start:]
    return {
        name: _view(path, name, entry, data)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _open_shards(folder: Path) -> dict[str, np.ndarray]:
    index_path = folder / INDEX_NAME
    try:
        weight_map = json.loads(index_path.read_bytes())["weight_map"]
        shards = sorted(set(weight_map.values()))
        is_inside = all(Path(shard).name == shard for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index_path} is corrupt ({error!r}); expected JSON with a weight_map "
            "from tensor to file name. Fetch the file again."
        ) from error
    if not is_inside:
        raise ValueError(
            f"{index_path} names files outside its folder; expected plain file names "
            "in weight_map. Fetch the file again."
        )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of the {len(shards)} files that "
            f"{INDEX_NAME} names: {', '.join(missing[:10])}. Fetch them again."
        )
    files = {shard: open_file(folder / shard) for shard in shards}
    absent = [name for name, shard in weight_map.items() if name not in files[shard]]
    if absent:
        raise ValueError(
            f"{INDEX_NAME} places {len(absent)} tensors in files of {folder} that do "
            f"not hold them: {', '.join(absent[:10])}. Index and files are of "
            "different exports; fetch them again."
        )
    return {name: files[shard][name] for name, shard in weight_map.items()}


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header and the offset of the first data byte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if prefix == b"version ":
            raise ValueError(
                f"{path} is a Git LFS pointer, not the weights; run `git lfs pull`, or "
                "fetch the file itself."
            )
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise ValueError(
                f"{path} has {size} bytes but its header alone claims {length} + 8: "
                "the file is truncated or not safetensors. Fetch it again."
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{path} has a header that is not JSON ({error}); the file is corrupt or "
            "not safetensors. Fetch it again."
        ) from error
    if not isinstance(header, dict):
        raise ValueError(
            f"{path} has a header that is a {type(header).__name__}, expected an "
            "object of tensors; the file is corrupt. Fetch it again."
        )
    return header, 8 + length


def _view(path: Path, name: str, entry: Any, data: np.ndarray) -> np.ndarray:
    """Returns tensor `name`; `data` u8[...] is everything after the header."""
    try:
        shape = tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
        dtype_name = entry["dtype"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: the entry of tensor {name!r} is {entry!r}, expected dtype, shape "
            "and two data_offsets; the file is corrupt. Fetch it again."
        ) from error
    if dtype_name not in _DTYPES:
        raise ValueError(
            f"{path}: tensor {name!r} has dtype {dtype_name}, expected one of "
            f"{', '.join(_DTYPES)}; export the model in BF16, F16 or F32."
        )
    dtype = np.dtype(_DTYPES[dtype_name])
    num_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or not 0 <= begin <= end:
        raise ValueError(
            f"{path}: tensor {name!r} has {shape=} and bytes {begin} to {end}; the "
            "file is corrupt. Fetch it again."
        )
    if end > data.size:
        raise ValueError(
            f"{path}: tensor {name!r} ends at byte {end} of the data but the file "
            f"holds {data.size}: it is truncated. Fetch it again."
        )
    if end - begin != num_bytes:
        raise ValueError(
            f"{path}: tensor {name!r} of {shape=} and dtype {dtype_name} needs "
            f"{num_bytes} bytes but has {end - begin}; the file is corrupt. Fetch it "
            "again."
        )
    return data[begin:end].view(dtype).reshape(shape)
