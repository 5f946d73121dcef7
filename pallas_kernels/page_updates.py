"""Tokens read out of pages and written into them, for TPU: whole pages go to VMEM and back.

A token's key is one sublane of a page's tile, which no copy reaches alone, so a page is
read, changed and written: 2 * kv_heads * page_size * head_dim * itemsize bytes, once for all new
tokens of the page in a chunk. While one page is changed the next ones are on their way.

A call takes any number of arrays of one shape: the keys and values of a layer, or of all
layers. A grid step is a chunk of tokens in one array; which array is told apart where a copy
begins and nowhere else, so that the code hardly grows with their number.
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
from pallas_kernels.implementations import is_in_a_loop

LANES = 128
MOST_PAGES_UNDER_WAY = 16
BYTES_UNDER_WAY = 2 << 20
MOST_TOKENS = 512  # of a chunk
VMEM_BYTES = 12 << 20  # of 16 MiB, the least of all generations
SMEM_BYTES = 1_000_000  # of 1 MiB, the least of all generations


def check_pages(pages: Array) -> None:
    """Raises NotImplementedError for pages that do not lie in whole tiles."""
    page_size, head_dim = layout.page_size(pages), layout.head_dim(pages)
    if pages.dtype not in (jnp.bfloat16, jnp.float32, *layout.LARGEST):
        raise NotImplementedError(
            f"{pages.dtype=} must be bfloat16, float32, int8 or float8_e4m3fn on a TPU."
        )
    sublanes = sublanes_of(pages.dtype)
    if head_dim % LANES or page_size % sublanes:
        raise NotImplementedError(
            f"{head_dim=} must be a multiple of {LANES} and {page_size=} of {sublanes} on a "
            "TPU; layout.init_pages(in_lanes=True) lays heads in lanes."
        )


def sublanes_of(dtype: jnp.dtype) -> int:
    """Returns the sublanes of a tile."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def token_bytes(pages: Any) -> int:
    """Returns the bytes of a token of one array, in whole tiles."""
    sublanes = sublanes_of(pages.dtype)
    kv_heads = -(-layout.kv_heads(pages) // sublanes) * sublanes
    return kv_heads * layout.head_dim(pages) * pages.dtype.itemsize


def in_hbm(pages: Array, interpret: Any) -> Array:
    """Returns pages that XLA may not copy to VMEM as a whole in a loop, though they might fit."""
    if interpret or not is_in_a_loop():  # the interpreter knows no such constraint
        return pages
    return pltpu.with_memory_space_constraint(pages, pltpu.HBM)


def read_tokens(
    arrays: Sequence[Array],  # dtype[num_pages, kv_heads, page_size, head_dim] each
    slots: Array,  # i32[num_tokens]
    *,
    interpret: Any = False,
) -> Array:
    """Returns the tokens at the slots, dtype[arrays, num_tokens or more, kv_heads, head_dim].

    Values for slots that do not exist, and past the last token, are meaningless.
    """
    call = _Call.of(arrays[0], slots.shape[0])
    size = call.num_chunks * call.chunk
    out = (len(arrays), size, *call.token_shape)
    return pl.pallas_call(
        functools.partial(_read_kernel, call=call, count=len(arrays)),
        out_shape=jax.ShapeDtypeStruct(out, call.dtype),
        grid_spec=call.grid_spec(
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * len(arrays),
            out_specs=call.token_spec(),
            count=len(arrays),
        ),
        compiler_params=_PARALLEL_ARRAYS,
        interpret=interpret,
        name="read_kv",
    )(*_group_by_page(slots, call), *(in_hbm(array, interpret) for array in arrays))


def write_tokens(
    arrays: Sequence[Array],  # dtype[num_pages, kv_heads, page_size, head_dim] each
    new: Array,  # dtype[arrays, num_tokens or more, kv_heads, head_dim]
    slots: Array,  # i32[num_tokens]
    *,
    name: str,
    interpret: Any = False,
) -> list[Array]:
    """Returns the arrays with the tokens at their slots; one that does not exist is dropped."""
    if slots.shape[0] == 0:
        return list(arrays)
    call = _Call.of(arrays[0], slots.shape[0])
    count, num_scalars = len(arrays), len(_Updates._fields)
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        functools.partial(_write_kernel, call=call, count=count),
        out_shape=[jax.ShapeDtypeStruct(arrays[0].shape, call.dtype)] * count,
        grid_spec=call.grid_spec(
            in_specs=[call.token_spec(), *[anywhere] * count],
            out_specs=[anywhere] * count,
            count=count,
        ),
        input_output_aliases={num_scalars + 1 + i: i for i in range(count)},
        compiler_params=_PARALLEL_ARRAYS,
        interpret=interpret,
        name=name,
    )(
        *_group_by_page(slots, call),
        new,
        *(in_hbm(array, interpret) for array in arrays),
    )


