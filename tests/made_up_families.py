"""Families that nobody published: that of docs/adding-a-model.md, and one of experts."""

from __future__ import annotations

import functools
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.models import blocks, register, weights
from specjax.models.base import Family, ModelConfig, RopeConfig, embed_tokens
from specjax.models.layers import rms_norm
from specjax.models.weights import Source, Stacked, Weight, matrix, vector

_DOCUMENT = Path(__file__).parents[1] / "docs" / "adding-a-model.md"
NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 2


def _stilt() -> types.ModuleType:
    """Returns the module that the document has the code of."""
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", _DOCUMENT.read_text(), re.DOTALL)
        if "FAMILY = Family(" in block
    )
    module = types.ModuleType("stilt")
    # Under another name: the page's own blocks are run by another test of the same process.
    code = code.replace("stork", "stilt").replace("Stork", "Stilt")
    exec(compile(code, _DOCUMENT.name, "exec"), module.__dict__)
    return module


stilt = _stilt()

STILT_JSON = {
    "model_type": "stilt",
    "architectures": ["StiltForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 20,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "max_position_embeddings": 256,
}


def heron_config(**overrides) -> ModelConfig:
    """Returns a config of two layers: the first rotates and has a window, the last neither."""
    fields = {
        "architecture": "heron",
        "family": "heron",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "layer_windows": (20, None),
        "layer_ropes": (RopeConfig(theta=100.0), None),
        "attention_softcap": 4.0,
    }
    return ModelConfig(**(fields | overrides))


def _heron_weights(config: ModelConfig) -> dict:
    d, f, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * hd, config.num_kv_heads * hd

    def layer(at: str) -> dict[str, Weight]:
        def stacked(name: str, shape: tuple[int, int], axes) -> Weight:
            # Stored [in, out], one tensor per expert.
            of = lambda e: Source(f"{at}experts.{e}.{name}.weight", shape[::-1], is_transposed=True)
            parts = tuple(of(expert) for expert in range(NUM_EXPERTS))
            return Weight((NUM_EXPERTS, *shape), ("experts", *axes), Stacked(parts))

        return {
            "input_norm": vector(f"{at}norm_1.weight", d, "embed", 1.0),
            "q_proj": matrix(f"{at}q.weight", (q_size, d), ("heads", "embed")),
            "k_proj": matrix(f"{at}k.weight", (kv_size, d), ("kv_heads", "embed")),
            "v_proj": matrix(f"{at}v.weight", (kv_size, d), ("kv_heads", "embed")),
            "q_norm": vector(f"{at}q_norm.weight", q_size, "heads", 1.0),
            "k_norm": vector(f"{at}k_norm.weight", kv_size, "kv_heads", 1.0),
            "o_proj": matrix(f"{at}o.weight", (d, q_size), ("embed", "heads")),
            "sinks": vector(f"{at}sinks", config.num_heads, "heads"),
            "mlp_norm": vector(f"{at}norm_2.weight", d, "embed", 1.0),
            "router": matrix(f"{at}router.weight", (NUM_EXPERTS, d), (None, "embed")),
            "router_bias": vector(f"{at}router.bias", NUM_EXPERTS, None),
            "experts_gate_proj": stacked("gate", (f, d), ("mlp", "embed")),
            "experts_up_proj": stacked("up", (f, d), ("mlp", "embed")),
            "experts_down_proj": stacked("down", (d, f), ("embed", "mlp")),
        }

    return {
        "embed_tokens": matrix("embed.weight", (config.vocab_size, d), (None, "embed")),
        "layers": tuple(layer(f"blocks.{index}.") for index in range(config.num_layers)),
        "norm": vector("norm.weight", d, "embed", 1.0),
        "lm_head": matrix("head.weight", (config.vocab_size, d), ("vocab", "embed")),
    }


def norm_across_heads(x, weight, eps, tensor_axis=None):
    """Norms queries or keys [..., own heads, head_dim] by the squares of all shards' heads."""
    flat = x.reshape(*x.shape[:-2], -1)
    return rms_norm(flat, weight, eps, tensor_axis=tensor_axis).reshape(x.shape)


def _heron_forward(
    params,
    config,
    token_ids,
    positions,
    attend,
    caches,
    tensor_axis=None,
    *,
    taps=None,
    is_token=None,
):
    tapped = blocks.Taps(taps, config.num_layers)
    norm = functools.partial(rms_norm, eps=config.norm_eps)
    head_norm = functools.partial(norm_across_heads, eps=config.norm_eps, tensor_axis=tensor_axis)
    x = embed_tokens(params, config, token_ids, tensor_axis)
    tables = blocks.rotary_tables(config, positions)
    new_caches = []
    for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        tapped.see(index, x)
        out, cache = blocks.attention(
            norm(x, layer["input_norm"]),
            layer,
            attend,
            index,
            cache,
            head_dim=config.head_dim,
            table=tables[index],
            head_norm=head_norm,
            tensor_axis=tensor_axis,
        )
        new_caches.append(cache)
        x = x + out
        x = x + blocks.experts(
            norm(x, layer["mlp_norm"]),
            layer,
            experts_per_token=EXPERTS_PER_TOKEN,
            activate=lambda gate, up: jax.nn.silu(gate) * up,
            renormalises=True,
            is_token=is_token,
            tensor_axis=tensor_axis,
        )
    tapped.see(config.num_layers, x)
    return tapped.results(norm(x, params["norm"]), tuple(new_caches))


HERON = Family(
    name="heron",
    model_types={"heron": "HeronForCausalLM"},
    parse=lambda raw: heron_config(),
    sources=lambda config, names: weights.sources_of(_heron_weights(config)),
    axes=lambda config: weights.axes_of(_heron_weights(config)),
    init=lambda key, config, dtype=jnp.float32: weights.init_of(_heron_weights(config), key, dtype),
    forward=_heron_forward,
    logits=lambda params, config, hidden, tensor_axis=None: blocks.head(
        hidden, params["lm_head"], config, tensor_axis
    ),
    work=lambda config, num_weights: blocks.dense_work(
        config, num_weights, config.vocab_size * config.hidden_size
    ),
    has_experts=True,
)

register(stilt.FAMILY)
register(HERON)
