"""Least squares with no coefficient below 0."""

from __future__ import annotations

import functools
import itertools

import numpy as np

RIDGE = 1e-13  # added to normal equations with diagonal 1: features may be linearly dependent


def fit_nonnegative(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the non-negative coefficients of least squared error.

    It tries every subset of the features at once, which is exact and fast enough for a few.
    Among equally good subsets the one of fewest features wins, then the first. For that reason it
    does not use scipy.optimize.nnls, which takes 10 times less time: where features are linearly
    dependent, as before many sizes were measured, nnls returns any of the solutions, and
    predictions for other sizes depend on which one.

    Args:
      features: f64[num_values, num_features].
      values: f64[num_values].

    Returns:
      f64[num_features].
    """
    count = features.shape[1]
    scale = np.sqrt((features**2).sum(axis=0))
    scaled = features / np.where(scale > 0, scale, 1.0)
    normal = (scaled[:, :, None] * scaled[:, None, :]).sum(axis=0)
    right = (scaled * values[:, None]).sum(axis=0)
    sizes, masks = _subsets(count)
    usable = (sizes <= len(values)) & ~(masks & (scale == 0)).any(axis=1)
    masks = masks[usable]
    both = masks[:, :, None] & masks[:, None, :]
    eye = np.eye(count)
    systems = np.where(both, normal, 0.0) + np.where(masks, RIDGE, 1.0)[:, None] * eye
    found = np.linalg.solve(systems, np.where(masks, right, 0.0)[:, :, None])[:, :, 0]
    missed = values - (scaled * found[:, None, :]).sum(axis=2)
    errors = (missed**2).sum(axis=1)
    errors[(found < 0).any(axis=1)] = np.inf
    close = errors <= errors.min() + 1e-12 * float((values**2).sum())
    return found[int(close.argmax())] / np.where(scale > 0, scale, 1.0)


@functools.cache
def _subsets(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sizes of all subsets, i64[subsets], the smallest first, and their masks,
    bool[subsets, count]."""
    chosen = [
        subset for size in range(count + 1) for subset in itertools.combinations(range(count), size)
    ]
    masks = np.zeros((len(chosen), count), bool)
    for mask, subset in zip(masks, chosen, strict=True):
        mask[list(subset)] = True
    return masks.sum(axis=1), masks