def vmem_bytes(pages: Any, num_tokens: int) -> int:
    """Returns the bytes of VMEM that reading or writing so many tokens keeps there."""
    return _Call.of(pages, num_tokens).vmem_bytes()


# Two cores, where a chip has them, take an array each: no page is in two arrays.
_PARALLEL_ARRAYS = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))


@dataclasses.dataclass(frozen=True)
class _Call:
    """Static sizes of a call."""

    page_shape: tuple[int, int, int]  # kv_heads, page_size, head_dim
    dtype: jnp.dtype
    num_slots: int
    num_tokens: int
    token_bytes: int
    chunk: int  # tokens of a grid step

    @classmethod
    def of(cls, pages: Any, num_tokens: int) -> _Call:
        """Returns the sizes for arrays like `pages`.

        Raises:
          NotImplementedError: pages that do not lie in whole tiles, or no chunk that fits.
        """
        check_pages(pages)
        chunk = min(max(num_tokens, 1), MOST_TOKENS)
        while True:
            call = cls(
                pages.shape[1:],
                pages.dtype,
                layout.num_slots(pages),
                num_tokens,
                token_bytes(pages),
                chunk,
            )
            if call.vmem_bytes() <= VMEM_BYTES:
                break
            if chunk == 1:
                raise NotImplementedError(
                    f"pages of {pages.shape[1:]} need {call.vmem_bytes()} bytes of VMEM, and "
                    f"{VMEM_BYTES} are there."
                )
            chunk = max(chunk // 2 // 8 * 8, 1)
        if call.smem_bytes() > SMEM_BYTES:
            raise NotImplementedError(
                f"{num_tokens=} need {call.smem_bytes()} bytes of SMEM, and {SMEM_BYTES} are there."
            )
        return call

    @property
    def num_chunks(self) -> int:
        return max(-(-self.num_tokens // self.chunk), 1)

    @property
    def token_shape(self) -> tuple[int, int]:
        return self.page_shape[0], self.page_shape[2]

    @property
    def pages_under_way(self) -> int:
        page = math.prod(self.page_shape) * self.dtype.itemsize
        return min(MOST_PAGES_UNDER_WAY, max(2, BYTES_UNDER_WAY // page))

    def vmem_bytes(self) -> int:
        """Returns the bytes of VMEM of a grid step: tokens twice, and pages under way."""
        page = math.prod(self.page_shape) * self.dtype.itemsize
        return 2 * self.chunk * self.token_bytes + self.pages_under_way * page

    def smem_bytes(self) -> int:
        """Returns the bytes of SMEM that the tokens' places take."""
        return 4 * self.num_chunks * (4 * self.chunk + 2)

    def token_spec(self) -> pl.BlockSpec:
        """Returns the tokens that a grid step reads or writes."""
        block = (1, self.chunk, *self.token_shape)
        return pl.BlockSpec(block, lambda array, chunk, *_: (array, chunk, 0, 0))

    def grid_spec(self, *, count: int, **specs: Any) -> pltpu.PrefetchScalarGridSpec:
        under_way = self.pages_under_way
        return pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(_Updates._fields),
            grid=(count, self.num_chunks),
            scratch_shapes=[
                pltpu.VMEM((under_way, *self.page_shape), self.dtype),
                *[pltpu.SemaphoreType.DMA((under_way,))] * 2,
            ],
            **specs,
        )


# Around the kernels


class _Updates(NamedTuple):
    """Tokens of each chunk, grouped by page; those that are dropped come last.

    Chunks lie end to end; `start` has one number more for each.
    """

    token: Array  # i32[tokens], within the chunk, in the order of their slots
    offset: Array  # i32[tokens], slot within the page, in the same order
    page: Array  # i32[tokens], one entry per page that changes
    start: Array  # i32[tokens + chunks], first token of each page; also past the last one
    num_pages: Array  # i32[chunks], entries in use


def _group_by_page(slots: Array, call: _Call) -> _Updates:
    """Returns where token i of i32[num_tokens] slots goes; a slot that does not exist means
    dropped."""
    size = call.num_chunks * call.chunk
    exists = (slots >= 0) & (slots < call.num_slots)
    slots = jnp.where(exists, slots, call.num_slots).astype(jnp.int32)
    slots = jnp.pad(slots, (0, size - slots.shape[0]), constant_values=call.num_slots).reshape(
        call.num_chunks, call.chunk
    )
    grouped = jax.vmap(functools.partial(_group_chunk, call=call))(slots)
    return _Updates(*(field.reshape(-1) for field in grouped))


def _group_chunk(slots: Array, call: _Call) -> _Updates:
    size, page_size = call.chunk, call.page_shape[1]
    token = jnp.argsort(slots).astype(jnp.int32)
    slots = slots[token]
    pages = slots // page_size
    index = jnp.arange(size, dtype=jnp.int32)
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), pages[:-1]])
    is_first = (pages != before) & (slots < call.num_slots)
    entry = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    num_kept = jnp.sum(slots < call.num_slots, dtype=jnp.int32)
    # Nothing is set at `size`, past the last entry that there can be.
    place = jnp.where(is_first, entry, size + 1)
    start = jnp.full(size + 1, num_kept).at[place].set(index, mode="drop")
    page = jnp.zeros(size, jnp.int32).at[place].set(pages, mode="drop")
    num_pages = jnp.sum(is_first, dtype=jnp.int32)
    return _Updates(token, slots % page_size, page, start, num_pages)


# The kernels


def _read_kernel(*refs: Any, call: _Call, count: int) -> None:
    updates, rest = _Chunk.of(refs, call)
    arrays, (out, buffer, sems, _) = rest[:count], rest[count:]
    copies = _Copies(updates, arrays, buffer, sems, is_write=False)
    row = _rows_of(call)

    def of_page(entry: Any) -> None:
        ahead = entry + call.pages_under_way - 1
        pl.when(ahead < updates.num_pages)(lambda: copies.start(ahead))
        copies.wait(entry)
        page = lax.rem(entry, call.pages_under_way)

        def of_token(place: Any, _: Any) -> Any:
            is_own = row == updates.offset(place)
            tokens = []
            for head in range(call.page_shape[0]):
                own = buffer[page, head].astype(jnp.float32)
                # A sum with zeros, exact; NaN of other slots is not in it.
                tokens.append(jnp.where(is_own, own, 0.0).sum(axis=0, keepdims=True))
            token = jnp.concatenate(tokens, axis=0)
            out[0, updates.token(place)] = token.astype(out.dtype)
            return ()

        lax.fori_loop(updates.first(entry), updates.first(entry + 1), of_token, ())

    copies.start_first()
    _for_each(updates.num_pages, of_page)


def _write_kernel(*refs: Any, call: _Call, count: int) -> None:
    updates, (new, *rest) = _Chunk.of(refs, call)
    read, written = rest[:count], rest[count : 2 * count]
    buffer, read_sems, write_sems = rest[2 * count :]
    copies = _Copies(updates, read, buffer, read_sems, is_write=False)
    writes = _Copies(updates, written, buffer, write_sems, is_write=True)
    row = _rows_of(call)

    def of_page(entry: Any) -> None:
        ahead = entry + call.pages_under_way - 1

        @pl.when(ahead < updates.num_pages)
        def _():
            # Its buffer is that of the entry before this one.
            pl.when(entry > 0)(lambda: writes.wait(entry - 1))
            copies.start(ahead)

        copies.wait(entry)
        page = lax.rem(entry, call.pages_under_way)

        def of_token(place: Any, _: Any) -> Any:
            is_own = row == updates.offset(place)
            token = new[0, updates.token(place)].astype(jnp.float32)
            for head in range(call.page_shape[0]):
                own = buffer[page, head].astype(jnp.float32)
                own = jnp.where(is_own, token[head : head + 1], own)
                buffer[page, head] = own.astype(buffer.dtype)
            return ()

        lax.fori_loop(updates.first(entry), updates.first(entry + 1), of_token, ())
        writes.start(entry)

    copies.start_first()
    _for_each(updates.num_pages, of_page)
    # Waits for the last writes: the next chunk may read their pages.
    first = jnp.maximum(updates.num_pages - call.pages_under_way, 0)
    _for_each(updates.num_pages, writes.wait, first)


def _for_each(end: Any, act: Callable[[Any], None], first: Any = 0) -> None:
    def body(entry: Any, _: Any) -> Any:
        act(entry)
        return ()

    lax.fori_loop(first, end, body, ())


def _rows_of(call: _Call) -> Array:
    """Returns each slot's place in its page, i32[page_size, head_dim]."""
    return lax.broadcasted_iota(jnp.int32, call.page_shape[1:], 0)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """The updates of a grid step: refs in SMEM, and where its own begin."""

    updates: _Updates
    index: Any
    size: int

    @classmethod
    def of(cls, refs: Sequence[Any], call: _Call) -> tuple[_Chunk, list[Any]]:
        """Returns the chunk, and the refs behind those of the updates."""
        count = len(_Updates._fields)
        updates = cls(_Updates(*refs[:count]), pl.program_id(1), call.chunk)
        return updates, list(refs[count:])

    @property
    def num_pages(self) -> Any:
        return self.updates.num_pages[self.index]

    def token(self, place: Any) -> Any:
        return self.updates.token[self.index * self.size + place]

    def offset(self, place: Any) -> Any:
        return self.updates.offset[self.index * self.size + place]

    def page(self, entry: Any) -> Any:
        return self.updates.page[self.index * self.size + entry]

    def first(self, entry: Any) -> Any:
        """Returns the first token of a page, or of none past the last."""
        return self.updates.start[self.index * (self.size + 1) + entry]


@dataclasses.dataclass(frozen=True)
class _Copies:
    """Copies of pages of the grid step's array to their buffers, or back."""

    updates: _Chunk
    arrays: Sequence[Any]  # refs in HBM
    buffer: Any  # dtype[under_way, kv_heads, page_size, head_dim] in VMEM
    sems: Any
    is_write: bool

    def start_first(self) -> None:
        """Begins those that are under way before the first is waited for."""
        most = self.buffer.shape[0] - 1
        _for_each(jnp.minimum(self.updates.num_pages, most), self.start)

    def start(self, entry: Any) -> None:
        own = pl.program_id(0)

        def among(first: int, last: int) -> None:
            if last - first == 1:
                self._copy(self.arrays[first], entry).start()
                return
            middle = (first + last) // 2
            lax.cond(
                own < middle,
                lambda: among(first, middle),
                lambda: among(middle, last),
            )

        among(0, len(self.arrays))

    def wait(self, entry: Any) -> None:
        # A copy of as many bytes, whichever the array.
        self._copy(self.arrays[0], entry).wait()

    def _copy(self, array: Any, entry: Any) -> Any:
        slot = lax.rem(entry, self.buffer.shape[0])
        page, buffer = array.at[self.updates.page(entry)], self.buffer.at[slot]
        ends = (buffer, page) if self.is_write else (page, buffer)
        return pltpu.make_async_copy(*ends, self.sems.at[slot])
