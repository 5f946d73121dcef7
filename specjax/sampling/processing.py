"""Processes logits: bias, masks, penalties, temperature, min_p, top_k, top_p."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.implementations import by_platform
from specjax.sampling.argmax import (
    FEW_BLOCK,
    block_indices,
    block_maxima,
    is_short,
    top_few,
)
from specjax.sampling.packing import take
from specjax.sampling.row_sampling import RowSampling
from specjax.sampling.vocabulary import WHOLE, Vocabulary

# How many parts a pass over the logits splits a search's range into. An accelerator reads them
# once for all comparisons (up to 8 on v5e, compiled with jax 0.10.2); a CPU takes as long for a
# comparison as for a pass.
WAYS, WAYS_ON_CPU = 8, 2


class TreeHistory(NamedTuple):
    """The prefix of each node of a tree, in which siblings share a position."""

    token_ids: Array  # i32[rows, max_length], committed tokens by position
    roots: Array  # i32[num_tokens], the root's position; the node's path follows it
    path_token_ids: Array  # i32[num_tokens, max_depth], ancestors after the root, and itself

    def prefixes(self, row: Array) -> Array:
        """Returns prefixes i32[num_tokens, max_length], valid up to each node's own position."""
        committed = self.token_ids[row]
        depth = self.path_token_ids.shape[1]
        ahead = jnp.arange(committed.shape[1])[None, :] - self.roots[:, None] - 1
        drafted = jnp.take_along_axis(self.path_token_ids, jnp.clip(ahead, 0, depth - 1), axis=1)
        return jnp.where((ahead >= 0) & (ahead < depth), drafted, committed)


# i32[rows, max_length], tokens by position, drafts of a chain included; or a TreeHistory.
History: TypeAlias = Array | TreeHistory


class Usage(NamedTuple):
    """Which features each token, or any of the batch, needs; bool[num_tokens] or bool[] each.

    Of a feature that the step is not compiled for it is the Python value False.
    """

    allowed: Array | bool = False
    bias: Array | bool = False
    min_tokens: Array | bool = False
    repetition: Array | bool = False
    presence: Array | bool = False
    frequency: Array | bool = False
    filters: Array | bool = False
    temperature: Array | bool = False

    @property
    def edits(self) -> Array | bool:
        """Whether logits change before the temperature."""
        return (
            self.allowed
            | self.bias
            | self.min_tokens
            | self.repetition
            | self.presence
            | self.frequency
        )

    @property
    def masks(self) -> Array | bool:
        """Whether a NaN or +inf among the logits may be gone after processing.

        True for every feature except those that add or multiply, which keep NaN or +inf (+inf
        less inf is NaN). A new feature counts by default.
        """
        keeps = {"bias", "repetition", "presence", "frequency"}
        hides = [used for name, used in self._asdict().items() if name not in keeps]
        return functools.reduce(operator.or_, hides)


def usage(sampling: RowSampling, row_ids: Array, positions: Array) -> Usage:
    """Returns the features used by rows with tokens in the batch, bool[] each."""
    by_token = usage_by_token(sampling, row_ids, positions)._asdict()
    used = {name: flags for name, flags in by_token.items() if flags is not False}
    if not used:
        return Usage()
    return Usage(**dict(zip(used, jnp.any(jnp.stack([*used.values()]), axis=1))))


def is_plain(sampling: RowSampling, row_ids: Array, positions: Array) -> Array:
    """Returns which tokens use no feature but the temperature, bool[num_tokens]; padding is
    plain."""
    used = usage_by_token(sampling, row_ids, positions)
    return ~jnp.broadcast_to(used.edits | used.filters, row_ids.shape)


