"""What this CPU does, measured in less than a second, and kept."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specjax import compilation_cache
from specjax.engine.step_prior import ProcessorSpeed

TOKENS = (1, 2, 4, 8, 16, 32)
LAYERS, HIDDEN, WIDE = 4, 512, 2048  # 32 MB of weights
REPEATS = 5
NUM_SMALL = 200  # operations that hang on one another


@functools.cache
def processor_speed() -> ProcessorSpeed:
    """Returns what was measured of this processor before, or now."""
    root = compilation_cache.user_cache_dir(os.environ)
    path = root and root / f"processor-{compilation_cache.processor()}.json"
    if path is not None and (kept := _read(path)) is not None:
        return kept
    speed = measure()
    if path is not None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(json.dumps(dataclasses.asdict(speed)), encoding="utf-8")
        except OSError:
            pass  # measured again by the next process
    return speed


def _read(path: Any) -> ProcessorSpeed | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        factors = tuple((int(n), float(factor)) for n, factor in kept["factors"])
        speed = ProcessorSpeed(
            float(kept["bytes_per_s"]), factors, float(kept["launch_s"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    figures = [speed.bytes_per_s, speed.launch_s, *(f for _, f in speed.factors)]
    is_sound = len(speed.factors) > 1 and all(0 < f < float("inf") for f in figures)
    return speed if is_sound else None


def measure() -> ProcessorSpeed:
    """Times products with few tokens, and small operations."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jax.device_put(rng.normal(size=shape).astype(np.float32))
    weights = [(draw(HIDDEN, WIDE), draw(WIDE, HIDDEN)) for _ in range(LAYERS)]

    @jax.jit
    def products(x, weights):
        for up, down in weights:
            x = (x @ up) @ down * 1e-3
        return x

    @jax.jit
    def small(x):
        for _ in range(NUM_SMALL):
            # A cumulative sum fuses with nothing: each is launched on its own.
            x = jax.lax.cumsum(x)
        return x

    seconds = {
        count: _median_s(functools.partial(products, draw(count, HIDDEN), weights))
        for count in TOKENS
    }
    num_bytes = LAYERS * 2 * HIDDEN * WIDE * 4
    return ProcessorSpeed(
        bytes_per_s=num_bytes / seconds[1],
        factors=tuple((n, max(seconds[n] / seconds[1], 1.0)) for n in TOKENS),
        launch_s=_median_s(functools.partial(small, draw(8))) / NUM_SMALL,
    )


def _median_s(run: Callable[[], Any]) -> float:
    """Returns the median seconds of a call, compiling left out."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
