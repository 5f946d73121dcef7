"""The Llama skeleton: Llama 2/3, Mistral, Qwen2/2.5, Qwen3, MiMo and Granite by static flags.

Weights are matrices [out, in] as published, one array per projection and layer. They have the
published names: `post_attention_norm` is the norm before the MLP.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from specjax.models import blocks, two_places, unparsing, weights
from specjax.models.base import (
    Attend,
    Family,
    ForwardWork,
    Json,
    LayerCache,
    MeshAxes,
    ModelConfig,
    Params,
    embed_tokens,
)
from specjax.models.config_values import (
    MAX_LAYERS,
    divide,
    flag,
    layer_windows,
    number,
    require,
    rope,
    rope_context,
    size,
    token_id,
    token_ids,
)
from specjax.models.layers import rms_norm
from specjax.models.weights import Weight, matrix, vector


@dataclasses.dataclass(frozen=True)
class _Implied:
    """Defaults that a model_type implies for keys missing in config.json."""

    class_name: str
    num_kv_heads: int | None = None  # None: num_attention_heads
    max_position_embeddings: int = 2048


_IMPLIED = {
    "llama": _Implied("LlamaForCausalLM"),
    "qwen2": _Implied("Qwen2ForCausalLM", 32, 32768),
    "qwen3": _Implied("Qwen3ForCausalLM", 32, 32768),
    "mimo": _Implied("MiMoForCausalLM", 32, 32768),  # Qwen2, and layers that predict more
    "mistral": _Implied("MistralForCausalLM", 8, 131072),
    "granite": _Implied("GraniteForCausalLM"),
}
_QWEN = ("qwen2", "qwen3", "mimo")


def forward(
    params: Params,
    config: ModelConfig,
    token_ids: Array,
    positions: Array,
    attend: Attend,
    caches: tuple[LayerCache, ...],
    tensor_axis: MeshAxes | None = None,
    *,
    taps: tuple[int, ...] | None = None,
    is_token: Array | None = None,
) -> Any:
    """Runs all layers.

    Args:
      token_ids, positions: i32[...], any leading shape.
      attend: computes attention, see `specjax.models.base.Attend`; called per layer, in order.
      caches: one per layer, passed through `attend`.
      taps: see `specjax.models.base.Family`.

    Returns:
      hidden [..., hidden_size] after the final norm, the new caches, and with taps a tuple of
      hidden states.
    """
    del is_token  # padding is computed and dropped
    tapped = blocks.Taps(taps, config.num_layers)
    norm = functools.partial(rms_norm, eps=config.norm_eps)
    attention = functools.partial(
        blocks.attention,
        head_dim=config.head_dim,
        head_norm=norm if config.qk_norm else None,
        tensor_axis=tensor_axis,
    )
    x = embed_tokens(params, config, token_ids, tensor_axis)
    tables = blocks.rotary_tables(config, positions)
    new_caches = []
    for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        tapped.see(index, x)
        normed = norm(x, layer["input_norm"])
        out, cache = attention(normed, layer, attend, index, cache, table=tables[index])
        new_caches.append(cache)
        x = x + config.residual_multiplier * out
        normed = norm(x, layer["post_attention_norm"])
        out = blocks.gated_mlp(normed, layer, jax.nn.silu, tensor_axis)
        x = x + config.residual_multiplier * out
    tapped.see(config.num_layers, x)
    return tapped.results(norm(x, params["norm"]), tuple(new_caches))


def logits(
    params: Params, config: ModelConfig, hidden: Array, tensor_axis: MeshAxes | None = None
) -> Array:
    """Returns f32[..., vocab] from hidden [..., hidden_size]."""
    name = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    return blocks.head(hidden, params[name], config, tensor_axis)


def init(
    key: Array, config: ModelConfig, dtype: DTypeLike = jnp.float32, std: float = 0.02
) -> Params:
    """Returns random weights: normal matrices, norms near one, small biases."""
    return weights.init_of(_weights(config), key, dtype, std)


def sources(config: ModelConfig, names: Container[str] = ()) -> Any:
    """Returns the source of each leaf in a checkpoint."""
    del names
    return weights.sources_of(_weights(config))


def axes(config: ModelConfig) -> Any:
    """Returns the logical axes of each leaf."""
    return weights.axes_of(_weights(config))


def work(config: ModelConfig, num_weights: int) -> ForwardWork:
    """Returns the work of a forward; an untied embedding is only looked up."""
    table = config.vocab_size * config.hidden_size
    return blocks.dense_work(config, num_weights, 0 if config.tie_word_embeddings else table)


def _weights(config: ModelConfig) -> dict[str, Any]:
    """Returns a Weight per leaf."""
    d, vocab = config.hidden_size, config.vocab_size
    params: dict[str, Any] = {
        "embed_tokens": matrix("model.embed_tokens.weight", (vocab, d), ("vocab", "embed")),
        "layers": tuple(
            _layer_weights(config, f"model.layers.{index}.") for index in range(config.num_layers)
        ),
        "norm": vector("model.norm.weight", d, "embed", 1.0),
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = matrix("lm_head.weight", (vocab, d), ("vocab", "embed"))
    return params


def _layer_weights(config: ModelConfig, prefix: str) -> dict[str, Weight]:
    d, f, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    # Name in the file, [out, in], axes, and whether there is a bias.
    matrices = {
        "q_proj": ("self_attn.q_proj", (q_size, d), ("heads", "embed"), config.qkv_bias),
        "k_proj": ("self_attn.k_proj", (kv_size, d), ("kv_heads", "embed"), config.qkv_bias),
        "v_proj": ("self_attn.v_proj", (kv_size, d), ("kv_heads", "embed"), config.qkv_bias),
        "o_proj": ("self_attn.o_proj", (d, q_size), ("embed", "heads"), config.o_bias),
        "gate_proj": ("mlp.gate_proj", (f, d), ("mlp", "embed"), config.mlp_bias),
        "up_proj": ("mlp.up_proj", (f, d), ("mlp", "embed"), config.mlp_bias),
        "down_proj": ("mlp.down_proj", (d, f), ("embed", "mlp"), config.mlp_bias),
    }
    in_file = lambda key: f"{prefix}{matrices[key][0]}.weight"
    of = lambda *keys: {key: matrix(in_file(key), *matrices[key][1:3]) for key in keys}
    norm = lambda name, size, axis: vector(f"{prefix}{name}.weight", size, axis, 1.0)
    layer = {"input_norm": norm("input_layernorm", d, "embed")}
    layer |= of("q_proj", "k_proj", "v_proj", "o_proj")
    layer["post_attention_norm"] = norm("post_attention_layernorm", d, "embed")
    layer |= of("gate_proj", "up_proj", "down_proj")
    for key, (name, shape, own_axes, has_bias) in matrices.items():
        if has_bias:
            layer[f"{key}_bias"] = vector(f"{prefix}{name}.bias", shape[0], own_axes[0])
    if config.qk_norm:
        layer["q_norm"] = norm("self_attn.q_norm", head_dim, None)
        layer["k_norm"] = norm("self_attn.k_norm", head_dim, None)
    return layer


def parse(raw: Json) -> ModelConfig:
    """Returns the ModelConfig of a config.json; its model_type selects the differences."""
    family = raw["model_type"]
    require(raw, "hidden_act", ("silu", "swish"), "silu")
    implied = _IMPLIED[family]
    num_heads = size(raw, "num_attention_heads")
    hidden_size = size(raw, "hidden_size")
    num_layers = size(raw, "num_hidden_layers", most=MAX_LAYERS)
    vocab_size = size(raw, "vocab_size")
    num_kv_heads = size(
        raw, "num_key_value_heads", implied.num_kv_heads or num_heads, is_zero_none=True
    )
    # Where a family does not ask, the tensors tell: a bias without a use is refused.
    says_attention_bias, says_mlp_bias = (
        flag(raw, key, False) for key in ("attention_bias", "mlp_bias")
    )
    has_attention_bias = says_attention_bias and family in ("llama", "qwen3", "granite")
    head_dim = size(raw, "head_dim", 0, is_zero_none=True) or (
        128 if family == "qwen3" else divide(hidden_size, num_heads)
    )
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"{num_heads=} must be a multiple of {num_kv_heads=}, and {head_dim=} "
            "even; correct the config."
        )
    is_granite = family == "granite"
    scalar = lambda key: number(raw, key, 1.0) if is_granite else 1.0
    max_positions = size(raw, "max_position_embeddings", implied.max_position_embeddings)
    own_rope = rope(raw, max_positions)
    return ModelConfig(
        architecture=FAMILY.name,
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=size(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=rope_context(raw, own_rope, max_positions),
        norm_eps=number(raw, "rms_norm_eps", 1e-6, most=1.0),
        rope=own_rope,
        tie_word_embeddings=flag(raw, "tie_word_embeddings", False),
        qkv_bias=family in ("qwen2", "mimo") or has_attention_bias,
        o_bias=has_attention_bias,
        mlp_bias=says_mlp_bias and family in ("llama", "granite"),
        qk_norm=family == "qwen3",
        layer_windows=_layer_windows(raw, family, num_layers),
        embedding_multiplier=scalar("embedding_multiplier"),
        attention_scale=scalar("attention_multiplier") if is_granite else None,
        residual_multiplier=scalar("residual_multiplier"),
        logits_divisor=scalar("logits_scaling"),
        bos_token_id=token_id("bos_token_id", raw.get("bos_token_id"), vocab_size),
        eos_token_ids=token_ids(raw, vocab_size),
    )


def _layer_windows(raw: Json, family: str, num_layers: int) -> tuple[int | None, ...]:
    # Asked for where windows are switched off, too.
    default = raw.get("sliding_window", 4096) if family in (*_QWEN, "mistral") else None
    first = num_layers  # that slides
    if family == "mistral" and default is not None:
        first = 0
    slides = False
    if family in _QWEN:
        first_sliding = size(raw, "max_window_layers", 28, least=0)
        slides = flag(raw, "use_sliding_window", False)
        first = first_sliding if slides else num_layers
    kinds = ["full_attention"] * min(first, num_layers)
    kinds += ["sliding_attention"] * (num_layers - len(kinds))
    types = raw.get("layer_types") or kinds
    if slides and types != kinds and raw.get("max_window_layers") is not None:
        two_places.warn("layer_types beside a max_window_layers of others", "layer_types is used")
    if raw.get("use_sliding_window") is False and family in _QWEN and types != kinds:
        raise ValueError(
            "use_sliding_window=false and layer_types with layers that slide contradict each "
            "other; correct one of them."
        )
    return layer_windows(raw, kinds, default)


FAMILY = Family(
    name="llama",
    model_types={model_type: implied.class_name for model_type, implied in _IMPLIED.items()},
    parse=parse,
    sources=sources,
    axes=axes,
    init=init,
    forward=forward,
    logits=logits,
    work=work,
    unparse=unparsing.llama_skeleton,
)
