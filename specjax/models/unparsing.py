"""What a family's `parse` reads, written: ModelConfig to the contents of a config.json.

The keys are those of transformers 4, which transformers 5, vLLM and SGLang read too.
"""

from __future__ import annotations

from typing import Any

from specjax.models.base import Json, ModelConfig, RopeConfig

_MASK_KEY = "pard_token"
_QWEN = ("qwen2", "qwen3", "mimo")


def llama_skeleton(config: ModelConfig) -> Json:
    """Returns the config.json of a model of the Llama skeleton, without its class and dtype."""
    raw: Json = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
    }
    if config.rope.kind == "linear":
        # Without it, readers take the context for the one before it was stretched.
        original = max(1, int(config.max_position_embeddings / config.rope.factor))
        raw["original_max_position_embeddings"] = original
    if config.family in ("llama", "qwen3", "granite"):
        raw["attention_bias"] = config.qkv_bias
    if config.family in ("llama", "granite"):
        raw["mlp_bias"] = config.mlp_bias
    if config.family == "granite":
        raw |= {
            "embedding_multiplier": config.embedding_multiplier,
            "attention_multiplier": config.scale,
            "residual_multiplier": config.residual_multiplier,
            "logits_scaling": config.logits_divisor,
        }
    return raw | _windows(config) | _tokens(config)


def gpt2(config: ModelConfig) -> Json:
    """Returns the config.json of GPT-2 or GPTBigCode, without its class and dtype."""
    is_of_big_code = config.family == "gpt_bigcode"
    raw: Json = {
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_position_embeddings,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": _activation(config, is_of_big_code),
        "scale_attn_weights": config.attention_scale is None,
    }
    if is_of_big_code:
        raw["multi_query"] = True
    return raw | _tokens(config)


def _activation(config: ModelConfig, is_of_big_code: bool) -> str:
    if config.activation in (None, "gelu_tanh"):
        return "gelu_pytorch_tanh" if is_of_big_code else "gelu_new"
    return config.activation


def _tokens(config: ModelConfig) -> Json:
    raw: Json = {
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    return raw if config.mask_token_id is None else raw | {_MASK_KEY: config.mask_token_id}


def _windows(config: ModelConfig) -> Json:
    """Returns what says the sliding windows, of which a config.json has one size."""
    slides = [window is not None for window in config.layer_windows]
    sizes = sorted({window for window in config.layer_windows if window is not None})
    if not sizes:
        if config.family in _QWEN:
            return {"use_sliding_window": False, "sliding_window": None}
        return {"sliding_window": None} if config.family == "mistral" else {}
    raw: Json = {"sliding_window": sizes[0]}
    if config.family in _QWEN:
        raw |= {"use_sliding_window": True, "max_window_layers": slides.index(True)}
    if config.family != "mistral" or not all(slides):
        kinds = {True: "sliding_attention", False: "full_attention"}
        raw["layer_types"] = [kinds[each] for each in slides]
    return raw


def _rope_scaling(rope: RopeConfig) -> Json | None:
    """Returns how a rope is stretched, None for the plain one."""
    if rope.kind == "default":
        return None
    raw: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        raw["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.kind == "llama3":
        raw |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        raw |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        raw["truncate"] = rope.truncate
        if rope.attention_factor is not None:
            raw["attention_factor"] = rope.attention_factor
    return raw
