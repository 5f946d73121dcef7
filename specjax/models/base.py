"""What a target or a draft model is: a config, a pytree of weights, a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, Self, TypedDict

import jax
from jax import Array

# Weights and per-layer caches are plain nested dicts and tuples of arrays: a
# training loop hands over what it has, and jit sees ordinary pytrees.
Params = dict[str, Any]
LayerCache = Any

# attend(layer_index, q [..., heads, head_dim], k, v [..., kv_heads, head_dim], cache)
#   -> (out [..., heads, head_dim], cache)
# A family with attention sinks passes sinks=f32[heads] as well. What is static about a
# layer's attention is in `ModelConfig.attention_options`.
# The model knows nothing of pages: prefill, decoding, chains, trees and training
# differ only in the function given here.
Attend = Callable[..., tuple[Array, LayerCache]]

# The contents of a config.json.
Json = dict[str, Any]


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


class AttentionOptions(TypedDict):
    """What is static about the attention of a layer."""

    scale: float
    window: int | None
    softcap: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Static shape and flags of a decoder-only model; hashable, a jit key.

    `architecture` names the Family that runs it. A family may subclass this with static
    fields of its own; fields that hold one entry per layer have names that begin `layer_`.
    """

    architecture: str  # the name of its Family: "llama", "gpt2", or a registered one
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
    # Of each layer, where they differ; None is no rotation. () is `rope` in all of them.
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    # Scores, and logits, become cap * tanh(score / cap); None is no cap.
    attention_softcap: float | None = None
    logits_softcap: float | None = None
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

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Returns how a layer rotates queries and keys, None when it does not."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def attention_options(self, layer: int) -> AttentionOptions:
        """Returns the static options of a layer's attention, by keyword."""
        return {
            "scale": self.scale,
            "window": self.window(layer),
            "softcap": self.attention_softcap,
        }

    def first_layers(self, num_layers: int) -> Self:
        """Returns the config of the first layers alone."""
        per_layer = {
            field.name: getattr(self, field.name)[:num_layers]
            for field in dataclasses.fields(self)
            if field.name.startswith("layer_")
        }
        return dataclasses.replace(self, num_layers=num_layers, **per_layer)


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


class ForwardWork(NamedTuple):
    """What one forward of a model does, whatever its dtype and how many chips it is split over.

    Attributes:
      weights_read: numbers read once per forward, however many tokens it has.
      token_products: multiply-adds per token in products with weights.
      context_products: multiply-adds per token and token of its context, in all layers.
      layer_windows: tokens that each layer sees back, None where all; () is all in every
        layer. Layers have equal parts of context_products.
    """

    weights_read: int
    token_products: int
    context_products: int
    layer_windows: tuple[int | None, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The functions of one model file; docs/adding-a-model.md has a whole one.

    Attributes:
      name: what `ModelConfig.architecture` says.
      model_types: each `model_type` of a config.json that the family reads, and the class
        that `architectures` names beside it.
      parse: parse(raw) -> config, of a config.json whose model_type is filled in. KeyError
        for a key that is missing, ValueError for a value that cannot be.
      sources: sources(config, names) -> tree like params of where each leaf is read from
        (`specjax.models.weights.Source` and others). names: of the tensors in the file.
      axes: axes(config) -> tree like params of logical axes, a tuple of names per leaf; see
        `specjax.sharding.RULES`.
      init: init(key, config, dtype) -> params, random, for tests and benchmarks.
      forward: forward(params, config, token_ids, positions, attend, caches, tensor_axis,
        *, taps, is_token) -> hidden [..., hidden_size] after the final norm, and caches.

        taps: None, or a tuple of layers. Then hidden states come third, an array
          [..., hidden_size] per tap: the input of layer i for tap i, and hidden itself for
          tap num_layers (`specjax.models.blocks.Taps`).
        is_token: bool[...], which tokens are no padding; None is all of them, or a family
          without experts.
      logits: logits(params, config, hidden, tensor_axis) -> f32[..., vocab].
      work: work(config, num_weights) -> ForwardWork. num_weights: numbers in all leaves.
      has_experts: whether forward is told which tokens are padding.
    """

    name: str
    model_types: Mapping[str, str]
    parse: Callable[[Json], ModelConfig]
    sources: Callable[[Any, Container[str]], Any]
    axes: Callable[[Any], Any]
    init: Callable[..., Params]
    forward: Callable[..., Any]
    logits: Callable[..., Array]
    work: Callable[[Any, int], ForwardWork]
    has_experts: bool = False
