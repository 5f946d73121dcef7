"""Scales of int8 and fp8 keys and values: one per key head of each layer.

They follow from the weights alone, so that output never depends on which requests came first.
A scale covers the largest absolute key or value of its head over a fixed text of token ids,
times HEADROOM. Larger values of real text are clipped to the largest number of the dtype.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import layout
from specjax.models.base import LayerCache, ModelConfig, Params
from specjax.models.families import family_of
from specjax.models.layers import dense_causal_attention

# Size of the fixed text: sequences, and tokens of each; ids are spread over the vocabulary.
NUM_SEQUENCES, LENGTH = 8, 64
HEADROOM = 1.5
LEAST = 1e-30  # scale of a head whose values are always 0


def measure_kv_scales(
    params: Params, config: ModelConfig, dtype: np.dtype, *, tensor_axis: str | None = None
) -> Array:
    """Returns f32[2, layers, kv_heads], keys first: factors to multiply numbers of pages by.

    Args:
      params: the target's weights; under a mesh one device's part of its heads.
      dtype: of the pages, int8 or fp8 (e4m3).
    """
    token_ids = calibration_tokens(config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), token_ids.shape)

    def attend(
        layer: int, q: Array, k: Array, v: Array, cache: LayerCache, sinks: Array | None = None
    ) -> tuple[Array, Array]:
        largest = jnp.stack([_largest(k), _largest(v)])
        options = config.attention_options(layer)
        return dense_causal_attention(q, k, v, sinks=sinks, **options), largest

    family = family_of(config)
    _, largest, *_ = family.forward(
        params,
        config,
        jnp.asarray(token_ids),
        positions,
        attend,
        (None,) * config.num_layers,
        tensor_axis,
        is_token=jnp.ones(token_ids.shape, bool) if family.has_experts else None,
    )
    scales = jnp.stack(largest, axis=1) * (HEADROOM / layout.LARGEST[jnp.dtype(dtype)])
    # NaN or infinite weights are reported by their logits, not here.
    return jnp.where(jnp.isfinite(scales), jnp.maximum(scales, LEAST), 1.0)


def calibration_tokens(vocab_size: int) -> np.ndarray:
    """Returns the fixed text, i32[NUM_SEQUENCES, LENGTH]: ids at steps of the golden ratio."""
    places = np.arange(NUM_SEQUENCES * LENGTH, dtype=np.uint64)
    spread = (places * np.uint64(0x9E3779B1)) % np.uint64(2**32)
    token_ids = (spread * np.uint64(vocab_size)) >> np.uint64(32)
    return token_ids.astype(np.int32).reshape(NUM_SEQUENCES, LENGTH)


def _largest(values: Array) -> Array:
    """Returns each head's largest absolute value, f32[kv_heads], of values [.., kv_heads, dim]."""
    return jnp.abs(values.astype(jnp.float32)).max(axis=(0, 1, 3))
