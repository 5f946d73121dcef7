"""Forward over whole sequences without a cache, for training."""

from __future__ import annotations

from typing import Any, overload

import jax.numpy as jnp
from jax import Array

from specjax.models.base import LayerCache, ModelConfig, Params, resolve_taps
from specjax.models.families import family_of
from specjax.models.layers import dense_causal_attention


@overload
def sequence_logits(
    params: Params,
    config: ModelConfig,
    token_ids: Array,
    mask: Array | None = None,
    *,
    taps: None = None,
) -> Array: ...


@overload
def sequence_logits(
    params: Params,
    config: ModelConfig,
    token_ids: Array,
    mask: Array | None = None,
    *,
    taps: tuple[int, ...],
) -> tuple[Array, tuple[Array, ...]]: ...


def sequence_logits(
    params: Params,
    config: ModelConfig,
    token_ids: Array,
    mask: Array | None = None,
    *,
    taps: tuple[int, ...] | None = None,
) -> Any:
    """Returns the logits after each token, f32[rows, length, vocab]; differentiable.

    Args:
      token_ids: i32[rows, length].
      mask: bool[rows, length], True for text, False for padding; None: all text. Padding on
        either side is neither seen nor counted in positions, and its logits are meaningless.
      taps: static; None, or layers whose hidden states are returned as well: for tap i the
        input of layer i, for tap num_layers the output after the final norm, for tap
        num_layers + 1 that before it. Negative numbers count from the normed output, as in
        `DrafterSpec.taps`: -1 is it.

    Returns:
      The logits; with taps, the logits and a tuple of [rows, length, hidden_size], one per tap.

    Raises:
      ValueError: there is no such layer.
    """
    hidden, *tapped = sequence_hidden(params, config, token_ids, mask, taps=taps)
    logits = family_of(config).logits(params, config, hidden)
    return (logits, *tapped) if tapped else logits


def sequence_hidden(
    params: Params,
    config: ModelConfig,
    token_ids: Array,
    mask: Array | None = None,
    *,
    taps: tuple[int, ...] | None = None,
    queries_at_once: int | None = None,
) -> Any:
    """Returns what the head reads, [rows, length, hidden_size], in a tuple; differentiable.

    Args:
      params, config, token_ids, mask, taps: as for `sequence_logits`.
      queries_at_once: as for `dense_causal_attention`.

    Returns:
      (hidden,); with taps (hidden, taps).
    """
    if mask is None:
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    else:
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)

    def attend(
        layer: int, q: Array, k: Array, v: Array, cache: LayerCache, sinks: Array | None = None
    ) -> tuple[Array, LayerCache]:
        out = dense_causal_attention(
            q,
            k,
            v,
            sinks=sinks,
            key_mask=mask,
            queries_at_once=queries_at_once,
            **config.attention_options(layer),
        )
        return out, cache

    family = family_of(config)
    hidden, _, *tapped = family.forward(
        params,
        config,
        token_ids,
        positions,
        attend,
        (None,) * config.num_layers,
        taps=None if taps is None else resolve_taps(taps, config.num_layers),
        is_token=mask if family.has_experts else None,
    )
    return (hidden, *tapped)
