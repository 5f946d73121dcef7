"""Sampling with seeded noise, defined: one row after the other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.counter_noise import gumbel, random_bits


class Sample(NamedTuple):
    """The token drawn for each row; 0 with a log-probability of -inf where invalid."""

    token_ids: Array  # i32[num_tokens], inside the vocabulary
    logprobs: Array  # f32[num_tokens], of the tokens
    is_invalid: Array  # bool[num_tokens]: NaN or +inf, or nothing that can be chosen


def seeded_sample_reference(
    logits: Array,  # f32 or bf16[num_tokens, vocab]
    keys: Array,  # u32[num_tokens, 2]
    temperature: Array,  # f32[num_tokens]
    bias: Array | None,  # f32[num_tokens, vocab]
    thresholds: Array,  # f32[num_tokens]
) -> Sample:
    """See `seeded_sample`."""
    values = logits.astype(jnp.float32)
    if bias is not None:
        values = values + bias

    def of_row(row: tuple[Array, ...]) -> Sample:
        values, key, temperature, threshold = row
        is_random = temperature > 0
        noise = gumbel(random_bits(key[None], values.size))[0]
        scaled = jnp.where(is_random, (values - values.max()) / temperature, values)
        kept = jnp.where(scaled < threshold, -jnp.inf, scaled)
        scores = jnp.where(is_random, kept + noise, kept)
        token_id = jnp.argmax(scores).astype(jnp.int32)
        logprob = jax.nn.log_softmax(kept)[token_id]
        is_invalid = jnp.any(~(values < jnp.inf)) | ~jnp.any(kept > -jnp.inf)
        return Sample(
            jnp.where(is_invalid, 0, token_id),
            jnp.where(is_invalid, -jnp.inf, logprob),
            is_invalid,
        )

    return lax.map(of_row, (values, keys, temperature, thresholds))