def usage_by_token(sampling: RowSampling, row_ids: Array, positions: Array) -> Usage:
    """Returns which features each token needs, bool[num_tokens] each."""
    row, is_own = own_rows(sampling, row_ids)
    is_random = sampling.temperature > 0
    uses, by_row = sampling.uses, {}
    if uses.filters:
        filters = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    if uses.edits:
        by_row = dict(
            allowed=sampling.has_allowed,
            bias=jnp.any(sampling.bias_values != 0, axis=1),
            min_tokens=sampling.min_tokens > 0,
            repetition=sampling.repetition_penalty != 1,
            presence=sampling.presence_penalty != 0,
            frequency=sampling.frequency_penalty != 0,
        )
    if uses.filters:
        by_row["filters"] = is_random & filters
    if uses.random:
        by_row["temperature"] = is_random
    if not by_row:
        return Usage()
    rows = jnp.stack([*by_row.values()], axis=1), sampling.prompt_lengths, sampling.min_tokens
    flags, *own = take(rows, row)
    by_token = Usage(**dict(zip(by_row, (flags & is_own[:, None]).T)))
    if not uses.edits:
        return by_token
    return by_token._replace(min_tokens=is_own & _is_early(positions, *own))


def either(
    predicate: Array | bool, one: Callable[..., Any], other: Callable[..., Any], *operands: Any
) -> Any:
    """Returns lax.cond(...); of a Python bool only the branch that is meant, without a cond."""
    if isinstance(predicate, bool):
        return one(*operands) if predicate else other(*operands)
    return lax.cond(predicate, one, other, *operands)


def own_rows(sampling: RowSampling, row_ids: Array) -> tuple[Array, Array]:
    """Returns the row of each token, clamped to the batch, and whether the token is no
    padding."""
    return _clamp(row_ids, sampling), row_ids < sampling.rows


def process_logits(
    logits: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: History,
    *,
    vocabulary: Vocabulary = WHOLE,
) -> Array:
    """Returns logits whose softmax each node samples from, f32[num_tokens, vocab].

    The order is: allowed ids, bad ids and logit_bias, min_tokens, repetition, frequency
    and presence penalty; then, unless the row's temperature is 0, the temperature,
    min_p, top_k and top_p, each over the tokens that the one before kept. Tokens that
    cannot be chosen get -inf. Tokens equal to the last one kept are kept too, and the most
    likely token always is. With a temperature the largest logit is 0.

    A NaN logit becomes NaN or -inf; other logits of its row are arbitrary then, and other
    rows are not affected.

    Over slices of a vocabulary the result equals that of the whole to the last bit, but for
    top_p: its sums of probabilities are added in another order.

    Args:
      logits: f32[num_tokens, vocab], of the token at positions + 1; this device's slice of
        them if the vocabulary is split.
      row_ids: i32[num_tokens]; padding may hold numbers past the last row.
      positions: i32[num_tokens], of the node's own token: its prefix is
        history[row, : position + 1], drafted ancestors included.
      history: i32[rows, max_length], or a TreeHistory.
      vocabulary: how logits and result are split over devices.

    Source: the order of vLLM's steps; docs/sampling-meaning.md says what differs.
    """
    check_shapes(logits, sampling, row_ids, positions, history)
    used = usage(sampling, row_ids, positions)
    row = _clamp(row_ids, sampling)
    edited = _when(
        used.edits,
        lambda values: _edit(values, used, sampling, row, positions, history, vocabulary),
        logits,
    )
    return _when(
        used.temperature,  # no filter without one
        lambda values: _filter(
            scaler(values, sampling, row, vocabulary)(values), used, sampling, row, vocabulary
        ),
        edited,
    )


def scaler(
    logits: Array, sampling: RowSampling, row: Array, vocabulary: Vocabulary = WHOLE
) -> Callable[[Array], Array]:
    """Returns a function that shifts the largest logit to 0 and divides by the temperature.

    It changes nothing where the temperature is 0. Subtracting the maximum first keeps
    precision for the likely tokens, and no temperature can overflow to +inf.

    Args:
      logits: f32[num_tokens, vocab], whose maximum is subtracted.
      row: i32[num_tokens], inside the batch.
    """
    temperature = sampling.temperature[row][:, None]
    is_random = temperature > 0
    largest = vocabulary.max(jnp.max(logits, axis=1, keepdims=True))
    shift = jnp.where(is_random & jnp.isfinite(largest), largest, 0.0)
    divisor = jnp.where(is_random, temperature, 1.0)
    return lambda values: (values - shift) / divisor


