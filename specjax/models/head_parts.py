"""What heads over a target have in common: weights of layers, and vocabularies that are a part."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from specjax.models import weights
from specjax.models.base import ModelConfig, Params
from specjax.models.weights import Weight, matrix, vector


class HeadConfig(Protocol):
    """What the configs of heads have in common; see theirs."""

    @property
    def layers(self) -> ModelConfig: ...

    @property
    def target_vocab_size(self) -> int: ...

    @property
    def maps_vocabulary(self) -> bool: ...


def layer_weights(own: ModelConfig, prefix: str, input_width: int) -> dict[str, Weight]:
    """Returns a Weight per leaf of a layer of attention and a gated MLP, as Llama has it.

    Args:
      prefix: of the names in the file, as "layers.0.".
      input_width: numbers that queries, keys and values are made of.
    """
    d, f, head_dim = own.hidden_size, own.intermediate_size, own.head_dim
    q_size, kv_size = own.num_heads * head_dim, own.num_kv_heads * head_dim
    matrices = {
        "q_proj": ("self_attn.q_proj", (q_size, input_width), ("heads", "embed"), own.qkv_bias),
        "k_proj": ("self_attn.k_proj", (kv_size, input_width), ("kv_heads", "embed"), own.qkv_bias),
        "v_proj": ("self_attn.v_proj", (kv_size, input_width), ("kv_heads", "embed"), own.qkv_bias),
        "o_proj": ("self_attn.o_proj", (d, q_size), ("embed", "heads"), own.o_bias),
        "gate_proj": ("mlp.gate_proj", (f, d), ("mlp", "embed"), own.mlp_bias),
        "up_proj": ("mlp.up_proj", (f, d), ("mlp", "embed"), own.mlp_bias),
        "down_proj": ("mlp.down_proj", (d, f), ("embed", "mlp"), own.mlp_bias),
    }
    norm = lambda name, size: vector(f"{prefix}{name}.weight", size, None, 1.0)
    layer = {
        "input_norm": norm("input_layernorm", d),
        "post_attention_norm": norm("post_attention_layernorm", d),
    }
    for key, (name, shape, axes, has_bias) in matrices.items():
        layer[key] = matrix(f"{prefix}{name}.weight", shape, axes)
        layer |= only_if(
            has_bias, **{f"{key}_bias": vector(f"{prefix}{name}.bias", shape[0], axes[0])}
        )
    q_norm, k_norm = (norm(f"self_attn.{name}", head_dim) for name in ("q_norm", "k_norm"))
    return layer | only_if(own.qk_norm, q_norm=q_norm, k_norm=k_norm)


def only_if(condition: bool, **leaves: Any) -> dict[str, Any]:
    return leaves if condition else {}


def scores_of_target(scores: Array, target_ids: Array, target_vocab_size: int) -> Array:
    """Returns f32[num_tokens, target_vocab_size] from scores of a head's own vocabulary.

    What the head cannot say has -inf.

    Args:
      scores: f32[num_tokens, vocab].
      target_ids: i32[vocab], the target's number of each of the head's tokens; all differ.
    """
    size = scores.shape[0], target_vocab_size
    return jnp.full(size, -jnp.inf).at[:, target_ids].set(scores, unique_indices=True)


def abstract(leaves: Any, config: HeadConfig, dtype: DTypeLike) -> Params:
    """Returns the names, shapes and dtypes of the weights, a tree of jax.ShapeDtypeStruct.

    Args:
      leaves: a tree with a Weight at each leaf of floating point.
    """
    params = weights.map_weights(
        lambda weight: jax.ShapeDtypeStruct(weight.shape, jnp.dtype(dtype)), leaves
    )
    ids = jax.ShapeDtypeStruct((config.layers.vocab_size,), jnp.dtype(jnp.int32))
    return params | only_if(config.maps_vocabulary, target_ids=ids)


def init(leaves: Any, config: HeadConfig, key: Array, dtype: DTypeLike, std: float) -> Params:
    """Returns random weights; a vocabulary that is a part is evenly spaced over the target's."""
    params, count = weights.init_of(leaves, key, dtype, std), config.layers.vocab_size
    ids = jnp.arange(count, dtype=jnp.int32) * (config.target_vocab_size // count)
    return params | only_if(config.maps_vocabulary, target_ids=ids)
