"""Tokens read out of pages and written into them, for TPU: parts of pages go to VMEM and back.

A token's key is one sublane of a tile in memory, which no copy reaches alone. So the tiles that
hold it are read, changed and written: those of as many neighbouring tokens of a page as a tile
has sublanes, 16 of bfloat16, 8 of float32, 32 of int8 and fp8, for all key heads. Such a group is
called a stripe. It takes 2 * kv_heads * sublanes * head_dim * itemsize bytes of traffic, whatever
the page's size, once for all new tokens of the stripe in a chunk. While one stripe is changed the
next ones are on their way.

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
MOST_STRIPES_UNDER_WAY = 64
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
    )(*_group_by_stripe(slots, call), *(in_hbm(array, interpret) for array in arrays))


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
        *_group_by_stripe(slots, call),
        new,
        *(in_hbm(array, interpret) for array in arrays),
    )


def vmem_bytes(pages: Any, num_tokens: int) -> int:
    """Returns the bytes of VMEM that reading or writing so many tokens keeps there."""
    return _Call.of(pages, num_tokens).vmem_bytes()


# Two cores, where a chip has them, take an array each: no page is in two arrays. Only stripes of
# slots that exist are copied.
_PARALLEL_ARRAYS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Static sizes of a call."""

    stripe_shape: tuple[int, int, int]  # kv_heads, tokens, head_dim
    page_size: int
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
                (layout.kv_heads(pages), sublanes_of(pages.dtype), layout.head_dim(pages)),
                layout.page_size(pages),
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
                    f"tokens of {call.token_shape} need {call.vmem_bytes()} bytes of VMEM, and "
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
        return self.stripe_shape[0], self.stripe_shape[2]

    @property
    def stripes_under_way(self) -> int:
        stripe = math.prod(self.stripe_shape) * self.dtype.itemsize
        return min(MOST_STRIPES_UNDER_WAY, max(2, BYTES_UNDER_WAY // stripe))

    def vmem_bytes(self) -> int:
        """Returns the bytes of VMEM of a grid step: tokens twice, and stripes under way."""
        stripe = math.prod(self.stripe_shape) * self.dtype.itemsize
        return 2 * self.chunk * self.token_bytes + self.stripes_under_way * stripe

    def smem_bytes(self) -> int:
        """Returns the bytes of SMEM that the tokens' places take."""
        return 4 * self.num_chunks * (4 * self.chunk + 2)

    def token_spec(self) -> pl.BlockSpec:
        """Returns the tokens that a grid step reads or writes."""
        block = (1, self.chunk, *self.token_shape)
        return pl.BlockSpec(block, lambda array, chunk, *_: (array, chunk, 0, 0))

    def grid_spec(self, *, count: int, **specs: Any) -> pltpu.PrefetchScalarGridSpec:
        under_way = self.stripes_under_way
        return pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(_Updates._fields),
            grid=(count, self.num_chunks),
            scratch_shapes=[
                pltpu.VMEM((under_way, *self.stripe_shape), self.dtype),
                *[pltpu.SemaphoreType.DMA((under_way,))] * 2,
            ],
            **specs,
        )


# Around the kernels


class _Updates(NamedTuple):
    """Tokens of each chunk, grouped by stripe; those that are dropped come last.

    Chunks lie end to end; `start` has one number more for each.
    """

    token: Array  # i32[tokens], within the chunk, in the order of their slots
    offset: Array  # i32[tokens], slot within the stripe, in the same order
    stripe: Array  # i32[tokens], one entry per stripe that changes
    start: Array  # i32[tokens + chunks], first token of each stripe; also past the last one
    num_stripes: Array  # i32[chunks], entries in use


def _group_by_stripe(slots: Array, call: _Call) -> _Updates:
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
    """Sorts and counts by comparing all tokens with each other, which a chip does in few
    operations; a sort and scatters take some thirty."""
    size, stripe_size = call.chunk, call.stripe_shape[1]
    index = jnp.arange(size, dtype=jnp.int32)
    total = lambda where, values: jnp.sum(jnp.where(where, values, 0), axis=1, dtype=jnp.int32)
    is_earlier = index[None] < index[:, None]  # [token, token]
    is_before = (slots[None] < slots[:, None]) | ((slots[None] == slots[:, None]) & is_earlier)
    is_at = total(is_before, 1)[None] == index[:, None]  # [place, token]
    token, slots = total(is_at, index[None]), total(is_at, slots[None])
    # From here on in the order of slots.
    stripes = slots // stripe_size
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), stripes[:-1]])
    is_first = (stripes != before) & (slots < call.num_slots)
    entry = total(is_earlier & is_first[None], 1)  # stripes that begin before each place
    is_of = is_first[None] & (entry[None] == index[:, None])  # [entry, place]
    num_kept = jnp.sum(slots < call.num_slots, dtype=jnp.int32)
    num_stripes = jnp.sum(is_first, dtype=jnp.int32)
    start = jnp.where(index < num_stripes, total(is_of, index[None]), num_kept)
    start = jnp.append(start, num_kept)
    return _Updates(token, slots % stripe_size, total(is_of, stripes[None]), start, num_stripes)


