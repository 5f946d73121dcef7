"""Tree attention for Hopper GPUs: a thread block is one block of queries, one key head, one
part of the context.

Run on an H200, compiled for H100. It is taken where it is asked for by name, and where its
self-test passed on the device.

One or two warpgroups multiply tiles of keys and values by wgmma, up to two matrices of 64
queries each, and keep the running softmax in registers: Milakov and Gimelshein 2018, section
3. They also have TMA fetch the pages, ahead by as many tiles as buffers fit. What a query
sees is said by three things that XLA prepares: the position that it sees all keys below, the
one that its window begins after, and bits for the new tokens that it sees besides. Only tiles
that reach past the prefix, or a window, are masked.

Where blocks and key heads are few, the context is split: each part writes its sums as
float32, and XLA merges them.

Work of a step: 2 * page_size * head_dim * itemsize bytes per key head and page that a row
has in use, read once per block of queries, which is 64 new tokens where 64 * group is at most
256 (128 with heads of 256), and 4 * 64 * matrices * keys * head_dim operations per block and
key head, padding of its queries to whole matrices included. Where the context is split,
2 * 4 * 64 * matrices * head_dim bytes more for each part, block and key head.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import layout
from pallas_kernels.tree_attention.query_blocks import (
    Blocks,
    blocks_of,
    by_block,
    by_query_row,
    lay_flat,
    most_blocks,
    queries_by_head,
    union_bits,
)
from pallas_kernels.tree_attention.reference import check_window, depths

MOST_QUERIES = 64  # tokens of a block
TILE_TOKENS = 64  # keys that are fetched and multiplied at once
MATRIX_ROWS = 64  # of queries in one product: the M of a wgmma
MOST_MATRICES = {64: 4, 128: 4, 256: 2}  # by head_dim: sums are kept in registers
# Each has one or two matrices of queries. A thread gets at most 255 of 65,536 registers, and
# two matrices take nearly all. A third warpgroup, to fetch, would leave 168 per thread:
# ptxas ignores `setmaxnreg` in code that XLA links, as in jax 0.12.
MOST_WARPGROUPS = 2
SMEM_BYTES = 220 << 10  # of 227 KiB
MOST_STAGES = 4  # buffers of a tile of keys and one of values
MULTIPROCESSORS = 132  # of an H100
TILES_PER_SPLIT = 4  # fewer are not worth a merge
MASKED = -1e30  # far below FLOOR: exp2(MASKED - FLOOR) is 0
FLOOR = -1e29  # the largest score of a query that saw nothing
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Static sizes of a call."""

    kv_heads: int
    group: int  # query heads of a key head
    head_dim: int
    page_size: int
    queries: int  # tokens of a block
    num_blocks: int
    matrices: int  # of queries, 64 rows each, of a key head
    splits: int  # parts of the context
    words: int  # of ancestor bits; 0 without
    dtype: jnp.dtype
    # What a key counts for.
    scale: float = 1.0
    softcap: float | None = None
    begins_later: bool = False  # whether the first keys of a row may not be seen
    has_sinks: bool = False

    @property
    def warpgroups(self) -> int:
        return min(self.matrices, MOST_WARPGROUPS)

    @property
    def share(self) -> int:
        """Matrices of a warpgroup."""
        return self.matrices // self.warpgroups

    @property
    def query_rows(self) -> int:
        return self.matrices * MATRIX_ROWS

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a copy: a page, or the part of one that fits a tile."""
        return min(self.page_size, TILE_TOKENS)

    @property
    def stages(self) -> int:
        size = jnp.dtype(self.dtype).itemsize * self.head_dim
        room = SMEM_BYTES - self.query_rows * size
        return min(room // (2 * TILE_TOKENS * size), MOST_STAGES)


def tree_attention_mosaic_gpu(
    q: Array,  # dtype[num_tokens, heads, head_dim]
    k_pages: Array,  # dtype[num_pages, kv_heads, page_size, head_dim]
    v_pages: Array,
    block_table: Array,  # i32[rows, pages_per_row]
    row_starts: Array,  # i32[rows + 1]
    lengths: Array,  # i32[rows]
    *,
    ancestor_bits: Array | None = None,  # u32[num_tokens, words]
    is_causal: Array | None = None,  # bool[rows]
    num_new_keys: Array | None = None,  # i32[rows]
    sinks: Array | None = None,  # f32[heads]
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    first_key: int = 0,
    max_tokens_per_row: int,
) -> Array:
    """See `tree_attention`; pages with scales are not covered.

    Raises:
      NotImplementedError: sizes or dtypes that no tile fits, or a GPU that is no Hopper.
    """
    del k_scale, v_scale  # of dtypes that are refused
    check_window(window, ancestor_bits)
    _check_device()
    shape = _shape_of(q, k_pages, block_table, ancestor_bits, max_tokens_per_row)
    shape = dataclasses.replace(
        shape,
        scale=scale,
        softcap=softcap,
        begins_later=window is not None or first_key > 0,
        has_sinks=sinks is not None,
    )
    # What lies past the bound means nothing.
    num_new = jnp.minimum(row_starts[1:] - row_starts[:-1], max_tokens_per_row)
    blocks = blocks_of(num_new, row_starts, q.shape[0], shape)
    of_blocks = functools.partial(by_block, blocks=blocks, row_starts=row_starts, sizes=shape)
    bits = None if ancestor_bits is None else of_blocks(ancestor_bits)
    in_order = jnp.full(lengths.shape, ancestor_bits is None)
    if is_causal is not None:
        in_order = is_causal
    seen = num_new if num_new_keys is None else num_new_keys
    seen = jnp.where(in_order, num_new, seen)
    union = union_bits(ancestor_bits, row_starts)
    cut = _Cut(window, first_key)
    visible = _visible(blocks, bits, union, lengths, seen, in_order, cut, shape)
    pages_per_row = block_table.shape[1]
    padding = -pages_per_row % max(TILE_TOKENS // shape.page_size, 1)
    table = jnp.pad(jnp.maximum(block_table, 0), ((0, 0), (0, padding)))
    arguments = _Inputs(
        table=table,
        **visible._asdict(),
        sinks=_sinks_by_query_row(sinks, shape),
        q=queries_by_head(of_blocks(q), shape),
        k_pages=k_pages,
        v_pages=v_pages,
    )
    outputs = _call(arguments, shape)
    out = outputs[0] if shape.splits == 1 else _merge(outputs, shape)
    return lay_flat(out.astype(q.dtype), num_new, row_starts, q, shape)


def _check_device() -> None:
    """Raises NotImplementedError on a GPU of another generation: wgmma is Hopper's alone."""
    if jax.default_backend() != "gpu":
        return  # lowered for one elsewhere, or interpreted
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    if not capability.startswith("9."):
        raise NotImplementedError(f"compute {capability=} of the GPU must be 9.x.")


