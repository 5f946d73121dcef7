"""Timing by ratios: all contenders in one process, in turn, medians of several rounds."""

from __future__ import annotations

import json
import math
import platform
import random
import time
from collections.abc import Callable, Mapping
from statistics import median as median
from typing import Any

import jax
import jax.numpy as jnp

from specjax.runtime.version import __version__


def interleaved(
    contenders: Mapping[Any, Callable[[], Any]],
    rounds: int,
    *,
    warms_up: bool = True,
    seed: int = 0,
) -> dict[Any, list[float]]:
    """Returns seconds per call, by contender and round.

    Rounds go through all contenders in turn, so a machine that slows down slows all. The order
    of a round is random, or the reverse of the one before: no contender always follows the same
    one, and of any two each comes first equally often.

    Args:
      warms_up: whether each runs once before it counts.
      seed: of the orders.
    """
    for run in contenders.values() if warms_up else ():
        jax.block_until_ready(run())
    seconds: dict[Any, list[float]] = {name: [] for name in contenders}
    source = random.Random(seed)
    order: list[Any] = []
    for index in range(rounds):
        if index % 2:
            order.reverse()
        else:
            order = source.sample([*contenders], len(contenders))
        for name in order:
            start = time.perf_counter()
            jax.block_until_ready(contenders[name]())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Returns the median of the ratios round by round."""
    return median(a / b for a, b in zip(numerator, denominator, strict=True))


def ratio_interval(
    numerator: list[float], denominator: list[float], level: float = 0.95
) -> tuple[float, float, float]:
    """Returns the median of the ratios round by round, and the ends of its interval.

    The interval is the sign test's: between two of the ordered ratios, whatever their law.
    """
    ratios = sorted(a / b for a, b in zip(numerator, denominator, strict=True))
    count = len(ratios)
    outside = 0
    tail = 0.5**count
    while tail <= (1 - level) / 2:
        outside += 1
        tail += math.comb(count, outside) * 0.5**count
    first = max(outside - 1, 0)
    return median(ratios), ratios[first], ratios[count - 1 - first]


def read_bandwidth(num_bytes: int = 2**30) -> Callable[[], Any]:
    """Returns a function that reads num_bytes once, on all cores, and does little else."""
    words = jnp.ones((2, num_bytes // 8), jnp.float32)
    total = jax.jit(lambda halves: [jnp.sum(half) for half in halves])
    halves = [words[0], words[1]]
    return lambda: total(halves)


def document(settings: dict[str, Any], figures: Any) -> str:
    """Returns figures as JSON, with what they were measured on and by."""
    whole = {"environment": environment(), "settings": settings, "figures": figures}
    return json.dumps(whole, indent=1)


def environment() -> dict[str, str]:
    """Returns the machine and versions of the figures."""
    return {
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "specjax": __version__,
    }
