"""Rows of pages replaced in place, for TPU: whole pages go to VMEM and back.

A token's key is one sublane of a page's tile, which no copy reaches alone, so the page
is read, changed and written: 2 * kv_heads * page_size * head_dim * itemsize bytes for keys and
as many for values, once for all new tokens of the page. While one page is changed the next
ones are on their way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import layout

DEPTH = 4  # pages under way
LANES = 128


def check_pages(pages: Array) -> None:
    """Raises NotImplementedError for pages that do not lie in whole tiles."""
    page_size, head_dim = layout.page_size(pages), layout.head_dim(pages)
    sublanes = 8 * 4 // pages.dtype.itemsize
    if head_dim % LANES or page_size % sublanes:
        raise NotImplementedError(
            f"{head_dim=} must be a multiple of {LANES} and {page_size=} of {sublanes} on a "
            "TPU for now."
        )


class Updates(NamedTuple):
    """Tokens grouped by the page they go to; those that are dropped come last."""

    token: Array  # i32[num_tokens], in the order of their slots
    offset: Array  # i32[num_tokens], slot within the page, in the same order
    page: Array  # i32[num_tokens], one entry per page that changes
    start: (
        Array  # i32[num_tokens + 1], first token of each page; also past the last one
    )
    num_pages: Array  # i32[1], entries in use


def group_by_page(slot_mapping: Array, page_size: int, num_slots: int) -> Updates:
    """Returns the updates that write token i at slot_mapping[i], i32[num_tokens].

    A slot that does not exist means dropped.
    """
    num_tokens = slot_mapping.shape[0]
    exists = (slot_mapping >= 0) & (slot_mapping < num_slots)
    slots = jnp.where(exists, slot_mapping, num_slots)
    token = jnp.argsort(slots).astype(jnp.int32)
    slots = slots[token]
    pages = slots // page_size
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    before = jnp.concatenate([jnp.full(1, -1, pages.dtype), pages[:-1]])
    is_first = (pages != before) & (slots < num_slots)
    entry = jnp.cumsum(is_first) - 1
    num_kept = jnp.sum(slots < num_slots, dtype=jnp.int32)
    place = jnp.where(is_first, entry, num_tokens)
    start = jnp.full(num_tokens + 1, num_kept).at[place].set(index, mode="drop")
    page = jnp.zeros(num_tokens, jnp.int32).at[place].set(pages, mode="drop")
    # `start` of entry num_tokens, past the last one, is num_kept: nothing is set there.
    start = start.at[num_tokens].set(num_kept)
    num_pages = jnp.sum(is_first, dtype=jnp.int32)[None]
    return Updates(token, (slots % page_size).astype(jnp.int32), page, start, num_pages)


def collect(
    sources: Updates,  # refs in SMEM: where each token is read
    held: list,  # refs in VMEM, dtype[num_tokens, kv_heads, head_dim]
    pages: list,  # refs in HBM
    buffers: list,  # refs in VMEM, dtype[DEPTH, kv_heads, page_size, head_dim]
    sems,
) -> None:
    """Reads tokens out of one or more arrays of pages, in a kernel; others' are left as they are."""
    num_pages = sources.num_pages[0]
    reads = functools.partial(_read, sources, pages, buffers, sems)
    _start_first(reads, num_pages)

    def body(entry, _):
        ahead = entry + DEPTH - 1
        pl.when(ahead < num_pages)(lambda: reads(ahead, "start"))
        reads(entry, "wait")
        slot = lax.rem(entry, DEPTH)
        for side in range(len(held)):
            _take(sources, entry, held[side], buffers[side], slot)
        return ()

    lax.fori_loop(0, num_pages, body, ())


def _read(updates: Updates, pages: list, buffers: list, sems, entry, action) -> None:
    """Starts or awaits ("start", "wait") the copies of one page into its buffers."""
    slot = lax.rem(entry, DEPTH)
    for side, buffer in enumerate(buffers):
        source, sem = pages[side].at[updates.page[entry]], sems.at[slot, side]
        copy = pltpu.make_async_copy(source, buffer.at[slot], sem)
        getattr(copy, action)()


def _start_first(reads: Callable[..., None], num_pages) -> None:
    for entry in range(DEPTH - 1):
        start = functools.partial(reads, jnp.int32(entry), "start")
        pl.when(entry < num_pages)(start)


def _take(sources: Updates, entry, held_ref, buffer, slot) -> None:
    """Copies the tokens of one page out of its buffer."""
    _, kv_heads, page_size, head_dim = buffer.shape
    row = lax.broadcasted_iota(jnp.int32, (page_size, head_dim), 0)

    def body(place, _):
        is_own = row == sources.offset[place]
        tokens = []
        for head in range(kv_heads):
            page = buffer[slot, head].astype(jnp.float32)
            # A sum with zeros, exact; NaN of other slots is not in it.
            tokens.append(jnp.where(is_own, page, 0.0).sum(axis=0, keepdims=True))
        token = jnp.concatenate(tokens, axis=0)
        held_ref[sources.token[place]] = token.astype(held_ref.dtype)
        return ()

    lax.fori_loop(sources.start[entry], sources.start[entry + 1], body, ())


def apply(
    updates: Updates,  # refs in SMEM
    news: list,  # refs in VMEM, dtype[num_tokens, kv_heads, head_dim]
    pages: list,  # refs in HBM, read
    written: list,  # the same, written
    buffers: list,  # refs in VMEM, dtype[DEPTH, kv_heads, page_size, head_dim]
    read_sems,
    write_sems,
) -> None:
    """Replaces the tokens of one or more arrays of pages, in a kernel."""
    num_pages = updates.num_pages[0]
    reads = functools.partial(_read, updates, pages, buffers, read_sems)
    _start_first(reads, num_pages)

    def writes(entry, action):
        slot = lax.rem(entry, DEPTH)
        for side, buffer in enumerate(buffers):
            target = written[side].at[updates.page[entry]]
            sem = write_sems.at[slot, side]
            copy = pltpu.make_async_copy(buffer.at[slot], target, sem)
            getattr(copy, action)()

    def body(entry, _):
        ahead = entry + DEPTH - 1

        @pl.when(ahead < num_pages)
        def _():
            # Its buffer is that of the entry before this one.
            pl.when(entry > 0)(lambda: writes(entry - 1, "wait"))
            reads(ahead, "start")

        reads(entry, "wait")
        slot = lax.rem(entry, DEPTH)
        for side in range(len(news)):
            _replace(updates, entry, news[side], buffers[side], slot)
        writes(entry, "start")
        return ()

    lax.fori_loop(0, num_pages, body, ())
    # Those that nobody waited for yet.
    for back in range(DEPTH, 0, -1):
        entry = num_pages - back
        pl.when(entry >= 0)(lambda entry=entry: writes(entry, "wait"))


def _replace(updates: Updates, entry, new_ref, buffer, slot) -> None:
    """Puts the new tokens of one page into its buffer."""
    _, kv_heads, page_size, head_dim = buffer.shape
    row = lax.broadcasted_iota(jnp.int32, (page_size, head_dim), 0)

    def body(place, _):
        is_own = row == updates.offset[place]
        new = new_ref[updates.token[place]].astype(jnp.float32)
        for head in range(kv_heads):
            page = buffer[slot, head].astype(jnp.float32)
            page = jnp.where(is_own, new[head : head + 1], page)
            buffer[slot, head] = page.astype(buffer.dtype)
        return ()

    lax.fori_loop(updates.start[entry], updates.start[entry + 1], body, ())