def _shape_of(
    q: Array,
    k_pages: Array,
    block_table: Array,
    ancestor_bits: Array | None,
    max_tokens_per_row: int,
) -> _Shape:
    """Returns the sizes of a call, its tiles among them."""
    num_tokens, heads, head_dim = q.shape
    rows, pages_per_row = block_table.shape
    page_size, kv_heads = layout.page_size(k_pages), layout.kv_heads(k_pages)
    if head_dim not in MOST_MATRICES:
        sizes = [*MOST_MATRICES]
        raise NotImplementedError(f"{head_dim=} must be one of {sizes} on a GPU.")
    if q.dtype != jnp.bfloat16 or k_pages.dtype != jnp.bfloat16:
        raise NotImplementedError(f"{q.dtype=}, {k_pages.dtype=} must be bfloat16.")
    if page_size % 8 or (page_size % TILE_TOKENS and TILE_TOKENS % page_size):
        raise NotImplementedError(
            f"{page_size=} must be 8, 16, 32 or a multiple of {TILE_TOKENS} on a GPU."
        )
    group = heads // kv_heads
    most_rows = MATRIX_ROWS * MOST_MATRICES[head_dim]
    if group > most_rows:
        raise NotImplementedError(
            f"{heads=} of {kv_heads=} key heads: {group=} exceeds {most_rows}."
        )
    queries = min(max_tokens_per_row, MOST_QUERIES, most_rows // group)
    num_blocks = most_blocks(rows, num_tokens, max_tokens_per_row, queries)
    tiles = -(-pages_per_row * page_size // TILE_TOKENS)
    matrices = -(-queries * group // MATRIX_ROWS)
    if matrices > MOST_WARPGROUPS:
        matrices = -(-matrices // MOST_WARPGROUPS) * MOST_WARPGROUPS
    splits = min(MULTIPROCESSORS // (num_blocks * kv_heads), tiles // TILES_PER_SPLIT)
    return _Shape(
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        queries=queries,
        num_blocks=num_blocks,
        matrices=matrices,
        splits=max(splits, 1),
        words=0 if ancestor_bits is None else ancestor_bits.shape[1],
        dtype=q.dtype,
    )


# Around the kernel

# Zeros around the words of bits: a tile's, wherever it begins, are read without a check.
_WORDS_AROUND = TILE_TOKENS // 32 + 1


class _Visible(NamedTuple):
    """Keys that are fetched, seen and free of NaN, by position in the row."""

    row: Array  # i32[blocks]
    length: Array  # i32[blocks], position of the row's new token 0
    oldest: Array  # i32[blocks], no query sees positions below it
    clear_tile: Array  # i32[blocks], from it on all queries see all keys,
    masked_tile: Array  # i32[blocks], up to this one
    last_tile: Array  # i32[blocks], one past
    clean: Array  # i32[blocks], positions below it hold no NaN
    below: Array  # i32[blocks, query_rows], positions that a query sees
    above: Array  # i32[blocks, query_rows], and sees only these of all
    bits: Array  # i32[blocks, words + zeros around, query_rows], new tokens it sees too
    union: Array  # i32[blocks, words + zeros around], those that hold no NaN past `clean`


class _Inputs(NamedTuple):
    """Arguments of the kernel: refs in global memory."""

    table: Any  # i32[rows, pages_per_row], whole tiles of pages that exist
    row: Any
    length: Any
    oldest: Any
    clear_tile: Any
    masked_tile: Any
    last_tile: Any
    clean: Any
    below: Any
    above: Any
    bits: Any
    union: Any
    sinks: Any  # f32[kv_heads, query_rows], in powers of two
    q: Any  # dtype[blocks, kv_heads, query_rows, head_dim]
    k_pages: Any
    v_pages: Any


class _Cut(NamedTuple):
    """What keeps queries from the first keys of a row."""

    window: int | None
    first_key: int


def _visible(
    blocks: Blocks,
    bits: Array | None,  # u32[blocks, queries, words]
    union: Array,  # i32[rows, words]
    lengths: Array,  # i32[rows]
    seen: Array,  # i32[rows], keys from `lengths` on
    in_order: Array,  # bool[rows], whose new tokens no bits name
    cut: _Cut,
    shape: _Shape,
) -> _Visible:
    """Returns the keys that the kernel fetches, masks and cleans."""
    length, in_order = lengths[blocks.row], in_order[blocks.row]
    seen = seen[blocks.row]
    own = blocks.first[:, None] + jnp.arange(shape.queries, dtype=jnp.int32)[None]
    is_token = own < (blocks.first + blocks.count)[:, None]
    # A query sees all positions below this one, and among the others those of its bits.
    below = length[:, None] + jnp.where(in_order[:, None], own + 1, 0)
    place = own
    words = jnp.zeros((*own.shape, 0), jnp.int32)
    of_union = jnp.zeros((shape.num_blocks, 0), jnp.int32)
    if bits is not None:
        place = jnp.where(in_order[:, None], own, depths(bits))
        has_key = _first_bits(jnp.where(in_order, 0, seen), shape.words)
        words = lax.bitcast_convert_type(bits, jnp.int32) & has_key[:, None]
        words = jnp.where(is_token[..., None], words, 0)
        of_union = union[blocks.row] & has_key
    below = jnp.where(is_token, below, 0)
    above = jnp.full_like(below, cut.first_key - 1)
    if cut.window is not None:
        above = jnp.maximum(length[:, None] + place - cut.window, above)
    # Tiles from the oldest key of any query to the newest.
    newest = jnp.where(in_order, length + blocks.first + blocks.count, length + seen)
    oldest = jnp.full_like(length, cut.first_key)
    clear_tile = jnp.zeros_like(length)
    if shape.begins_later:
        last_unseen = jnp.where(is_token, above, -1).max(axis=1)
        clear_tile = last_unseen // TILE_TOKENS + 1
    if cut.window is not None:
        own_oldest = length + jnp.where(in_order, blocks.first, 0) - cut.window + 1
        oldest = jnp.maximum(own_oldest, oldest)
    last_tile = jnp.where(blocks.count > 0, -(-newest // TILE_TOKENS), 0)
    # Query rows without a token need no mask: their results are not read.
    masked_tile = (length + jnp.where(in_order, blocks.first + 1, 0)) // TILE_TOKENS
    around = (_WORDS_AROUND, _WORDS_AROUND)
    rows = by_query_row(words, shape).transpose(0, 2, 1)
    return _Visible(
        row=blocks.row,
        length=length,
        oldest=oldest,
        clear_tile=clear_tile,
        masked_tile=masked_tile,
        last_tile=last_tile,
        clean=length + jnp.where(in_order, seen, 0),
        below=by_query_row(below, shape),
        above=by_query_row(above, shape),
        bits=jnp.pad(rows, ((0, 0), around, (0, 0))),
        union=jnp.pad(of_union, ((0, 0), around)),
    )


def _first_bits(count: Array, words: int) -> Array:
    """Returns i32[*count.shape, words] with the first bits set."""
    in_word = jnp.clip(count[:, None] - 32 * jnp.arange(words)[None], 0, 32)
    # A shift by 32 is not defined.
    half = jnp.uint32(1) << (in_word // 2).astype(jnp.uint32)
    power = half * (jnp.uint32(1) << (in_word - in_word // 2).astype(jnp.uint32))
    return lax.bitcast_convert_type(power - 1, jnp.int32)


def _sinks_by_query_row(sinks: Array | None, shape: _Shape) -> Array:
    """Returns the first key's score of each query, f32[kv_heads, query_rows]."""
    if sinks is None:
        return jnp.full((shape.kv_heads, shape.query_rows), FLOOR)
    by_head = sinks.astype(jnp.float32).reshape(shape.kv_heads, shape.group) * LOG2_E
    by_head = jnp.tile(by_head, (1, shape.queries))
    padding = shape.query_rows - by_head.shape[1]
    return jnp.pad(by_head, ((0, 0), (0, padding)))


def _merge(sums: tuple[Array, ...], shape: _Shape) -> Array:
    """Returns the mean of values over all parts of the context.

    Args:
      sums: of each part the values, f32[splits, blocks, kv_heads, query_rows, head_dim], the
        largest score and the sum of weights, f32[splits, blocks, kv_heads, query_rows].
    """
    acc, top, total = sums
    used = shape.queries * shape.group
    acc, top, total = acc[..., :used, :], top[..., :used], total[..., :used]
    top, total = (jnp.broadcast_to(x[..., None], acc.shape) for x in (top, total))

    # One reduction of three arrays: with several, each is a launch, in every layer.
    def merge_two(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
        top = jnp.maximum(one[0], other[0])
        by_one, by_other = jnp.exp2(one[0] - top), jnp.exp2(other[0] - top)
        total = one[1] * by_one + other[1] * by_other
        return top, total, one[2] * by_one + other[2] * by_other

    none = np.float32(FLOOR), np.float32(0), np.float32(0)
    _, total, acc = lax.reduce((top, total, acc), none, merge_two, (0,))
    return acc / jnp.where(total == 0.0, 1.0, total)


def _call(inputs: _Inputs, shape: _Shape) -> tuple[Array, ...]:
    """Returns the means of values, or where the context is split each part's sums."""
    # Needs absl on some versions of jax, which this package does not ask for.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    sums = shape.splits, shape.num_blocks, shape.kv_heads, shape.query_rows
    if shape.splits == 1:
        out_type = [jax.ShapeDtypeStruct(inputs.q.shape, shape.dtype)]
    else:
        out_type = [
            jax.ShapeDtypeStruct((*sums, shape.head_dim), jnp.float32),
            jax.ShapeDtypeStruct(sums, jnp.float32),
            jax.ShapeDtypeStruct(sums, jnp.float32),
        ]
    call = plgpu.kernel(
        functools.partial(_kernel, shape=shape),
        out_type=out_type,
        grid=(shape.splits, shape.kv_heads, shape.num_blocks),
        grid_names=("split", "head", "block"),
        num_threads=shape.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return tuple(call(*inputs))


# The kernel

_COLUMNS = 64  # of values, that a swizzled line of shared memory holds


def _kernel(*refs: Any, shape: _Shape):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    inputs, outputs = (
        _Inputs(*refs[: len(_Inputs._fields)]),
        refs[len(_Inputs._fields) :],
    )
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tiles = plgpu.SMEM(
        (shape.stages, TILE_TOKENS, shape.head_dim), shape.dtype, transforms=transforms
    )
    queries = plgpu.SMEM(
        (shape.matrices, MATRIX_ROWS, shape.head_dim),
        shape.dtype,
        transforms=transforms,
    )
    copies = TILE_TOKENS // shape.chunk_tokens
    arrived = plgpu.Barrier(num_arrivals=copies, num_barriers=shape.stages)

    def body(*scratch: Any) -> None:
        block = _Block(inputs, _Scratch(*scratch), shape)
        block.attend(lax.axis_index("warpgroup"), outputs)

    pl.run_scoped(
        body,
        *_Scratch(
            q=queries,
            k=tiles,
            v=tiles,
            q_arrived=plgpu.Barrier(num_arrivals=shape.share, num_barriers=shape.warpgroups),
            k_arrived=arrived,
            v_arrived=arrived,
            used=plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=shape.stages),
            cleaned=plgpu.Barrier(num_arrivals=shape.warpgroups),
        ),
        collective_axes="warpgroup",
    )


class _Scratch(NamedTuple):
    """Buffers and barriers in shared memory."""

    q: Any  # dtype[matrices, 64, head_dim]; results on their way out, too
    k: Any  # dtype[stages, tile, head_dim]
    v: Any
    q_arrived: Any  # [warpgroups]
    k_arrived: Any  # [stages]
    v_arrived: Any
    used: Any  # [stages], every warpgroup is done with a tile of keys and values
    cleaned: Any  # the first warpgroup is done with a tile's NaN


class _Queries(NamedTuple):
    """64 queries and, in registers, the positions that each sees."""

    matrix: Any
    below: Array  # i32[64]
    above: Array | None  # i32[64]; None without a window

    @property
    def rows(self) -> Any:
        """The rows of these queries among all queries."""
        return _rows(self.matrix)


class _Sums(NamedTuple):
    """Running softmax of 64 queries over the keys so far, in registers."""

    acc: Array  # f32[64, head_dim]
    top: Array  # f32[64], the largest score in powers of two
    total: Array  # f32[64]


class _Block:
    """One block of queries, one key head, one part of the context."""

    def __init__(self, inputs: _Inputs, scratch: _Scratch, shape: _Shape):
        self.inputs, self.scratch, self.shape = inputs, scratch, shape
        self.split = lax.axis_index("split")
        self.head = lax.axis_index("head")
        self.block = block = lax.axis_index("block")
        self.length = inputs.length[block]
        self.clean = inputs.clean[block]
        # A part is a run of tiles; the last parts may be empty.
        self.oldest, last = inputs.oldest[block], inputs.last_tile[block]
        first = jnp.minimum(lax.div(self.oldest, jnp.int32(TILE_TOKENS)), last)
        per_split = lax.div(last - first + (shape.splits - 1), jnp.int32(shape.splits))
        self.first = jnp.minimum(first + self.split * per_split, last)
        self.last = jnp.minimum(self.first + per_split, last)
        self.clear, self.masked = inputs.clear_tile[block], inputs.masked_tile[block]

    def _stage(self, tile: Any) -> Any:
        return lax.rem(tile - self.first, jnp.int32(self.shape.stages))

    def attend(self, warpgroup: Any, outputs: tuple[Any, ...]) -> None:
        """Attends a warpgroup's queries to all tiles and writes what comes of it."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        inputs, scratch, shape = self.inputs, self.scratch, self.shape
        ahead = jnp.minimum(self.first + (shape.stages - 1), self.last)
        first = warpgroup * shape.share
        queries = [self._queries(first + place) for place in range(shape.share)]
        for own in queries:
            plgpu.copy_gmem_to_smem(
                inputs.q.at[self.block, self.head, own.rows],
                scratch.q.at[own.matrix],
                scratch.q_arrived.at[warpgroup],
            )
        fetch = lambda tile, _: self._fetch(warpgroup, tile)
        lax.fori_loop(self.first, ahead, fetch, None)
        plgpu.barrier_wait(scratch.q_arrived.at[warpgroup])
        sums = tuple(self._start(own) for own in queries)
        # One loop for all tiles, masked or not. With two loops around the same products, ptxas
        # 12.8.61 to 12.9.41 addresses the second's by registers that only the first sets.
        add = functools.partial(self._add, warpgroup, queries)
        sums = lax.fori_loop(self.first, self.last, add, sums)
        for own, own_sums in zip(queries, sums, strict=True):
            self._finish(own, own_sums, outputs)
        plgpu.wait_smem_to_gmem(0)

    def _queries(self, matrix: Any) -> _Queries:
        inputs, place = self.inputs, (self.block, _rows(matrix))
        above = self._by_row(inputs.above.at[place]) if self.shape.begins_later else None
        return _Queries(matrix, self._by_row(inputs.below.at[place]), above)

    def _fetch(self, warpgroup: Any, tile: Any) -> None:
        """Begins to copy the pages of a tile: the first warpgroup keys, the last values."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        inputs, scratch, shape = self.inputs, self.scratch, self.shape
        row, size, stage = inputs.row[self.block], shape.chunk_tokens, self._stage(tile)
        starts = range(0, TILE_TOKENS, size)
        positions = [tile * TILE_TOKENS + start for start in starts]
        page_size = jnp.int32(shape.page_size)
        pages = [inputs.table[row, lax.div(place, page_size)] for place in positions]

        @pl.when(tile - self.first >= shape.stages)
        def _():
            plgpu.barrier_wait(scratch.used.at[stage])

        def copy(source: Any, target: Any, arrived: Any) -> None:
            for start, position, page in zip(starts, positions, pages, strict=True):
                place = pl.ds(lax.rem(position, page_size), size)
                plgpu.copy_gmem_to_smem(
                    source.at[page, self.head, place],
                    target.at[stage, pl.ds(start, size)],
                    arrived.at[stage],
                )

        @pl.when(warpgroup == 0)
        def _():
            copy(inputs.k_pages, scratch.k, scratch.k_arrived)

        @pl.when(warpgroup == shape.warpgroups - 1)
        def _():
            copy(inputs.v_pages, scratch.v, scratch.v_arrived)

    def _finish(self, queries: _Queries, sums: _Sums, outputs: tuple[Any, ...]) -> None:
        """Writes the means of values, or where the context is split the sums."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        rows = queries.rows
        if self.shape.splits > 1:
            acc, top, total = outputs
            place = (self.split, self.block, self.head, rows)
            acc.at[place][...] = sums.acc
            top.at[place][...] = sums.top
            total.at[place][...] = sums.total
            return
        total = jnp.where(sums.total == 0.0, 1.0, sums.total)
        mean = sums.acc / lax.broadcast_in_dim(total, sums.acc.shape, (0,))
        out = self.scratch.q.at[queries.matrix]
        out[...] = mean.astype(self.shape.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, outputs[0].at[self.block, self.head, rows])

    def _start(self, queries: _Queries) -> _Sums:
        """Returns the sums before the first key: none, or the sink, a key whose value is 0."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        wgmma, by_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
        size = MATRIX_ROWS, self.shape.head_dim
        acc = plgpu.layout_cast(jnp.zeros(size, jnp.float32), wgmma)
        top = plgpu.layout_cast(jnp.full(size[:1], FLOOR, jnp.float32), by_row)
        total = plgpu.layout_cast(jnp.zeros(size[:1], jnp.float32), by_row)
        if self.shape.has_sinks:
            # It counts once: in the first part.
            sinks = self._by_row(self.inputs.sinks.at[self.head, queries.rows])
            is_first = self.split == 0
            top = jnp.where(is_first, sinks, top)
            total = jnp.where(is_first, jnp.ones_like(total), total)
        return _Sums(acc, top, total)

    def _by_row(self, ref: Any) -> Array:
        """Reads one number of each query from global memory."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        # jax 0.10 asks for the index that 0.11 deprecates.
        index = [()] if jax.__version_info__ < (0, 11) else []
        by_row = plgpu.Layout.WGMMA.reduce(1)
        return plgpu.load(ref, *index, layout=by_row, optimized=False)

    def _add(
        self,
        warpgroup: Any,
        queries: list[_Queries],
        tile: Any,
        sums: tuple[_Sums, ...],
    ) -> tuple[_Sums, ...]:
        """Returns the sums of each matrix with the keys and values of a tile."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        scratch, stage = self.scratch, self._stage(tile)
        ahead = tile + (self.shape.stages - 1)  # where the tile before this one was
        pl.when(ahead < self.last)(lambda: self._fetch(warpgroup, ahead))
        is_masked = tile >= self.masked
        if self.shape.begins_later:
            is_masked |= tile < self.clear
        wait_for_values = functools.partial(plgpu.barrier_wait, scratch.v_arrived.at[stage])

        @pl.when(is_masked)
        def _():
            # First, while no scores take registers.
            wait_for_values()
            self._clean(warpgroup, tile, stage)

        plgpu.barrier_wait(scratch.k_arrived.at[stage])
        result = []
        for place, own in enumerate(queries):
            scores = self._scores(scratch.q.at[own.matrix], scratch.k.at[stage])
            mask = functools.partial(self._mask, tile, own)
            scores = lax.cond(is_masked, mask, lambda scores: scores, scores)
            if place == 0:
                pl.when(~is_masked)(wait_for_values)
            result.append(self._softmax(sums[place], scores, scratch.v.at[stage]))

        @pl.when(tile + self.shape.stages < self.last)  # only if a later fetch waits for it
        def _():
            plgpu.barrier_arrive(scratch.used.at[stage])

        return tuple(result)

    def _softmax(self, sums: _Sums, scores: Array, values: Any) -> _Sums:
        """Returns the sums with keys of these scores and values."""
        top = jnp.maximum(sums.top, scores.max(axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, (0,)))
        decay = jnp.exp2(sums.top - top)
        total = sums.total * decay + weights.sum(axis=1)
        acc = sums.acc * lax.broadcast_in_dim(decay, sums.acc.shape, (0,))
        acc = _add_product(acc, weights.astype(self.shape.dtype), values)
        return _Sums(acc, top, total)

    def _scores(self, queries: Any, keys: Any) -> Array:
        """Returns the scores of keys in powers of two, f32[64, keys]."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def multiply(acc: Any) -> Array:
            plgpu.wgmma(acc, queries, keys.transpose((1, 0)))
            return acc[...]

        shape, size = self.shape, (MATRIX_ROWS, TILE_TOKENS)
        scores = pl.run_scoped(multiply, plgpu.ACC(size, jnp.float32))
        if shape.softcap is None:
            return scores * (shape.scale * LOG2_E)
        # tanh(x) = 1 - 2 / (exp(2 * x) + 1); the one of approximate math is too coarse.
        power = jnp.exp2(scores * (2 * shape.scale / shape.softcap * LOG2_E))
        return (1.0 - 2.0 / (power + 1.0)) * (shape.softcap * LOG2_E)

    def _mask(self, tile: Any, queries: _Queries, scores: Array) -> Array:
        """Returns the scores of a tile, those of keys that a query does not see MASKED."""
        is_visible = self._is_visible(tile * TILE_TOKENS, queries)
        return jnp.where(is_visible, scores, MASKED)

    def _is_visible(self, start: Any, queries: _Queries) -> Array:
        """Returns which keys of the tile that starts here each query sees, bool[64, tile]."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        inputs, shape = self.inputs, self.shape
        size = MATRIX_ROWS, TILE_TOKENS
        place = plgpu.broadcasted_iota(jnp.int32, size, 1, layout=plgpu.Layout.WGMMA)
        spread = functools.partial(lax.broadcast_in_dim, shape=size, broadcast_dimensions=(0,))
        is_visible = place < spread(queries.below - start)
        if shape.words:
            words = [
                self._by_row(inputs.bits.at[self.block, word, queries.rows])
                for word in self._words_of(start)
            ]
            is_visible |= self._has_bit(words, start, place, spread)
        if queries.above is not None:
            is_visible &= place > spread(queries.above - start)
        return is_visible

    def _words_of(self, start: Any) -> list[Any]:
        """Returns where the words of bits stand that tokens from a position on need."""
        shape = self.shape
        # Rounded down, below 0 too.
        word = lax.shift_right_arithmetic(start - self.length, jnp.int32(5))
        # Before and behind the words there are as many zeros as a tile may need.
        word = jnp.clip(word, -_WORDS_AROUND, shape.words) + _WORDS_AROUND
        return [word + place for place in range(_WORDS_AROUND)]

    def _has_bit(self, words: list[Any], start: Any, place: Any, spread: Any) -> Array:
        """Returns whether the bits of tokens are set, bool of `place`'s shape.

        They begin within a word: words are shifted first, then bits are picked.
        """
        shift = (start - self.length) & 31
        result = []
        for index in range(len(words) - 1):
            low = lax.shift_right_logical(words[index], _like(shift, words[index]))
            high = lax.shift_left(words[index + 1], _like(31 - shift, words[index]))
            word = spread(low | (high + high))  # shifted by 32 - shift, which may be 32
            bit = lax.shift_right_logical(word, place & 31) & 1
            is_own = (place >= 32 * index) & (place < 32 * index + 32) & (bit == 1)
            result.append(is_own)
        return functools.reduce(operator.or_, result)

    def _clean(self, warpgroup: Any, tile: Any, stage: Any) -> None:
        """Zeroes values of a tile that no query may see: 0 * NaN is NaN."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        inputs, scratch, shape = self.inputs, self.scratch, self.shape
        start = tile * TILE_TOKENS
        has_unseen = start + TILE_TOKENS > self.clean
        if shape.begins_later:
            has_unseen |= start < self.oldest

        @pl.when(has_unseen)
        def _():
            @pl.when(warpgroup == 0)
            def _():
                size = TILE_TOKENS, _COLUMNS
                place = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=plgpu.Layout.WGMMA)
                is_safe = place < self.clean - start
                if shape.words:
                    words = [inputs.union[self.block, word] for word in self._words_of(start)]
                    spread = lambda word: jnp.full(size, word)
                    is_safe |= self._has_bit(words, start, place, spread)
                if shape.begins_later:
                    is_safe &= place >= self.oldest - start
                # By columns, for registers are few.
                for column in range(0, shape.head_dim, _COLUMNS):
                    values = scratch.v.at[stage, :, pl.ds(column, _COLUMNS)]
                    loaded = plgpu.layout_cast(values[...], plgpu.Layout.WGMMA)
                    values[...] = jnp.where(is_safe, loaded, jnp.zeros_like(loaded))
                plgpu.commit_smem()

            if shape.warpgroups > 1:
                plgpu.barrier_arrive(scratch.cleaned)
                plgpu.barrier_wait(scratch.cleaned)


def _rows(matrix: Any) -> Any:
    """Returns the rows of all queries that are those of a matrix."""
    from jax.experimental import pallas as pl

    return pl.ds(matrix * MATRIX_ROWS, MATRIX_ROWS)


def _add_product(acc: Array, weights: Array, values: Any) -> Array:
    """Returns acc + weights @ values, of which only the values are in shared memory."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def add(acc: Any) -> None:
        plgpu.wgmma(acc, weights, values)

    result: Any = pl.run_state(add)(plgpu.ACC.init(acc))
    return result


def _like(scalar: Any, array: Any) -> Array:
    return jnp.broadcast_to(scalar, array.shape)
