"""Stores matrices in int8 with a scale per output, in half the bytes of bfloat16.

The scale of a row is its largest number / 127, and the nearest of 127 multiples stands for each
number. The largest is rounded to bfloat16 first: then weights that were stored so and read, in
float32, bfloat16 or float16, are stored again as the same bytes. Smaller scales, searched row by
row, had 1 % less error on the embedded model, and would not keep that.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from specjax.models.int8_config import INT8
from specjax.models.int8_reading import SCALE, WEIGHT
from specjax.models.quantised import INTEGERS, nearest
from specjax.models.weight_writing import Tensor
from specjax.models.weights import Source

_LARGEST = INTEGERS[8][1]
_BLOCK = 2**22  # numbers that are rounded at a time
_LEAST = np.finfo(np.float32).tiny  # of a scale; smaller ones lose digits


def check_stored(stored: str | None) -> None:
    """Raises ValueError unless weights can be stored so."""
    if stored not in (None, INT8):
        raise ValueError(
            f"{stored=!r:.100} is no way to store weights; expected {INT8!r}, or None for the "
            "dtype that they have."
        )


def is_stored_so(name: str, shape: tuple[int, ...]) -> bool:
    """Returns whether a tensor is one of those that are stored in int8."""
    return name.endswith(WEIGHT) and len(shape) >= 2


def in_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors with matrices in int8, each followed by its scales.

    Norms, biases and tables stay as they are.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not is_stored_so(name, tensor.shape):
            found[name] = tensor
            continue
        matrix, scale_name = _Matrix(name, tensor), name.removesuffix(WEIGHT) + SCALE
        shape, few = tensor.shape, (*tensor.shape[:-1], 1)
        found[name] = Tensor(shape, np.dtype(np.int8), [(Source(name, shape), matrix.values)])
        found[scale_name] = Tensor(
            few, np.dtype(np.float32), [(Source(scale_name, few), matrix.scales)]
        )
    return found


class _Matrix:
    """A matrix that is gathered once for its numbers and its scales, which are written next."""

    def __init__(self, name: str, tensor: Tensor):
        self._name, self._tensor = name, tensor
        self._scales: np.ndarray | None = None

    def values(self) -> np.ndarray:
        values, self._scales = rounded(self._tensor.make(), self._name)
        return values

    def scales(self) -> np.ndarray:
        if self._scales is None:
            self.values()
        scales, self._scales = self._scales, None
        assert scales is not None
        return scales


def rounded(matrix: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a matrix [..., in] in int8, and its scales f32[..., 1].

    Args:
      name: for messages.

    Raises:
      ValueError: a number is NaN, or infinite once it is rounded to bfloat16.
    """
    values = np.empty(matrix.shape, np.int8)
    scales = np.empty((*matrix.shape[:-1], 1), np.float32)
    num_rows = max(1, _BLOCK // max(1, matrix[:1].size))
    for start in range(0, len(matrix), num_rows):
        rows = slice(start, start + num_rows)
        values[rows], scales[rows] = _rounded_rows(matrix[rows].astype(np.float32), name)
    return values, scales


def _rounded_rows(rows: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    largest = np.max(np.abs(rows), axis=-1, keepdims=True, initial=0)
    with np.errstate(over="ignore"):
        largest = largest.astype(ml_dtypes.bfloat16).astype(np.float32)
    if not np.all(np.isfinite(largest)):
        raise ValueError(
            f"{name} holds NaN, an infinity or a number near the end of float32, and int8 can hold "
            "none of these; store it in the dtype that it has."
        )
    scales = np.maximum(largest / _LARGEST, _LEAST)  # of a row of zeros, too, there is some scale
    # At most 127.496 scales, where the largest number was rounded down.
    return nearest(rows, scales).astype(np.int8), scales


def largest_error(matrix: np.ndarray) -> np.ndarray:
    """Returns f32[..., 1]: how far numbers of a row may be from those that are stored for them.

    Half a scale, which is up to 1/256 more than the largest number / 127.
    """
    largest = np.max(np.abs(matrix), axis=-1, keepdims=True, initial=0).astype(np.float32)
    return 0.51 * largest / _LARGEST + _LEAST
