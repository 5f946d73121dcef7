"""Measures the speed of this CPU in less than a second, and keeps it on disk."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from specjax.models.layers import PRODUCT_WIDTHS, linear
from specjax.planning.step_prior import ProcessorSpeed
from specjax.runtime import compilation_cache, kept_files

TOKENS = PRODUCT_WIDTHS
LAYERS, HIDDEN, WIDE = 4, 512, 2048  # 32 MB of weights
REPEATS = 12
# Limits of a valid measurement: bytes per second, and seconds of the smallest operation.
SLOWEST, FASTEST, SLOWEST_LAUNCH_S = 1e6, 1e15, 1.0
EXPIRES_S = 30 * 24 * 3600.0  # after which a processor is measured again
NUM_SMALL = 200  # operations, each of which depends on the one before


@functools.cache
def processor_speed() -> ProcessorSpeed:
    """Returns the speed of this processor, from disk or measured now."""
    root = compilation_cache.user_cache_dir(os.environ)
    path = root and root / f"processor-{compilation_cache.processor()}.json"
    if path is not None and (kept := _read(path)) is not None:
        return kept
    speed = measure()
    if path is not None:
        # If the file cannot be written, the next process measures again.
        kept_files.write_json(path, dataclasses.asdict(speed))
    return speed


def _read(path: Path) -> ProcessorSpeed | None:
    """Returns the speed that an earlier process measured; None if the file is invalid or old."""
    try:
        if abs(time.time() - path.stat().st_mtime) > EXPIRES_S:
            return None  # a disturbed measurement must not last for ever
        kept = kept_files.read_json(path)
        factors = tuple((int(n), float(factor)) for n, factor in kept["factors"])
        speed = ProcessorSpeed(float(kept["bytes_per_s"]), factors, float(kept["launch_s"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    is_sound = tuple(count for count, _ in factors) == TOKENS
    is_sound &= all(1 <= factor <= count for count, factor in factors)
    is_sound &= SLOWEST < speed.bytes_per_s < FASTEST
    is_sound &= 0 < speed.launch_s < SLOWEST_LAUNCH_S
    return speed if is_sound else None


def measure() -> ProcessorSpeed:
    """Measures matrix products with few tokens, and small operations."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jax.device_put(rng.normal(size=shape).astype(np.float32))
    weights = [(draw(WIDE, HIDDEN), draw(HIDDEN, WIDE)) for _ in range(LAYERS)]

    @jax.jit
    def products(x: Array, weights: list[tuple[Array, Array]]) -> Array:
        for up, down in weights:
            x = linear(linear(x, up), down) * 1e-3
        return x

    @jax.jit
    def small(x: Array) -> Array:
        for _ in range(NUM_SMALL):
            # A cumulative sum fuses with nothing: each is launched on its own.
            x = jax.lax.cumsum(x)
        return x

    inputs = {count: draw(count, HIDDEN) for count in TOKENS}
    runs: dict[int, Callable[[], Any]] = {
        count: functools.partial(products, inputs[count], weights) for count in TOKENS
    }
    seconds = _least_s(runs | {0: functools.partial(small, draw(8))})
    factors, most = [], 1.0
    for count in TOKENS:
        # More tokens take no less time, and no more than one at a time would.
        most = max(most, min(seconds[count] / seconds[1], float(count)))
        factors.append((count, most))
    return ProcessorSpeed(
        bytes_per_s=LAYERS * 2 * HIDDEN * WIDE * 4 / seconds[1],
        factors=tuple(factors),
        launch_s=seconds[0] / NUM_SMALL,
    )


def _least_s(runs: Mapping[int, Callable[[], Any]]) -> dict[int, float]:
    """Returns the minimum seconds of each call, without compiling.

    Calls take turns; the minimum counts because other load can only lengthen them.
    """
    for run in runs.values():
        jax.block_until_ready(run())
    seconds = dict.fromkeys(runs, float("inf"))
    for _ in range(REPEATS):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds
