"""Sampling with seeded noise for any device."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.counter_noise import gumbel, random_bits
from pallas_kernels.seeded_sample.reference import Sample


def seeded_sample_xla(
    logits: Array,  # f32 or bf16[num_tokens, vocab]
    keys: Array,  # u32[num_tokens, 2]
    temperature: Array,  # f32[num_tokens]
    bias: Array | None,  # f32[num_tokens, vocab]
    thresholds: Array,  # f32[num_tokens]
) -> Sample:
    """See `seeded_sample`.

    Two passes over the logits where XLA fuses them: one for the maximum, one for all
    else.
    """
    values = logits.astype(jnp.float32)
    if bias is not None:
        values = values + bias
    is_random = (temperature > 0)[:, None]
    largest = jnp.max(values, axis=1, keepdims=True)
    has_largest = jnp.isfinite(largest)
    shift = jnp.where(is_random & has_largest, largest, 0.0)
    scaled = (values - shift) / jnp.where(is_random, temperature[:, None], 1.0)
    kept = jnp.where(scaled < thresholds[:, None], -jnp.inf, scaled)
    noise = gumbel(random_bits(keys, logits.shape[1]))
    scores = jnp.where(is_random, kept + noise, kept)
    # What is NaN stays so up to here, whatever the bias and the threshold.
    scores = jnp.where(scores < jnp.inf, scores, jnp.inf)
    best, token_ids, chosen = first_best(scores, kept)
    top = jnp.where(is_random | ~has_largest, 0.0, largest)
    total = jnp.sum(jnp.exp(kept - top), axis=1)
    return finish(token_ids, chosen, top[:, 0], total, best == jnp.inf)


def finish(
    token_ids: Array,  # i32[num_tokens]
    chosen: Array,  # f32[num_tokens], their processed logits; -inf where nothing is left
    top: Array,  # f32[num_tokens], what was subtracted before the exponential
    total: Array,  # f32[num_tokens], sum of exponentials
    is_bad: Array,  # bool[num_tokens], NaN or +inf among the logits
    *,
    log: Callable[[Array], Array] = jnp.log,
) -> Sample:
    """Returns the sample of what a pass over the vocabulary found."""
    is_invalid = is_bad | ~(chosen > -jnp.inf)
    logprobs = chosen - top - log(jnp.where(is_invalid, 1.0, total))
    return Sample(
        jnp.where(is_invalid, 0, token_ids),
        jnp.where(is_invalid, -jnp.inf, logprobs),
        is_invalid,
    )


def first_best(scores: Array, *values: Array) -> tuple[Array, ...]:
    """Returns each row's best score f32[n], its lowest index i32[n], and its values f32[n] each.

    One reduction of all: a score computed a second time may differ in its last bit.

    Args:
      scores: f32[n, size], never NaN.
      values: f32[n, size] each.
    """
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)

    def better(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
        is_first = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
        return tuple(jnp.where(is_first, *pair) for pair in zip(one, other))

    lowest = jnp.float32(-jnp.inf)
    start = lowest, jnp.int32(jnp.iinfo(jnp.int32).max), *[lowest] * len(values)
    return tuple(lax.reduce((scores, ids, *values), start, better, (1,)))
