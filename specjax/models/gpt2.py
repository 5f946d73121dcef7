"""GPT-2: learned positions, LayerNorm, a GELU MLP, biases everywhere, a tied head.

Matrices are [out, in], like those of every other model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax.models.base import Architecture, Attend, LayerCache, ModelConfig, Params
from specjax.models.layers import along_last_axis, layer_norm, linear


def forward(
    params: Params,
    config: ModelConfig,
    token_ids: Array,
    positions: Array,
    attend: Attend,
    caches: tuple[LayerCache, ...],
    tensor_axis: str | None = None,
) -> tuple[Array, tuple[LayerCache, ...]]:
    """Runs all layers; arguments and results as `specjax.models.llama.forward`."""

    def reduce(partial: Array) -> Array:
        return partial if tensor_axis is None else jax.lax.psum(partial, tensor_axis)

    # Draft slots past the last position are computed and dropped; clipping keeps
    # their lookup in range.
    last = params["embed_positions"].shape[0] - 1
    x = params["embed_tokens"][token_ids] + params["embed_positions"][jnp.minimum(positions, last)]
    new_caches = []
    for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        normed = layer_norm(x, layer["input_norm"], layer["input_norm_bias"], config.norm_eps)
        q, k, v = (
            (linear(normed, layer[name]) + _bias(layer, name, x)).reshape(
                *x.shape[:-1], -1, config.head_dim
            )
            for name in ("q_proj", "k_proj", "v_proj")
        )
        mixed, cache = attend(index, q, k, v, cache)
        new_caches.append(cache)
        mixed = mixed.reshape(*x.shape[:-1], -1)
        x = x + reduce(linear(mixed, layer["o_proj"])) + _bias(layer, "o_proj", x)
        normed = layer_norm(
            x,
            layer["post_attention_norm"],
            layer["post_attention_norm_bias"],
            config.norm_eps,
        )
        widened = jax.nn.gelu(
            linear(normed, layer["up_proj"]) + _bias(layer, "up_proj", x),
            approximate=True,
        )
        x = x + reduce(linear(widened, layer["down_proj"])) + _bias(layer, "down_proj", x)
    return layer_norm(x, params["norm"], params["norm_bias"], config.norm_eps), tuple(new_caches)


def logits(
    params: Params, config: ModelConfig, hidden: Array, tensor_axis: str | None = None
) -> Array:
    """Returns f32[..., vocab]; the head is the embedding."""
    del config, tensor_axis
    return linear(hidden, params["embed_tokens"], jnp.float32)


def init(key: Array, config: ModelConfig, dtype=jnp.float32, std: float = 0.02) -> Params:
    """Returns random weights: normal matrices and biases, norms near one."""
    keys = iter(jax.random.split(key, 16 * config.num_layers + 5))
    normal = lambda *shape: (jax.random.normal(next(keys), shape) * std).astype(dtype)
    near_one = lambda size: (1 + jax.random.normal(next(keys), (size,)) * std).astype(dtype)
    d, f = config.hidden_size, config.intermediate_size
    shapes = {
        "q_proj": (d, d),
        "k_proj": (d, d),
        "v_proj": (d, d),
        "o_proj": (d, d),
        "up_proj": (f, d),
        "down_proj": (d, f),
    }

    def layer() -> Params:
        weights = {name: normal(*shape) for name, shape in shapes.items()}
        weights |= {f"{name}_bias": normal(shape[0]) for name, shape in shapes.items()}
        for name in ("input_norm", "post_attention_norm"):
            weights |= {name: near_one(d), f"{name}_bias": normal(d)}
        return weights

    return {
        "embed_tokens": normal(config.vocab_size, d),
        "embed_positions": normal(config.max_position_embeddings, d),
        "layers": tuple(layer() for _ in range(config.num_layers)),
        "norm": near_one(d),
        "norm_bias": normal(d),
    }


def _bias(layer: Params, name: str, x: Array) -> Array:
    return along_last_axis(layer[f"{name}_bias"], x)


ARCHITECTURE = Architecture(forward=forward, logits=logits, init=init)
