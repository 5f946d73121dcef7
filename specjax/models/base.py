"""What a target or a draft model is: a config, a pytree of weights, a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

# Weights and per-layer caches are plain nested dicts and tuples of arrays: a
# training loop hands over what it has, and jit sees ordinary pytrees.
Params = dict[str, Any]
LayerCache = Any

# attend(layer_index, q [..., heads, head_dim], k, v [..., kv_heads, head_dim], cache)
#   -> (out [..., heads, head_dim], cache)
# The model knows nothing of pages: prefill, decoding, chains, trees and training
# differ only in the function given here.
Attend = Callable[[int, Array, Array, Array, LayerCache], tuple[Array, LayerCache]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, half-split ("NeoX") form.

    `kind` is "default", "linear", "llama3" or "yarn"; fields a kind does not use
    keep their defaults. Source: transformers `modeling_rope_utils` (behaviour).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Static shape and flags of a decoder-only model; hashable, a jit key.

    One skeleton covers Llama 2/3, Qwen2/2.5, Qwen3, Mistral and Granite by flags;
    `architecture` "gpt2" selects the other one.
    """

    architecture: str  # "llama" (the skeleton) or "gpt2"
    family: str  # model_type as published: llama, qwen2, qwen3, mistral, granite, gpt2
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # Tokens a layer sees back, itself included: query i sees keys j with
    # i - j < window. None is all.
    layer_windows: tuple[int | None, ...] = ()
    embedding_multiplier: float = 1.0
    attention_scale: float | None = None  # None is head_dim ** -0.5
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def scale(self) -> float:
        """What query-key products are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        """Returns the sliding window of a layer in tokens, None when it sees all."""
        return self.layer_windows[layer] if self.layer_windows else None


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model. `params` may be replaced at any time; nothing else holds them."""

    config: ModelConfig
    params: Params
    tokenizer: Any = None  # specjax.text.tokenization.Tokenizer, or None: token ids only
    name: str = ""
    generation_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)

    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def __repr__(self) -> str:
        config = self.config
        text = "" if self.tokenizer is not None else ", no tokenizer"
        return (
            f"Model({self.name!r}, {config.family}{parameters(self.params)}, "
            f"{config.num_layers} layers, vocabulary {config.vocab_size}, context "
            f"{config.max_position_embeddings}{text})"
        )


def parameters(params: Any) -> str:
    """Returns ", 5.8M parameters, float32" of a pytree of weights; nothing of none."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "size")]
    if not leaves:
        return ""
    count = sum(leaf.size for leaf in leaves)
    shown = f"{count:,}"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            shown = f"{count / size:.1f}{unit}"
            break
    dtypes = sorted({str(leaf.dtype) for leaf in leaves})
    return f", {shown} parameters, {'/'.join(dtypes)}"


class Architecture(NamedTuple):
    """The functions of one model file.

    forward(params, config, token_ids, positions, attend, caches, tensor_axis)
      -> (hidden [..., hidden_size] after the final norm, caches)
    logits(params, config, hidden, tensor_axis) -> f32[..., vocab]
    init(key, config, dtype) -> params, random, for tests and benchmarks
    """

    forward: Callable[..., tuple[Array, tuple[LayerCache, ...]]]
    logits: Callable[..., Array]
    init: Callable[..., Params]