# The kernels


def _read_kernel(*refs: Any, call: _Call, count: int) -> None:
    updates, rest = _Chunk.of(refs, call)
    arrays, (out, buffer, sems, _) = rest[:count], rest[count:]
    copies = _Copies(updates, arrays, buffer, sems, call.page_size, is_write=False)
    row = _rows_of(call)

    def of_stripe(entry: Any) -> None:
        ahead = entry + call.stripes_under_way - 1
        pl.when(ahead < updates.num_stripes)(lambda: copies.start(ahead))
        copies.wait(entry)
        place = lax.rem(entry, call.stripes_under_way)

        def of_token(token: Any, _: Any) -> Any:
            is_own = row == updates.offset(token)
            tokens = []
            for head in range(call.stripe_shape[0]):
                own = buffer[place, head].astype(jnp.float32)
                # A sum with zeros, exact; NaN of other slots is not in it.
                tokens.append(jnp.where(is_own, own, 0.0).sum(axis=0, keepdims=True))
            out[0, updates.token(token)] = jnp.concatenate(tokens, axis=0).astype(out.dtype)
            return ()

        lax.fori_loop(updates.first(entry), updates.first(entry + 1), of_token, ())

    copies.start_first()
    _for_each(updates.num_stripes, of_stripe)


def _write_kernel(*refs: Any, call: _Call, count: int) -> None:
    updates, (new, *rest) = _Chunk.of(refs, call)
    read, written = rest[:count], rest[count : 2 * count]
    buffer, read_sems, write_sems = rest[2 * count :]
    copies = _Copies(updates, read, buffer, read_sems, call.page_size, is_write=False)
    writes = _Copies(updates, written, buffer, write_sems, call.page_size, is_write=True)
    row = _rows_of(call)

    def of_stripe(entry: Any) -> None:
        ahead = entry + call.stripes_under_way - 1

        @pl.when(ahead < updates.num_stripes)
        def _():
            # Its buffer is that of the entry before this one.
            pl.when(entry > 0)(lambda: writes.wait(entry - 1))
            copies.start(ahead)

        copies.wait(entry)
        place = lax.rem(entry, call.stripes_under_way)

        def of_token(token: Any, _: Any) -> Any:
            is_own = row == updates.offset(token)
            own_new = new[0, updates.token(token)].astype(jnp.float32)
            for head in range(call.stripe_shape[0]):
                own = buffer[place, head].astype(jnp.float32)
                own = jnp.where(is_own, own_new[head : head + 1], own)
                buffer[place, head] = own.astype(buffer.dtype)
            return ()

        lax.fori_loop(updates.first(entry), updates.first(entry + 1), of_token, ())
        writes.start(entry)

    copies.start_first()
    _for_each(updates.num_stripes, of_stripe)
    # Waits for the last writes: the next chunk may read their stripes.
    first = jnp.maximum(updates.num_stripes - call.stripes_under_way, 0)
    _for_each(updates.num_stripes, writes.wait, first)


def _for_each(end: Any, act: Callable[[Any], None], first: Any = 0) -> None:
    def body(entry: Any, _: Any) -> Any:
        act(entry)
        return ()

    lax.fori_loop(first, end, body, ())


def _rows_of(call: _Call) -> Array:
    """Returns each slot's place in its stripe, i32[tokens, head_dim]."""
    return lax.broadcasted_iota(jnp.int32, call.stripe_shape[1:], 0)


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
    def num_stripes(self) -> Any:
        return self.updates.num_stripes[self.index]

    def token(self, place: Any) -> Any:
        return self.updates.token[self.index * self.size + place]

    def offset(self, place: Any) -> Any:
        return self.updates.offset[self.index * self.size + place]

    def stripe(self, entry: Any) -> Any:
        return self.updates.stripe[self.index * self.size + entry]

    def first(self, entry: Any) -> Any:
        """Returns the first token of a stripe, or of none past the last."""
        return self.updates.start[self.index * (self.size + 1) + entry]


@dataclasses.dataclass(frozen=True)
class _Copies:
    """Copies of stripes of the grid step's array to their buffers, or back."""

    updates: _Chunk
    arrays: Sequence[Any]  # refs in HBM
    buffer: Any  # dtype[under_way, *stripe_shape] in VMEM
    sems: Any
    page_size: int
    is_write: bool

    def start_first(self) -> None:
        """Begins those that are under way before the first is waited for."""
        most = self.buffer.shape[0] - 1
        _for_each(jnp.minimum(self.updates.num_stripes, most), self.start)

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
        place = lax.rem(entry, self.buffer.shape[0])
        size = self.buffer.shape[2]
        stripe, per_page = self.updates.stripe(entry), jnp.int32(self.page_size // size)
        page = lax.div(stripe, per_page)
        begin = pl.multiple_of((stripe - page * per_page) * size, size)
        stripe_in_hbm = array.at[page, :, pl.ds(begin, size)]
        buffer, sem = self.buffer.at[place], self.sems.at[place]
        if self.is_write:
            return pltpu.make_async_copy(buffer, stripe_in_hbm, sem)
        return pltpu.make_async_copy(stripe_in_hbm, buffer, sem)
