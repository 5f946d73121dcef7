"""The Llama skeleton: Llama 2/3, Qwen2/2.5, Qwen3, Mistral and Granite by static flags.

Weights are matrices [out, in] as published, one array per projection and layer. Under a mesh
every function may run on a shard of the heads and of the MLP; `tensor_axis` names
the mesh axis over which partial sums are added.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax.models.base import Architecture, Attend, LayerCache, ModelConfig, Params
from specjax.models.layers import (
    along_last_axis,
    linear,
    rms_norm,
    rope_tables,
    rotate,
)


def forward(
    params: Params,
    config: ModelConfig,
    token_ids: Array,
    positions: Array,
    attend: Attend,
    caches: tuple[LayerCache, ...],
    tensor_axis: str | None = None,
) -> tuple[Array, tuple[LayerCache, ...]]:
    """Runs all layers.

    Args:
      token_ids, positions: i32[...], any leading shape.
      attend: what attention means here; called once per layer, in order.
      caches: one per layer, passed through `attend`.

    Returns:
      hidden [..., hidden_size] after the final norm, and the new caches.
    """
    x = params["embed_tokens"][token_ids]
    if config.embedding_multiplier != 1.0:
        x = x * config.embedding_multiplier
    tables = rope_tables(config.rope, config.head_dim, positions)
    new_caches = []
    for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        normed = rms_norm(x, layer["input_norm"], config.norm_eps)
        q, k, v = _project_qkv(layer, config, normed, tables)
        mixed, cache = attend(index, q, k, v, cache)
        new_caches.append(cache)
        mixed = mixed.reshape(*mixed.shape[:-2], -1)
        x = x + config.residual_multiplier * _row_parallel(mixed, layer, "o_proj", tensor_axis)
        normed = rms_norm(x, layer["post_attention_norm"], config.norm_eps)
        gated = jax.nn.silu(_linear(normed, layer, "gate_proj")) * _linear(normed, layer, "up_proj")
        x = x + config.residual_multiplier * _row_parallel(gated, layer, "down_proj", tensor_axis)
    return rms_norm(x, params["norm"], config.norm_eps), tuple(new_caches)


def logits(
    params: Params, config: ModelConfig, hidden: Array, tensor_axis: str | None = None
) -> Array:
    """Returns f32[..., vocab] from hidden [..., hidden_size]."""
    if config.tie_word_embeddings:
        out = linear(hidden, params["embed_tokens"], jnp.float32)
    else:
        out = linear(hidden, params["lm_head"], jnp.float32)
        if tensor_axis is not None and out.shape[-1] != config.vocab_size:
            out = jax.lax.all_gather(out, tensor_axis, axis=out.ndim - 1, tiled=True)
    return out / config.logits_divisor if config.logits_divisor != 1.0 else out


def init(key: Array, config: ModelConfig, dtype=jnp.float32, std: float = 0.02) -> Params:
    """Returns random weights: normal matrices, norms near one, small biases."""
    keys = iter(jax.random.split(key, 16 * config.num_layers + 4))
    normal = lambda *shape: (jax.random.normal(next(keys), shape) * std).astype(dtype)
    near_one = lambda size: (1 + jax.random.normal(next(keys), (size,)) * std).astype(dtype)
    d, f, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * hd, config.num_kv_heads * hd

    def layer() -> Params:
        weights = {
            "input_norm": near_one(d),
            "q_proj": normal(q_size, d),
            "k_proj": normal(kv_size, d),
            "v_proj": normal(kv_size, d),
            "o_proj": normal(d, q_size),
            "post_attention_norm": near_one(d),
            "gate_proj": normal(f, d),
            "up_proj": normal(f, d),
            "down_proj": normal(d, f),
        }
        if config.qkv_bias:
            weights |= {
                "q_proj_bias": normal(q_size),
                "k_proj_bias": normal(kv_size),
                "v_proj_bias": normal(kv_size),
            }
        if config.o_bias:
            weights |= {"o_proj_bias": normal(d)}
        if config.mlp_bias:
            weights |= {
                "gate_proj_bias": normal(f),
                "up_proj_bias": normal(f),
                "down_proj_bias": normal(d),
            }
        if config.qk_norm:
            weights |= {"q_norm": near_one(hd), "k_norm": near_one(hd)}
        return weights

    params: Params = {
        "embed_tokens": normal(config.vocab_size, d),
        "layers": tuple(layer() for _ in range(config.num_layers)),
        "norm": near_one(d),
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = normal(config.vocab_size, d)
    return params


def _project_qkv(
    layer: Params, config: ModelConfig, x: Array, tables
) -> tuple[Array, Array, Array]:
    """Returns rotated q, k and plain v as [..., heads, head_dim]."""
    heads = lambda y: y.reshape(*y.shape[:-1], -1, config.head_dim)
    q, k, v = (heads(_linear(x, layer, name)) for name in ("q_proj", "k_proj", "v_proj"))
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.norm_eps)
        k = rms_norm(k, layer["k_norm"], config.norm_eps)
    return rotate(q, tables), rotate(k, tables), v


def _linear(x: Array, layer: Params, name: str) -> Array:
    out = linear(x, layer[name])
    bias = layer.get(f"{name}_bias")
    return out if bias is None else out + along_last_axis(bias, out)


def _row_parallel(x: Array, layer: Params, name: str, tensor_axis: str | None) -> Array:
    """Like _linear where a shard holds some of the inputs; the bias is added once."""
    out = linear(x, layer[name])
    if tensor_axis is not None:
        out = jax.lax.psum(out, tensor_axis)
    bias = layer.get(f"{name}_bias")
    return out if bias is None else out + along_last_axis(bias, out)


ARCHITECTURE = Architecture(forward=forward, logits=logits, init=init)
