"""Tree attention for GPUs, written for XLA: a list of tiles of keys, many at a time.

A turn of a loop costs a GPU microseconds, and XLA multiplies matrices from memory. A loop that
takes all rows forward by a few keys spends its time on launches, and ends with the longest row.
Here an entry of work is a block of up to 64 queries of one row with one tile of at least 512 of
its keys. A turn takes the next entries of a list, whichever rows they belong to.

    rows of 1,300 and 300 tokens, tiles of 512, 2 lanes, turns of 4 entries (- is no work):

    wave 0, a turn    (row 0, tile 0)  (row 0, tile 1)  (row 1, tile 0)  -
    wave 1, a turn    (row 0, tile 2)  -                -                -

A block has several lanes, each a running softmax, so that a long row fills a turn by itself. Tile
t goes to lane t % lanes; a wave is one tile of every lane, and begins with a turn of its own, so
that no two entries of a turn add to one lane. At the end the lanes of a block are merged.

So a token's keys are summed in an order that follows from their positions alone, and what other
rows hold does not matter. The bits of a result vary with what a compiled step varies with: the
numbers of lanes and of entries of a turn, which follow from its shapes, and the products that the
compiler picks for them.

Keys and values keep their dtype in products, whose sums are float32; softmax is float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import layout, running_softmax
from pallas_kernels.running_softmax import RunningSoftmax
from pallas_kernels.tree_attention.query_blocks import (
    Blocks,
    blocks_of,
    by_block,
    lay_flat,
    most_blocks,
    queries_by_head,
)
from pallas_kernels.tree_attention.reference import check_window
from pallas_kernels.tree_attention.xla import by_query_head, gather_tile, visible

TILE_TOKENS = 512  # keys of an entry, rounded up to whole pages
MOST_QUERIES = 64  # tokens of a block
# Chosen by bytes, not by time. Few entries lengthen the list by less than a turn per wave; many
# take fewer turns, each of which waits for the host: XLA reads there whether a loop goes on.
FEWEST_ENTRIES, MOST_ENTRIES = 8, 32
TURN_BYTES = 128 << 20  # of keys, values, scores and weights of a turn
MOST_LANES = 16
LANE_BYTES = 64 << 20  # of the running softmaxes of all lanes


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Static sizes of a call."""

    kv_heads: int
    group: int  # query heads of a key head
    head_dim: int
    queries: int  # tokens of a block
    num_blocks: int
    tile_pages: int
    tile_tokens: int
    num_tiles: int  # of a row's table
    lanes: int  # of a block
    entries: int  # of a turn

    @property
    def query_rows(self) -> int:
        return self.queries * self.group

    @property
    def num_lanes(self) -> int:
        """Lanes of all blocks."""
        return self.num_blocks * self.lanes


