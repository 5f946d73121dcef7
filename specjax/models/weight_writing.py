"""Writes weights as safetensors under their published names, one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from specjax.models.base import Params
from specjax.models.weights import Source, Stacked

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
}
_NAMES = WEIGHT_DTYPES | {
    np.dtype(np.int8): "I8",  # of a matrix with scales
    # Of tables beside the weights, as those of a vocabulary that is a part.
    np.dtype(np.int64): "I64",
    np.dtype(np.bool_): "BOOL",
}


@dataclasses.dataclass
class Tensor:
    """A tensor that is to be written: shape and dtype are known before it is made.

    Attributes:
      parts: the sources that read parts of it, and what returns their values as the weight has
        them, [..., out, in].
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: list[tuple[Source, Callable[[], np.ndarray]]]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def make(self) -> np.ndarray:
        """Returns the tensor, as it is stored.

        Raises:
          ValueError: two parts are the same numbers, or a part differs in shape from its values.
        """
        whole = np.zeros(self.shape, self.dtype)
        is_written = np.zeros(self.shape, bool) if len(self.parts) > 1 else None
        for part, read in self.parts:
            values = read()
            values = values.swapaxes(-1, -2) if part.is_transposed else values
            if whole[part.place].shape != values.shape:
                raise ValueError(
                    f"{part.name} is read as {list(whole[part.place].shape)} and written as "
                    f"{list(values.shape)}; give the source the shape of its weight."
                )
            if is_written is not None:
                if is_written[part.place].any():
                    raise ValueError(
                        f"{part.name} is the source of two weights; name each tensor once."
                    )
                is_written[part.place] = True
            whole[part.place] = values
        return whole


def tensors_of(sources: Any, params: Params) -> dict[str, Tensor]:
    """Returns the tensors from which `sources` read these weights, in the order of the sources.

    Args:
      sources: of a family; those of class `Source` and `Stacked` can be written.

    Raises:
      NotImplementedError: a source of another class.
      ValueError: parts of one tensor have several dtypes, or a dtype that weights cannot have.
    """
    tensors: dict[str, Tensor] = {}

    def put(part: Source, leaf: Any, index: int | None) -> None:
        read = lambda: np.asarray(leaf if index is None else leaf[index])
        dtype = np.dtype(leaf.dtype)
        if dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{part.name} is {dtype}; weights are written as float32, bfloat16 or float16."
            )
        tensor = tensors.setdefault(part.name, Tensor(part.shape, dtype, []))
        if tensor.dtype != dtype:
            raise ValueError(
                f"{part.name} is made of weights of {tensor.dtype} and {dtype}; cast them to one "
                "dtype."
            )
        tensor.parts.append((part, read))

    def put_leaf(source: Any, leaf: Any) -> None:
        if isinstance(source, Source):
            put(source, leaf, None)
        elif isinstance(source, Stacked):
            if len(source.parts) != leaf.shape[0]:
                raise ValueError(f"{len(source.parts)} tensors are the source of {leaf.shape}.")
            for index, part in enumerate(source.parts):
                put(part, leaf, index)
        else:
            raise NotImplementedError(f"a source of class {type(source).__name__} is not written.")

    jax.tree.map(put_leaf, sources, params)
    return tensors


def write_files(folder: Path, tensors: Mapping[str, Tensor], max_bytes: int) -> None:
    """Writes the tensors as one file, or as several and an index if they are larger.

    Args:
      folder: it holds no weights yet.
      max_bytes: of the tensors in one file; a larger tensor has a file of its own.
    """
    files: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        size = sum(each.num_bytes for each in files[-1].values())
        if files[-1] and size + tensor.num_bytes > max_bytes:
            files.append({})
        files[-1][name] = tensor
    if len(files) == 1:
        write_file(folder / SINGLE, files[0])
        return
    placed: dict[str, str] = {}
    for number, content in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        write_file(folder / name, content)
        placed |= dict.fromkeys(content, name)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one file, and waits until it is on the disk.

    Eight bytes with the header's length, the header as JSON, then the data; offsets count from
    the data's beginning.

    Raises:
      ValueError: a dtype that weights cannot have.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}; weights are written as float32, bfloat16 or float16."
            )
        end = offset + tensor.num_bytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.make().tobytes())
        file.flush()
        os.fsync(file.fileno())


def of_array(name: str, array: np.ndarray) -> Tensor:
    """Returns the tensor that holds an array as it is."""
    return Tensor(array.shape, array.dtype, [(Source(name, array.shape), lambda: array)])