def check_shapes(
    logits: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: History,
) -> None:
    """Raises ValueError for arguments of inconsistent shapes or dtypes."""
    num_tokens = logits.shape[0]
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(
            f"logits must be f32[num_tokens, vocab], got {logits.dtype}{logits.shape}."
        )
    if row_ids.shape != (num_tokens,) or positions.shape != (num_tokens,):
        raise ValueError(f"{row_ids.shape=} and {positions.shape=} must be {(num_tokens,)}.")
    is_tree = isinstance(history, TreeHistory)
    token_ids = history.token_ids if is_tree else history
    if token_ids.ndim != 2 or token_ids.shape[0] != sampling.rows:
        raise ValueError(f"history {token_ids.shape} must have {sampling.rows=} rows.")


def _clamp(row_ids: Array, sampling: RowSampling) -> Array:
    return jnp.minimum(row_ids, sampling.rows - 1)


def _is_early(positions: Array, prompt_lengths: Array, min_tokens: Array) -> Array:
    """Returns where a stop token is not yet allowed at the next position; i32[num_tokens] each."""
    return positions + 1 - prompt_lengths < min_tokens


def _when(predicate: Array | bool, change: Callable[[Array], Array], values: Array) -> Array:
    return either(predicate, change, lambda same: same, values)


def _edit(
    logits: Array,
    used: Usage,
    sampling: RowSampling,
    row: Array,
    positions: Array,
    history: History,
    vocabulary: Vocabulary,
) -> Array:
    """Applies all features before the temperature, f32[num_tokens, vocab]."""
    vocab = logits.shape[1]
    token = jnp.arange(logits.shape[0])[:, None]
    own = lambda token_ids: vocabulary.index(token_ids, vocab)

    def allow(values: Array) -> Array:
        ids = own(sampling.allowed_token_ids[row])
        kept = jnp.full_like(values, -jnp.inf)
        allowed = jnp.take_along_axis(values, jnp.minimum(ids, vocab - 1), axis=1)
        kept = kept.at[token, ids].set(allowed, mode="drop")
        return jnp.where(sampling.has_allowed[row][:, None], kept, values)

    def bias(values: Array) -> Array:
        ids = own(sampling.bias_token_ids[row])
        return values.at[token, ids].add(sampling.bias_values[row], mode="drop")

    def forbid_stop(values: Array) -> Array:
        ids = sampling.stop_token_ids[row]
        is_early = _is_early(positions, sampling.prompt_lengths[row], sampling.min_tokens[row])
        is_early = is_early[:, None] & (ids >= 0)
        ids = jnp.where(is_early, own(ids), vocab)
        return values.at[token, ids].set(-jnp.inf, mode="drop")

    logits = _when(used.allowed, allow, logits)
    logits = _when(used.bias, bias, logits)
    logits = _when(used.min_tokens, forbid_stop, logits)
    return _when(
        used.repetition | used.presence | used.frequency,
        lambda values: _penalise(values, sampling, row, positions, history, vocabulary),
        logits,
    )


