"""Whole sequences at once, without a cache: the forward of training."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from specjax.models.architectures import architecture_of
from specjax.models.base import ModelConfig, Params
from specjax.models.layers import dense_causal_attention


def sequence_logits(
    params: Params, config: ModelConfig, token_ids: Array, mask: Array | None = None
) -> Array:
    """Returns f32[rows, length, vocab], of what follows each token; differentiable.

    Args:
      token_ids: i32[rows, length].
      mask: bool[rows, length], where they are text; None is everywhere. Padding on either
        side is neither seen nor counted in positions, and its own logits mean nothing.
    """
    if mask is None:
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    else:
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)

    def attend(layer, q, k, v, cache):
        out = dense_causal_attention(
            q, k, v, scale=config.scale, window=config.window(layer), key_mask=mask
        )
        return out, cache

    architecture = architecture_of(config)
    caches = (None,) * config.num_layers
    hidden, _ = architecture.forward(params, config, token_ids, positions, attend, caches)
    return architecture.logits(params, config, hidden)
