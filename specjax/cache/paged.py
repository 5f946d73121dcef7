"""The paged KV cache: pages of every layer, and whose they are.

Every operation is a pure function; none moves pages. Requests that cannot be met
change nothing and say so in a flag, because device code cannot raise.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import layout
from pallas_kernels.write_kv import write_kv
from specjax.models.base import ModelConfig

NO_PAGE = -1

# Keys and values of one layer: (k_pages, v_pages).
Pages = tuple[Array, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedKVCache:
    """Key and value pages of every layer, and the table that says whose they are.

    Positions at or past `lengths` hold rejected drafts: readers mask them, the
    next write covers them, nobody clears them. Rejecting a draft costs nothing.

    Invariants: a page is free, and on the stack once, exactly when its reference
    count is 0; a row's table holds its pages in order, then NO_PAGE.
    """

    # Per layer, so that a loop writes in place: stacked layers were measured to
    # copy the whole pool in every step.
    pages: tuple[Pages, ...]  # dtype[num_pages, kv_heads, page_size, head_dim] each
    block_table: Array  # i32[rows, pages_per_row]
    lengths: Array  # i32[rows], tokens whose KV is final
    ref_counts: Array  # i32[num_pages], how many rows and prefixes hold each page
    free_pages: Array  # i32[num_pages], a stack: the first num_free are free
    num_free: Array  # i32[1]; an axis of its own, so that shards' pools lie end to end

    @property
    def page_size(self) -> int:
        return layout.page_size(self.pages[0][0])

    @property
    def num_pages(self) -> int:
        return self.ref_counts.shape[0]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size


def init_pages(
    config: ModelConfig, num_pages: int, page_size: int, dtype
) -> tuple[Pages, ...]:
    """Returns empty pages for every layer of a model."""
    return tuple(
        layout.init_pages(
            num_pages, page_size, config.num_kv_heads, config.head_dim, dtype
        )
        for _ in range(config.num_layers)
    )


def init(
    config: ModelConfig,
    *,
    rows: int,
    num_pages: int,
    page_size: int,
    pages_per_row: int,
    dtype,
    num_shards: int = 1,
) -> PagedKVCache:
    """Returns a cache in which every page is free and every row empty.

    Args:
      num_pages: of all shards together; page ids are a shard's own.
      num_shards: pools laid end to end, to be split over a mesh's data axis.
    """
    shard_pages = num_pages // num_shards
    return PagedKVCache(
        pages=init_pages(config, num_pages, page_size, dtype),
        block_table=jnp.full((rows, pages_per_row), NO_PAGE, jnp.int32),
        lengths=jnp.zeros(rows, jnp.int32),
        ref_counts=jnp.zeros(num_pages, jnp.int32),
        # Page 0 on top, so that small examples read in order.
        free_pages=jnp.tile(
            jnp.arange(shard_pages - 1, -1, -1, dtype=jnp.int32), num_shards
        ),
        num_free=jnp.full(num_shards, shard_pages, jnp.int32),
    )


def slots(
    block_table: Array,
    row_ids: Array,
    positions: Array,
    *,
    page_size: int,
    num_slots: int,
) -> Array:
    """Returns the slot of each (row, position), i32[n]; `num_slots` where there is none.

    Args:
      block_table: i32[rows, pages_per_row].
      row_ids: i32[n]; a row past the table has no slots.
      positions: i32[n]; negative ones, and those past the table, have no slots.
    """
    rows, pages_per_row = block_table.shape
    entry = positions // page_size
    is_inside = (
        (row_ids >= 0) & (row_ids < rows) & (positions >= 0) & (entry < pages_per_row)
    )
    page = block_table[
        jnp.clip(row_ids, 0, rows - 1), jnp.clip(entry, 0, pages_per_row - 1)
    ]
    # One past the end, because .at[slot].set(mode="drop") drops it. -1 would wrap to the last slot.
    return jnp.where(
        is_inside & (page != NO_PAGE),
        page * page_size + positions % page_size,
        num_slots,
    )


def num_held(cache: PagedKVCache) -> Array:
    """Returns how many pages each row holds, i32[rows]."""
    return jnp.sum(cache.block_table != NO_PAGE, axis=1, dtype=jnp.int32)


def allocate(cache: PagedKVCache, num_tokens: Array) -> tuple[PagedKVCache, Array]:
    """Gives each row the pages it lacks to hold `num_tokens` tokens.

    Args:
      num_tokens: i32[rows], tokens in all, those it already has room for included.

    Returns:
      The cache, and is_out_of_pages bool[]: when the free pages, or a row's table,
      cannot hold what is asked for, nothing is given to any row.
    """
    held = num_held(cache)
    wanted = -(-num_tokens // cache.page_size)
    missing = jnp.maximum(wanted - held, 0)
    total = jnp.sum(missing)
    is_out = (total > cache.num_free[0]) | jnp.any(wanted > cache.block_table.shape[1])
    missing = jnp.where(is_out, 0, missing)
    total = jnp.where(is_out, 0, total)
    # Row r takes the `first[r]`-th and following pages from the top of the stack.
    first = jnp.cumsum(missing) - missing
    entry = jnp.arange(cache.block_table.shape[1])[None, :]
    is_new = (entry >= held[:, None]) & (entry < (held + missing)[:, None])
    place = cache.num_free[0] - 1 - (first[:, None] + entry - held[:, None])
    page = cache.free_pages[jnp.clip(place, 0, cache.num_pages - 1)]
    taken = jnp.where(is_new, page, cache.num_pages)
    return dataclasses.replace(
        cache,
        block_table=jnp.where(is_new, page, cache.block_table),
        ref_counts=cache.ref_counts.at[taken].add(1, mode="drop"),
        num_free=cache.num_free - total,
    ), is_out


def share(
    cache: PagedKVCache, source_row: Array, target_row: Array, num_tokens: Array
) -> PagedKVCache:
    """Gives an empty row the pages that hold another row's first `num_tokens` tokens.

    Both then read the same pages; `make_writable` gives a row its own copy of a
    partly filled last page before it writes there. All arguments are i32[].
    """
    entry = jnp.arange(cache.block_table.shape[1])
    held = -(-num_tokens // cache.page_size)
    pages = jnp.where(entry < held, cache.block_table[source_row], NO_PAGE)
    counted = jnp.where(pages == NO_PAGE, cache.num_pages, pages)
    return dataclasses.replace(
        cache,
        block_table=cache.block_table.at[target_row].set(pages),
        lengths=cache.lengths.at[target_row].set(num_tokens),
        ref_counts=cache.ref_counts.at[counted].add(1, mode="drop"),
    )


def make_writable(
    cache: PagedKVCache, other_pages: tuple[Pages, ...] = ()
) -> tuple[PagedKVCache, tuple[Pages, ...], Array]:
    """Copies on write: each row's page at position `lengths` becomes its own.

    Only the page a row writes next can be both shared and partly filled; full
    pages are never written again.

    Args:
      other_pages: pages of a drafter, which live under the same page ids.

    Returns:
      The cache, `other_pages` with the same pages copied, and is_out_of_pages
      bool[]: when copies lack free pages nothing changes.
    """
    rows, pages_per_row = cache.block_table.shape
    next_entry = cache.lengths // cache.page_size
    entry = jnp.minimum(next_entry, pages_per_row - 1)
    page = cache.block_table[jnp.arange(rows), entry]
    is_full = next_entry >= pages_per_row  # writes no more
    has_page = (page != NO_PAGE) & ~is_full
    sharers = jnp.where(has_page, cache.ref_counts[jnp.clip(page, 0)], 0)
    # Rows that share a page copy it in row order; each copy drops the count, so the last may keep it.
    is_same = has_page[:, None] & (page[:, None] == page[None, :])
    num_earlier = jnp.sum(jnp.tril(is_same, -1), axis=1)
    needs_copy = has_page & (sharers - num_earlier > 1)
    order = jnp.cumsum(needs_copy) - needs_copy
    total = jnp.sum(needs_copy)
    is_out = total > cache.num_free[0]
    needs_copy = needs_copy & ~is_out
    fresh = cache.free_pages[
        jnp.clip(cache.num_free[0] - 1 - order, 0, cache.num_pages - 1)
    ]
    source = jnp.where(needs_copy, page, cache.num_pages)
    target = jnp.where(needs_copy, fresh, cache.num_pages)

    def copy(pages: Pages) -> Pages:
        k_pages, v_pages = (layout.copy_pages(side, source, target) for side in pages)
        return k_pages, v_pages

    ref_counts = (
        cache.ref_counts.at[source].add(-1, mode="drop").at[target].add(1, mode="drop")
    )
    table = cache.block_table.at[jnp.arange(rows), entry].set(
        jnp.where(needs_copy, fresh, page)
    )
    new_cache = dataclasses.replace(
        cache,
        pages=tuple(copy(pages) for pages in cache.pages),
        block_table=table,
        ref_counts=ref_counts,
        num_free=cache.num_free - jnp.where(is_out, 0, total),
    )
    return new_cache, tuple(copy(pages) for pages in other_pages), is_out


def write(pages: Pages, k: Array, v: Array, slot_mapping: Array) -> Pages:
    """Writes keys and values [num_tokens, kv_heads, head_dim] of one layer to their slots."""
    return write_kv(*pages, k, v, slot_mapping)


def commit(cache: PagedKVCache, num_committed: Array) -> PagedKVCache:
    """Makes the next num_committed i32[rows] tokens of each row final."""
    return dataclasses.replace(cache, lengths=cache.lengths + num_committed)


def release(cache: PagedKVCache, row_mask: Array) -> PagedKVCache:
    """Empties the rows of row_mask bool[rows]; pages that nobody holds become free."""
    held = jnp.where(
        row_mask[:, None] & (cache.block_table != NO_PAGE),
        cache.block_table,
        cache.num_pages,
    )
    ref_counts = cache.ref_counts.at[held.reshape(-1)].add(-1, mode="drop")
    is_freed = (cache.ref_counts > 0) & (ref_counts == 0)
    place = cache.num_free[0] + jnp.cumsum(is_freed) - 1
    place = jnp.where(is_freed, place, cache.num_pages)
    return dataclasses.replace(
        cache,
        block_table=jnp.where(row_mask[:, None], NO_PAGE, cache.block_table),
        lengths=jnp.where(row_mask, 0, cache.lengths),
        ref_counts=ref_counts,
        free_pages=cache.free_pages.at[place].set(
            jnp.arange(cache.num_pages, dtype=jnp.int32), mode="drop"
        ),
        num_free=cache.num_free + jnp.sum(is_freed, dtype=jnp.int32),
    )
