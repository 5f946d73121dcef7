"""The paged KV cache: pages of every layer, and the block table of the pages of each row.

The host allocates pages to rows, in `specjax.engine.pages`, and sends the block table to the
device with each burst.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import layout
from pallas_kernels.implementations import target_platform
from pallas_kernels.write_kv import write_kv
from specjax.models.base import ModelConfig

NO_PAGE = -1

# By EngineConfig.kv_cache_dtype.
QUANTIZED = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}

# Keys and values of one layer: (k_pages, v_pages).
Pages = tuple[Array, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedKVCache:
    """Key and value pages of every layer, and the table of the pages of each row.

    Positions at or past `lengths` hold rejected drafts. Readers mask them and the next
    write overwrites them; they are never cleared, so rejecting a draft costs nothing.

    Invariant: a row's table holds its pages in order, then NO_PAGE. Full pages of a
    prefix may be in the tables of several rows, and are never written again.
    """

    # One array per layer, so that a loop writes in place: with stacked layers every step
    # was measured to copy the whole pool.
    pages: tuple[Pages, ...]  # dtype[num_pages, kv_heads, page_size, head_dim] each
    block_table: Array  # i32[rows, pages_per_row]
    lengths: Array  # i32[rows], tokens whose KV is final
    # f32[2, layers, kv_heads], keys first: factors of the keys and values read from int8 and
    # fp8 pages; None for other dtypes.
    scales: Array | None = None

    @property
    def page_size(self) -> int:
        return layout.page_size(self.pages[0][0])

    @property
    def num_pages(self) -> int:
        return layout.num_pages(self.pages[0][0])

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size


def pages_dtype(kv_cache_dtype: str | None, dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of the target's pages.

    Args:
      kv_cache_dtype: EngineConfig.kv_cache_dtype.
      dtype: of the weights.
    """
    return jnp.dtype(dtype if kv_cache_dtype is None else QUANTIZED[kv_cache_dtype])


def init_pages(
    config: ModelConfig, num_pages: int, page_size: int, dtype: DTypeLike, *, kv_shards: int = 1
) -> tuple[Pages, ...]:
    """Returns empty pages for every layer of a model, in the layout of the platform's kernels.

    Args:
      kv_shards: number of devices of a mesh that heads are split over.
    """
    shape = page_shape(config, num_pages, page_size, kv_shards=kv_shards)
    pair = lambda: (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    return tuple(pair() for _ in range(config.num_layers))


def page_shape(
    config: ModelConfig, num_pages: int, page_size: int, *, kv_shards: int
) -> tuple[int, int, int, int]:
    """Returns the shape of a layer's key pages over all devices; on a TPU, in lanes."""
    _, lines, _, width = layout.page_shape(
        num_pages,
        page_size,
        config.num_kv_heads // kv_shards,
        config.head_dim,
        in_lanes=target_platform() == "tpu",
    )
    return num_pages, lines * kv_shards, page_size, width


def numbers_per_token(config: ModelConfig, *, kv_shards: int = 1) -> int:
    """Returns the numbers in the keys and values of one token, over all layers."""
    return 2 * config.num_layers * math.prod(page_shape(config, 1, 1, kv_shards=kv_shards))


def init(
    config: ModelConfig,
    *,
    rows: int,
    num_pages: int,
    page_size: int,
    pages_per_row: int,
    dtype: DTypeLike,
    kv_shards: int = 1,
) -> PagedKVCache:
    """Returns a cache in which every row is empty and has no page; scales, if any, are 1.

    Args:
      num_pages: over all shards; page ids are local to a shard.
      kv_shards: as for `init_pages`.
    """
    return PagedKVCache(
        pages=init_pages(config, num_pages, page_size, dtype, kv_shards=kv_shards),
        block_table=jnp.full((rows, pages_per_row), NO_PAGE, jnp.int32),
        lengths=jnp.zeros(rows, jnp.int32),
        scales=jnp.ones((2, config.num_layers, config.num_kv_heads), jnp.float32)
        if jnp.dtype(dtype) in QUANTIZED.values()
        else None,
    )


def own_pages(rows: int, pages_per_row: int, num_shards: int = 1) -> np.ndarray:
    """Returns a block table i32[rows, pages_per_row] in which every row has its own pages.

    It suits loops that keep the same rows throughout, and need no allocator.
    """
    pages = np.arange(rows // num_shards * pages_per_row, dtype=np.int32)
    return np.tile(pages.reshape(-1, pages_per_row), (num_shards, 1))


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
    is_inside = (row_ids >= 0) & (row_ids < rows) & (positions >= 0) & (entry < pages_per_row)
    page = block_table[jnp.clip(row_ids, 0, rows - 1), jnp.clip(entry, 0, pages_per_row - 1)]
    # One past the end, because .at[slot].set(mode="drop") drops it. -1 would wrap to the last slot.
    return jnp.where(
        is_inside & (page != NO_PAGE),
        page * page_size + positions % page_size,
        num_slots,
    )


def num_held(cache: PagedKVCache) -> Array:
    """Returns the number of pages of each row, i32[rows]."""
    return jnp.sum(cache.block_table != NO_PAGE, axis=1, dtype=jnp.int32)


def scales_of(scales: Array | None, layer: int) -> tuple[Array | None, Array | None]:
    """Returns a layer's scales of keys and of values, f32[kv_heads] each; None without scales."""
    return (None, None) if scales is None else (scales[0, layer], scales[1, layer])


def write(
    pages: Pages,
    k: Array,
    v: Array,
    slot_mapping: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Pages:
    """Writes keys and values [num_tokens, kv_heads, head_dim] of one layer to their slots.

    Args:
      k_scale, v_scale: the layer's scales, from `scales_of`.
    """
    return write_kv(*pages, k, v, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def commit(cache: PagedKVCache, num_committed: Array) -> PagedKVCache:
    """Makes the next num_committed i32[rows] tokens of each row final."""
    return dataclasses.replace(cache, lengths=cache.lengths + num_committed)
