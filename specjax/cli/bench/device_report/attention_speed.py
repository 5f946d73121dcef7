"""The share of a device's bandwidth that attention over pages reaches.

Of each shape: the time of a call, the bytes that it must move (the pages that rows have in use,
once, and queries and results), the bandwidth that makes, and its part of what a copy of a large
array reaches in the same run and of the device's published peak, where that is known. On a TPU the
fastest block sizes can be looked for. Pages that fit in a cache of the device are read faster than
a copy. `python -m tools.attention_speed` measures shapes of one's own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import layout
from pallas_kernels.implementations import target_platform
from pallas_kernels.tree_attention import block_sizes, tree_attention
from pallas_kernels.tree_attention.block_sizes import BlockSizes
from pallas_kernels.tree_attention.example_inputs import pack_ancestors
from pallas_kernels.tree_attention.mosaic_tpu import tree_attention_mosaic_tpu
from specjax.cli.bench import measuring
from specjax.cli.bench.device_report.peaks import published_peaks

COPIED_BYTES = 256 << 20
LEAST_S = 0.02  # that a timed program takes: many calls in one
ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Shape:
    """A step: rows of a context, and a tree of so many nodes in each."""

    rows: int
    context: int
    nodes: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"

    @property
    def moved_bytes(self) -> int:
        """Returns the pages in use once, and queries and results."""
        tokens = self.context + self.nodes
        pages = -(-tokens // self.page_size) * self.page_size
        kept = 2 * self.rows * pages * self.kv_heads
        new = 2 * self.rows * self.nodes * self.heads
        return (kept + new) * self.head_dim * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Result:
    """Medians over rounds."""

    shape: Shape
    implementation: str
    seconds: float
    bytes_per_s: float
    of_copy: float  # of the bandwidth of a copy in the same run
    of_peak: float | None  # of what the maker says
    sizes: BlockSizes | None


def make_call(shape: Shape) -> tuple[jax.Array, Callable[..., jax.Array], dict]:
    """Returns queries, a function of them and options that attends, and the pages it reads."""
    rng = np.random.default_rng(0)
    rows, nodes = shape.rows, shape.nodes
    per_row = -(-(shape.context + nodes) // shape.page_size)
    table = rng.permutation(rows * per_row).astype(np.int32).reshape(rows, per_row)
    pages = layout.page_shape(
        rows * per_row,
        shape.page_size,
        shape.kv_heads,
        shape.head_dim,
        in_lanes=target_platform() == "tpu",
    )
    keys = jax.random.split(jax.random.key(0), 3)
    draw = functools.partial(jax.random.normal, dtype=shape.dtype)
    tree = pack_ancestors([(node - 1) // 2 if node else -1 for node in range(nodes)])
    bits = jnp.asarray(np.tile(tree, (rows, 1))) if nodes > 1 else None
    arrays = {
        "k_pages": draw(keys[0], pages),
        "v_pages": draw(keys[1], pages),
        "block_table": jnp.asarray(table),
        "row_starts": jnp.arange(rows + 1, dtype=jnp.int32) * nodes,
        "lengths": jnp.full(rows, shape.context, jnp.int32),
        "ancestor_bits": bits,
    }
    q = draw(keys[2], (rows * nodes, shape.heads, shape.head_dim))

    def attend(q: jax.Array, arrays: dict, op: Callable, **options: Any) -> jax.Array:
        return op(
            q,
            **arrays,
            scale=shape.head_dim**-0.5,
            max_tokens_per_row=nodes,
            **options,
        )

    return q, attend, arrays


def seconds_of(
    contenders: Mapping[Any, Callable[[Any, Any], Any]], start: Any, held: Any = None
) -> dict[Any, float]:
    """Returns seconds per call: calls that follow each other in one program, contenders in turn.

    Args:
      contenders: each turns a state into the next, given what is held beside it.
    """
    programs, counts = {}, {}
    for name, call in contenders.items():

        def steps(count: jax.Array, state: Any, held: Any, call: Any = call) -> Any:
            return lax.fori_loop(0, count, lambda _, state: call(state, held), state)

        program = functools.partial(jax.jit(steps), state=start, held=held)
        count = 1
        while (took := _timed(program, count)) < LEAST_S and count < 1 << 16:
            count = max(2 * count, int(count * LEAST_S / max(took, 1e-6)))
        counts[name] = count
        programs[name] = functools.partial(program, jnp.int32(count))
    seconds = measuring.interleaved(programs, ROUNDS)
    return {name: measuring.median(each) / counts[name] for name, each in seconds.items()}


def _timed(program: Callable, count: int) -> float:
    """Returns seconds of a run, after one that compiles."""
    run = functools.partial(program, jnp.int32(count))
    return measuring.interleaved({"run": run}, 1)["run"][0]


def copy_bytes_per_s(num_bytes: int | None = None) -> float:
    """Returns what a loop over a large array reaches, read and written.

    Args:
      num_bytes: of the array; by default COPIED_BYTES.
    """
    num_bytes = num_bytes or COPIED_BYTES
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    (took,) = seconds_of({"copy": lambda array, _: array + 1.0}, array).values()
    return 2 * num_bytes / took


def measure(shape: Shape, implementation: str, copied: float, *, tunes: bool = False) -> Result:
    """Returns what a shape reaches; with `tunes`, by the fastest block sizes.

    Args:
      copied: bytes per second of a copy, as `copy_bytes_per_s` returns them.
    """
    q, attend, arrays = make_call(shape)
    if tunes:
        ops: dict[BlockSizes | None, Callable] = {
            sizes: functools.partial(_kernel, shape=shape, block_sizes=sizes)
            for sizes in _fitting(shape, attend, q, arrays)
        }
    else:
        options = {"implementation": implementation, "num_kv_heads": shape.kv_heads}
        ops = {None: functools.partial(tree_attention, **options)}
    # What attention returns has the shape of queries: it is what the next call asks for.
    contenders = {sizes: functools.partial(attend, op=op) for sizes, op in ops.items()}
    took = seconds_of(contenders, q, arrays)
    sizes = min(took, key=took.__getitem__)
    speed = shape.moved_bytes / took[sizes]
    peaks = published_peaks(jax.devices()[0])
    return Result(
        shape,
        implementation,
        took[sizes],
        speed,
        speed / copied,
        None if peaks is None else speed / peaks.bytes_per_s,
        sizes,
    )


def _kernel(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    *,
    shape: Shape,
    **options: Any,
) -> jax.Array:
    """Runs the TPU kernel over pages in lanes, as `tree_attention` does."""
    in_lines = layout.in_lines(q, shape.kv_heads, k_pages, v_pages)
    out = tree_attention_mosaic_tpu(in_lines, k_pages, v_pages, **options)
    return layout.from_lines(out, shape.kv_heads, shape.head_dim, k_pages)


def _fitting(shape: Shape, attend: Callable, q: jax.Array, arrays: dict) -> list[BlockSizes]:
    """Returns the candidates that the kernel takes, and that differ for the shape."""
    fitting: dict[tuple[int, int], BlockSizes] = {}
    for sizes in block_sizes.CANDIDATES:
        op = functools.partial(_kernel, shape=shape, block_sizes=sizes)
        try:
            jax.eval_shape(functools.partial(attend, op=op), q, arrays)
        except NotImplementedError:
            continue
        fitting.setdefault((min(sizes.queries, shape.nodes), sizes.tile_tokens), sizes)
    return list(fitting.values())


def entry_of(result: Result, kind: str) -> block_sizes.Entry:
    """Returns the entry of block_sizes.json that a tuned result makes on a kind of device."""
    shape = result.shape
    assert result.sizes is not None
    lines = layout.page_shape(1, 1, shape.kv_heads, shape.head_dim, in_lanes=True)
    group = shape.heads // lines[layout.KV_HEADS_AXIS]
    return block_sizes.Entry(
        kind, lines[3], group, shape.nodes, shape.rows, shape.context, result.sizes
    )
