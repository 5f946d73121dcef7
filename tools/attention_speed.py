"""Measures the share of a device's bandwidth that attention over pages reaches.

    python -m tools.attention_speed --rows 1 8 --context 2048 --nodes 1 8

prints what `specjax.cli.bench.device_report.attention_speed` says of each shape. With `--tune`, on
a TPU, the block sizes of each shape are chosen by time, and written to block_sizes.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence

import jax

from pallas_kernels.implementations import target_platform
from pallas_kernels.tree_attention import block_sizes
from specjax.cli.bench.device_report.attention_speed import (
    Result,
    Shape,
    copy_bytes_per_s,
    entry_of,
    measure,
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.attention_speed")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[2048])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--implementation", help="default: mosaic_tpu on a TPU, else xla")
    parser.add_argument("--tune", action="store_true", help="choose and write block sizes")
    parser.add_argument("--json", action="store_true", help="a list of documents")
    options = parser.parse_args(argv)
    is_tpu = target_platform() == "tpu"
    if options.tune and not is_tpu:
        parser.error(f"--tune needs a TPU, and this is {target_platform()}.")
    implementation = options.implementation or ("mosaic_tpu" if is_tpu else "xla")
    copied = copy_bytes_per_s()
    kind = jax.devices()[0].device_kind
    if not options.json:
        print(f"{kind}, jax {jax.__version__}, {implementation}; a copy: {copied / 1e9:.1f} GB/s")
    results = []
    for rows, context, nodes in itertools.product(options.rows, options.context, options.nodes):
        shape = Shape(
            rows=rows,
            context=context,
            nodes=nodes,
            heads=options.heads,
            kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            page_size=options.page_size,
            dtype=options.dtype,
        )
        result = measure(shape, implementation, copied, tunes=options.tune)
        results.append(result)
        if not options.json:
            print(_line(result), flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    if options.tune:
        block_sizes.write([entry_of(result, kind) for result in results])
    return 0


def _line(result: Result) -> str:
    shape, sizes = result.shape, result.sizes
    peak = "" if result.of_peak is None else f", {result.of_peak:.0%} of the peak"
    chosen = "" if sizes is None else f"; {sizes.queries} queries, {sizes.tile_tokens} keys"
    return (
        f"{shape.rows:4} rows, {shape.context:6} tokens, {shape.nodes:3} nodes: "
        f"{1e6 * result.seconds:10.1f} us, {shape.moved_bytes / 1e6:8.2f} MB, "
        f"{result.bytes_per_s / 1e9:7.1f} GB/s, {result.of_copy:.0%} of a copy{peak}{chosen}"
    )


if __name__ == "__main__":
    sys.exit(main())
