"""Reads safetensors checkpoints through a memory map: no copy until a tensor is used.

A file is an 8-byte little-endian header length, a JSON header of that length with
dtype, shape and byte range of every tensor, then the data. The whole header is checked
before any tensor is returned: tensors must fill the file without gap or overlap.
"""

from __future__ import annotations

import math
import reprlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.runtime.model_files import check_no_pointer, parse_object

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
# Most bytes of a JSON header; an index of 160,000 tensors has 20 MB. Larger ones are refused.
MAX_HEADER_BYTES = 32 * 2**20
_MAX_DIMENSIONS = 8


def open_file(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the tensors of one file as read-only views of its memory map.

    Raises:
      ValueError: the file is truncated, or its header is not a safetensors header.
    """
    path = Path(path)
    try:
        header, data_start = _read_header(path)
        data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))[data_start:]
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); check the file and its permissions."
        ) from error
    header.pop("__metadata__", None)
    tensors = {name: _view(path, name, entry, data) for name, entry in header.items()}
    _check_layout(path, header, data.size)
    return tensors


def _check_layout(path: Path, header: dict[str, Any], num_bytes: int) -> None:
    """Raises ValueError unless tensors lie one after the other and fill the data."""
    ranges = sorted((*entry["data_offsets"], name) for name, entry in header.items())
    end = 0
    for begin, next_end, name in ranges:
        if begin != end:
            kind = "overlaps another tensor" if begin < end else "leaves bytes unused"
            raise ValueError(
                f"{path}: tensor {_shown(name)} begins at byte {begin}, where {end} was "
                f"expected, and so {kind}; the file is corrupt. Fetch it again."
            )
        end = next_end
    if end != num_bytes:
        raise ValueError(
            f"{path} holds {num_bytes} bytes of tensors but its header describes {end}; "
            "the file is corrupt. Fetch it again."
        )


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header and the offset of the first data byte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        check_no_pointer(path, prefix)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise ValueError(
                f"{path} has {size} bytes but its header alone claims {length} + 8: "
                "the file is truncated or not safetensors. Fetch it again."
            )
        if length > MAX_HEADER_BYTES:
            raise ValueError(
                f"{path} claims a header of {length} bytes, and at most "
                f"{MAX_HEADER_BYTES} are read; the file is corrupt. Fetch it again."
            )
        text = file.read(length)
    if not text.startswith(b"{"):
        raise ValueError(
            f"{path} has a header that does not begin with a brace; the file is "
            "corrupt or not safetensors. Fetch it again."
        )
    return parse_object(text, f"{path}: its header"), 8 + length


def _view(path: Path, name: str, entry: Any, data: np.ndarray) -> np.ndarray:
    """Returns tensor `name`; `data` u8[...] is everything after the header."""
    shape, offsets, dtype_name = _fields(path, name, entry)
    begin, end = offsets
    dtype = np.dtype(_DTYPES[dtype_name])
    num_bytes = math.prod(shape) * dtype.itemsize
    if end > data.size:
        raise ValueError(
            f"{path}: tensor {_shown(name)} ends at byte {end} of the data but the file "
            f"holds {data.size}: it is truncated. Fetch it again."
        )
    if end - begin != num_bytes:
        raise ValueError(
            f"{path}: tensor {_shown(name)} of {shape=} and dtype {dtype_name} needs "
            f"{num_bytes} bytes but has {end - begin}; the file is corrupt. Fetch it "
            "again."
        )
    return data[begin:end].view(dtype).reshape(shape)


def _fields(path: Path, name: str, entry: Any) -> tuple[tuple[int, ...], tuple[int, int], str]:
    """Returns shape, byte range and dtype of a tensor, after checks of their types."""
    if not isinstance(entry, dict):
        entry = {}
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{path}: tensor {_shown(name)} has shape={_shown(shape)} and "
            f"data_offsets={_shown(offsets)}, expected dtype, shape and two "
            "data_offsets, all of them whole numbers from 0; the file is corrupt. "
            "Fetch it again."
        )
    if offsets[0] > offsets[1] or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(
            f"{path}: tensor {_shown(name)} has shape={_shown(shape)} and bytes "
            f"{offsets[0]} to {offsets[1]}; the file is corrupt. Fetch it again."
        )
    dtype_name = entry.get("dtype")
    if not isinstance(dtype_name, str) or dtype_name not in _DTYPES:
        raise ValueError(
            f"{path}: tensor {_shown(name)} has dtype {_shown(dtype_name)}, expected "
            f"one of {', '.join(_DTYPES)}; export the model in BF16, F16 or F32."
        )
    return tuple(shape), (offsets[0], offsets[1]), dtype_name


def _are_sizes(values: Any) -> bool:
    """Returns whether `values` is a list of whole numbers from 0 to 2**48 - 1."""
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48
        for value in values
    )


def _shown(value: Any) -> str:
    return reprlib.repr(value)