def tree_attention_xla_gpu(
    q: Array,  # dtype[num_tokens, heads, head_dim]
    k_pages: Array,  # as layout.init_pages makes them
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
) -> Array:
    """See `tree_attention`. Work follows each row's own tiles of keys in use."""
    check_window(window, ancestor_bits)
    dtype = _product_dtype(q, k_pages)
    shape = _shape_of(q, k_pages, block_table, max_tokens_per_row, dtype)
    num_new = jnp.minimum(row_starts[1:] - row_starts[:-1], max_tokens_per_row)
    blocks = blocks_of(num_new, row_starts, q.shape[0], shape)
    of_blocks = functools.partial(by_block, blocks=blocks, row_starts=row_starts, sizes=shape)
    own = blocks.first[:, None] + jnp.arange(shape.queries, dtype=jnp.int32)[None]
    is_token = own < (blocks.first + blocks.count)[:, None]
    keys = _keys_of(blocks, lengths, num_new, num_new_keys, ancestor_bits, is_causal)
    work = _list_work(blocks, keys, window, first_key, shape)
    bits = None if ancestor_bits is None else of_blocks(ancestor_bits)
    in_order = None if is_causal is None else is_causal[blocks.row]
    table = _tiles_of(block_table, shape)
    queries = queries_by_head(of_blocks(q).astype(dtype), shape)
    # A key's scale multiplies its scores, a value's the result: pages are read as they are.
    factor = scale * _by_query_row(by_query_head(k_scale, q), shape)
    precision = running_softmax.precision_of(q.dtype)

    def turn(index: Array, lanes: RunningSoftmax) -> RunningSoftmax:
        entry = jax.tree.map(lambda of_turn: of_turn[index], work.entries)
        block, lane = entry.block, entry.lane
        ids = table[blocks.row[block], entry.tile]
        start = entry.tile * shape.tile_tokens
        is_visible = is_token[block][:, :, None] & visible(
            start[:, None] + jnp.arange(shape.tile_tokens, dtype=jnp.int32)[None],
            keys.length[block],
            keys.end[block],
            own[block],
            None if bits is None else bits[block],
            None if in_order is None else in_order[block],
            window,
            first_key,
        )
        # A masked value has weight 0, but 0 * NaN is NaN, and slots that hold no key may be.
        is_used = jnp.any(is_visible, axis=1)[:, None, :, None]
        v = jnp.where(is_used, gather_tile(v_pages, ids, dtype), 0)
        scores = factor * jnp.einsum(
            "ehqd,ehkd->ehqk",
            queries[block],
            gather_tile(k_pages, ids, dtype),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        is_visible = jnp.repeat(is_visible, shape.group, axis=1)[:, None]
        before = jax.tree.map(lambda sums: sums[lane], lanes)
        after = running_softmax.add_tile(
            before, "ehqk,ehkd->ehqd", scores, is_visible, v, precision
        )
        put = lambda sums, new: sums.at[lane].set(new, mode="drop", unique_indices=True)
        return jax.tree.map(put, lanes, after)

    start = running_softmax.start((shape.num_lanes, *queries.shape[1:]))
    lanes = lax.fori_loop(0, work.num_turns, turn, start)
    first_keys: Any = None
    if sinks is not None:
        first_keys = _by_query_row(sinks.astype(jnp.float32)[None, :, None], shape)
    by_lane = lambda sums: sums.reshape(shape.num_blocks, shape.lanes, *sums.shape[1:])
    merged = running_softmax.merge(jax.tree.map(by_lane, lanes), 1, first_keys)
    out = lay_flat(running_softmax.finish(merged), num_new, row_starts, q, shape)
    return (out * by_query_head(v_scale, q)).astype(q.dtype)


def _product_dtype(q: Array, pages: Array) -> jnp.dtype:
    """Returns the dtype of the factors of both products.

    It is the queries' for quantised pages, whose numbers all three float dtypes hold exactly.
    """
    return q.dtype if layout.is_quantized(pages) else jnp.promote_types(q.dtype, pages.dtype)


def _shape_of(
    q: Array, k_pages: Array, block_table: Array, max_tokens_per_row: int, dtype: jnp.dtype
) -> _Shape:
    """Returns the sizes of a call: tiles, lanes and entries of a turn among them."""
    num_tokens, heads, head_dim = q.shape
    rows, pages_per_row = block_table.shape
    kv_heads, page_size = layout.kv_heads(k_pages), layout.page_size(k_pages)
    tile_pages = min(-(-TILE_TOKENS // page_size), pages_per_row)
    tile_tokens, num_tiles = tile_pages * page_size, -(-pages_per_row // tile_pages)
    queries = min(max_tokens_per_row, MOST_QUERIES)
    num_blocks = most_blocks(rows, num_tokens, max_tokens_per_row, queries)
    lane_bytes = 4 * heads * queries * (head_dim + 2)
    lanes = LANE_BYTES // (num_blocks * lane_bytes)
    lanes = max(min(lanes, MOST_LANES, num_tiles), 1)
    itemsize = jnp.dtype(dtype).itemsize
    read = 2 * kv_heads * head_dim * itemsize
    scored = heads * queries * (4 + itemsize)
    entries = TURN_BYTES // (tile_tokens * (read + scored))
    entries = min(entries, MOST_ENTRIES, max(num_blocks, FEWEST_ENTRIES), num_blocks * lanes)
    return _Shape(
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        queries=queries,
        num_blocks=num_blocks,
        tile_pages=tile_pages,
        tile_tokens=tile_tokens,
        num_tiles=num_tiles,
        lanes=lanes,
        entries=max(entries, 1),
    )


class _Keys(NamedTuple):
    """Positions of the keys that a block's queries may see; i32[blocks] each."""

    length: Array  # position of the row's new token 0
    oldest_query: Array  # new token from which the window of the block's first query counts
    end: Array  # one past the last key


def _keys_of(
    blocks: Blocks,
    lengths: Array,
    num_new: Array,
    num_new_keys: Array | None,
    ancestor_bits: Array | None,
    is_causal: Array | None,
) -> _Keys:
    length = lengths[blocks.row]
    last_query = blocks.first + blocks.count
    if ancestor_bits is None:
        return _Keys(length, blocks.first, length + last_query)
    seen = (num_new if num_new_keys is None else num_new_keys)[blocks.row]
    root = jnp.zeros_like(length)
    if is_causal is None:
        return _Keys(length, root, length + seen)
    in_order = is_causal[blocks.row]
    return _Keys(
        length,
        jnp.where(in_order, blocks.first, root),
        length + jnp.where(in_order, last_query, seen),
    )


class _Entries(NamedTuple):
    """Entries of every turn, i32[turns, entries] each."""

    block: Array
    tile: Array
    lane: Array  # among those of all blocks; past the last where there is no work


class _Work(NamedTuple):
    entries: _Entries
    num_turns: Array  # i32[], turns in use


def _list_work(
    blocks: Blocks, keys: _Keys, window: int | None, first_key: int, shape: _Shape
) -> _Work:
    """Returns the list of work: wave by wave, in each block by block, in each tile by tile."""
    last = jnp.where(blocks.count > 0, -(-keys.end // shape.tile_tokens), 0)
    oldest = jnp.full_like(last, first_key)
    if window is not None:
        oldest = jnp.maximum(keys.length + keys.oldest_query - window + 1, first_key)
    first = jnp.minimum(oldest // shape.tile_tokens, last)
    num_waves = -(-shape.num_tiles // shape.lanes)
    wave = shape.lanes * jnp.arange(num_waves, dtype=jnp.int32)[:, None]
    begin, end = (jnp.clip(tile[None], wave, wave + shape.lanes) for tile in (first, last))
    count = end - begin  # [waves, blocks]
    turns = -(-count.sum(axis=1) // shape.entries)
    first_turn = jnp.cumsum(turns) - turns
    ends = first_turn[:, None] * shape.entries + jnp.cumsum(count, axis=1)
    most_turns = num_waves * -(-shape.num_lanes // shape.entries)
    place = jnp.arange(most_turns * shape.entries, dtype=jnp.int32)
    # The number of (wave, block) pairs that end at or before a place: whose it is.
    ended = jnp.zeros_like(place).at[ends.reshape(-1)].add(1, mode="drop")
    pair = jnp.minimum(jnp.cumsum(ended), count.size - 1)
    place_in_pair = place - (ends - count).reshape(-1)[pair]
    # Places before the pair's first fill the turn of the wave before, those after are behind all.
    is_work = (place_in_pair >= 0) & (place_in_pair < count.reshape(-1)[pair])
    tile = begin.reshape(-1)[pair] + place_in_pair
    block = pair % shape.num_blocks
    nowhere = shape.num_lanes + place % shape.entries  # each its own, as unique indices must be
    entries = _Entries(
        block=block,
        tile=jnp.where(is_work, tile, 0),
        lane=jnp.where(is_work, block * shape.lanes + tile % shape.lanes, nowhere),
    )
    by_turn = lambda values: values.astype(jnp.int32).reshape(most_turns, shape.entries)
    return _Work(jax.tree.map(by_turn, entries), turns.sum())


def _tiles_of(block_table: Array, shape: _Shape) -> Array:
    """Returns the pages of each tile, i32[rows, tiles, tile_pages], all of which exist."""
    rows, pages_per_row = block_table.shape
    padding = shape.num_tiles * shape.tile_pages - pages_per_row
    table = jnp.pad(jnp.maximum(block_table, 0), ((0, 0), (0, padding)))
    return table.reshape(rows, shape.num_tiles, shape.tile_pages)


def _by_query_row(by_head: Array | float, shape: _Shape) -> Array | float:
    """Turns a number of each query head, f32[1, heads, 1], to f32[1, kv_heads, query_rows, 1]."""
    if not isinstance(by_head, Array):
        return by_head
    by_head = by_head.reshape(1, shape.kv_heads, shape.group)
    return jnp.tile(by_head, (1, 1, shape.queries))[..., None]
