"""Bounds the speed of the TPU kernel by its machine code, without a TPU.

    python -m tools.kernel_bundles --tpu v5e:2x2 v6e:2x2 --chips 1 4

compiles the kernel ahead of time, has libtpu write its final code, counts the instruction words
(bundles) of the loops over tiles, and prints at most how many bytes of pages per second that code
can attend to. It needs libtpu: pip install "jax[tpu]".

What the bound assumes, and what it leaves out:

- A core issues one bundle per cycle, at the clock of `CHIPS`. Stalls are not counted: of copies
  that arrive late, of the matrix unit, of registers. So a bound of at least 100 % of the memory's
  speed says that the memory is the limit, if copies are early enough; not that it is reached.
- Copies are early enough if `ahead_bytes` of them are under way while a tile is multiplied: about
  1 microsecond of latency times the memory's bandwidth.
- Every bundle of a loop is counted once per turn, those of branches that are not taken included.
- `of_memory` is of a step in which every row has `context` tokens: tiles that every query sees
  whole, the last tile with its masks, or the part of it that is enough, and what a grid step
  costs around them.
- Chips of two cores (v4, v5p) take every second block each, and share the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.check_kernels import NO_TPU


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one device of a topology has, as jax shows devices."""

    cores: int
    clock_hz: float
    flops_per_cycle: int  # of a core: bfloat16 products, summed in float32
    bytes_per_s: float  # of all cores together


