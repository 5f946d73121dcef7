"""Sampling with seeded noise: the public function, its checks, its implementations."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementations import call_best, needs_platform
from pallas_kernels.seeded_sample.mosaic_tpu import seeded_sample_mosaic_tpu
from pallas_kernels.seeded_sample.reference import Sample, seeded_sample_reference
from pallas_kernels.seeded_sample.xla import seeded_sample_xla


def seeded_sample(
    logits: Array,  # f32 or bf16[num_tokens, vocab]
    keys: Array,  # u32[num_tokens, 2]
    temperature: Array,  # f32[num_tokens]
    *,
    bias: Array | None = None,  # f32[num_tokens, vocab]
    thresholds: Array | None = None,  # f32[num_tokens]
    implementation: str | None = None,
) -> Sample:
    """Draws a token per row by argmax of processed logits plus Gumbel noise.

    For a row with logits x, bias b and temperature t > 0 the processed logits are
    (x + b - max(x + b)) / t, whose largest is 0; at t = 0, the argmax, they are
    x + b, and there is no noise. Tokens below the row's threshold cannot be chosen.
    The noise is a function of the key and the token id (`counter_noise`), so it does not
    depend on other rows. The lowest id wins a tie.

    All implementations use the same random bits. Their logarithms agree within 2 units in
    the last place, so they may choose differently between two tokens that close.

    Args:
      keys: one key per draw, as for `counter_noise.random_bits`.
      temperature: at least 0.
      bias: added to the logits; -inf forbids a token.
      thresholds: lower bounds of processed logits; -inf, or None, keeps all tokens. For min_p
        it is log(min_p) where the temperature is above 0, and -inf where it is 0, as min_p
        never cuts the argmax; those of top-k and top-p take passes of their own. A threshold
        above the largest logit leaves no token.
      implementation: "mosaic_tpu", "xla" or "reference"; None picks the best for this case.

    Returns:
      A `Sample`: token ids, and their natural log-probabilities in the softmax of the
      processed logits that are left. At temperature 0 that is the softmax at
      temperature 1.

    Raises:
      ValueError: shapes or dtypes disagree.

    Source: the Gumbel-max trick, Maddison, Tarlow and Minka 2014 (arXiv:1411.0030),
    section 2.
    """
    _validate(logits, keys, temperature, bias, thresholds)
    if thresholds is None:
        thresholds = jnp.full(logits.shape[0], -jnp.inf, jnp.float32)
    arguments = (logits, keys, temperature, bias, thresholds)
    mosaic_tpu = functools.partial(seeded_sample_mosaic_tpu, *arguments)
    implementations = {
        "mosaic_tpu": needs_platform("tpu", mosaic_tpu),
        "xla": functools.partial(seeded_sample_xla, *arguments),
        "reference": functools.partial(seeded_sample_reference, *arguments),
    }
    return call_best("seeded_sample", implementations, implementation)


def _validate(
    logits: Array,
    keys: Array,
    temperature: Array,
    bias: Array | None,
    thresholds: Array | None,
) -> None:
    if logits.ndim != 2 or not logits.size or logits.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            "logits must be f32 or bf16[num_tokens, vocab] and not empty, got "
            f"{logits.dtype}{list(logits.shape)}."
        )
    num_tokens, vocab = logits.shape
    for name, array, dtype, shape in (
        ("keys", keys, jnp.uint32, (num_tokens, 2)),
        ("temperature", temperature, jnp.float32, (num_tokens,)),
        ("bias", bias, jnp.float32, (num_tokens, vocab)),
        ("thresholds", thresholds, jnp.float32, (num_tokens,)),
    ):
        if array is not None and (array.dtype != dtype or array.shape != shape):
            raise ValueError(
                f"{name} must be {jnp.dtype(dtype).name}{list(shape)} for "
                f"{logits.shape=}, got {array.dtype}{list(array.shape)}."
            )
