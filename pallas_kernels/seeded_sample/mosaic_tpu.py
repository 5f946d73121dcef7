"""Sampling with seeded noise for TPU: one read of the logits, all else in VMEM.

No score is known before its row's maximum is, so a block of up to 8 rows stays in VMEM
from one pass over the vocabulary to the next. A grid step (block, tile) scores a tile of
the block before and puts the same tile of its own block in its place: while the
arithmetic of one block runs, the next one is read.

    tile                0   1   2   3         step (2, 1): tiles 1 to 3 are block 1's still,
    rows in VMEM       [2] [1] [1] [1]        tile 1 is scored, then overwritten by block 2's

Noise takes two logarithms, of some thirty operations each, and hardly any draw can win.
So a tile is first passed with a bound of the noise in its place, which takes seven. Each
lane of a row keeps the token with its highest bound; if that may win, it is scored. Where
two good ones share a lane the second may win too: then the whole tile is scored, which
happened in none of 240 blocks of 8 rows and 128,256 words. What is found is the best score
of all, as if each had been computed.

Work: num_tokens * vocab * itemsize bytes are read, and 4 more for a bias. Some forty
operations of the vector unit for each logit where any of its block's rows is random, and a
dozen where none is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.counter_noise import (
    gumbel_bound,
    gumbel_by_polynomials,
    log,
    random_bits,
)
from pallas_kernels.seeded_sample.reference import Sample
from pallas_kernels.seeded_sample.xla import finish

ROWS = 8  # of a block: the sublanes of a float32 register
TILE = 16384  # logits of a row that are copied at once
WIDTH = 512  # logits of a row whose best are told apart, and held in registers
UNROLLED = 4  # of these that a loop takes at once, to keep the vector unit busy
LANES = 128
VMEM_BYTES = 14 << 20  # of 16 MiB, the least of all generations

Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Static sizes of a call."""

    num_tokens: int
    vocab: int
    itemsize: int  # of a logit
    has_bias: bool

    @property
    def rows(self) -> int:
        return min(self.num_tokens, ROWS)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.rows)

    @property
    def width(self) -> int:
        return min(_whole_lanes(self.vocab), WIDTH)

    @property
    def chunk(self) -> int:
        """Logits of a row that a loop iteration processes."""
        return min(max(self.vocab // self.width, 1), UNROLLED) * self.width

    @property
    def tile(self) -> int:
        return min(TILE, max(self.vocab // self.chunk, 1) * self.chunk)

    @property
    def num_tiles(self) -> int:
        return -(-self.vocab // self.tile)

    def vmem_bytes(self) -> int:
        """Returns the bytes of VMEM of a grid step: rows, tiles twice, carried values."""
        kept = 4 * self.num_tiles * self.tile
        copied = 2 * (self.itemsize + 4 * self.has_bias) * self.tile
        carried = 4 * (10 * self.width + 2 * LANES)
        # Keys, temperature and threshold; token, log-probability and whether it is invalid.
        per_row = 2 * 4 * 6 * LANES
        return ROWS * (kept + copied + carried + per_row)


def _whole_lanes(size: int) -> int:
    return -(-size // LANES) * LANES


def seeded_sample_mosaic_tpu(
    logits: Array,  # f32 or bf16[num_tokens, vocab]
    keys: Array,  # u32[num_tokens, 2]
    temperature: Array,  # f32[num_tokens]
    bias: Array | None,  # f32[num_tokens, vocab]
    thresholds: Array,  # f32[num_tokens]
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Sample:
    """See `seeded_sample`.

    Raises:
      NotImplementedError: a vocabulary of which VMEM does not hold 8 rows.
    """
    shape = _shape_of(logits, bias)
    padding = (0, shape.num_blocks * shape.rows - shape.num_tokens)
    # Rows past the last must not ask for noise; nor may NaN hide those that do.
    temperature = jnp.pad(jnp.where(temperature > 0, temperature, 0.0), padding)
    # What is read by the step (block, tile), and what is scored then: the last block is
    # read once only, and nothing is scored in the first.
    last = shape.num_blocks - 1, shape.num_tiles - 1
    read = lambda block, tile: (
        jnp.minimum(block, last[0]),
        jnp.where(block > last[0], last[1], tile),
    )
    scored = lambda block, tile: (jnp.maximum(block - 1, 0), 0)
    wide = pl.BlockSpec((shape.rows, shape.tile), read)
    narrow = lambda lanes: pl.BlockSpec((shape.rows, lanes), scored)
    has_bias = bias is not None
    of = lambda dtype: jax.ShapeDtypeStruct((shape.num_tokens, 1), dtype)
    out = pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        out_shape=[of(jnp.int32), of(jnp.float32), of(jnp.int32)],
        grid=(shape.num_blocks + 1, shape.num_tiles),
        in_specs=[narrow(2), narrow(1), narrow(1), wide, *[wide] * has_bias],
        out_specs=[narrow(1)] * 3,
        scratch_shapes=_scratch_shapes(shape),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="seeded_sample",
    )(
        jnp.pad(keys, (padding, (0, 0))),
        temperature[:, None],
        jnp.pad(thresholds, padding)[:, None],
        logits,
        *([bias] if has_bias else []),
    )
    token_ids, logprobs, is_invalid = (values[:, 0] for values in out)
    return Sample(token_ids, logprobs, is_invalid > 0)


def vmem_bytes(logits: Any, bias: Any = None) -> int:
    """Returns the bytes of VMEM that a call keeps there; arguments or their shapes."""
    return _shape_of(logits, bias).vmem_bytes()


def _shape_of(logits: Any, bias: Any) -> _Shape:
    num_tokens, vocab = logits.shape
    shape = _Shape(num_tokens, vocab, logits.dtype.itemsize, bias is not None)
    if (needed := shape.vmem_bytes()) > VMEM_BYTES:
        raise NotImplementedError(
            f"{logits.shape=} needs {needed} bytes of VMEM, and {VMEM_BYTES} are there."
        )
    return shape


def _scratch_shapes(shape: _Shape) -> list:
    carried = lambda dtype: pltpu.VMEM((shape.rows, shape.width), dtype)
    one = lambda dtype: pltpu.VMEM((shape.rows, 1), dtype)
    return [
        pltpu.VMEM((shape.rows, shape.num_tiles * shape.tile), jnp.float32),
        *[carried(jnp.float32), carried(jnp.int32)],
        *[one(jnp.float32), one(jnp.int32)],
        *[carried(jnp.float32), carried(jnp.int32)],
        *[carried(jnp.float32), carried(jnp.float32)],
    ]


# The kernel


class _Refs(NamedTuple):
    """Inputs, outputs, scratch; lanes are put together when a block ends."""

    keys: Any  # u32[rows, 2], of the block that is scored
    temperature: Any  # f32[rows, 1]
    thresholds: Any  # f32[rows, 1]
    logits: Any  # dtype[rows, tile], of the block that is read
    bias: Any  # f32[rows, tile], or None
    # Outputs, of the block that is scored.
    token_ids: Any  # i32[rows, 1]
    logprobs: Any  # f32[rows, 1]
    is_invalid: Any  # i32[rows, 1]
    # Scratch.
    values: Any  # f32[rows, num_tiles * tile], logits and bias
    largest: Any  # f32[rows, width], of the block that is read
    is_bad: Any  # i32[rows, width], of the same block: whether it has NaN or +inf
    row_largest: Any  # f32[rows, 1], of the block that is scored
    row_is_bad: Any  # i32[rows, 1]
    best: Any  # f32[rows, width], the best score
    index: Any  # i32[rows, width], its token id, the lowest of equals
    chosen: Any  # f32[rows, width], its processed logit
    total: Any  # f32[rows, width], sum of exponentials


def _kernel(*refs, shape: _Shape):
    inputs = 5 if shape.has_bias else 4
    refs = _Refs(*refs[:inputs], *[None] * (5 - inputs), *refs[inputs:])
    block, tile = pl.program_id(0), pl.program_id(1)
    is_last = tile == shape.num_tiles - 1

    @pl.when(block > 0)
    def _():
        pl.when(tile == 0)(lambda: _begin_scores(refs))
        has_noise = jnp.max(refs.temperature[...]) > 0
        pl.when(has_noise)(lambda: _race(refs, tile, shape))
        pl.when(~has_noise)(lambda: _compare(refs, tile, shape))
        pl.when(is_last)(lambda: _end_scores(refs))

    @pl.when(block < shape.num_blocks)
    def _():
        pl.when(tile == 0)(lambda: _begin_values(refs))
        _read(refs, tile, shape)
        pl.when(is_last)(lambda: _end_values(refs))


def _begin_values(refs: _Refs) -> None:
    refs.largest[...] = jnp.full_like(refs.largest, -jnp.inf)
    refs.is_bad[...] = jnp.zeros_like(refs.is_bad)


def _read(refs: _Refs, tile: Any, shape: _Shape) -> None:
    """Puts a tile's values where they stay, and takes their maximum."""

    def body(start: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        largest, is_bad = carry
        at = pl.ds(start, shape.width)
        values = refs.logits[:, at].astype(jnp.float32)
        if refs.bias is not None:
            values = values + refs.bias[:, at]
        # Past the vocabulary lies anything.
        values = jnp.where(_ids(tile, start, shape) < shape.vocab, values, -jnp.inf)
        refs.values[:, _place(tile, start, shape)] = values
        is_good = values < jnp.inf  # NaN is not
        largest = jnp.where(is_good, jnp.maximum(largest, values), largest)
        return largest, jnp.where(is_good, is_bad, 1)

    carry = refs.largest[...], refs.is_bad[...]
    refs.largest[...], refs.is_bad[...] = _each_part(tile, shape, body, carry)


def _end_values(refs: _Refs) -> None:
    refs.row_largest[...] = jnp.max(refs.largest[...], axis=1, keepdims=True)
    refs.row_is_bad[...] = jnp.max(refs.is_bad[...], axis=1, keepdims=True)


def _begin_scores(refs: _Refs) -> None:
    for lowest in (refs.best, refs.chosen):
        lowest[...] = jnp.full_like(lowest, -jnp.inf)
    for zero in (refs.index, refs.total):
        zero[...] = jnp.zeros_like(zero)


def _compare(refs: _Refs, tile: Any, shape: _Shape) -> None:
    """Takes a tile's best tokens where no row has noise."""
    scaling = _scaling(refs)

    def body(start: Any, carry: tuple[_Best, Array]) -> tuple[_Best, Array]:
        best, total = carry
        kept, ids = _processed(refs, scaling, tile, start, shape)
        return best.take(kept, ids, kept), total + jnp.exp(kept - scaling.top)

    carry = _Best.of(refs), refs.total[...]
    best, refs.total[...] = _each_part(tile, shape, body, carry)
    best.put(refs)


def _race(refs: _Refs, tile: Any, shape: _Shape) -> None:
    """Takes a tile's best tokens, with noise for those that may be better than the best."""
    keys, scaling = refs.keys[...], _scaling(refs)
    has_noise = scaling.is_random.astype(jnp.float32)
    nothing = jnp.full((shape.rows, shape.width), -jnp.inf)

    def bound(start: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        first, second, total = carry
        kept, ids = _processed(refs, scaling, tile, start, shape)
        bounds = kept + has_noise * gumbel_bound(random_bits(keys, ids))
        second = jnp.maximum(second, jnp.minimum(first.score, bounds))
        first = first.take(bounds, ids, kept)
        return first, second, total + jnp.exp(kept - scaling.top)

    def score(best: _Best, kept: Array, ids: Array) -> _Best:
        noise = gumbel_by_polynomials(random_bits(keys, ids))
        scores = jnp.where(scaling.is_random, kept + noise, kept)
        return best.take_first(scores, ids, kept)

    def score_all() -> None:
        def body(start: Any, best: _Best) -> _Best:
            return score(best, *_processed(refs, scaling, tile, start, shape))

        _each_part(tile, shape, body, _Best.of(refs)).put(refs)

    carry = _Best(nothing, jnp.zeros_like(nothing, jnp.int32), nothing), nothing
    carry = *carry, refs.total[...]
    first, second, refs.total[...] = _each_part(tile, shape, bound, carry)

    # What is no more than the best comes after it, and loses a tie.
    @pl.when(_any_above(first.score, _Best.of(refs)))
    def _():
        best = score(_Best.of(refs), first.chosen, first.index)
        best.put(refs)
        # A bound is more than the score, except without noise, where the first of
        # equals is what its lane kept: as much as the best is not enough.
        pl.when(_any_above(second, best))(score_all)


class _Best(NamedTuple):
    """The best token of each lane of a row, of all whose ids are the lane's modulo width."""

    score: Array  # f32[rows, width]
    index: Array  # i32[rows, width], its token id, the lowest of equals
    chosen: Array  # f32[rows, width], its processed logit

    @classmethod
    def of(cls, refs: _Refs) -> _Best:
        return cls(refs.best[...], refs.index[...], refs.chosen[...])

    def put(self, refs: _Refs) -> None:
        refs.best[...], refs.index[...], refs.chosen[...] = self

    def take(self, score: Array, index: Array, chosen: Array) -> _Best:
        """Returns the better of each; `index` is the higher."""
        return self._where(score > self.score, score, index, chosen)

    def take_first(self, score: Array, index: Array, chosen: Array) -> _Best:
        """Returns the better of each, in whatever order they come."""
        is_first = (score == self.score) & (index < self.index)
        return self._where((score > self.score) | is_first, score, index, chosen)

    def _where(self, is_better: Array, *other: Array) -> _Best:
        return _Best(*(jnp.where(is_better, new, old) for new, old in zip(other, self)))


def _any_above(values: Array, best: _Best) -> Any:
    """Returns whether a value f32[rows, width] is above the best of its row, bool[]."""
    level = jnp.max(best.score, axis=1, keepdims=True)
    return jnp.max(jnp.where(values > level, 1.0, 0.0)) > 0


def _processed(
    refs: _Refs, scaling: _Scaling, tile: Any, start: Any, shape: _Shape
) -> tuple[Array, Array]:
    """Returns the processed logits of a part, f32[rows, width], and their token ids."""
    values = refs.values[:, _place(tile, start, shape)]
    scaled = (values - scaling.shift) / scaling.divisor
    kept = jnp.where(scaled < refs.thresholds[...], -jnp.inf, scaled)
    return kept, _ids(tile, start, shape)


def _end_scores(refs: _Refs) -> None:
    """Writes the best of all lanes; the lowest id of equals."""
    best = jnp.max(refs.best[...], axis=1, keepdims=True)
    far = jnp.iinfo(jnp.int32).max
    ids = jnp.where(refs.best[...] == best, refs.index[...], far)
    index = jnp.min(ids, axis=1, keepdims=True)
    chosen = jnp.where(ids == index, refs.chosen[...], -jnp.inf)
    sample = finish(
        index,
        jnp.max(chosen, axis=1, keepdims=True),
        _scaling(refs).top,
        jnp.sum(refs.total[...], axis=1, keepdims=True),
        refs.row_is_bad[...] > 0,
        log=log,
    )
    refs.token_ids[...] = sample.token_ids
    refs.logprobs[...] = sample.logprobs
    refs.is_invalid[...] = sample.is_invalid.astype(jnp.int32)


class _Scaling(NamedTuple):
    """Values that scale the rows of a block, [rows, 1] each."""

    is_random: Array
    shift: Array
    divisor: Array
    top: Array  # the largest processed logit


def _scaling(refs: _Refs) -> _Scaling:
    temperature, largest = refs.temperature[...], refs.row_largest[...]
    largest = jnp.where(largest > -jnp.inf, largest, 0.0)
    is_random = temperature > 0
    return _Scaling(
        is_random,
        jnp.where(is_random, largest, 0.0),
        jnp.where(is_random, temperature, 1.0),
        jnp.where(is_random, 0.0, largest),
    )


def _each_part(
    tile: Any, shape: _Shape, body: Callable[[Any, Carry], Carry], carry: Carry
) -> Carry:
    """Passes a carry through the parts of a tile that hold tokens.

    Args:
      body: given where in the tile the part begins.
    """

    def of_chunk(chunk: Any, carry: Carry) -> Carry:
        for part in range(0, shape.chunk, shape.width):
            start = chunk * shape.chunk + part
            carry = body(pl.multiple_of(start, shape.width), carry)
        return carry

    left = pl.cdiv(shape.vocab - tile * shape.tile, shape.chunk)
    return lax.fori_loop(0, jnp.minimum(left, shape.tile // shape.chunk), of_chunk, carry)


def _ids(tile: Any, start: Any, shape: _Shape) -> Array:
    """Returns the token ids of a part, i32[rows, width]."""
    first = tile * shape.tile + start
    return first + lax.broadcasted_iota(jnp.int32, (shape.rows, shape.width), 1)


def _place(tile: Any, start: Any, shape: _Shape) -> Any:
    """Returns where a part of a tile stays."""
    return pl.ds(pl.multiple_of(tile * shape.tile + start, shape.width), shape.width)