# Bytes and operations per second as in Google's documentation of each generation. Clocks follow
# from its operations per second, and from the sizes of the matrix units: four of 128 x 128 up to
# v5p, then two of 256 x 256 that take two rows per cycle.
CHIPS = {
    "v4": Chip(2, 1.05e9, 4 * 2 * 128**2, 1200e9),
    "v5e": Chip(1, 1.50e9, 4 * 2 * 128**2, 819e9),
    "v5p": Chip(2, 1.75e9, 4 * 2 * 128**2, 2765e9),
    "v6e": Chip(1, 1.75e9, 4 * 2 * 256**2, 1640e9),
    "tpu7x": Chip(1, 2.20e9, 4 * 2 * 256**2, 3690e9),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of attention on one chip: every row has a context and equally many new tokens."""

    topology: str
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 128
    rows: int = 32
    nodes: int = 1
    is_tree: bool = True  # False: new tokens in order
    context: int = 2048
    dtype: str = "bfloat16"
    page_dtype: str | None = None  # None: dtype
    sizes: tuple[int, int] | None = None  # queries and tile_tokens; None: as the kernel picks

    @property
    def chip(self) -> Chip:
        return CHIPS[self.topology.partition(":")[0]]

    @property
    def has_bits(self) -> bool:
        """Whether new tokens have ancestor bits."""
        return self.is_tree and self.nodes > 1


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of the machine code, loops within it included as often as they turn."""

    bundles: int
    matrix_instructions: int  # static, of the matrix unit
    spills: int  # static: registers stored to memory


@dataclasses.dataclass(frozen=True)
class Bound:
    """What the code of a shape allows."""

    shape: Shape
    tile_tokens: int
    ahead_bytes: int  # of copies that are under way while a tile is multiplied
    whole: Loop  # a tile that every query sees
    masked: Loop  # a tile with masks
    few: Loop | None  # the first keys of a tile, with masks, where the last tile is cut to them
    block_bundles: int  # around the tiles of a block of queries
    bytes_per_s: float  # of whole tiles
    of_memory: float  # for rows of the shape's context
    of_matrix_unit: float  # of whole tiles


@dataclasses.dataclass(frozen=True)
class _Bundle:
    depth: int
    loop_depth: int  # of the loop that begins here; 0: none does
    is_matrix: bool
    is_spill: bool


_LINE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s+(LB|LH|LE|PB|PF|CT)?\s*:\s*((?:> ?)*)\{")


def read_bundles(text: str) -> list[_Bundle]:
    """Returns the bundles of a kernel's final code, in order, as libtpu writes them.

    Raises:
      ValueError: nothing in the text reads as a bundle.
    """
    bundles: list[_Bundle] = []
    for line in text.splitlines():
        if not (found := _LINE.match(line)):
            continue
        depth = found[2].count(">")
        bundles.append(
            _Bundle(
                depth,
                depth if found[1] == "LB" else 0,
                "vmatmul" in line or "vmatpush" in line,
                "_spill]" in line and " = vst " in line.replace("vst.", "vst "),
            )
        )
    if not bundles:
        raise ValueError("no line of the text is a bundle as libtpu 0.0.42 writes them.")
    return bundles


def loops_over_tiles(bundles: Sequence[_Bundle], turns_within: int) -> tuple[list[Loop], int]:
    """Returns the loops that multiply tiles, in the order of the code, and the bundles around.

    Args:
      turns_within: how often a loop turns that multiplies within such a loop.
    """
    loops, around = [], 0
    for first, last in _extents(bundles, 1):  # over the grid: blocks of queries
        step = bundles[first:last]
        around += len(step)
        for begin, end in _extents(step, 2):
            body = step[begin:end]
            around -= len(body)
            matrix = sum(one.is_matrix for one in body)
            if matrix:
                within = sum(
                    last - first
                    for first, last in _extents(body, 3)
                    if any(one.is_matrix for one in body[first:last])
                )
                count = len(body) + (turns_within - 1) * within
                loops.append(Loop(count, matrix, sum(one.is_spill for one in body)))
    return loops, around


def _extents(bundles: Sequence[_Bundle], depth: int) -> Iterator[tuple[int, int]]:
    """Yields where each loop of a depth begins, and where it has ended.

    Within a loop some bundles are marked as of the code around it, where the compiler moved
    instructions from behind the loop into its last turn. So a loop ends with its last bundle that
    is marked as its own, before another loop begins.
    """
    begins = [
        place for place, one in enumerate(bundles) if one.loop_depth and one.loop_depth <= depth
    ]
    for begin, limit in zip(begins, [*begins[1:], len(bundles)], strict=True):
        if bundles[begin].loop_depth == depth:
            own = [place for place in range(begin, limit) if bundles[place].depth >= depth]
            yield begin, own[-1] + 1


def bound(shape: Shape) -> Bound:
    """Returns what the code of a shape allows; to be called in a process of its own.

    Raises:
      ValueError: libtpu knows no such topology, or wrote no code.
      NotImplementedError: the kernel does not cover the shape.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, value in NO_TPU.items():
            os.environ.setdefault(name, value)
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        tiling = _compile(shape)
        found = [
            path
            for path in Path(folder).glob("*tree_attention*final_bundles.txt")
            if "schedule-analysis" not in path.name
        ]
        if not found:
            raise ValueError(f"libtpu wrote no bundles for {shape}: was it loaded before?")
        bundles = read_bundles(found[0].read_text())
    loops, around = loops_over_tiles(bundles, tiling.turns_per_tile)
    whole, masked, *few = loops[-2:] if tiling.few_tokens is None else loops[-3:]
    return _of_loops(shape, tiling, whole, masked, few[0] if few else None, around)


def _of_loops(
    shape: Shape, tiling: Any, whole: Loop, masked: Loop, few: Loop | None, around: int
) -> Bound:
    chip = shape.chip
    tokens = tiling.tile_tokens
    size = _itemsize(shape.page_dtype or shape.dtype)
    token_bytes = 2 * shape.kv_heads * shape.head_dim * size
    # In order, every query sees the first new token, too.
    num_whole = (shape.context + (not shape.has_bits)) // tokens
    num_masked, rest = divmod(shape.context + shape.nodes - num_whole * tokens, tokens)
    bundles = num_whole * whole.bundles + num_masked * masked.bundles + around
    if rest:
        is_few = tiling.few_tokens is not None and rest <= tiling.few_tokens
        bundles += few.bundles if few is not None and is_few else masked.bundles
    in_use = -(-(shape.context + shape.nodes) // shape.page_size) * shape.page_size
    per_second = chip.cores * chip.clock_hz
    queries = min(shape.nodes, tiling.queries)
    flops = 4 * queries * shape.heads * shape.head_dim * tokens
    return Bound(
        shape=shape,
        tile_tokens=tokens,
        ahead_bytes=(tiling.slots - 1) * tokens * token_bytes,
        whole=whole,
        masked=masked,
        few=few,
        block_bundles=around,
        bytes_per_s=tokens * token_bytes / whole.bundles * per_second,
        of_memory=in_use * token_bytes / bundles * per_second / chip.bytes_per_s,
        of_matrix_unit=flops / whole.bundles / chip.flops_per_cycle,
    )


def _itemsize(dtype: str) -> int:
    import jax.numpy as jnp

    return jnp.dtype(dtype).itemsize


def _compile(shape: Shape) -> Any:
    """Compiles attention for a shape; returns the kernel's own sizes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, PartitionSpec

    from pallas_kernels import layout
    from pallas_kernels.implementations import lowered_for
    from pallas_kernels.tree_attention.block_sizes import BlockSizes
    from pallas_kernels.tree_attention.mosaic_tpu import tiling, tree_attention_mosaic_tpu

    described = topologies.get_topology_desc(topology_name=shape.topology, platform="tpu")
    mesh = Mesh(np.array(described.devices[:1]), ("one",))
    of = jax.ShapeDtypeStruct
    per_row = -(-(shape.context + shape.nodes) // shape.page_size)
    pages = of(
        layout.page_shape(
            shape.rows * per_row, shape.page_size, shape.kv_heads, shape.head_dim, in_lanes=True
        ),
        shape.page_dtype or shape.dtype,
    )
    num_tokens = shape.rows * shape.nodes
    arguments = {
        "q": of((num_tokens, shape.heads, shape.head_dim), shape.dtype),
        "k_pages": pages,
        "v_pages": pages,
        "block_table": of((shape.rows, per_row), jnp.int32),
        "row_starts": of((shape.rows + 1,), jnp.int32),
        "lengths": of((shape.rows,), jnp.int32),
    }
    options: dict[str, Any] = {"max_tokens_per_row": shape.nodes}
    if shape.sizes is not None:
        options["block_sizes"] = BlockSizes(*shape.sizes)
    if layout.is_quantized(pages):
        scales = of((shape.kv_heads,), jnp.float32)
        arguments |= {"k_scale": scales, "v_scale": scales}
    if shape.has_bits:
        arguments["ancestor_bits"] = of((num_tokens, -(-shape.nodes // 32)), jnp.uint32)

    def attend(arguments: dict[str, Any]) -> Any:
        return tree_attention_mosaic_tpu(**arguments, **options, scale=shape.head_dim**-0.5)

    with lowered_for("tpu", described.devices[0].device_kind):
        local = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        jax.jit(local).lower(arguments).compile()
        return tiling(
            arguments["q"],
            pages,
            arguments["block_table"],
            arguments.get("ancestor_bits"),
            **options,
        )


def bounds(shapes: Sequence[Shape], jobs: int = 1) -> Iterator[Bound]:
    """Yields the bound of each shape, each compiled in a process of its own."""
    # libtpu reads where to write once, when it is loaded, and does not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=spawn, max_tasks_per_child=1
    ) as pool:
        yield from pool.map(bound, shapes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.kernel_bundles")
    parser.add_argument("--tpu", nargs="+", default=["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
    parser.add_argument("--chips", type=int, nargs="+", default=[1, 4], help="that share heads")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 5, 8, 16])
    parser.add_argument("--page-size", type=int, nargs="+", default=[128])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-dtype", help="int8 or float8_e4m3fn; default: bfloat16")
    parser.add_argument("--in-order", action="store_true", help="a prompt's tokens, no tree")
    parser.add_argument("--sizes", type=int, nargs=2, metavar=("QUERIES", "TILE_TOKENS"))
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--json", action="store_true", help="a list of documents")
    options = parser.parse_args(argv)
    shapes = [
        Shape(
            topology=topology,
            heads=options.heads // chips,
            kv_heads=options.kv_heads // chips,
            head_dim=options.head_dim,
            page_size=page_size,
            rows=options.rows,
            nodes=nodes,
            is_tree=not options.in_order,
            context=options.context,
            page_dtype=options.page_dtype,
            sizes=options.sizes and tuple(options.sizes),
        )
        for topology, chips, page_size, nodes in itertools.product(
            options.tpu, options.chips, options.page_size, options.nodes
        )
    ]
    found = []
    for one in bounds(shapes, options.jobs):
        found.append(one)
        if not options.json:
            print(_line(one), flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
    return 0


def _line(one: Bound) -> str:
    shape = one.shape
    return (
        f"{shape.topology:12} {shape.kv_heads:2} key heads, pages of {shape.page_size:3}, "
        f"{shape.nodes:3} nodes: {one.whole.bundles:5} bundles per {one.tile_tokens:4} keys "
        f"({one.masked.bundles:5} with masks, {one.few.bundles if one.few else 0:4} of few, "
        f"{one.block_bundles:4} around, {one.whole.spills:3} spills), "
        f"{one.ahead_bytes / 1e6:.2f} MB ahead, "
        f"{one.bytes_per_s / 1e9:6.0f} GB/s, {one.of_memory:5.0%} of the memory at "
        f"{shape.context}, {one.of_matrix_unit:4.0%} of the matrix unit"
    )


if __name__ == "__main__":
    sys.exit(main())
