"""What heads over a target have in common: weights of layers, and vocabularies that are a part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from specjax.models import blocks, weights
from specjax.models.base import Attend, LayerCache, ModelConfig, Params
from specjax.models.layers import linear, rms_norm
from specjax.models.weights import Weight, matrix, vector

# (index, layer, cache, x, what attention reads) -> x after the layer, and the cache
RunLayer = Callable[[int, Params, LayerCache, Array, Array], tuple[Array, LayerCache]]
# (layer, "attention" or "mlp", its normed input) -> what the branch reads, and what is made of its
# output
Around = Callable[[Params, str, Array], tuple[Array, Callable[[Array], Array]]]


class HeadConfig(Protocol):
    """What the configs of heads have in common; see theirs."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def target_vocab_size(self) -> int: ...

    @property
    def has_head(self) -> bool: ...

    @property
    def maps_vocabulary(self) -> bool: ...


class OfLayers:
    """Sizes of a head that are those of its layers."""

    layers: ModelConfig

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.layers.vocab_size


def _nothing(layer: Params, branch: str, normed: Array) -> tuple[Array, Callable[[Array], Array]]:
    del layer, branch
    return normed, lambda out: out


def layer_runner(
    own: ModelConfig, positions: Array, attend: Attend, around: Around = _nothing
) -> RunLayer:
    """Returns what runs a layer of attention and a gated MLP, both added to x, as Llama has it.

    Args:
      positions: i32[...], of the tokens.
      attend: as for the forward of a family.
      around: what stands around the branches of a layer.
    """
    norm = functools.partial(rms_norm, eps=own.norm_eps)
    tables = blocks.rotary_tables(own, positions)

    def run(
        index: int, layer: Params, cache: LayerCache, x: Array, normed: Array
    ) -> tuple[Array, LayerCache]:
        read, finish = around(layer, "attention", normed)
        out, cache = blocks.attention(
            read,
            layer,
            attend,
            index,
            cache,
            head_dim=own.head_dim,
            table=tables[index],
            head_norm=norm if own.qk_norm else None,
        )
        x = x + finish(out)
        read, finish = around(layer, "mlp", norm(x, layer["post_attention_norm"]))
        return x + finish(blocks.gated_mlp(read, layer, jax.nn.silu)), cache

    return run


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


def own_logits(params: Params, normed: Array) -> Array:
    """Returns f32[num_tokens, vocab_size] by a head's own matrix; only with `has_head`.

    Args:
      normed: [num_tokens, hidden_size].
    """
    return linear(normed, params["lm_head"], jnp.float32)


def draft_products(config: HeadConfig, leaves: Any) -> int:
    """Returns the multiply-adds per token in products with weights, the head's matrix among them.

    Args:
      leaves: the others of these weights.
    """
    vocab = config.vocab_size if config.has_head else config.target_vocab_size
    return weights.num_weights(leaves) + vocab * config.hidden_size


def weight_functions(
    weights_of: Callable[[Any], Any],
) -> tuple[Callable[[Any, DTypeLike], Params], Callable[..., Params]]:
    """Returns the functions `abstract` and `init` of a kind of head.

    Args:
      weights_of: from its config to a tree with a Weight at each leaf of floating point.
    """

    def abstract(config: Any, dtype: DTypeLike) -> Params:
        """Returns the names, shapes and dtypes of the weights, a tree of jax.ShapeDtypeStruct."""
        shape = lambda weight: jax.ShapeDtypeStruct(weight.shape, jnp.dtype(dtype))
        params = weights.map_weights(shape, weights_of(config))
        ids = jax.ShapeDtypeStruct((config.vocab_size,), jnp.dtype(jnp.int32))
        return params | only_if(config.maps_vocabulary, target_ids=ids)

    def init(key: Array, config: Any, dtype: DTypeLike = jnp.float32, std: float = 0.02) -> Params:
        """Returns random weights; a part of a vocabulary is evenly spaced over the target's."""
        params, count = weights.init_of(weights_of(config), key, dtype, std), config.vocab_size
        ids = jnp.arange(count, dtype=jnp.int32) * (config.target_vocab_size // count)
        return params | only_if(config.maps_vocabulary, target_ids=ids)

    return abstract, init
