"""The stage "kernel times": attention and the writing of keys and values at decode shapes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout
from pallas_kernels.implementations import in_a_loop, target_platform
from pallas_kernels.names import IMPLEMENTATIONS, PLATFORMS
from pallas_kernels.write_kv import write_kv
from specjax.api.self_tests import trusted_kernels
from specjax.cli.bench.device_report.attention_speed import Shape, measure, seconds_of
from specjax.cli.bench.device_report.cases import Case, Context, LeftOut, Results, Stage
from specjax.cli.bench.device_report.sizes import Heads, ReportSize, counted
from specjax.cli.table import Row, number, percent
from specjax.config.engine import EngineConfig
from specjax.models.loading import default_dtype
from specjax.runtime.amounts import amount


def cases(size: ReportSize, platform: str) -> list[Case]:
    found = []
    for name, shape in shapes(size, size.kernel_contexts).items():
        for implementation in offered("tree_attention", platform):
            run = functools.partial(time_attention, implementation, shape)
            found.append(Case(f"tree_attention, {implementation}, {name}", run))
    for heads, rows in itertools.product(size.heads, size.kernel_rows):
        for implementation in offered("write_kv", platform):
            run = functools.partial(time_writing, implementation, heads, rows)
            found.append(
                Case(f"write_kv, {implementation}, {heads.name}, {counted(rows, 'token')}", run)
            )
    return found


def shapes(size: ReportSize, contexts: Sequence[int]) -> dict[str, Shape]:
    """Returns the steps whose attention is timed, by name, in the dtype that weights have here."""
    return {
        f"{heads.name}, {rows} x {tokens} tokens, nodes per row {nodes}": Shape(
            rows=rows,
            context=tokens,
            nodes=nodes,
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            page_size=size.page_size,
            dtype=default_dtype().name,
        )
        for heads, tokens, rows, nodes in itertools.product(
            size.heads, contexts, size.kernel_rows, size.kernel_nodes
        )
    }


def offered(op: str, platform: str) -> list[str]:
    """Returns the implementations of an op for a platform, the definition left out."""
    names = IMPLEMENTATIONS[op][:-1]
    return [name for name in names if PLATFORMS.get(name, platform) == platform]


def check_trusted(context: Context, implementation: str) -> None:
    """Raises LeftOut for the GPU kernel where its self-test, in its own process, did not pass."""
    if implementation != "mosaic_gpu":
        return
    if not trusted_kernels(EngineConfig(), [context.device], jnp.bfloat16):
        raise LeftOut(
            f"mosaic_gpu is for Hopper GPUs where its self-test passes, and on this "
            f"{context.device.device_kind} it does not."
        )


def time_attention(implementation: str, shape: Shape, context: Context) -> dict[str, Any]:
    """Returns seconds of a call, the bytes that it must move, and its share of the peak."""
    check_trusted(context, implementation)
    try:
        result = measure(shape, implementation, context.copy_bytes_per_s)
    except NotImplementedError as error:
        raise LeftOut(f"not covered: {error}") from error
    return _figures(context, implementation, result.seconds, shape.moved_bytes, shape.dtype)


def time_writing(implementation: str, heads: Heads, rows: int, context: Context) -> dict[str, Any]:
    """Returns seconds of a call that writes one token per row, read and written once."""
    _ = context.peaks  # without them nothing need be timed
    dtype = default_dtype()
    page_size, pages_per_row = context.size.page_size, 4
    pages = layout.init_pages(
        rows * pages_per_row,
        page_size,
        heads.kv_heads,
        heads.head_dim,
        dtype,
        in_lanes=target_platform() == "tpu",
    )
    rng = np.random.default_rng(0)
    new = jnp.asarray(rng.standard_normal((2, rows, heads.kv_heads, heads.head_dim)), dtype)
    slots = jnp.arange(rows, dtype=jnp.int32) * pages_per_row * page_size + 3

    def write(pages: tuple[jax.Array, jax.Array], held: tuple) -> tuple[jax.Array, jax.Array]:
        with in_a_loop():
            return write_kv(*pages, held[0][0], held[0][1], held[1], implementation=implementation)

    try:
        took = seconds_of({implementation: write}, pages, (new, slots))
    except NotImplementedError as error:
        raise LeftOut(f"not covered: {error}") from error
    return _figures(context, implementation, took[implementation], 2 * new.nbytes, dtype.name)


def _figures(
    context: Context, implementation: str, seconds: float, num_bytes: int, dtype: str
) -> dict[str, Any]:
    peaks = context.peaks
    return {
        "implementation": implementation,
        "dtype": dtype,
        "page_size": context.size.page_size,
        "seconds": seconds,
        "moved_bytes": num_bytes,
        "bytes_per_s": num_bytes / seconds,
        "of_peak": num_bytes / seconds / peaks.bytes_per_s,
        "peak": peaks.source,
    }


def table(results: Results) -> list[Row]:
    return [
        {
            "call": name,
            "dtype": found["dtype"],
            "us": number(1e6 * found["seconds"], 4),
            "moved": amount(found["moved_bytes"]),
            "GB/s": number(found["bytes_per_s"] / 1e9),
            "of the memory": percent(found["of_peak"]),
        }
        for name, found in results.items()
    ]


STAGE = Stage(
    "kernel times",
    0.10,
    cases,
    "Times of kernels",
    table,
    "Seconds of one call among many in one program; medians. Moved are the bytes that a call "
    "cannot avoid; above 100 % they lie in a cache.",
)
