"""Scales of int8 and fp8 keys and values: one per key head of each layer.

They follow from the weights alone, so that output never depends on which requests came first.
A scale covers the largest absolute key or value of its head over a fixed text of token ids,
times HEADROOM. Larger values of real text are clipped to the largest number of the dtype.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import layout
from specjax.models.base import LayerCache, ModelConfig, Params
from specjax.models.families import family_of
from specjax.models.layers import dense_causal_attention

# Size of the fixed text: sequences, and tokens of each; ids are spread over the vocabulary.
NUM_SEQUENCES, LENGTH = 8, 64
HEADROOM = 1.5
MANTISSA_BITS = 7
MOST_KNOWN = 4  # models whose scales are kept
LEAST = 1e-30  # scale of a head whose values are always 0


def kv_scales_of(params: Params, config: ModelConfig, dtype: np.dtype) -> np.ndarray:
    """Returns `measure_kv_scales` on the host, measured once for the weights asked for last.

    Args:
      params: the target's; over a mesh they lie as its steps take them.
    """
    leaves = jax.tree.leaves(params)
    measure = lambda: np.array(_measure(params, config, np.dtype(dtype)))
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return measure()  # arrays of numpy may change in place
    key = config, np.dtype(dtype)
    if key not in _KNOWN or not _KNOWN[key].is_of(leaves):
        _KNOWN.pop(key, None)
        _KNOWN[key] = _Known([weakref.ref(leaf) for leaf in leaves], measure())
        while len(_KNOWN) > MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)))
    return _KNOWN[key].scales


class _Known(NamedTuple):
    leaves: list[weakref.ref]  # of the weights, which are not kept alive
    scales: np.ndarray

    def is_of(self, leaves: list[Any]) -> bool:
        """Returns whether the weights are the very same arrays."""
        pairs = zip(self.leaves, leaves, strict=False)
        return len(self.leaves) == len(leaves) and all(ref() is leaf for ref, leaf in pairs)


_KNOWN: dict[tuple[ModelConfig, np.dtype], _Known] = {}  # the one measured last at the end


def measure_kv_scales(params: Params, config: ModelConfig, dtype: np.dtype) -> Array:
    """Returns f32[2, layers, kv_heads], keys first: what is read from pages is multiplied by it.

    Of weights whose keys or values are not finite it is NaN: whatever reads such pages has
    invalid logits, and its request ends with an error.

    Args:
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
        is_token=jnp.ones(token_ids.shape, bool) if family.has_experts else None,
    )
    scales = jnp.stack(largest, axis=1) * (HEADROOM / layout.LARGEST[jnp.dtype(dtype)])
    scales = jnp.where(jnp.isfinite(scales), jnp.maximum(scales, LEAST), jnp.nan)
    # Rounded, so that the last bits of this forward, which differ between a device and a mesh of
    # them, seldom move the grid that keys and values are rounded to.
    return lax.reduce_precision(scales, exponent_bits=8, mantissa_bits=MANTISSA_BITS)


_measure = jax.jit(measure_kv_scales, static_argnames=("config", "dtype"))


def calibration_tokens(vocab_size: int) -> np.ndarray:
    """Returns the fixed text, i32[NUM_SEQUENCES, LENGTH]: ids at steps of the golden ratio."""
    places = np.arange(NUM_SEQUENCES * LENGTH, dtype=np.uint64)
    spread = (places * np.uint64(0x9E3779B1)) % np.uint64(2**32)
    token_ids = (spread * np.uint64(vocab_size)) >> np.uint64(32)
    return token_ids.astype(np.int32).reshape(NUM_SEQUENCES, LENGTH)


def _largest(values: Array) -> Array:
    """Returns the largest absolute value of each head, f32[kv_heads], of [.., kv_heads, dim].

    NaN where a head has one: a maximum may pass over it.
    """
    wide = jnp.abs(values.astype(jnp.float32))
    has_nan = jnp.isnan(wide).any(axis=(0, 1, 3))
    return jnp.where(has_nan, jnp.nan, wide.max(axis=(0, 1, 3)))
