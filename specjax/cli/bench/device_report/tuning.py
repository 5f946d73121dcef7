"""The stage "block sizes": the fastest ones of the TPU kernel of attention, kept in a file."""

from __future__ import annotations

import functools
from typing import Any

from pallas_kernels.tree_attention import block_sizes
from specjax.cli.bench.device_report.attention_speed import Shape, entry_of, measure
from specjax.cli.bench.device_report.cases import Case, Context, LeftOut, Results, Stage
from specjax.cli.bench.device_report.kernel_times import shapes
from specjax.cli.bench.device_report.sizes import ReportSize
from specjax.cli.table import Row, number

FILE = "block_sizes.json"
_ARTICLE = {"cpu": "a CPU", "gpu": "a GPU"}


def cases(size: ReportSize, platform: str) -> list[Case]:
    if platform != "tpu":
        return [Case("tree_attention", functools.partial(_leave_out, platform))]
    return [
        Case(f"tree_attention, {name}", functools.partial(tune, shape))
        for name, shape in shapes(size, size.kernel_contexts[:1]).items()
    ]


def _leave_out(platform: str, context: Context) -> dict[str, Any]:
    here = _ARTICLE.get(platform, platform)
    raise LeftOut(f"only the TPU kernel has block sizes to choose; this is {here}.")


def tune(shape: Shape, context: Context) -> dict[str, Any]:
    """Returns the fastest block sizes of a shape, which are added to `FILE` in the folder."""
    result = measure(shape, "mosaic_tpu", context.copy_bytes_per_s, tunes=True)
    block_sizes.write([entry_of(result, context.device.device_kind)], context.out / FILE)
    assert result.sizes is not None
    return {
        "queries": result.sizes.queries,
        "tile_tokens": result.sizes.tile_tokens,
        "default_queries": block_sizes.DEFAULT.queries,
        "default_tile_tokens": block_sizes.DEFAULT.tile_tokens,
        "seconds": result.seconds,
    }


def table(results: Results) -> list[Row]:
    return [
        {
            "shape": name,
            "queries": found["queries"],
            "keys at once": found["tile_tokens"],
            "by default": f"{found['default_queries']}, {found['default_tile_tokens']}",
            "us": number(1e6 * found["seconds"]),
        }
        for name, found in results.items()
    ]


STAGE = Stage(
    "block sizes",
    0.10,
    cases,
    "Block sizes",
    table,
    f"The fastest of the TPU kernel's block sizes. They are in `{FILE}` beside this page; copied "
    "over the file of that name in `pallas_kernels/tree_attention`, they are used.",
)
