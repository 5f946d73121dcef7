"""Tree attention for TPU: each page is copied to VMEM once per row, for up to 256 new tokens.

Queries are laid out in blocks of one row's new tokens; a grid step is one of them. Its
keys come in tiles of whole pages, all key heads at once, through a ring of slots: while one tile
is multiplied the next ones are copied, those of the blocks that follow included. Tiles that
every query of a block sees whole are multiplied without masks, by code of their own. Pages that
end before a block's window are not copied.

`bundles` says what the machine code of these loops allows.

Work of a step: 2 * kv_heads * page_size * head_dim * itemsize bytes per page that a row
has in use, read once per block of queries, and 4 * queries * keys * heads * head_dim
operations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import layout
from pallas_kernels.implementations import target_kind
from pallas_kernels.page_updates import LANES, SMEM_BYTES, check_pages, in_hbm
from pallas_kernels.running_softmax import precision_of
from pallas_kernels.tree_attention.block_sizes import (
    BlockSizes,
    choose,
    cores_of,
    vmem_budget,
    vmem_limit_bytes,
)
from pallas_kernels.tree_attention.query_blocks import (
    blocks_of,
    by_block,
    by_query_row,
    lay_flat,
    most_blocks,
    queries_by_head,
    union_bits,
)
from pallas_kernels.tree_attention.reference import check_window

LEAST_QUERIES = 16  # of a block, as long as smaller tiles do as well
FEW_QUERIES = 8  # of a block that has no more, no more are computed
MASKED = -1e30  # finite, so that masked minus masked is 0 and not NaN
UNSEEN = 1 << 30  # a new key that no token sees
LOG2_E = math.log2(math.e)
KEYS_AT_ONCE = 256  # of a tile: a row whose last tile holds no more keys multiplies no more
MOST_ROWS = 256  # of queries that are multiplied at once, as parts
ROWS_OF_PART = 128
MOST_PAIRS = 4  # of steps of MOST_ROWS that are one turn of a loop
MOST_SCORES = 128 << 10  # of parts that are multiplied at once: twice the vector registers
MOST_HEADS = 4  # that are multiplied at once
LEAST_BYTES_AHEAD = 3 << 19  # of copies under way while a tile is multiplied
LEAST_SLOTS, MOST_SLOTS = 3, 8  # of tiles


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Static sizes of a call."""

    kv_heads: int
    group: int  # query heads of a key head
    head_dim: int
    page_size: int
    pages_per_row: int
    queries: int  # tokens of a block
    num_blocks: int
    pages_per_tile: int
    words: int  # of ancestor bits; 0 without
    slots: int  # of tiles in VMEM
    cores: int  # that take every so many-th block
    dtype: jnp.dtype
    page_dtype: jnp.dtype
    heads_per_line: int = 1  # key heads that lie beside each other; told by their scales
    # What a key counts for.
    scale: float = 1.0
    softcap: float | None = None
    window: int | None = None
    first_key: int = 0  # of a row that any query sees
    has_sinks: bool = False
    has_scales: bool = False
    is_mixed: bool = False  # whether rows say which of them are trees
    has_holes: bool = False  # whether keys may lie among the new ones that no query has a bit of

    @property
    def query_rows(self) -> int:
        """Rows of a key head's query matrix, whole sublanes."""
        return self.rows_of_queries(self.queries)

    def rows_of_queries(self, queries: int) -> int:
        """Returns how many rows of it the first so many tokens take."""
        packing = 8 * 4 // jnp.dtype(self.dtype).itemsize
        rows = -(-queries * self.group // packing) * packing
        return rows if rows <= MOST_ROWS else -(-rows // MOST_ROWS) * MOST_ROWS

    def steps_of(self, queries: int) -> tuple[int, int, int]:
        """Returns how many steps add a tile to so many queries, the key heads of each step, and
        the rows of each head. A loop takes the steps if there are several."""
        rows = self.rows_of_queries(queries)
        if rows > MOST_ROWS:
            return self.kv_heads * (rows // MOST_ROWS), 1, MOST_ROWS
        heads = max(n for n in range(1, MOST_HEADS + 1) if self.kv_heads % n == 0)
        return self.kv_heads // heads, heads, rows

    @property
    def is_ahead(self) -> bool:
        """Whether scores of the next rows are computed beside the softmax of some rows."""
        return self.query_rows > MOST_ROWS

    @property
    def steps_ahead(self) -> tuple[int, int]:
        """Steps whose scores lie in either place; of an odd number the last is in the second."""
        steps, _, _ = self.steps_of(self.queries)
        return steps // 2, steps - steps // 2

    @property
    def turns_ahead(self) -> tuple[int, int]:
        """Turns of the loop over pairs of steps, and how many pairs are a turn."""
        pairs, _ = self.steps_ahead
        at_once = max(n for n in range(1, MOST_PAIRS + 1) if pairs % n == 0)
        return pairs // at_once, at_once

    @property
    def top_rows(self) -> int:
        """Rows of queries whose highest scores lie by key heads, not by steps."""
        return self.rows_of_queries(FEW_QUERIES) if self.is_ahead else self.query_rows

    @property
    def keys_at_once(self) -> int:
        """Keys of a tile whose products are one matrix product; a tile adds these in order."""
        size, most = self.tile_tokens, KEYS_AT_ONCE
        is_cut = most % self.page_size == 0 or self.page_size % most == 0
        return most if size % most == 0 and is_cut else size

    @property
    def few_tokens(self) -> int | None:
        """Keys that are enough for the last tile of many rows; None: the tile is not cut."""
        is_cut = self.query_rows <= MOST_ROWS and self.keys_at_once < self.tile_tokens
        return self.keys_at_once if is_cut else None

    @property
    def tile_tokens(self) -> int:
        return self.pages_per_tile * self.page_size

    @property
    def begins_later(self) -> bool:
        """Whether queries may not see the first keys of their row."""
        return self.window is not None or self.first_key > 0

    def smem_bytes(self, rows: int) -> int:
        """Returns the bytes of the scalars in SMEM, of one axis each: two would be padded."""
        per_row = self.pages_per_row + self.words + 3
        return 4 * (rows * per_row + 3 * self.num_blocks + 8 * LANES)

    def vmem_bytes(self) -> int:
        """Returns the bytes of VMEM of a grid step: tiles, queries and results twice, sums."""
        size = jnp.dtype(self.dtype).itemsize
        tile = self.tile_tokens * self.head_dim
        tiles = 2 * self.slots * self.kv_heads * tile * jnp.dtype(self.page_dtype).itemsize
        if self.page_dtype != self.dtype:
            tiles += 2 * 4 * tile  # on their way to the dtype of queries
        rows = self.kv_heads * self.query_rows
        blocks = 2 * 2 * rows * self.head_dim * size
        sums = (rows * (self.head_dim + LANES) + self.kv_heads * self.top_rows * LANES) * 4
        bits = 2 * self.query_rows * LANES * 4 if self.words else 0
        scores = 3 * min(self.query_rows, MOST_ROWS) * max(self.tile_tokens, LANES) * 4
        if self.is_ahead:
            scores += 2 * MOST_ROWS * max(self.tile_tokens, LANES) * 4
            scores += 2 * sum(self.steps_ahead) * MOST_ROWS * LANES * 4
        return tiles + blocks + sums + bits + scores


def tree_attention_mosaic_tpu(
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
    k_scale: Array | None = None,  # f32[key heads in the pages]
    v_scale: Array | None = None,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    first_key: int = 0,
    max_tokens_per_row: int,
    block_sizes: BlockSizes | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """See `tree_attention`.

    Args:
      block_sizes: None: those measured on the device, or the default.

    Raises:
      NotImplementedError: a size that no tile fits.
    """
    check_window(window, ancestor_bits)
    shape = _shape_of(q, k_pages, block_table, ancestor_bits, max_tokens_per_row, block_sizes)
    shape = dataclasses.replace(
        shape,
        scale=scale,
        softcap=softcap,
        window=window,
        first_key=first_key,
        has_sinks=sinks is not None,
        has_scales=k_scale is not None,
        heads_per_line=1 if k_scale is None else len(k_scale) // shape.kv_heads,
        is_mixed=ancestor_bits is not None and is_causal is not None,
        # Otherwise every new key is that of a query, which has its own bit.
        has_holes=ancestor_bits is not None and num_new_keys is not None,
    )
    # What lies past the bound means nothing.
    num_new = jnp.minimum(row_starts[1:] - row_starts[:-1], max_tokens_per_row)
    seen = num_new if num_new_keys is None else num_new_keys
    if is_causal is not None:
        seen = jnp.where(is_causal, num_new, seen)
    ends = jnp.where(num_new > 0, lengths + seen, 0)
    blocks = blocks_of(num_new, row_starts, q.shape[0], shape)
    of_blocks = functools.partial(by_block, blocks=blocks, row_starts=row_starts, sizes=shape)
    queries = queries_by_head(of_blocks(q), shape)
    arguments = [queries]
    in_specs = [_block_spec(shape.cores, shape.kv_heads, shape.query_rows, shape.head_dim)]
    if ancestor_bits is not None:
        bits = by_query_row(of_blocks(ancestor_bits), shape)
        arguments.append(lax.bitcast_convert_type(bits, jnp.int32))
        in_specs.append(_block_spec(shape.cores, shape.query_rows, shape.words))
    for per_head in (sinks, k_scale, v_scale):
        if per_head is not None:
            arguments.append(per_head.astype(jnp.float32))
            in_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    rows = lengths.shape[0]
    causal = jnp.zeros(rows, bool) if is_causal is None else is_causal
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    out = pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(_Scalars._fields),
            grid=(shape.cores, shape.num_blocks // shape.cores),
            in_specs=[*in_specs, anywhere, anywhere],
            out_specs=_block_spec(shape.cores, shape.kv_heads, shape.query_rows, shape.head_dim),
            scratch_shapes=_scratch_shapes(shape),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            # Every page that is copied is in the table, whose numbers are clipped.
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_limit_bytes(target_kind(), shape.vmem_bytes()),
        ),
        interpret=interpret,
        name="tree_attention",
    )(
        jnp.clip(block_table, 0, layout.num_pages(k_pages) - 1).reshape(-1),
        *blocks,
        lengths,
        ends,
        union_bits(ancestor_bits if shape.has_holes else None, row_starts).reshape(-1),
        causal.astype(jnp.int32),
        *arguments,
        in_hbm(k_pages, interpret),
        in_hbm(v_pages, interpret),
    )
    return lay_flat(out, num_new, row_starts, q, shape)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a call cuts its queries and keys."""

    queries: int  # tokens of a block
    tile_tokens: int
    slots: int  # tiles in VMEM
    few_tokens: int | None  # keys that the last tile is cut to where they are enough
    turns_per_tile: int  # of the loop that multiplies a tile, 1 if it is unrolled


def tiling(
    q: Any,
    k_pages: Any,
    block_table: Any,
    ancestor_bits: Any,
    *,
    max_tokens_per_row: int,
    block_sizes: BlockSizes | None = None,
) -> Tiling:
    """Returns how a call would be cut; arguments or their shapes."""
    shape = _shape_of(q, k_pages, block_table, ancestor_bits, max_tokens_per_row, block_sizes)
    return Tiling(
        shape.queries,
        shape.tile_tokens,
        shape.slots,
        shape.few_tokens,
        shape.turns_ahead[0] if shape.is_ahead else shape.steps_of(shape.queries)[0],
    )


def vmem_bytes(
    q: Any,
    k_pages: Any,
    block_table: Any,
    ancestor_bits: Any,
    *,
    max_tokens_per_row: int,
) -> int:
    """Returns the bytes of VMEM that a call keeps there; arguments or their shapes."""
    shape = _shape_of(q, k_pages, block_table, ancestor_bits, max_tokens_per_row)
    return shape.vmem_bytes()


def _shape_of(
    q: Array,
    k_pages: Array,
    block_table: Array,
    ancestor_bits: Array | None,
    max_tokens_per_row: int,
    sizes: BlockSizes | None = None,
) -> _Shape:
    """Returns the sizes of a call, its tiles among them."""
    num_tokens, heads, head_dim = q.shape
    rows, pages_per_row = block_table.shape
    page_size, kv_heads = layout.page_size(k_pages), layout.kv_heads(k_pages)
    check_pages(k_pages)
    if head_dim != layout.head_dim(k_pages):
        raise NotImplementedError(
            f"{head_dim=} in pages of {layout.head_dim(k_pages)}; layout.in_lines spreads q."
        )
    is_widened = q.dtype == jnp.float32 and k_pages.dtype == jnp.bfloat16
    if q.dtype != k_pages.dtype and not is_widened and not layout.is_quantized(k_pages):
        raise NotImplementedError(f"{q.dtype=} must be {k_pages.dtype=}, or float32, on a TPU.")
    group = heads // kv_heads
    sizes = sizes or choose(
        target_kind(),
        head_dim,
        group,
        max_tokens_per_row,
        rows,
        pages_per_row * page_size,
        kv_heads=kv_heads,
    )
    queries = min(max_tokens_per_row, sizes.queries)
    pages_per_tile = min(max(sizes.tile_tokens // page_size, 1), pages_per_row)
    cores, budget = cores_of(target_kind()), vmem_budget(target_kind())
    while True:
        num_blocks = most_blocks(rows, num_tokens, max_tokens_per_row, queries)
        shape = _Shape(
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            page_size=page_size,
            pages_per_row=pages_per_row,
            queries=queries,
            num_blocks=-(-num_blocks // cores) * cores,
            pages_per_tile=pages_per_tile,
            slots=0,
            cores=cores,
            words=0 if ancestor_bits is None else ancestor_bits.shape[1],
            dtype=q.dtype,
            page_dtype=k_pages.dtype,
            has_scales=layout.is_quantized(k_pages),
        )
        # A tile less under way costs less than smaller blocks, which read pages more often.
        for slots in range(_slots(shape), LEAST_SLOTS - 1, -1):
            shape = dataclasses.replace(shape, slots=slots)
            if shape.vmem_bytes() <= budget or not shape.is_ahead:
                break
        if shape.vmem_bytes() <= budget or (queries, pages_per_tile) == (1, 1):
            break
        # The tile first, where it is what takes most.
        if pages_per_tile > 1 and queries <= LEAST_QUERIES:
            pages_per_tile = -(-pages_per_tile // 2)
        else:
            queries = -(-queries // 2)
    if shape.smem_bytes(rows) > SMEM_BYTES:
        raise NotImplementedError(
            f"{rows=} of {pages_per_row=} need {shape.smem_bytes(rows)} bytes of SMEM, and "
            f"{SMEM_BYTES} are there; larger pages need fewer."
        )
    if shape.vmem_bytes() > budget:
        raise NotImplementedError(
            f"{heads=} of {head_dim=} need {shape.vmem_bytes()} bytes of VMEM for "
            f"one query and one page, and {budget} are there."
        )
    return shape


def _slots(shape: _Shape) -> int:
    """Returns how many tiles to keep in VMEM."""
    tile = 2 * shape.kv_heads * shape.tile_tokens * shape.head_dim
    ahead = -(-LEAST_BYTES_AHEAD // (tile * jnp.dtype(shape.page_dtype).itemsize))
    # Scores that are computed ahead are those of a second tile at the end of the first.
    return min(max(ahead + 1, LEAST_SLOTS), MOST_SLOTS) + shape.is_ahead


def _block_spec(cores: int, *sizes: int) -> pl.BlockSpec:
    def index(core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return step * cores + core, *[0] * len(sizes)

    return pl.BlockSpec((1, *sizes), index)


def _scratch_shapes(shape: _Shape) -> list:
    tile = (
        shape.slots,
        shape.pages_per_tile,
        shape.kv_heads,
        shape.page_size,
        shape.head_dim,
    )
    sums = shape.kv_heads, shape.query_rows
    ahead = []
    if shape.is_ahead:
        for steps in shape.steps_ahead:
            ahead.append(pltpu.VMEM((MOST_ROWS, shape.tile_tokens), jnp.float32))
            ahead.append(pltpu.VMEM((2, steps, MOST_ROWS, LANES), jnp.float32))
    return [
        pltpu.VMEM(tile, shape.page_dtype),
        pltpu.VMEM(tile, shape.page_dtype),
        pltpu.VMEM((shape.kv_heads, shape.top_rows, LANES), jnp.float32),
        pltpu.VMEM((*sums, LANES), jnp.float32),
        pltpu.VMEM((*sums, shape.head_dim), jnp.float32),
        *ahead,
        pltpu.SMEM((5,), jnp.int32),
        pltpu.SemaphoreType.DMA((shape.slots, 2)),
    ]


# The kernel


class _Scalars(NamedTuple):
    """Prefetched scalars: refs in SMEM."""

    table: Any  # i32[rows * pages_per_row]
    row: Any  # i32[blocks]
    first: Any
    count: Any
    lengths: Any  # i32[rows]
    ends: Any
    union: Any  # i32[rows * words]
    is_causal: Any  # i32[rows], read where rows say which of them are trees


def _kernel(*refs, shape: _Shape):
    num_scalars = len(_Scalars._fields)
    scalars, (q, *refs) = _Scalars(*refs[:num_scalars]), refs[num_scalars:]
    bits = refs.pop(0) if shape.words else None
    sinks = refs.pop(0) if shape.has_sinks else None
    scales = (refs.pop(0), refs.pop(0)) if shape.has_scales else None
    k_hbm, v_hbm, out, k_tiles, v_tiles, top, total, acc, *ahead, cursor, sems = refs
    tiles = _Tiles(scalars, k_hbm, v_hbm, k_tiles, v_tiles, cursor, sems, shape)
    known = scalars, q, bits, sinks, scales, k_tiles, v_tiles
    scores = [_Scores(*ahead[place : place + 2]) for place in range(0, len(ahead), 2)]
    sums = _Sums(*known, top, total, acc, scores, shape)
    block = pl.program_id(1) * shape.cores + pl.program_id(0)
    pl.when(pl.program_id(1) == 0)(lambda: tiles.start_first(block))

    def add_all(queries: int) -> None:
        for span in tiles.spans(block):
            if shape.is_ahead and queries == shape.queries:
                pl.when(span.first < span.end)(functools.partial(add_ahead, span))
                continue

            def body(tile: Any, _: Any, span: _Span = span) -> Any:
                tiles.start_next()
                slot = tiles.wait(block, tile, span.is_whole)
                sums.add(block, tile, slot, queries, span)
                return ()

            lax.fori_loop(span.first, span.end, body, ())

    def add_ahead(span: _Span) -> None:
        def body(tile: Any, slot: Any) -> Any:
            tiles.start_next()
            is_last = tile + 1 == span.end
            following = jnp.where(is_last, slot, tiles.next_slot)

            @pl.when(~is_last)
            def _():
                tiles.wait(block, tile + 1, span.is_whole)

            # In the last tile of a span its own first step is scored once more, for nothing.
            sums.add_ahead(block, (tile, slot), (tile + 1 - is_last, following), span)
            return following

        slot = tiles.wait(block, span.first, span.is_whole)
        sums.score_first(block, (span.first, slot), span)
        lax.fori_loop(span.first, span.end, body, slot)

    @pl.when(scalars.count[block] > 0)
    def _():
        sums.clear()
        if shape.queries > FEW_QUERIES:
            is_few = scalars.count[block] <= FEW_QUERIES
            pl.when(is_few)(lambda: add_all(FEW_QUERIES))
            pl.when(~is_few)(lambda: add_all(shape.queries))
        else:
            add_all(shape.queries)
        sums.finish(out)


class _Span(NamedTuple):
    """Tiles of a block that are added by the same code."""

    first: Any
    end: Any
    tokens: int  # of each tile, from its first on, that any query of the block sees
    is_whole: bool  # every query of the block sees all of them


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Copies of pages to VMEM, a tile of them into each slot of a ring.

    The tiles of a core's blocks, one block after the other, are copied in the order in which
    they are multiplied. While one is multiplied all other slots are under way, but for the next
    one where its scores are computed ahead.
    """

    scalars: _Scalars
    k_hbm: Any
    v_hbm: Any
    k_tiles: Any  # dtype[slots, pages_per_tile, kv_heads, page_size, head_dim]
    v_tiles: Any
    cursor: Any  # i32[5] in SMEM: see _BLOCK and those that follow
    sems: Any
    shape: _Shape

    def spans(self, block: Any) -> list[_Span]:
        """Returns the tiles of a block, in order.

        Tiles between those that the window cuts and those with new tokens hold only keys that
        every query of the block sees.
        """
        scalars, shape = self.scalars, self.shape
        first, end, last_key = self._extent(block)
        row, size = scalars.row[block], shape.tile_tokens
        length = scalars.lengths[row]
        newest = scalars.first[block]
        if shape.is_mixed:
            newest = jnp.where(scalars.is_causal[row] > 0, newest, -1)
        elif shape.words:
            newest = jnp.int32(-1)
        whole_end = jnp.clip(self._tile_of(length + newest + 1), first, end)
        spans = []
        whole_first = first
        if shape.begins_later:
            oldest: Any = shape.first_key
            if shape.window is not None:
                newest = scalars.first[block] + scalars.count[block] - 1
                newest = jnp.maximum(newest, 32 * shape.words - 1)  # of any depth
                oldest = jnp.maximum(length + newest - shape.window + 1, oldest)
            whole_first = jnp.clip(self._tile_of(oldest + size - 1), first, whole_end)
            spans.append(_Span(first, whole_first, size, False))
        spans.append(_Span(whole_first, whole_end, size, True))
        few = shape.few_tokens
        if few is None:
            return [*spans, _Span(whole_end, end, size, False)]
        # A block has a tile though it sees no key: the copies of the next one begin in it.
        num_last = last_key - (end - 1) * size
        is_few = (num_last <= few) & (whole_end < end)
        before_few = end - is_few.astype(jnp.int32)
        return [
            *spans,
            _Span(whole_end, before_few, size, False),
            _Span(before_few, end, few, False),
        ]

    def _extent(self, block: Any) -> tuple[Any, Any, Any]:
        """Returns a block's first tile, the one after its last, at least one, and the position
        after the last key that it sees."""
        scalars, shape = self.scalars, self.shape
        row = scalars.row[block]
        length, last = scalars.lengths[row], scalars.ends[row]
        end = jnp.minimum(last, length + scalars.first[block] + scalars.count[block])
        if shape.is_mixed:
            last = jnp.where(scalars.is_causal[row] > 0, end, last)
        elif not shape.words:
            last = end
        first = jnp.int32(0)
        if shape.begins_later:
            first = self._tile_of(_first_seen(scalars, block, shape))
        return first, jnp.maximum(self._tile_of(last + shape.tile_tokens - 1), first + 1), last

    def _tile_of(self, position: Any) -> Any:
        return _divide(position, self.shape.tile_tokens)

    def start_first(self, block: Any) -> None:
        """Begins to copy the first tiles of a core, into all slots but one."""
        self.cursor[_FILL] = self.cursor[_READ] = 0
        self._enter(block)

        def body(_: Any, __: Any) -> Any:
            self.start_next()
            return ()

        lax.fori_loop(0, self.shape.slots - 1, body, ())

    def start_next(self) -> None:
        """Begins to copy the tile that the cursor is at, if there is one, and moves on."""
        cursor = self.cursor
        block = cursor[_BLOCK]

        @pl.when(block < self.shape.num_blocks)
        def _():
            tile, slot = cursor[_TILE], cursor[_FILL]
            self._each_page(block, tile, slot, lambda copy: copy.start())
            cursor[_FILL] = self._after(slot)
            cursor[_TILE] = tile + 1
            pl.when(tile + 1 == cursor[_END])(lambda: self._enter(block + self.shape.cores))

    def _enter(self, block: Any) -> None:
        """Moves the cursor to the first tile of a block; past all blocks if it is not in use."""
        most = self.shape.num_blocks
        known = jnp.minimum(block, most - 1)
        is_used = (block < most) & (self.scalars.count[known] > 0)
        self.cursor[_TILE], self.cursor[_END], _ = self._extent(known)
        self.cursor[_BLOCK] = jnp.where(is_used, block, most)

    @property
    def next_slot(self) -> Any:
        """The slot of the tile that is waited for next."""
        return self.cursor[_READ]

    def wait(self, block: Any, tile: Any, is_whole: bool) -> Any:
        """Waits until the tile that is next is there, and returns its slot."""
        slot = self.next_slot
        self.cursor[_READ] = self._after(slot)
        if is_whole:  # for all of its pages at once
            for side, tiles in enumerate((self.k_tiles, self.v_tiles)):
                pltpu.make_async_copy(
                    tiles.at[slot], tiles.at[slot], self.sems.at[slot, side]
                ).wait()
        else:
            self._each_page(block, tile, slot, lambda copy: copy.wait())
        return slot

    def _after(self, slot: Any) -> Any:
        return jnp.where(slot + 1 == self.shape.slots, 0, slot + 1)

    def _each_page(self, block: Any, tile: Any, slot: Any, act: Callable[[Any], None]) -> None:
        """Acts on the copies of the pages of a tile that hold keys in use.

        Pages that end before the first key that any query sees are not copied.
        """
        shape = self.shape
        row = self.scalars.row[block]
        num_pages = _divide(self.scalars.ends[row] + shape.page_size - 1, shape.page_size)
        before = tile * shape.pages_per_tile
        first_page = None
        if shape.begins_later:
            first_page = _divide(_first_seen(self.scalars, block, shape), shape.page_size)
        entry = row * shape.pages_per_row + before

        def of_page(place: int) -> None:
            page = self.scalars.table[entry + place]
            for side, (hbm, tiles) in enumerate(
                [(self.k_hbm, self.k_tiles), (self.v_hbm, self.v_tiles)]
            ):
                sem = self.sems.at[slot, side]
                act(pltpu.make_async_copy(hbm.at[page], tiles.at[slot, place], sem))

        for place in range(shape.pages_per_tile):
            is_used = before + place < num_pages
            if first_page is not None:
                is_used &= before + place >= first_page
            pl.when(is_used)(functools.partial(of_page, place))


# Places in the cursor: the tile to copy next, its block, that block's end, the slot to fill, and
# the slot to read.
_BLOCK, _TILE, _END, _FILL, _READ = range(5)


def _first_seen(scalars: _Scalars, block: Any, shape: _Shape) -> Any:
    """Returns the position of the first key that any query of a block sees, i32[]."""
    if shape.window is None:
        return jnp.int32(shape.first_key)
    row = scalars.row[block]
    oldest = jnp.int32(0)  # new token: nodes of a tree have depths from 0 on
    if not shape.words:
        oldest = scalars.first[block]
    elif shape.is_mixed:
        oldest = jnp.where(scalars.is_causal[row] > 0, scalars.first[block], 0)
    return jnp.maximum(scalars.lengths[row] + oldest - shape.window + 1, shape.first_key)


def _divide(number: Any, divisor: int) -> Any:
    """Returns a number that is not negative, divided and rounded down."""
    if divisor & (divisor - 1):
        return lax.div(number, jnp.int32(divisor))
    return lax.shift_right_logical(number, jnp.int32(divisor.bit_length() - 1))


class _Part(NamedTuple):
    """Some rows of the queries of a key head."""

    head: Any
    begin: Any  # first row
    # Per piece of `keys_at_once` of the tile: bool[rows, keys]. None: every key is visible.
    is_visible: Sequence[Array | None]


class _Scores(NamedTuple):
    """Scores of every second step, MOST_ROWS queries each: refs in VMEM."""

    scores: Any  # f32[MOST_ROWS, tile_tokens], as logarithms to base 2, not summed yet
    # f32[2, steps, MOST_ROWS, LANES]: the highest before a tile and with it, which change places
    # from tile to tile; equal in all lanes.
    top: Any


@dataclasses.dataclass(frozen=True)
class _Sums:
    """The running softmax of a block's queries: Milakov and Gimelshein 2018, section 3."""

    scalars: _Scalars
    q: Any  # dtype[1, kv_heads, query_rows, head_dim]
    bits: Any  # i32[1, query_rows, words], or None
    sinks: Any  # f32[heads] in SMEM, or None
    scales: Any  # of keys and of values, f32[key heads in the pages] in SMEM, or None
    k_tiles: Any
    v_tiles: Any
    top: Any  # f32[kv_heads, top_rows, LANES], equal in all lanes
    total: Any  # f32[kv_heads, query_rows, LANES], which sum to the total
    acc: Any  # f32[kv_heads, query_rows, head_dim]
    ahead: Sequence[_Scores]  # two, or none; see `_Shape.is_ahead`
    shape: _Shape

    def clear(self) -> None:
        """Begins with no key, or with the sink: a key whose value is 0."""
        self.acc[...] = jnp.zeros_like(self.acc)
        if self.sinks is None:
            for top in (self.top, *(each.top for each in self.ahead)):
                top[...] = jnp.full_like(top, MASKED)
            self.total[...] = jnp.zeros_like(self.total)
            return
        self.total[...] = jnp.full_like(self.total, 1 / LANES)
        shape = self.shape

        def sink_of(head: int, begin: int, rows: int) -> Array:
            sink = self._by_query(self.sinks, head, shape.group, begin, rows)
            return jnp.broadcast_to(sink * LOG2_E, (rows, LANES))

        for head in range(shape.kv_heads):
            self.top[head] = sink_of(head, 0, shape.top_rows)
        turns = shape.query_rows // MOST_ROWS
        for which, of in enumerate(self.ahead):
            for place in range(of.top.shape[1]):
                # The last of an odd number of steps lies behind the second ones.
                step = min(2 * place + which, shape.kv_heads * turns - 1)
                sink = sink_of(step // turns, step % turns * MOST_ROWS, MOST_ROWS)
                of.top[:, place] = jnp.broadcast_to(sink, (2, *sink.shape))

    def add(self, block: Any, tile: Any, slot: Any, queries: int, span: _Span) -> None:
        """Adds the keys and values of a tile to what the first so many queries know."""
        shape = self.shape
        steps, heads, rows = shape.steps_of(queries)
        value_masks = self._value_masks(block, tile, span)
        part_rows = ROWS_OF_PART if rows % ROWS_OF_PART == 0 else rows
        at_once = max(MOST_SCORES // (part_rows * span.tokens), 1)
        turns = steps // (shape.kv_heads // heads)  # of each head, or of some heads

        def add_step(step: Any) -> None:
            head = step if turns == 1 else _divide(step, turns)
            begin = 0 if turns == 1 else pl.multiple_of((step - head * turns) * rows, rows)
            parts = [
                _Part(head * heads + place, begin + offset, is_visible)
                for offset in range(0, rows, part_rows)
                for is_visible in [self._visible_of(block, tile, begin + offset, part_rows, span)]
                for place in range(heads)
            ]
            for first in range(0, len(parts), at_once):
                self._add_parts(slot, parts[first : first + at_once], part_rows, value_masks)

        if steps == 1:
            add_step(0)
        else:
            lax.fori_loop(0, steps, lambda step, _: (add_step(step), ())[1], ())

    def score_first(self, block: Any, tile: tuple[Any, Any], span: _Span) -> None:
        """Computes the scores that `add_ahead` expects; tile: its number and its slot."""
        self._score(block, tile, 0, 0, self.ahead[0], span)

    def add_ahead(
        self, block: Any, tile: tuple[Any, Any], following: tuple[Any, Any], span: _Span
    ) -> None:
        """Adds a tile to all queries, MOST_ROWS rows per step, scores computed one step ahead.

        The products of the next step then hide the softmax of this one. A turn of the loop is
        some pairs of steps. Those of a pair have places of their own for scores: the compiler
        knows that they differ.

        Args:
          tile, following: number and slot of this tile, whose first step was scored, and of the
            one whose first step is scored here.
        """
        (first, second), (turns, pairs) = self.ahead, self.shape.turns_ahead
        value_masks = self._value_masks(block, tile[0], span)
        score = functools.partial(self._score, block, span=span)
        add = functools.partial(self._add_scores, tile, value_masks=value_masks)

        def turn(number: Any, _: Any) -> Any:
            is_end = number + 1 == turns
            for pair in range(pairs):
                place = number * pairs + pair
                score(tile, 2 * place + 1, place, second)
                add(2 * place, place, first)
                if pair + 1 < pairs:
                    score(tile, 2 * place + 2, place + 1, first)
                else:
                    after = jnp.where(is_end, 0, place + 1)
                    of = [jnp.where(is_end, *two) for two in zip(following, tile, strict=True)]
                    score(of, 2 * after, after, first)
                add(2 * place + 1, place, second)
            return ()

        lax.fori_loop(0, turns, turn, ())
        if self.shape.steps_ahead[0] < self.shape.steps_ahead[1]:
            place = turns * pairs
            score(tile, 2 * place, place, second)
            add(2 * place, place, second)

    def _score(
        self, block: Any, tile: Sequence[Any], step: Any, place: Any, to: _Scores, span: _Span
    ) -> None:
        """Computes the scores of a step of MOST_ROWS rows, and the highest with them."""
        number, slot = tile
        head, begin = self._rows_of(step)
        is_visible = self._visible_of(block, number, begin, MOST_ROWS, span)
        scores = self._scores_of(slot, _Part(head, begin, is_visible), MOST_ROWS)
        size = self.shape.keys_at_once
        for piece, of_piece in enumerate(scores):
            to.scores[:, piece * size : (piece + 1) * size] = of_piece
        to.top[1 - number % 2, place] = _top_of(to.top[number % 2, place], scores)

    def _add_scores(
        self,
        tile: tuple[Any, Any],
        step: Any,
        place: Any,
        of: _Scores,
        value_masks: Sequence[Array | None],
    ) -> None:
        """Adds the values of a tile to a step's rows by the scores computed before."""
        number, slot = tile
        size = self.shape.keys_at_once
        begins = range(0, self.shape.tile_tokens, size)
        top = of.top[1 - number % 2, place]
        weights = _weights(
            top, [of.scores[:, first : first + size] for first in begins], value_masks
        )
        decay = jnp.exp2(of.top[number % 2, place] - top)
        head, begin = self._rows_of(step)
        self._add_weights(slot, head, pl.ds(begin, MOST_ROWS), decay, weights, value_masks)

    def _rows_of(self, step: Any) -> tuple[Any, Any]:
        """Returns the head of a step of MOST_ROWS rows, and its first row."""
        turns = self.shape.query_rows // MOST_ROWS
        head = _divide(jnp.int32(step), turns)
        return head, pl.multiple_of((step - head * turns) * MOST_ROWS, MOST_ROWS)

    def _visible_of(
        self, block: Any, tile: Any, begin: Any, rows: int, span: _Span
    ) -> list[Array | None]:
        """Returns `_visible` of each piece of a tile; None where all of it is visible."""
        return [
            None if span.is_whole else self._visible(block, tile, begin, rows, piece)
            for piece in range(0, span.tokens, self.shape.keys_at_once)
        ]

    def _value_masks(self, block: Any, tile: Any, span: _Span) -> list[Array | None]:
        """Returns `_value_mask` of each piece of a tile; None where all of it is needed."""
        return [
            None if span.is_whole else self._value_mask(block, tile, piece)
            for piece in range(0, span.tokens, self.shape.keys_at_once)
        ]

    def _add_parts(
        self,
        slot: Any,
        parts: Sequence[_Part],
        rows: int,
        value_masks: Sequence[Array | None],  # per piece of the tile, see `_value_mask`
    ) -> None:
        """Adds the first pieces of a tile to parts of the queries, of so many rows each.

        Each operation is done for all parts before the next one, so that the products of one
        part hide the latency of another's.
        """
        scores = [self._scores_of(slot, part, rows) for part in parts]
        places = [(part.head, pl.ds(part.begin, rows)) for part in parts]
        tops = [_top_of(self.top[place], of) for place, of in zip(places, scores, strict=True)]
        weights = [_weights(*known, value_masks) for known in zip(tops, scores, strict=True)]
        for place, top, of in zip(places, tops, weights, strict=True):
            decay = jnp.exp2(self.top[place] - top)
            self._add_weights(slot, *place, decay, of, value_masks)
            self.top[place] = top

    def _scores_of(self, slot: Any, part: _Part, rows: int) -> list[Array]:
        """Returns the scores of the first pieces of a tile, f32[rows, keys_at_once] each."""
        q, scores = self.q[0, part.head, pl.ds(part.begin, rows)], []
        for piece, is_visible in enumerate(part.is_visible):
            k = self._read(self.k_tiles, slot, part.head, piece)
            product = self._multiply(q, k, (((1,), (1,)), ((), ())))
            scores.append(self._scaled(product, part, rows, is_visible))
        return scores

    def _add_weights(
        self,
        slot: Any,
        head: Any,
        place: Any,  # of the rows
        decay: Array,  # f32[rows, LANES], of what was added before
        weights: Sequence[Array],
        value_masks: Sequence[Array | None],  # per piece of the tile, see `_value_mask`
    ) -> None:
        """Adds the values of the first pieces of a tile by their weights.

        Pieces are summed in order: those that are masked as a whole add 0, so that leaving them
        out changes no bit.
        """
        acc = self.acc[head, place] * _in_lanes(decay, self.shape.head_dim)
        for piece, weight in enumerate(weights):
            v = self._read(self.v_tiles, slot, head, piece)
            if (mask := value_masks[piece]) is not None:
                v = pltpu.bitcast(pltpu.bitcast(v, jnp.int32) & mask, v.dtype)
            acc += self._multiply(weight.astype(v.dtype), v, (((1,), (0,)), ((), ())))
        added = _over_lanes(functools.reduce(jnp.add, weights))
        self.total[head, place] = self.total[head, place] * decay + added
        self.acc[head, place] = acc

    def _multiply(self, left: Array, right: Array, dimensions: Any) -> Array:
        return lax.dot_general(
            left,
            right,
            dimensions,
            precision=precision_of(self.shape.dtype),
            preferred_element_type=jnp.float32,
        )

    def _read(self, tiles: Any, slot: Any, head: Any, piece: int) -> Array:
        """Returns the keys or values of a piece of a tile, dtype[keys_at_once, head_dim]."""
        shape, count = self.shape, self.shape.keys_at_once
        pages, of_page = max(count // shape.page_size, 1), min(count, shape.page_size)
        page, begin = divmod(piece * count, shape.page_size)
        numbers = tiles[slot, page : page + pages, head, begin : begin + of_page]
        numbers = numbers.reshape(count, shape.head_dim)
        if shape.page_dtype == shape.dtype:
            return numbers
        return numbers.astype(jnp.float32).astype(shape.dtype)

    def _scaled(self, scores: Array, part: _Part, rows: int, is_visible: Array | None) -> Array:
        """Returns scores as logarithms to base 2, whose exponential is one instruction."""
        shape = self.shape
        factor = shape.scale * (LOG2_E if shape.softcap is None else 1 / shape.softcap)
        if self.scales is not None:
            heads = shape.heads_per_line
            factor *= self._by_query(self.scales[0], part.head, heads, part.begin, rows)
        scores = scores * factor
        if shape.softcap is not None:
            scores = shape.softcap * LOG2_E * jnp.tanh(scores)
        return scores if is_visible is None else jnp.where(is_visible, scores, MASKED)

    def finish(self, out: Any) -> None:
        """Writes the means of the values; 0 where nothing was seen."""
        for head in range(self.shape.kv_heads):
            total = self.total[head].sum(axis=1, keepdims=True)
            total = jnp.where(total == 0.0, 1.0, total)
            values = self.acc[head] / total
            if self.scales is not None:
                count = self.shape.heads_per_line
                rows = self.shape.query_rows
                values *= self._by_query(self.scales[1], head, count, 0, rows)
            out[0, head] = values.astype(out.dtype)

    def _by_query(self, numbers: Any, line: Any, count: int, begin: Any, rows: int) -> Any:
        """Returns the number that belongs to each query, f32[rows, 1], or to all.

        Args:
          numbers: f32 in SMEM, `count` of each line of keys.
        """
        own, group = numbers[line * count], self.shape.group
        if count == 1:
            return own
        row = begin + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        place = lax.div(lax.rem(row, jnp.int32(group)), jnp.int32(group // count))
        by_query = jnp.full(row.shape, own)
        for other in range(1, count):
            by_query = jnp.where(place == other, numbers[line * count + other], by_query)
        return by_query

    def _visible(self, block: Any, tile: Any, begin: Any, rows: int, first: int) -> Array:
        """Returns which keys of a piece some rows of queries see, bool[rows, keys_at_once].

        Args:
          first: place of the piece in the tile.


        What depends on the key alone is computed for one row, to leave few operations for all.
        """
        shape, scalars = self.shape, self.scalars
        row = scalars.row[block]
        place = first + lax.broadcasted_iota(jnp.int32, (1, shape.keys_at_once), 1)
        position = tile * shape.tile_tokens + place
        new = position - scalars.lengths[row]
        new_or_unseen = jnp.where(position < scalars.ends[row], new, UNSEEN)
        token = _divide(begin + lax.broadcasted_iota(jnp.int32, (rows, 1), 0), shape.group)
        own = scalars.first[block] + token
        if not shape.words:
            is_visible = new_or_unseen <= own
        else:
            words = [self.bits[0, pl.ds(begin, rows), i : i + 1] for i in range(shape.words)]
            is_visible = self._sees(words, new_or_unseen)
            depth = sum(map(lax.population_count, words)) - 1
            if shape.is_mixed:
                in_order = scalars.is_causal[row] > 0
                # One of the two sees nothing.
                is_visible = self._sees(words, jnp.where(in_order, UNSEEN, new_or_unseen))
                is_visible |= jnp.where(in_order, new_or_unseen, UNSEEN) <= own
                depth = jnp.where(in_order, own, depth)
            own = depth
        if shape.window is not None:
            is_visible &= new > own - shape.window
        if shape.first_key:
            is_visible &= position >= shape.first_key
        return is_visible

    def _sees(self, words: Sequence[Any], new: Array) -> Array:
        """Returns whether tokens with bits i32[rows, 1] see new keys i32[1, keys], or the prefix.

        A token has its own bit, so that some bit is set of each that is not padding.
        """
        seen = jnp.int32(0)
        for place, word in enumerate(words):
            shift = new - 32 * place
            bit = lax.shift_left(jnp.ones_like(new), jnp.clip(shift, 0, 31))
            bit = jnp.where((shift >= 0) & (shift < 32), bit, 0)
            seen |= word & jnp.where(new < 0, -1, bit)
        return seen != 0

    def _value_mask(self, block: Any, tile: Any, first: int) -> Array:
        """Returns a mask of the bits of a piece's values that a query may see: others may hold
        NaN.

        i32[keys_at_once * itemsize / 4, head_dim] for values whose neighbours share a word.
        """
        shape = self.shape
        packing = 4 // jnp.dtype(shape.dtype).itemsize
        size = shape.keys_at_once // packing, shape.head_dim
        word = lax.broadcasted_iota(jnp.int32, size, 0)
        mask = jnp.int32(0)
        for place in range(packing):
            bits = (1 << 32 // packing) - 1 << place * (32 // packing)
            bits = jnp.int32(bits - (1 << 32) if bits >> 31 else bits)
            is_needed = self._needed(block, tile, first + word * packing + place)
            mask |= jnp.where(is_needed, bits, 0)
        return mask

    def _needed(self, block: Any, tile: Any, place: Array) -> Array:
        """Returns whether any query of the block may see the tokens at some places of a tile."""
        shape, scalars = self.shape, self.scalars
        row = scalars.row[block]
        position = tile * shape.tile_tokens + place
        is_needed = position < scalars.ends[row]
        if shape.begins_later:
            is_needed &= position >= _first_seen(scalars, block, shape)
        if not shape.has_holes:
            return is_needed
        new = position - scalars.lengths[row]
        words = [scalars.union[row * shape.words + word] for word in range(shape.words)]
        in_tree = (new < 0) | _has_bit(words, new)
        if shape.is_mixed:
            in_tree |= jnp.full(place.shape, scalars.is_causal[row]) > 0
        return is_needed & in_tree


def _top_of(before: Array, scores: Sequence[Array]) -> Array:
    """Returns the highest scores so far, f32[rows, LANES]; before: without these."""
    highest = functools.reduce(jnp.maximum, scores).max(axis=1, keepdims=True)
    return jnp.maximum(before, highest)


def _weights(
    top: Array, scores: Sequence[Array], value_masks: Sequence[Array | None]
) -> list[Array]:
    """Returns exp2(scores - top) of the pieces of a tile; top f32[rows, LANES]."""
    if value_masks[0] is not None:
        # Far above what is masked: its weight is 0 in rows that see nothing, too.
        top = jnp.maximum(top, MASKED / 2)
    return [jnp.exp2(score - _in_lanes(top, score.shape[1])) for score in scores]


def _over_lanes(numbers: Array) -> Array:
    """Returns f32[rows, LANES] that sum to the numbers f32[rows, width] of each row."""
    width = numbers.shape[1]
    if width % LANES:
        return jnp.broadcast_to(numbers.sum(axis=1, keepdims=True), (len(numbers), LANES)) / LANES
    lanes = [numbers[:, first : first + LANES] for first in range(0, width, LANES)]
    return functools.reduce(jnp.add, lanes)


def _in_lanes(numbers: Array, width: int) -> Array:
    """Returns f32[rows, LANES], equal in all lanes, as f32[rows, width] or f32[rows, 1]."""
    if width <= LANES:
        return numbers[:, :width]
    if width % LANES:
        return numbers[:, :1]
    return jnp.concatenate([numbers] * (width // LANES), axis=1)


def _has_bit(words: Sequence[Any], new: Array) -> Array:
    """Returns whether the bit of each new token is set, bool of new's shape."""
    has_bit = jnp.zeros(new.shape, bool)
    for place, word in enumerate(words):
        shift = new - 32 * place
        is_word = (shift >= 0) & (shift < 32)
        word = jnp.broadcast_to(word, new.shape)
        bit = lax.shift_right_logical(word, jnp.clip(shift, 0, 31)) & 1
        has_bit |= is_word & (bit == 1)
    return has_bit
