"""Optimisers of optax that models and drafters are trained with here."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib


def trapezoid(peak: float, steps: int, warmup: int, decay: int) -> optax.Schedule:
    """Returns a rate that rises over `warmup` steps, stays, and falls to zero over the last
    `decay`, or over what the rise leaves of all steps; no step's rate is zero."""
    warmup = min(warmup, steps)
    decay = min(decay, steps - warmup)

    def rate(step: Any) -> Any:
        rise = (step + 1) / (warmup + 1)
        fall = (steps - step) / (decay + 1)
        return peak * jnp.clip(jnp.minimum(rise, fall), 0.0, 1.0)

    return rate


@functools.lru_cache(maxsize=8)  # one object for equal arguments: it is static in jitted updates
def muon(
    peak: float,
    steps: int,
    warmup: int,
    decay: int,
    vocab_sizes: frozenset[int],
    weight_decay: float = 0.0,
    adam_share: float = 0.2,
) -> optax.GradientTransformation:
    """Returns Muon for matrices [out, in], and Adam for everything else.

    Tables with a row per token are no matrices here: an update of full rank would move the rows of
    tokens that a batch does not have.

    Args:
      vocab_sizes: lengths of axes that make a matrix such a table; one that has such a length by
        chance is taken for one.
      adam_share: of Muon's rate, that of Adam.

    Source: Jordan 2024, "Muon: an optimizer for hidden layers in neural networks".
    """

    def kinds(params: Any) -> Any:
        is_matrix = lambda leaf: leaf.ndim == 2 and not vocab_sizes & set(leaf.shape)
        return jax.tree.map(lambda leaf: "matrix" if is_matrix(leaf) else "other", params)

    rate = lambda share: trapezoid(share * peak, steps, warmup, decay)
    transforms: dict[Hashable, optax.GradientTransformation] = {
        "matrix": optax.contrib.muon(
            rate(1.0),
            weight_decay=weight_decay,
            muon_weight_dimension_numbers=cast(Any, _output_first),
        ),
        "other": optax.adam(rate(adam_share), b1=0.9, b2=0.98),
    }
    return optax.partition(transforms, kinds)


@functools.lru_cache(maxsize=8)
def adamw(peak: float, steps: int, warmup: int, decay: int) -> optax.GradientTransformation:
    """Returns AdamW with gradients clipped to a norm of 1."""
    rate = trapezoid(peak, steps, warmup, decay)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.01)
    )


def _output_first(params: Any) -> Any:
    """Says to Muon that matrices are [out, in].

    It scales updates by sqrt(max(1, out / in)), so it must know which is which; its
    orthogonalisation is the same for a matrix and its transpose.
    """
    out_in = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    return jax.tree.map(lambda _: out_in, params)
