"""GPT-2 and GPTBigCode: learned positions, LayerNorm, a GELU MLP, biases everywhere.

The head is the embedding, or has a matrix of its own. `activation` None is the tanh form of GELU.

Matrices are [out, in], like those of every other model and in files of GPTBigCode; files of GPT-2
store them [in, out]. All heads of GPTBigCode share one key head (multi-query attention, Shazeer
2019); Granite 20B and 34B Code, with the exact GELU, and StarCoder are of this family.
`post_attention_norm` is the norm before the MLP, as in the Llama skeleton.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
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
    number,
    require,
    size,
    token_id,
    token_ids,
)
from specjax.models.layers import layer_norm, linear
from specjax.models.weights import Axes, Source, Weight, matrix, vector

BIG_CODE = "gpt_bigcode"
_USUAL = "gelu_tanh"
# Names of transformers that differ in rounding alone.
_ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"), _USUAL),
    **dict.fromkeys(("gelu_fast", "gelu_accurate"), _USUAL),
    "quick_gelu": "quick_gelu",
}
# What transformers reads under other names too.
_OTHER_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
}


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
    """Runs all layers; arguments and results as for `specjax.models.llama.forward`."""
    del is_token  # padding is computed and dropped
    tapped = blocks.Taps(taps, config.num_layers)
    norm = lambda x, owner, name: layer_norm(x, owner[name], owner[f"{name}_bias"], config.norm_eps)

    def add(x: Array, inner: Array, layer: Params, name: str) -> Array:
        # The bias is added last: another order would round differently.
        product = blocks.sum_over_shards(linear(inner, layer[name]), tensor_axis)
        product = checkpoint_name(product, blocks.BRANCH)
        return blocks.with_bias(x + product, layer, name)

    # Draft slots past the last position are computed and dropped; clipping keeps
    # their lookup in range.
    last = params["embed_positions"].shape[0] - 1
    x = embed_tokens(params, config, token_ids, tensor_axis)
    x = x + params["embed_positions"][jnp.minimum(positions, last)]
    activate = blocks.ACTIVATIONS[config.activation or _USUAL]
    new_caches = []
    for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        tapped.see(index, x)
        normed = norm(x, layer, "input_norm")
        mixed, cache = blocks.attend_heads(
            normed, layer, attend, index, cache, head_dim=config.head_dim
        )
        new_caches.append(cache)
        x = add(x, mixed, layer, "o_proj")
        normed = norm(x, layer, "post_attention_norm")
        widened = activate(blocks.project(normed, layer, "up_proj"))
        x = add(x, widened, layer, "down_proj")
    tapped.see(config.num_layers, x)
    return tapped.results(norm(x, params, "norm"), tuple(new_caches))


def logits(
    params: Params, config: ModelConfig, hidden: Array, tensor_axis: MeshAxes | None = None
) -> Array:
    """Returns f32[..., vocab]; a tied head is the embedding."""
    name = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    return blocks.head(hidden, params[name], config, tensor_axis)


def init(
    key: Array, config: ModelConfig, dtype: DTypeLike = jnp.float32, std: float = 0.02
) -> Params:
    """Returns random weights: normal matrices and biases, norms near one."""
    return weights.init_of(_weights(config), key, dtype, std)


def sources(config: ModelConfig, names: Container[str] = ()) -> Any:
    """Returns the source of each leaf in a checkpoint.

    Names in re-saved files have a prefix, those in the first published files do not.
    """
    prefix = "" if "wte.weight" in names else "transformer."
    return weights.sources_of(_weights(config, prefix))


def axes(config: ModelConfig) -> Any:
    """Returns the logical axes of each leaf."""
    return weights.axes_of(_weights(config))


def work(config: ModelConfig, num_weights: int) -> ForwardWork:
    """Returns the work of a forward; positions and an untied embedding are only looked up."""
    rows = config.max_position_embeddings
    rows += 0 if config.tie_word_embeddings else config.vocab_size
    return blocks.dense_work(config, num_weights, rows * config.hidden_size)


def _weights(config: ModelConfig, prefix: str = "") -> dict[str, Any]:
    """Returns a Weight per leaf."""
    d, vocab, positions = config.hidden_size, config.vocab_size, config.max_position_embeddings
    layers = range(config.num_layers)
    params = {
        "embed_tokens": matrix(f"{prefix}wte.weight", (vocab, d), ("vocab", "embed")),
        "embed_positions": matrix(f"{prefix}wpe.weight", (positions, d), (None, "embed")),
        "layers": tuple(_layer_weights(config, f"{prefix}h.{index}.") for index in layers),
        **_norm("norm", f"{prefix}ln_f", d),
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = matrix("lm_head.weight", (vocab, d), ("vocab", "embed"))
    return params


def _layer_weights(config: ModelConfig, prefix: str) -> dict[str, Weight]:
    d, f, kv = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim
    # Name in the file, [out, in], axes, and the first of them in a tensor of q, k and v; None: all.
    matrices: dict[str, tuple[str, tuple[int, int], Axes, int | None]] = {
        "q_proj": ("attn.c_attn", (d, d), ("heads", "embed"), 0),
        "k_proj": ("attn.c_attn", (kv, d), ("kv_heads", "embed"), d),
        "v_proj": ("attn.c_attn", (kv, d), ("kv_heads", "embed"), d + kv),
        "o_proj": ("attn.c_proj", (d, d), ("embed", "heads"), None),
        "up_proj": ("mlp.c_fc", (f, d), ("mlp", "embed"), None),
        "down_proj": ("mlp.c_proj", (d, f), ("embed", "mlp"), None),
    }
    is_transposed = config.family == "gpt2"
    layer: dict[str, Weight] = {}
    biases: dict[str, Weight] = {}
    for key, (name, (size_out, size_in), own_axes, first) in matrices.items():
        stored, outputs = size_out, None
        if first is not None:
            stored, outputs = d + 2 * kv, slice(first, first + size_out)
        shape = (size_in, stored) if is_transposed else (stored, size_in)
        source = Source(f"{prefix}{name}.weight", shape, is_transposed, outputs)
        layer[key] = Weight((size_out, size_in), own_axes, source)
        source = Source(f"{prefix}{name}.bias", (stored,), outputs=outputs)
        biases[f"{key}_bias"] = Weight((size_out,), own_axes[:1], source)
    layer |= biases
    layer |= _norm("input_norm", f"{prefix}ln_1", d)
    return layer | _norm("post_attention_norm", f"{prefix}ln_2", d)


def _norm(key: str, name: str, size: int) -> dict[str, Weight]:
    return {
        key: vector(f"{name}.weight", size, "embed", 1.0),
        f"{key}_bias": vector(f"{name}.bias", size, "embed"),
    }


def parse(raw: Json) -> ModelConfig:
    """Returns the ModelConfig of a config.json."""
    raw = two_places.by_one_name(raw, _OTHER_NAMES)
    if raw.get("n_ctx") not in (None, raw.get("n_positions")):
        two_places.warn("n_ctx beside another n_positions", "n_positions is used")
    is_of_big_code = raw.get("model_type") == BIG_CODE
    require(raw, "activation_function", (*_ACTIVATIONS, None), None)
    activation = _ACTIVATIONS.get(raw.get("activation_function") or "", _USUAL)
    if is_of_big_code:
        # Without it, the rows of c_attn are in another order.
        require(raw, "multi_query", (True,), True)
        require(raw, "num_key_value_heads", (1, None), None)
    require(raw, "scale_attn_by_inverse_layer_idx", (False,), False)
    hidden_size, num_heads = size(raw, "n_embd"), size(raw, "n_head")
    vocab_size = size(raw, "vocab_size")
    return ModelConfig(
        architecture=FAMILY.name,
        family=BIG_CODE if is_of_big_code else "gpt2",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=size(raw, "n_inner", 4 * hidden_size, is_zero_none=True),
        num_layers=size(raw, "n_layer", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=1 if is_of_big_code else num_heads,
        head_dim=divide(hidden_size, num_heads),
        max_position_embeddings=size(raw, "n_positions"),
        norm_eps=number(raw, "layer_norm_epsilon", 1e-5, most=1.0),
        tie_word_embeddings=flag(raw, "tie_word_embeddings", True),
        activation=None if activation == _USUAL else activation,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        attention_scale=None if flag(raw, "scale_attn_weights", True) else 1.0,
        bos_token_id=token_id("bos_token_id", raw.get("bos_token_id"), vocab_size),
        eos_token_ids=token_ids(raw, vocab_size),
    )


FAMILY = Family(
    name="gpt2",
    model_types={"gpt2": "GPT2LMHeadModel", BIG_CODE: "GPTBigCodeForCausalLM"},
    parse=parse,
    sources=sources,
    axes=axes,
    init=init,
    forward=forward,
    logits=logits,
    work=work,
    unparse=unparsing.gpt2,
)
