"""Buffers in host memory: aligned ones, and giving back what was freed."""

from __future__ import annotations

import contextlib
import ctypes
import math

import numpy as np

ALIGNMENT = 64  # bytes; on a CPU jax keeps an array that begins at a multiple, and copies others


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array of any content, which jax can keep on a CPU as it is."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def aligned_copy(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns a copy of an array in another dtype."""
    copy = aligned_empty(x.shape, dtype)
    copy[...] = x.astype(dtype, copy=False)
    return copy


def give_back() -> None:
    """Has glibc return the pages of freed memory; elsewhere nothing happens.

    Buffers that threads allocate and free while files are decoded stay with the process
    otherwise.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