def _penalise(
    logits: Array,
    sampling: RowSampling,
    row: Array,
    positions: Array,
    history: History,
    vocabulary: Vocabulary,
) -> Array:
    """Applies repetition, frequency and presence penalties without a [rows, vocab] count.

    The tokens of the history index the logits to change. A penalty that counts a token
    once gathers, recomputes and sets, so that duplicates set the same value.
    """
    vocab = logits.shape[1]
    token = jnp.arange(logits.shape[0])[:, None]
    is_tree = isinstance(history, TreeHistory)
    ids = history.prefixes(row) if is_tree else history[row]  # [num_tokens, max_length]
    place = jnp.arange(ids.shape[1])[None, :]
    is_prefix = (place <= positions[:, None]) & (ids >= 0)
    is_output = is_prefix & (place >= sampling.prompt_lengths[row][:, None])
    ids = vocabulary.index(ids, vocab)
    readable = jnp.clip(ids, 0, vocab - 1)
    prefix_ids = jnp.where(is_prefix, ids, vocab)
    output_ids = jnp.where(is_output, ids, vocab)

    repetition = sampling.repetition_penalty[row][:, None]
    current = jnp.take_along_axis(logits, readable, axis=1)
    repeated = jnp.where(current > 0, current / repetition, current * repetition)
    logits = logits.at[token, prefix_ids].set(repeated, mode="drop")

    frequency = sampling.frequency_penalty[row][:, None]
    logits = logits.at[token, output_ids].add(-frequency, mode="drop")

    presence = sampling.presence_penalty[row][:, None]
    current = jnp.take_along_axis(logits, readable, axis=1)
    return logits.at[token, output_ids].set(current - presence, mode="drop")


def _filter(
    scaled: Array, used: Usage, sampling: RowSampling, row: Array, vocabulary: Vocabulary
) -> Array:
    """Applies min_p, top_k and top_p as one threshold, the maximum of their cuts."""
    is_random = sampling.temperature[row] > 0
    min_p = jnp.where(is_random, sampling.min_p[row], 0.0)
    top_k = jnp.where(is_random, sampling.top_k[row], 0)
    top_p = jnp.where(is_random, sampling.top_p[row], 1.0)
    cut_of_slices = functools.partial(_cut, vocabulary=vocabulary)

    def cut() -> Array:
        limits = scaled, min_p, top_k, top_p
        # What a CPU does first may differ between slices, which must search together.
        if vocabulary.is_split:
            return cut_of_slices(*limits)
        return by_platform(*limits, cpu=_cut_few_first, default=_cut)

    nothing = lambda: jnp.full(scaled.shape[0], -jnp.inf)
    return jnp.where(scaled < either(used.filters, cut, nothing)[:, None], -jnp.inf, scaled)


def _cut(
    scaled: Array,
    min_p: Array,
    top_k: Array,
    top_p: Array,
    vocabulary: Vocabulary = WHOLE,
    ways: int = WAYS,
) -> Array:
    """Returns the least logit that is kept, f32[num_tokens]; of this device's slice, if split."""
    cut = jnp.log(min_p)  # the largest logit is 0; log(0) = -inf is off
    cut = lax.cond(
        jnp.any(top_k > 0),
        lambda: _top_k_cut(scaled, top_k, cut, vocabulary, ways),
        lambda: cut,
    )

    def nucleus() -> Array:
        enough = top_p * _mass(scaled, cut, vocabulary)
        return _top_p_cut(scaled, top_p, enough, cut, vocabulary, ways)

    return lax.cond(jnp.any(top_p < 1), nucleus, lambda: cut)


def _cut_few_first(scaled: Array, min_p: Array, top_k: Array, top_p: Array) -> Array:
    """Returns `_cut`, from only the blocks of largest logits for tokens where these suffice."""
    if is_short(scaled):
        return _cut_one_by_one(scaled, min_p, top_k, top_p)
    cut, is_enough = _cut_few(scaled, min_p, top_k, top_p)

    def finish(token: tuple[Array, ...]) -> Array:
        *limits, cut, is_enough = (x[None] for x in token)
        return lax.cond(is_enough[0], lambda: cut, lambda: _cut_on_cpu(*limits))[0]

    return lax.cond(
        jnp.all(is_enough),
        lambda: cut,
        lambda: lax.map(finish, (scaled, min_p, top_k, top_p, cut, is_enough)),
    )


def _cut_on_cpu(scaled: Array, min_p: Array, top_k: Array, top_p: Array) -> Array:
    return _cut(scaled, min_p, top_k, top_p, ways=WAYS_ON_CPU)


def _cut_one_by_one(*batch: Array) -> Array:
    """Returns `_cut`, one token at a time: its logits stay in a CPU's cache for all passes."""
    limits = lambda token: (x[None] for x in token)
    return lax.map(lambda token: _cut_on_cpu(*limits(token))[0], batch)


