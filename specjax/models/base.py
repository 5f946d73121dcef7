"""Types of a target or draft model: its config, weights, tokenizer and family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypedDict

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from specjax.config.keywords import hints_at

# Weights and per-layer caches are plain nested dicts and tuples of arrays: a training
# loop passes its weights as they are, and jit sees ordinary pytrees.
Params = dict[str, Any]
LayerCache = Any

# attend(layer_index, q [..., heads, head_dim], k, v [..., kv_heads, head_dim], cache)
#   -> (out [..., heads, head_dim], cache)
# A family with attention sinks passes sinks=f32[heads] as well. Static options of a
# layer's attention are in `ModelConfig.attention_options`.
# The model does not depend on pages: prefill, decoding, chains, trees and training
# differ only in this function.
Attend = Callable[..., tuple[Array, LayerCache]]

# Name of a mesh axis, or names of several that are one axis together: collectives and
# PartitionSpec take both.
MeshAxes = str | tuple[str, ...]

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
    """Static options of the attention of a layer."""

    scale: float
    window: int | None
    softcap: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Static sizes and flags of a decoder-only model; hashable, a jit key.

    `architecture` names the Family that runs it. A family may subclass this with static
    fields of its own; fields that hold one entry per layer have names that begin `layer_`.

    The library itself reads the sizes (`hidden_size` apart), `max_position_embeddings`,
    `eos_token_ids`, `mask_token_id`, and what is static about attention: `attention_scale`,
    `layer_windows` and `attention_softcap`. `blocks.rotary_tables` reads `rope` and `layer_ropes`;
    `blocks.head` reads `logits_softcap` and `logits_divisor`. All other fields have an effect only
    where the code of the family reads them: `norm_eps`, `tie_word_embeddings`, `activation`, the
    biases, `qk_norm`, `embedding_multiplier` and `residual_multiplier`. A family leaves those that
    it does not have at their defaults.
    """

    architecture: str  # the name of its Family: "llama", "gpt2", or a registered one
    family: str  # model_type as published: "llama", "qwen3", "gpt_bigcode", ...
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
    # Of the MLP, a name in `blocks.ACTIVATIONS`; None: the family's usual one.
    activation: str | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # Sliding window of each layer in tokens, the query included: query i sees keys j with
    # i - j < window. None: no window; (): none in any layer.
    layer_windows: tuple[int | None, ...] = ()
    # Rope of each layer, where they differ; None: no rotation. (): `rope` in every layer.
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    # Scores, and logits, become cap * tanh(score / cap); None: no cap.
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_multiplier: float = 1.0
    attention_scale: float | None = None  # None: head_dim ** -0.5
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    # dtype of hidden states, where they have more digits than the weights; None: the weights'.
    activation_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    # Of a model that drafts several tokens in one forward: what it is fed in place of a token
    # that is not known yet. None: it was not trained for that.
    mask_token_id: int | None = None

    @property
    def scale(self) -> float:
        """Factor of query-key products."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        """Returns the sliding window of a layer in tokens, None if it has none."""
        return self.layer_windows[layer] if self.layer_windows else None

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Returns the rotary embedding of a layer, None if it has none."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def attention_options(self, layer: int) -> AttentionOptions:
        """Returns the static options of a layer's attention, by keyword."""
        return {
            "scale": self.scale,
            "window": self.window(layer),
            "softcap": self.attention_softcap,
        }

    def param_shapes(self, dtype: DTypeLike = jnp.float32) -> Params:
        """Returns the tree of weights with a jax.ShapeDtypeStruct at each leaf.

        docs/weights-layout.md describes it. Nothing is computed or allocated.

        Raises:
          ValueError: no family is named `architecture`.
        """
        # The families, which it asks, ask this module.
        from specjax.models.abstract import abstract_weights

        return abstract_weights(self, jnp.dtype(dtype))

    def first_layers(self, num_layers: int) -> Self:
        """Returns the config of a model of only the first layers."""
        return self._with_layers(num_layers, lambda each: each[:num_layers])

    def of_layers(self, layers: Sequence[int]) -> Self:
        """Returns the config of a model of some of its layers, by number, in that order."""
        pick = lambda each: each and tuple(each[layer] for layer in layers)
        return self._with_layers(len(layers), pick)

    def _with_layers(
        self, num_layers: int, pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    ) -> Self:
        """Returns the config with other layers; `pick` takes theirs from a field of all."""
        per_layer = {
            field.name: pick(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name.startswith("layer_")
        }
        return dataclasses.replace(self, num_layers=num_layers, **per_layer)


@hints_at({"generate": "write specjax.generate(model, prompts)"})
@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model. `params` may be replaced at any time; nothing else holds them."""

    config: ModelConfig
    params: Params
    tokenizer: Any = None  # specjax.text.tokenization.Tokenizer, or None: token ids only
    name: str = ""
    generation_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    folder: str | None = None  # that it was loaded from, where layers that predict more lie too

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
    """Returns text such as ", 5.8M parameters, float32" for a pytree of weights; "" if empty."""
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
    """The work of one forward of a model, over all chips and independent of its dtype.

    Attributes:
      weights_read: numbers of the weights read once per forward, for any number of tokens.
      token_products: multiply-adds per token in products with weights.
      context_products: multiply-adds per pair of a token and a token of its context, over
        all layers. Layers have equal parts of it.
      layer_windows: sliding window of each layer in tokens, None without; (): none in any
        layer.
    """

    weights_read: int
    token_products: int
    context_products: int
    layer_windows: tuple[int | None, ...] = ()


def embed_tokens(
    params: Params,
    config: ModelConfig,
    token_ids: Array,
    tensor_axis: MeshAxes | None = None,
) -> Array:
    """Returns the rows of params["embed_tokens"] times config.embedding_multiplier.

    Hidden states have the dtype of what this returns.

    Args:
      token_ids: i32[...], any shape.
      tensor_axis: as for `look_up`.

    Returns:
      [..., hidden_size], in config.activation_dtype, or the dtype of the weights.
    """
    x = look_up(params["embed_tokens"], token_ids, config.vocab_size, tensor_axis)
    x = x if config.activation_dtype is None else x.astype(config.activation_dtype)
    return x if config.embedding_multiplier == 1.0 else x * config.embedding_multiplier


def look_up(
    table: Array, token_ids: Array, num_rows: int, tensor_axis: MeshAxes | None = None
) -> Array:
    """Returns the rows of a table that may be split by rows over a mesh, bit for bit.

    The shard that holds a row contributes it, and all others 0. The sum is one of integers with
    the bits of the rows: sums of floating-point numbers turn -0.0 into 0.0, and on a CPU the
    smallest numbers into 0 as well.

    Args:
      table: [num_rows, size], or a shard of its rows; shards have equally many.
      token_ids: i32[...]; ids outside the table find the row that jnp's indexing finds.
      num_rows: of the whole table.
      tensor_axis: mesh axes that rows are split over, if this is a shard.

    Returns:
      [..., size], in the dtype of the table; the same on every shard.
    """
    own_rows = table.shape[0]
    if tensor_axis is None or own_rows == num_rows:
        return table[token_ids]
    wrapped = jnp.where(token_ids < 0, token_ids + num_rows, token_ids)
    place = jnp.clip(wrapped, 0, num_rows - 1) - jax.lax.axis_index(tensor_axis) * own_rows
    is_own = (place >= 0) & (place < own_rows)
    rows = table[jnp.clip(place, 0, own_rows - 1)]
    bits = jax.lax.bitcast_convert_type(rows, f"uint{8 * rows.dtype.itemsize}")
    bits = jax.lax.psum(jnp.where(is_own[..., None], bits, jnp.zeros_like(bits)), tensor_axis)
    return jax.lax.bitcast_convert_type(bits, rows.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The functions of one model family; docs/adding-a-model.md has a complete example.

    Attributes:
      name: the value of `ModelConfig.architecture`.
      model_types: each `model_type` of a config.json that the family reads, and its class
        name in `architectures`.
      parse: parse(raw) -> config, from a config.json whose model_type is filled in. Raises
        KeyError for a missing key, ValueError for an impossible value.
      sources: sources(config, names) -> tree like params that says where each leaf is read
        from (`specjax.models.weights.Source` and others). names: tensors in the file.
      axes: axes(config) -> tree like params of logical axes, a tuple of names per leaf; see
        `specjax.models.sharding.RULES`.
      init: init(key, config, dtype) -> params, random, for tests and benchmarks.
      forward: forward(params, config, token_ids, positions, attend, caches, tensor_axis,
        *, taps, is_token) -> hidden [..., hidden_size] after the final norm, and caches.

        taps: None, or a tuple of layers. Then hidden states come third, an array
          [..., hidden_size] per tap: the input of layer i for tap i, hidden itself for tap
          num_layers, and what the final norm reads for tap num_layers + 1
          (`specjax.models.blocks.Taps`).
        is_token: bool[...], False for padding; None: no padding, or a family without
          experts.
      logits: logits(params, config, hidden, tensor_axis) -> f32[..., vocab]. tensor_axis: the
        mesh axis to gather them over where params hold a slice of the vocabulary; None: the
        logits of that slice.
      work: work(config, num_weights) -> ForwardWork. num_weights: numbers in all leaves.
      has_experts: whether forward needs is_token.
      embed: embed(params, config, token_ids, tensor_axis) -> [..., hidden_size], what tokens add
        to the input of the first layer wherever they stand. The default suits weights with
        `embed_tokens`.
      unparse: unparse(config) -> the contents of a config.json that `parse` reads as config,
        without its class, model_type and dtype; for `specjax.save_pretrained`. None: models are
        saved only with the config.json that they were loaded from.
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
    embed: Callable[..., Array] = embed_tokens
    unparse: Callable[[Any], Json] | None = None


def resolve_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Returns taps counted from the first layer; those below 0 count from the normed output.

    Raises:
      ValueError: there is no such layer.
    """
    resolved = tuple(tap + num_layers + 1 if tap < 0 else tap for tap in taps)
    if any(not 0 <= tap <= before_final_norm(num_layers) for tap in resolved):
        raise ValueError(
            f"taps={tuple(taps)} must lie from {-num_layers - 1} to {num_layers + 1}, for a target "
            f"of {num_layers} layers."
        )
    return resolved


def before_final_norm(num_layers: int) -> int:
    """Returns the tap of the last layer's output, which the final norm reads."""
    return num_layers + 1
