"""Reads matrices that a checkpoint stores in int8 with scales, one slice at a time.

Names and scales are checked when a folder is opened. The numbers stay in the file: what stands for
a matrix among the tensors has its shape, and multiplies a slice out when that is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from specjax.models.base import Json
from specjax.models.int8_config import CHANNEL, KEY, TENSOR, strategies

WEIGHT, SCALE = ".weight", ".weight_scale"
# Of what a layer computes, which keeps its full precision.
_OF_ACTIVATIONS = (".input_scale", ".output_scale", ".input_zero_point", ".output_zero_point")
# Of matrices in few bits, in this format and in others, the parts that nothing else is called by.
_PARTS = (
    SCALE,
    ".weight_scale_inv",
    ".weight_zero_point",
    ".weight_packed",
    ".qweight",
)
_BLOCK = 2**22  # numbers that are multiplied out at a time, 16 MB in float32

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Int8Matrix:
    """A matrix in int8, which is read as an array of float32 is; not one of numpy's.

    Attributes:
      values: i8[..., in], a view of the file.
      scales: f32[..., in], which repeats a few numbers; a number of the matrix is value * scale,
        rounded to float32.
      scale: as it is stored; None of a part.
    """

    values: np.ndarray
    scales: np.ndarray
    scale: np.ndarray | None = None

    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return self.values.size

    def __getitem__(self, index: Any) -> Int8Matrix:
        return Int8Matrix(self.values[index], self.scales[index])

    def swapaxes(self, first: int, second: int) -> Int8Matrix:
        return Int8Matrix(self.values.swapaxes(first, second), self.scales.swapaxes(first, second))

    def astype(self, dtype: DTypeLike, order: str = "C", copy: bool = True) -> np.ndarray:
        """Returns the matrix, a new array; each number is rounded to float32, then to the dtype."""
        del order, copy  # always so
        whole = np.empty(self.shape, dtype)
        if not self.ndim:
            return np.asarray(self.values * self.scales, dtype)
        num_rows = max(1, _BLOCK // max(1, math.prod(self.shape[1:])))
        for start in range(0, len(whole), num_rows):
            rows = slice(start, start + num_rows)
            whole[rows] = self.values[rows] * self.scales[rows]  # int8 widens to float32
        return whole

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a matrix in int8 is multiplied out, and so a copy.")
        return self.astype(np.float32 if dtype is None else dtype)


def stored_parts(tensor: Any) -> tuple[np.ndarray, ...]:
    """Returns the arrays that a file holds of a tensor: itself, or int8 numbers and scales."""
    if not isinstance(tensor, Int8Matrix):
        return (tensor,)
    return (tensor.values,) if tensor.scale is None else (tensor.values, tensor.scale)


def multiplied_out(
    tensors: Tensors, raw: Callable[[], Json], file_of: Callable[[str], Path]
) -> Tensors:
    """Returns tensors with an `Int8Matrix` in place of each matrix in int8 and its scales.

    Which tensors are so is told by themselves: one `X.weight` in int8 beside `X.weight_scale`.
    `targets` and `ignore` of config.json name classes and modules, which files do not have.

    Args:
      tensors: of a folder.
      raw: returns the contents of its config.json; called if there are tensors in few bits.
      file_of: returns the file of a tensor, for messages.

    Raises:
      ValueError: config.json says nothing of weights in int8, or another format; a matrix lacks
        scales, or they have another shape or values that no scale has.
    """
    if not any(map(_is_part, tensors, tensors.values())):
        return tensors
    kinds = _kinds(tensors, raw(), file_of)
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(WEIGHT) and tensor.dtype == np.int8:
            found[name] = cast(Any, _matrix(name, tensors, kinds, file_of))
        elif name.endswith(SCALE):
            _check_belongs(name, tensors, file_of)
        elif not name.endswith(_OF_ACTIVATIONS):
            found[name] = tensor
    return found


def _is_part(name: str, tensor: np.ndarray) -> bool:
    return name.endswith(_PARTS) or (tensor.dtype == np.int8 and name.endswith(WEIGHT))


def _kinds(tensors: Tensors, raw: Json, file_of: Callable[[str], Path]) -> set[str]:
    """Returns for what the matrices have one scale, as config.json says it."""
    name = next(name for name, tensor in tensors.items() if _is_part(name, tensor))
    try:
        kinds = strategies(raw)
    except ValueError as error:
        raise ValueError(f"{file_of(name).parent / 'config.json'}: {error}") from error
    if not kinds:
        raise ValueError(
            f"{file_of(name)}: tensor {name[:200]!r} is {tensors[name].dtype}, part of a matrix in "
            f"few bits, and config.json has no {KEY} that says how it is stored. Use both files as "
            "they were published."
        )
    return kinds


def _matrix(
    name: str, tensors: Tensors, kinds: set[str], file_of: Callable[[str], Path]
) -> Int8Matrix:
    values, scale_name = tensors[name], name.removesuffix(WEIGHT) + SCALE
    scale = tensors.get(scale_name)
    if scale is None:
        raise ValueError(
            f"{file_of(name)}: tensor {name[:200]!r} is int8, and there is no {scale_name[:200]!r} "
            "with its scales. Fetch the file again, or export the model again."
        )
    shapes = _shapes_of_scales(values.shape, kinds)
    is_float = scale.dtype.kind == "f" or scale.dtype.name == "bfloat16"
    if scale.shape not in shapes or not is_float or scale.dtype.itemsize < 2:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"{file_of(scale_name)}: tensor {scale_name[:200]!r} is {scale.dtype}"
            f"{list(scale.shape)}, expected floating point of shape {expected}, as "
            f"{name[:200]!r} is {list(values.shape)} and config.json says a scale per "
            f"{' or '.join(sorted(kinds))}."
        )
    wide = scale.astype(np.float32)
    if not np.all((wide > 0) & np.isfinite(wide)):
        wrong = wide[~((wide > 0) & np.isfinite(wide))].flat[0]
        raise ValueError(
            f"{file_of(scale_name)}: tensor {scale_name[:200]!r} holds {wrong}; expected positive "
            "numbers. The file is corrupt. Fetch it again, or export the model again."
        )
    return Int8Matrix(values, np.broadcast_to(wide, values.shape), scale)


def _shapes_of_scales(shape: tuple[int, ...], kinds: set[str]) -> list[tuple[int, ...]]:
    """Returns the shapes that the scales of a matrix may have."""
    shapes: list[tuple[int, ...]] = [(*shape[:-1], 1)] if CHANNEL in kinds and shape else []
    return [*shapes, (1,), ()] if TENSOR in kinds else shapes


def _check_belongs(name: str, tensors: Mapping[str, np.ndarray], file_of: Any) -> None:
    """Raises ValueError for scales of what is no matrix in int8."""
    weight = name.removesuffix(SCALE) + WEIGHT
    if weight not in tensors or tensors[weight].dtype != np.int8:
        found = f"is {tensors[weight].dtype}" if weight in tensors else "is not there"
        raise ValueError(
            f"{file_of(name)}: tensor {name[:200]!r} holds the scales of {weight[:200]!r}, which "
            f"{found}; expected int8, as config.json says. Use both files as they were published."
        )
