"""The static sizes of a run, from what is asked and how much memory pages may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.api.requests import Refused
from specjax.config.engine import KV_CACHE_BYTES, EngineConfig
from specjax.decode.sizes import Sizes
from specjax.engine.request import Request
from specjax.models.base import ModelConfig
from specjax.paged import kv_cache
from specjax.runtime.amounts import amount

MIN_ROW_TOKENS = 256  # smallest bucket of a row's capacity


class Pooled(NamedTuple):
    """The models whose keys and values lie in pages of the same numbers."""

    target: ModelConfig
    # On each device, per token of a row: `DrafterSpec.bytes_per_token`.
    drafter_bytes: int = 0


def choose_sizes(
    requests: Sequence[Request],
    pooled: Pooled,
    engine: EngineConfig,
    dtype: Any,
    num_shards: int,
    tree_slots: int = 0,
    kv_shards: int = 1,
) -> tuple[Sizes | None, list[Request], list[Refused]]:
    """Returns sizes, the requests that they can serve, and the refused ones.

    Rows, and the tokens of a row, are powers of two, so that calls of similar size
    share their executables.

    Args:
      pooled: whose pages are allocated together.
      num_shards: of the mesh's data axis; a request's pages lie in one of them.
      kv_shards: of the mesh's tensor axis.
      tree_slots: what every row needs past its last token.
    """
    size = engine.chosen_page_size
    shard_pages = _pages_per_shard(pooled, engine, dtype, num_shards, kv_shards)
    num_slots = lambda request: request.max_length + tree_slots
    has_room = lambda request: -(-num_slots(request) // size) <= shard_pages
    of_tree = ""
    if tree_slots:
        of_tree = f" and {tree_slots} more for nodes of a tree (draft fewer of them)"
    fits = list(filter(has_room, requests))
    refused = [
        Refused(
            request.prompt_index,
            request.sample_index,
            request.seed,
            f"prompt {request.prompt_index}: prompt and output need {request.max_length} tokens"
            f"{of_tree}, and the pool holds {shard_pages * size} for one request; lower "
            f"max_tokens, shorten the prompt or raise "
            f"{'num_pages' if engine.num_pages else 'kv_cache_bytes'}.",
        )
        for request in requests
        if not has_room(request)
    ]
    if not fits:
        return None, [], refused
    rows = min(engine.max_rows, power_of_two(len(fits)))
    rows = -(-rows // num_shards) * num_shards
    longest = max(max(map(num_slots, fits)), MIN_ROW_TOKENS)
    pages_per_row = power_of_two(-(-longest // size))
    layout = rows, pages_per_row, shard_pages, num_shards
    return _sizes(engine, dtype, tree_slots, *layout), fits, refused


def standing_sizes(
    context: int,
    pooled: Pooled,
    engine: EngineConfig,
    dtype: Any,
    num_shards: int,
    tree_slots: int = 0,
    kv_shards: int = 1,
) -> Sizes:
    """Returns sizes for requests that are not known yet; arguments as of `choose_sizes`.

    Args:
      context: tokens that the model takes; engine.max_context may ask for fewer.
    """
    size = engine.chosen_page_size
    rows = -(-engine.max_rows // num_shards) * num_shards
    longest = min(context, engine.max_context or context) + tree_slots
    shard_pages = _pages_per_shard(pooled, engine, dtype, num_shards, kv_shards)
    pages_per_row = min(-(-longest // size), shard_pages)
    layout = rows, pages_per_row, shard_pages, num_shards
    return _sizes(engine, dtype, tree_slots, *layout)


def _sizes(
    engine: EngineConfig,
    dtype: Any,
    tree_slots: int,
    rows: int,
    pages_per_row: int,
    shard_pages: int,
    num_shards: int,
) -> Sizes:
    """Returns sizes with no more pages than rows can hold, unless num_pages is set."""
    if engine.num_pages is None:
        shard_pages = min(shard_pages, rows // num_shards * pages_per_row)
    return Sizes(
        rows=rows,
        page_size=engine.chosen_page_size,
        num_pages=shard_pages * num_shards,
        pages_per_row=pages_per_row,
        burst_steps=engine.burst_steps,
        tree_slots=tree_slots,
        dtype=dtype,
    )


def _pages_per_shard(
    pooled: Pooled,
    engine: EngineConfig,
    dtype: Any,
    num_shards: int,
    kv_shards: int,
) -> int:
    """Returns how many pages a shard may have, at least 1.

    Raises:
      ValueError: there is not one for each.
    """
    of_page = page_bytes(pooled, engine, dtype, kv_shards)
    limit = engine.num_pages or (engine.kv_cache_bytes or KV_CACHE_BYTES) // of_page
    if limit >= num_shards:
        return limit // num_shards
    shards = "" if num_shards == 1 else f" for each of {num_shards} data shards"
    if engine.num_pages:
        raise ValueError(f"num_pages={engine.num_pages} is not one page{shards}; raise it.")
    given = "" if engine.kv_cache_bytes else " (the default)"
    raise ValueError(
        f"kv_cache_bytes={engine.kv_cache_bytes or KV_CACHE_BYTES}{given} holds no page"
        f"{shards}: a page of {engine.chosen_page_size} tokens takes {of_page:,} bytes. Raise "
        "it, or lower page_size."
    )


def check_pages(
    pooled: Pooled,
    engine: EngineConfig,
    dtype: Any,
    num_shards: int = 1,
    kv_shards: int = 1,
    device_bytes: int | None = None,
) -> None:
    """Refuses pages that are fewer than one, or more than a device holds; before any compile.

    Args:
      pooled, num_shards, kv_shards: as of `choose_sizes`.
      device_bytes: of each device; None is not known.

    Raises:
      ValueError: it names what to change.
    """
    shard_pages = _pages_per_shard(pooled, engine, dtype, num_shards, kv_shards)
    if engine.num_pages is None or device_bytes is None:
        return
    of_page = page_bytes(pooled, engine, dtype, kv_shards) // kv_shards
    if shard_pages * of_page > device_bytes:
        raise ValueError(
            f"num_pages={engine.num_pages} take {amount(shard_pages * of_page)} of a device "
            f"that has {amount(device_bytes)}; lower it."
        )


def check_state(
    sizes: Sizes,
    pooled: Pooled,
    engine: EngineConfig,
    num_shards: int = 1,
    kv_shards: int = 1,
    device_bytes: int | None = None,
) -> None:
    """Refuses sizes whose pages and rows alone take more than a device has.

    Raises:
      ValueError: it names what to change.
    """
    if device_bytes is None:
        return
    of_page = page_bytes(pooled, engine, sizes.dtype, kv_shards) // kv_shards
    options = 2 * engine.max_bias_entries + engine.max_allowed_tokens
    of_row = sizes.max_length + sizes.pages_per_row + options + engine.max_stop_tokens
    # What a burst reports of each step: tokens, and ids and values of the most likely.
    of_step = engine.burst_steps * 2 * engine.max_logprobs
    pages = sizes.num_pages * of_page // num_shards
    rows = sizes.rows * 4 * (of_row + of_step) // num_shards
    if pages + rows > device_bytes:
        raise ValueError(
            f"{sizes.num_pages} pages take {amount(pages)} and {sizes.rows} rows "
            f"{amount(rows)} of a device that has {amount(device_bytes)}; lower "
            "max_rows, max_context, kv_cache_bytes, num_pages, burst_steps or max_logprobs."
        )


def page_bytes(pooled: Pooled, engine: EngineConfig, dtype: Any, kv_shards: int = 1) -> int:
    """Returns the bytes of one page of target and drafter on all devices of a data shard.

    Args:
      dtype: of the weights.
      kv_shards: devices over which the target's heads are split.
    """
    own = kv_cache.numbers_per_token(pooled.target, kv_shards=kv_shards)
    own *= kv_cache.pages_dtype(engine.kv_cache_dtype, dtype).itemsize
    return (own + pooled.drafter_bytes * kv_shards) * engine.chosen_page_size


def power_of_two(number: int) -> int:
    """Returns the least power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()
