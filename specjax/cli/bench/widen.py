"""Widens a model to more weights that compute the same function, to measure speed at that size.

A small trained model gives realistic text, and a large one realistic step costs. Padding the
small one with zeros gives both: the same logits up to rounding, with the bytes and operations
of a real model of that size. Zeros are read and multiplied like any other numbers; neither
CPUs, GPUs nor TPUs skip them.

    hidden states   [x, 0]                  embeddings, and what layers add, end in zeros
    RMS norm        divides by the mean over more entries: its weight shrinks by
                    sqrt(old / new size), and epsilon by old / new
    new heads       attend to zeros alone, and are multiplied by zeros
    new layers      add zeros
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.models.base import Model, ModelConfig, Params
from specjax.models.families import family_of

# Per layer of a model of hidden size d: 4 d**2 of attention, and 3 * 2.75 d**2.
MLP_FACTOR = 2.75
LAYER_SHARE = 4 + 3 * MLP_FACTOR
LAYERS_PER_HIDDEN = 1 / 128  # 8 layers at 1,024, as models of that size have about twice


def widen(model: Model, num_parameters: float) -> Model:
    """Returns a model of about num_parameters parameters that computes the same as `model`.

    Its logits equal those of `model` up to rounding. Heads keep their size, and the number of
    query heads per key head stays.

    Args:
      num_parameters: at least those of `model`.

    Raises:
      ValueError: it has more already.
      NotImplementedError: no Llama-type model, or one with norms or biases that cannot be
        padded (q_norm, attention biases).
    """
    config = model.config
    if config.architecture != "llama" or config.qk_norm or config.qkv_bias:
        raise NotImplementedError(
            f"widen covers Llama-type models without q_norm and biases, got {config.family!r}."
        )
    if num_parameters < model.num_parameters():
        raise ValueError(
            f"{num_parameters=:.3g} is below the {model.num_parameters():,} that the model has."
        )
    wide = _wider(config, num_parameters)
    return dataclasses.replace(
        model,
        config=wide,
        params=_padded(model.params, config, wide),
        name=f"{model.name} widened to {num_parameters / 1e6:.0f}M",
    )


def _wider(config: ModelConfig, num_parameters: float) -> ModelConfig:
    """Returns the config of about so many parameters; sizes are multiples of the old ones."""
    # num_parameters = layers * share * d**2 + vocab * d, with layers = d / 128.
    hidden = (num_parameters / (LAYER_SHARE * LAYERS_PER_HIDDEN)) ** (1 / 3)
    groups = config.num_heads // config.num_kv_heads
    step = math.lcm(config.head_dim * groups, 64)
    hidden = max(round(hidden / step) * step, config.hidden_size)
    heads = max(hidden // config.head_dim, config.num_heads)
    mlp = max(round(MLP_FACTOR * hidden / 64) * 64, config.intermediate_size)
    of_layer = 2 * hidden * config.head_dim * (heads + heads // groups)
    of_layer += 3 * hidden * mlp
    tables = 1 if config.tie_word_embeddings else 2
    left = num_parameters - tables * config.vocab_size * hidden
    layers = max(round(left / of_layer), config.num_layers)
    windows = config.layer_windows
    return dataclasses.replace(
        config,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_heads=heads,
        num_kv_heads=heads // groups,
        num_layers=layers,
        norm_eps=config.norm_eps * config.hidden_size / hidden,
        layer_windows=windows and (*windows, *[None] * (layers - config.num_layers)),
        attention_scale=config.scale,
    )


def _padded(params: Params, config: ModelConfig, wide: ModelConfig) -> Params:
    shrink = (config.hidden_size / wide.hidden_size) ** 0.5
    first = params["layers"][0]
    # Its norms pass on what is multiplied by zeros.
    nothing = {
        name: weight if name.endswith("norm") else jnp.zeros_like(weight)
        for name, weight in first.items()
    }
    more = wide.num_layers - config.num_layers
    params = {**params, "layers": (*params["layers"], *[nothing] * more)}

    def widened(path: Sequence[Any], weight: Array, like: jax.ShapeDtypeStruct) -> Array:
        if path[-1].key.endswith("norm"):
            weight = weight * jnp.asarray(shrink, weight.dtype)
        return pad(weight, like.shape)

    shapes = jax.eval_shape(lambda: family_of(wide).init(jax.random.key(0), wide))
    return jax.tree_util.tree_map_with_path(widened, params, shapes)


def pad(weight: Array, shape: Sequence[int]) -> Array:
    """Returns the weight with zeros after it, in every axis."""
    missing = [(0, new - old) for old, new in zip(weight.shape, shape, strict=True)]
    return jnp.pad(weight, missing)
