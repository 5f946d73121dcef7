"""Grows a small trained model into a larger one that computes the same function.

Learning which tokens follow which is cheap in a small model and slow in a large one.
So the draft is trained first and the target begins where the draft has arrived.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from specjax.models import llama
from specjax.models.base import ModelConfig, Params

_WRITES = ("o_proj", "down_proj")  # the two matrices that add to the hidden state


def grow(params: Params, config: ModelConfig, larger: ModelConfig, key: Array) -> Params:
    """Returns weights of `larger` with, but for a little noise, the same logits.

    Width: hidden states become [x, small]. What is new in a layer (channels, heads,
    MLP units) reads at random and writes zero, so gradients reach it at once.
    Depth: each layer is followed by copies that write zero.

    Args:
      config: the shape of `params`; `larger` has the same head_dim, vocabulary and
        number of heads per key-value head, and a multiple of its layers.

    Raises:
      ValueError: the shapes are not related like that.
    """
    group = lambda shape: (
        shape.head_dim,
        shape.vocab_size,
        shape.num_heads // shape.num_kv_heads,
    )
    if group(config) != group(larger) or larger.num_layers % config.num_layers:
        raise ValueError(
            f"a model with {group(config)} (head_dim, vocabulary, heads per key-value head) and "
            f"{config.num_layers} layers cannot grow to {group(larger)} and {larger.num_layers}."
        )
    fresh = llama.init(key, larger, std=0.01)
    # The mean square of [x, 0] is smaller than that of x by this ratio.
    norm_scale = (config.hidden_size / larger.hidden_size) ** 0.5
    copies = larger.num_layers // config.num_layers
    layers = []
    for index, new_layer in enumerate(fresh["layers"]):
        old_layer = params["layers"][index // copies]
        grown = {}
        for name, new in new_layer.items():
            old = old_layer[name]
            if name in _WRITES:
                is_first_copy = index % copies == 0
                grown[name] = _place(old * is_first_copy, jnp.zeros_like(new))
            else:
                is_norm = new.ndim == 1
                grown[name] = _place(old * norm_scale if is_norm else old, new)
        layers.append(grown)
    return {
        "embed_tokens": _place(params["embed_tokens"], fresh["embed_tokens"]),
        "layers": tuple(layers),
        "norm": _place(params["norm"] * norm_scale, fresh["norm"]),
    }


def _place(old: Array, new: Array) -> Array:
    """Returns `new` with its leading corner replaced by `old`."""
    return new.at[tuple(slice(size) for size in old.shape)].set(old)
