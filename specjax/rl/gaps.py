"""What a policy-gradient loss multiplies by where trainer and sampler give other probabilities."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from specjax.runtime.jax_settings import own_arithmetic

PER = ("token", "sequence", "mean")
BEYOND = ("clip", "mask")


class ImportanceWeights(NamedTuple):
    """Weights of tokens, constants of a loss; 0 outside the mask that was given."""

    weights: Array  # f32[num_samples, width]
    # bool[num_samples, width], the tokens of the mask whose ratio is within bounds.
    is_within: Array


def importance_weights(
    behaviour: Array,
    other: Array,
    mask: Array,
    *,
    per: str = "token",
    lowest: float = 0.0,
    highest: float = 2.0,
    beyond: str = "clip",
) -> ImportanceWeights:
    """Returns the ratio of two probabilities of the same tokens, within bounds; pure, for jit.

    They correct a loss for what was sampled by weights, or with roundings, other than the
    trainer's. No gradient flows through them.

        per="token", beyond="clip"      truncated importance sampling
        per="token", beyond="mask"      IcePop (arXiv:2510.18855), with lowest=0.5, highest=5
        per="sequence", beyond="clip"   the ratio of the whole completion, unbiased before bounds
        per="mean"                      its geometric mean per token, GSPO (arXiv:2507.18071)

    Args:
      behaviour: f32[num_samples, width], log-probabilities from the sampler.
      other: f32[num_samples, width], from the trainer.
      mask: bool[num_samples, width], which tokens count.
      per: "token", each token's own ratio; "sequence", the product of a sample's ratios; "mean",
        the geometric mean of them.
      lowest, highest: bounds of a ratio.
      beyond: "clip" moves a ratio to the nearer bound; "mask" makes the weight 0.

    Raises:
      ValueError: shapes differ, bounds are not in order, or a name is unknown.
    """
    _check(behaviour, other, mask, lowest, highest)
    for name, value, allowed in (("per", per, PER), ("beyond", beyond, BEYOND)):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}.")
    with own_arithmetic():
        log_ratio = log_ratios(behaviour, other, mask)
        if per != "token":
            log_ratio = jnp.sum(log_ratio, axis=1, keepdims=True)
        if per == "mean":
            count = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32)
            log_ratio = log_ratio / jnp.maximum(count, 1)
        ratio = jnp.broadcast_to(jnp.exp(log_ratio), mask.shape)
        is_within = mask & (ratio >= lowest) & (ratio <= highest)
        kept = is_within if beyond == "mask" else mask
        weights = jnp.where(kept, jnp.clip(ratio, lowest, highest), 0.0)
        return ImportanceWeights(lax.stop_gradient(weights), is_within)


def sequence_gaps(behaviour: Array, other: Array, mask: Array) -> dict[str, Array]:
    """Returns the gap between two sets of log-probabilities, sample by sample; pure, for jit.

    Args:
      behaviour, other, mask: as for `importance_weights`.

    Returns:
      f32[num_samples] each, 0 for samples without tokens: `mean_gap` and `largest_gap` of
      |other - behaviour|; `log_ratio`, of the whole completion; `kl` of the sampler from the
      trainer, the mean over tokens of ratio - 1 - log ratio.
    """
    _check(behaviour, other, mask)
    with own_arithmetic():
        log_ratio = log_ratios(behaviour, other, mask)
        count = jnp.maximum(jnp.sum(mask, axis=1, dtype=jnp.float32), 1)
        gap = jnp.abs(log_ratio)
        return {
            "mean_gap": jnp.sum(gap, axis=1) / count,
            "largest_gap": jnp.max(gap, axis=1, initial=0.0),
            "log_ratio": jnp.sum(log_ratio, axis=1),
            "kl": jnp.sum(jnp.expm1(log_ratio) - log_ratio, axis=1) / count,
        }


def log_ratios(behaviour: Array, other: Array, mask: Array) -> Array:
    """Returns other - behaviour, f32[num_samples, width], 0 outside the mask."""
    # A trainer may compute in 64 bits, or in 16.
    behaviour, other = (jnp.asarray(x, jnp.float32) for x in (behaviour, other))
    return jnp.where(mask, other - behaviour, 0.0)


def _check(
    behaviour: Array, other: Array, mask: Array, lowest: float = 0.0, highest: float = 1.0
) -> None:
    """Raises ValueError for shapes that differ or bounds that are not in order."""
    shapes = {jnp.shape(behaviour), jnp.shape(other), jnp.shape(mask)}
    if len(shapes) != 1 or jnp.ndim(mask) != 2:
        raise ValueError(
            f"behaviour {jnp.shape(behaviour)}, other {jnp.shape(other)} and mask "
            f"{jnp.shape(mask)} must be [num_samples, width] alike."
        )
    is_known = not any(isinstance(bound, Tracer) for bound in (lowest, highest))
    if is_known and not 0 <= lowest < highest:
        raise ValueError(f"{lowest=} and {highest=} must be in order, from 0.")
