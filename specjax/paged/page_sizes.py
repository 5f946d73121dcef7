"""Chooses the number of tokens of a page, by the device and the shape of the cache.

A page is the unit that an attention kernel copies and that rows share. On a CPU small pages
waste little and cost nothing. On an accelerator each page is a copy of its own: a small one is
issued more slowly than memory delivers it (docs/decisions/0010-page-sizes.md has the figures).
"""

from __future__ import annotations

import dataclasses

from jax.typing import DTypeLike

from pallas_kernels.implementations import target_platform
from specjax.config.engine import EngineConfig
from specjax.models.base import ModelConfig
from specjax.paged import kv_cache

CPU_PAGE = 16
ACCELERATOR_PAGES = (64, 128, 256)
# Least bytes of the keys of one page and layer on one device: a copy of this size outlasts
# the instructions that issue it.
LEAST_COPY = 64 << 10
# Most bytes of the block table, which a TPU keeps in scalar memory (1 MiB) beside other
# scalars.
MOST_TABLE = 512 << 10


def with_page_size(
    engine: EngineConfig, config: ModelConfig, dtype: DTypeLike, *, kv_shards: int = 1
) -> EngineConfig:
    """Returns the engine's config with a page size; unchanged if it has one.

    It is chosen for the platform that ops are traced for. The same config, model and devices
    always get the same page size.

    Args:
      dtype: of the weights.
      kv_shards: devices over which the target's heads are split.
    """
    if engine.page_size is not None:
        return engine
    size = CPU_PAGE
    if target_platform() != "cpu":
        size = _for_accelerator(engine, config, dtype, kv_shards)
    return dataclasses.replace(engine, page_size=size)


def _for_accelerator(
    engine: EngineConfig, config: ModelConfig, dtype: DTypeLike, kv_shards: int
) -> int:
    """Returns the smallest page with long copies and a short table, or the largest page.

    A budget of kv_cache_bytes that holds fewer such pages than rows gets smaller ones.
    """
    itemsize = kv_cache.pages_dtype(engine.kv_cache_dtype, dtype).itemsize
    _, lines, _, width = kv_cache.page_shape(config, 1, 1, kv_shards=kv_shards)
    key_bytes = lines // kv_shards * width * itemsize
    most = config.max_position_embeddings
    context = min(engine.max_context or most, most)

    def is_good(size: int) -> bool:
        table = 4 * engine.max_rows * -(-context // size)
        return size * key_bytes >= LEAST_COPY and table <= MOST_TABLE

    size = next(filter(is_good, ACCELERATOR_PAGES), ACCELERATOR_PAGES[-1])
    budget = engine.kv_cache_bytes
    of_token = itemsize * kv_cache.numbers_per_token(config, kv_shards=kv_shards)
    least = max(CPU_PAGE, 32 // itemsize)  # a whole tile of a TPU's memory
    while budget is not None and size > least and size * of_token * engine.max_rows > budget:
        size //= 2
    return size