def _cut_few(scaled: Array, min_p: Array, top_k: Array, top_p: Array) -> tuple[Array, Array]:
    """Looks for the cut in the FEW blocks with the largest maxima.

    The least of these maxima is the floor: no other block holds a larger logit, so these
    blocks hold all logits above it.

    Returns:
      cut f32[num_tokens], and whether it is that of `_cut`, bool[num_tokens].
    """
    maxima, blocks = top_few(block_maxima(scaled, width=FEW_BLOCK))
    floor = maxima[:, -1]
    index = block_indices(blocks, scaled.shape[1])
    few = jnp.take_along_axis(scaled, index, axis=1)
    # Where the last block repeats the last token, it counts once.
    is_repeated = index[:, 1:] == index[:, :-1]
    few = few.at[:, 1:].set(jnp.where(is_repeated, -jnp.inf, few[:, 1:]))

    has_top_k = (top_k > 0) & (top_k < scaled.shape[1])
    num_above = jnp.sum((few >= floor[:, None]).astype(jnp.float32), axis=1)
    has_enough = ~has_top_k | ((num_above >= top_k) & (top_k < few.shape[1]))
    search = WHOLE, WAYS_ON_CPU
    cut = jnp.log(min_p)
    cut = lax.cond(jnp.any(top_k > 0), lambda: _top_k_cut(few, top_k, cut, *search), lambda: cut)

    def nucleus() -> tuple[Array, Array]:
        enough = top_p * _mass(scaled, cut)
        # Equal weights are either all in these blocks, or not above the floor.
        is_above = jnp.exp(few) > jnp.exp(floor)[:, None]
        above = _mass(jnp.where(is_above, few, -jnp.inf), cut)
        has_mass = (top_p >= 1) | (above >= enough)
        return _top_p_cut(few, top_p, enough, cut, *search), has_mass

    cut, has_mass = lax.cond(jnp.any(top_p < 1), nucleus, lambda: (cut, jnp.ones_like(has_enough)))
    return cut, has_enough & has_mass


