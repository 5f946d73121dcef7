"""The stage "device": the speed of its memory and of its products, and the published figures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from specjax.cli.bench import measuring
from specjax.cli.bench.device_report.attention_speed import copy_bytes_per_s
from specjax.cli.bench.device_report.cases import Case, Context, Results, Stage
from specjax.cli.bench.device_report.peaks import published_peaks
from specjax.cli.bench.device_report.sizes import ReportSize
from specjax.cli.table import Row
from specjax.models.loading import default_dtype

NUM_PRODUCTS = 8  # timed at once; their dispatch is spread over them


def cases(size: ReportSize, platform: str) -> list[Case]:
    del size, platform
    return [Case("speed", measure_speed)]


def measure_speed(context: Context) -> dict[str, Any]:
    """Returns bytes per second of a copy, of reading (on a CPU), and operations per second."""
    published = published_peaks(context.device)
    return {
        "copy_bytes_per_s": copy_bytes_per_s(context.size.copied_bytes),
        "read_bytes_per_s": _read_bytes_per_s(context) if context.is_cpu else None,
        "flops_per_s": _flops_per_s(context.size.product_size, max(context.size.rounds, 3)),
        "product_dtype": default_dtype().name,
        "published": None if published is None else dataclasses.asdict(published),
    }


def _read_bytes_per_s(context: Context) -> float:
    num_bytes = context.size.read_bytes
    read = measuring.read_bandwidth(num_bytes)
    seconds = measuring.interleaved({"read": read}, context.size.rounds)["read"]
    return num_bytes / min(seconds)  # a peak: other programs can only make it slower


def _flops_per_s(size: int, rounds: int) -> float:
    """Returns operations per second of the fastest of products of matrices of weights' dtype.

    They are square, of `size` and of twice that.
    """
    products = {side: _products(side) for side in (size, 2 * size)}
    seconds = measuring.interleaved(products, rounds)
    # A peak: other programs can only make it slower.
    return max(NUM_PRODUCTS * 2 * side**3 / min(took) for side, took in seconds.items())


def _products(side: int) -> Callable[[], jax.Array]:
    """Returns a function that takes NUM_PRODUCTS products, each of the one before."""
    dtype = default_dtype()
    x, y = (
        jax.random.normal(key, (side, side), dtype) for key in jax.random.split(jax.random.key(0))
    )
    # The next product takes the result: it must not grow.
    step = lambda x, y: (x @ y * side**-0.5).astype(dtype)
    chain = lambda x, y: jax.lax.fori_loop(0, NUM_PRODUCTS, lambda _, x: step(x, y), x)
    return functools.partial(jax.jit(chain), x, y)


def table(results: Results) -> list[Row]:
    speeds: dict[str, str] = {}
    for found in results.values():
        speeds["copy of a large array"] = f"{found['copy_bytes_per_s'] / 1e9:,.1f} GB/s"
        if found["read_bytes_per_s"] is not None:
            speeds["reading a large array"] = f"{found['read_bytes_per_s'] / 1e9:,.1f} GB/s"
        product = f"product of matrices, {found['product_dtype']}"
        speeds[product] = f"{found['flops_per_s'] / 1e12:,.2f} TFLOP/s"
        if (published := found["published"]) is not None:
            speeds["memory, as published"] = f"{published['bytes_per_s'] / 1e9:,.0f} GB/s"
            speeds["products, as published"] = f"{published['flops_per_s'] / 1e12:,.0f} TFLOP/s"
    return [{"": name, "speed": speed} for name, speed in speeds.items()]


STAGE = Stage("device", 0.03, cases, "The device", table)