def _mass(scaled: Array, cut: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """Returns the sum of the weights of tokens that are not cut, f32[num_tokens]."""
    return vocabulary.sum(jnp.sum(jnp.where(scaled >= cut[:, None], jnp.exp(scaled), 0.0), axis=1))


def _top_k_cut(scaled: Array, top_k: Array, cut: Array, vocabulary: Vocabulary, ways: int) -> Array:
    """Returns the larger of `cut` and the top_k-th largest logit of each token."""
    is_on = (top_k > 0) & (top_k < vocabulary.size(scaled.shape[1]))

    def measure(level: Array) -> tuple[Array, Array]:
        count = _count(scaled >= level[:, None])
        return count, count

    search = _Search(measure, top_k.astype(jnp.float32), vocabulary, ways)
    level = search.run(is_on, jnp.full_like(cut, -jnp.inf), jnp.zeros_like(cut))
    least = jnp.min(jnp.where(scaled >= level[:, None], scaled, jnp.inf), axis=1)
    return jnp.where(is_on, jnp.maximum(cut, least), cut)


def _top_p_cut(
    scaled: Array, top_p: Array, enough: Array, cut: Array, vocabulary: Vocabulary, ways: int
) -> Array:
    """Returns the least logit of the smallest set, most likely first, with mass `enough`."""
    is_on = top_p < 1
    is_left = scaled >= cut[:, None]
    weights = jnp.where(is_left, jnp.exp(scaled), 0.0)

    # To count costs a CPU as much as the passes that it saves.
    ends_early = ways > WAYS_ON_CPU

    def measure(level: Array) -> tuple[Array, Array]:
        is_kept = weights >= level[:, None]
        mass = jnp.sum(jnp.where(is_kept, weights, 0.0), axis=1)
        return mass, _count(is_kept) if ends_early else mass

    search = _Search(measure, enough, vocabulary, ways, ends_early)
    level = search.run(is_on, jnp.zeros_like(cut), jnp.ones_like(cut))
    is_kept = is_left & (weights >= level[:, None])
    least = jnp.min(jnp.where(is_kept, scaled, jnp.inf), axis=1)
    return jnp.where(is_on, least, cut)


def _count(is_kept: Array) -> Array:
    """Returns how many of each row are set, f32[n]: exact up to 2**24, and vectorised where a
    sum of integers is not."""
    return jnp.sum(is_kept.astype(jnp.float32), axis=1)


class _Range(NamedTuple):
    """Where a level lies: the level `low` leaves enough, `high` does not."""

    low: Array  # u32[num_tokens], a key
    high: Array  # u32[num_tokens]
    num_at_low: Array  # f32[num_tokens], numbers that `low` leaves
    num_at_high: Array  # f32[num_tokens]


class _Search(NamedTuple):
    """A search for the highest level that leaves enough of some numbers, those at or above it.

    A pass over the numbers compares them with ways - 1 levels and leaves one part of the
    range in `ways`: at most 11 passes of 8 ways for the 32 bits of a float. The search ends as
    soon as the two ends differ by a single number, which is the one that is looked for: after
    6 to 9 such passes over normally distributed logits of 32,000 and 128,256 tokens, for
    top_k=50 and top_p=0.95. A sort would move all numbers.
    """

    # f32[num_tokens] -> what a level leaves of a device's numbers, which must not rise with
    # the level, and how many numbers it leaves; f32[num_tokens] each.
    measure: Callable[[Array], tuple[Array, Array]]
    enough: Array  # f32[num_tokens]
    vocabulary: Vocabulary
    ways: int
    ends_early: bool = True  # whether measure counts

    def run(self, is_on: Array, lowest: Array, largest: Array) -> Array:
        """Returns a level that leaves just the numbers wanted, f32[num_tokens].

        Args:
          is_on: bool[num_tokens]; others get `lowest`.
          lowest: f32[num_tokens], a level that leaves enough.
          largest: f32[num_tokens], no number is above it.
        """
        low = _key(lowest)
        high = jnp.where(is_on, _key(largest), low) + jnp.uint32(1)
        start = _Range(low, high, jnp.full_like(lowest, jnp.inf), jnp.zeros_like(lowest))
        return _level(lax.while_loop(self._is_open, self._narrowed, start).low)

    def _narrowed(self, at: _Range) -> _Range:
        part, rest = jnp.divmod(at.high - at.low, jnp.uint32(self.ways))
        ends = range(1, self.ways)
        keys = [at.low + part * jnp.uint32(i) + rest * jnp.uint32(i) // self.ways for i in ends]
        measured = jnp.stack([jnp.stack(self.measure(_level(key))) for key in keys])
        sums, counts = jnp.moveaxis(self.vocabulary.sum(measured), 1, 0)  # [ways - 1, num_tokens]
        is_enough = jnp.ones_like(at.low, bool)
        low, high = at.low, at.high
        num_at_low, num_at_high = at.num_at_low, at.num_at_high
        for key, left, count in zip(keys, sums, counts):
            was_enough, is_enough = is_enough, is_enough & (left >= self.enough)
            low, num_at_low = (
                jnp.where(is_enough, new, old) for new, old in ((key, low), (count, num_at_low))
            )
            is_first_short = was_enough & ~is_enough
            high, num_at_high = (
                jnp.where(is_first_short, new, old)
                for new, old in ((key, high), (count, num_at_high))
            )
        return _Range(low, high, num_at_low, num_at_high)

    def _is_open(self, at: _Range) -> Array:
        """Returns whether any range has more than the one level or number wanted, bool[]."""
        is_open = at.high - at.low > 1
        if self.ends_early:
            is_open &= at.num_at_low - at.num_at_high > 1
        return jnp.any(is_open)


def _key(values: Array) -> Array:
    """Maps f32 to u32 in the same order."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _level(keys: Array) -> Array:
    """Maps keys back to f32, the inverse of `_key`."""
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(keys >= sign, keys ^ sign, ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)
