"""config.json and generation_config.json, of transformers 4 and 5, to a ModelConfig."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from specjax.models.base import ModelConfig, RopeConfig

Json = dict[str, Any]

SAMPLING_KEYS = (
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a model_type implies where its config.json is silent."""

    class_name: str
    num_kv_heads: int | None = None  # None is num_attention_heads
    max_position_embeddings: int = 2048


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "qwen2": _Family("Qwen2ForCausalLM", 32, 32768),
    "qwen3": _Family("Qwen3ForCausalLM", 32, 32768),
    "mistral": _Family("MistralForCausalLM", 8, 131072),
    "granite": _Family("GraniteForCausalLM"),
    "gpt2": _Family("GPT2LMHeadModel"),
}
_QWEN = ("qwen2", "qwen3")


def read_config(folder: str | Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns a folder's config and its sampling defaults.

    `eos_token_id` of generation_config.json overrides the one of config.json.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: a file is not JSON, or the model is not one that specjax runs.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no config.json; give a folder in Hugging Face format "
            "(config.json and model.safetensors, as save_pretrained writes)."
        )
    try:
        config = parse_config(read_json(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    if generation.get("eos_token_id") is not None:
        eos = _token_ids(generation["eos_token_id"])
        config = dataclasses.replace(config, eos_token_ids=eos)
    defaults = {
        k: generation[k] for k in SAMPLING_KEYS if generation.get(k) is not None
    }
    return config, defaults


def read_json(path: Path) -> Json:
    """Returns the object in a JSON file; ValueError when it holds anything else."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); fetch the file again."
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} holds a {type(value).__name__}, expected an object; fetch the "
            "file again."
        )
    return value


def parse_config(raw: Json) -> ModelConfig:
    """Returns the ModelConfig that the contents of a config.json describe.

    Raises:
      ValueError: a model_type, option or quantisation that specjax does not run.
    """
    family = _family(raw)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"quantization_config asks for quantised weights ({method}), which are not "
            "read; use an export in BF16, F16 or F32."
        )
    try:
        return _gpt2(raw) if family == "gpt2" else _skeleton(raw, family)
    except KeyError as error:
        raise ValueError(
            f"key {error.args[0]!r} is missing, which every {family} config has; add "
            "it."
        ) from error


def _family(raw: Json) -> str:
    """Returns the model_type; refuses other heads on a known body (drafters)."""
    architectures = raw.get("architectures") or []
    supported = ", ".join(f"{k} ({v.class_name})" for k, v in _FAMILIES.items())
    by_class = {family.class_name: key for key, family in _FAMILIES.items()}
    model_type = raw.get("model_type") or by_class.get((architectures or [None])[0])
    if model_type not in _FAMILIES:
        raise ValueError(
            f"{model_type=} with {architectures=} is not supported; expected one of "
            f"{supported}."
        )
    if architectures and _FAMILIES[model_type].class_name not in architectures:
        raise ValueError(
            f"{architectures=} is not supported as a language model; expected one of "
            f"{supported}. A drafter's folder is loaded with specjax.load_drafter."
        )
    return model_type


def _skeleton(raw: Json, family: str) -> ModelConfig:
    """The Llama skeleton and its family differences."""
    _require(raw, "hidden_act", ("silu", "swish"), "silu")
    implied = _FAMILIES[family]
    num_heads, hidden_size = raw["num_attention_heads"], raw["hidden_size"]
    num_kv_heads = raw.get("num_key_value_heads", implied.num_kv_heads) or num_heads
    has_attention_bias = family in ("llama", "qwen3", "granite") and bool(
        raw.get("attention_bias", False)
    )
    head_dim = raw.get("head_dim") or (
        128 if family == "qwen3" else _divide(hidden_size, num_heads)
    )
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"{num_heads=} must be a multiple of {num_kv_heads=}, and {head_dim=} "
            "even; correct the config."
        )
    is_granite = family == "granite"
    scalar = lambda key: float(raw.get(key, 1.0)) if is_granite else 1.0
    max_positions = raw.get("max_position_embeddings", implied.max_position_embeddings)
    return ModelConfig(
        architecture="llama",
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, max_positions),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or has_attention_bias,
        o_bias=has_attention_bias,
        mlp_bias=family in ("llama", "granite") and bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        layer_windows=_layer_windows(raw, family),
        embedding_multiplier=scalar("embedding_multiplier"),
        attention_scale=scalar("attention_multiplier") if is_granite else None,
        residual_multiplier=scalar("residual_multiplier"),
        logits_divisor=scalar("logits_scaling"),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_token_ids(raw.get("eos_token_id")),
    )


def _gpt2(raw: Json) -> ModelConfig:
    tanh_gelu = ("gelu_new", "gelu_pytorch_tanh")
    _require(raw, "activation_function", tanh_gelu, "gelu_new")
    _require(raw, "scale_attn_by_inverse_layer_idx", (False,), False)
    _require(raw, "tie_word_embeddings", (True,), True)
    hidden_size, num_heads = raw["n_embd"], raw["n_head"]
    return ModelConfig(
        architecture="gpt2",
        family="gpt2",
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=raw.get("n_inner") or 4 * hidden_size,
        num_layers=raw["n_layer"],
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_divide(hidden_size, num_heads),
        max_position_embeddings=raw["n_positions"],
        norm_eps=float(raw.get("layer_norm_epsilon", 1e-5)),
        tie_word_embeddings=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        attention_scale=None if raw.get("scale_attn_weights", True) else 1.0,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_token_ids(raw.get("eos_token_id")),
    )


def _rope(raw: Json, max_positions: int) -> RopeConfig:
    """Rope of `rope_parameters` (5.x), or `rope_scaling` and `rope_theta` (4.x)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ValueError(
            f"rope_parameters per layer type ({', '.join(scaling)}) are not supported; "
            "expected one set for all layers."
        )
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ValueError(
            f"partial_rotary_factor={partial} is not supported; expected 1.0."
        )
    original = scaling.get("original_max_position_embeddings")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=float(scaling["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position_embeddings=original or max_positions,
        )
    if kind == "yarn":
        factor = float(scaling["factor"] or max_positions / (original or max_positions))
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position_embeddings=original or max_positions,
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            truncate=bool(scaling.get("truncate", True)),
            attention_factor=_yarn_attention_factor(scaling, factor),
        )
    hint = (
        " Its frequencies depend on the current length, which would change keys that "
        "are already cached."
        if kind == "dynamic"
        else ""
    )
    raise ValueError(
        f"rope type {kind!r} is not supported; expected default, linear, llama3 or "
        f"yarn.{hint}"
    )


def _yarn_attention_factor(scaling: Json, factor: float) -> float | None:
    """The factor on cos and sin, outright or by mscale; None: the paper's rule."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not (mscale and mscale_all_dim):
        return None
    stretch = math.log(factor) if factor > 1 else 0.0
    return (0.1 * mscale * stretch + 1.0) / (0.1 * mscale_all_dim * stretch + 1.0)


def _layer_windows(raw: Json, family: str) -> tuple[int | None, ...]:
    """Returns a window per layer, () when no layer has one."""
    num_layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window", 4096 if family in (*_QWEN, "mistral") else None)
    first = num_layers
    if family == "mistral" and window is not None:
        first = 0
    if family in _QWEN and raw.get("use_sliding_window", False):
        first = raw.get("max_window_layers", 28)
    types = raw.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(num_layers)
    ]
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types has {len(types)} entries and unknown types {unknown}; "
            f"expected {num_layers} of sliding_attention or full_attention."
        )
    if "sliding_attention" not in types:
        return ()
    if not isinstance(window, int) or window < 1:
        raise ValueError(
            f"layers slide but sliding_window={window}; expected a positive number of "
            "tokens, or full_attention in layer_types."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _require(raw: Json, key: str, allowed: tuple, default: Any) -> None:
    value = raw.get(key, default)
    if value not in allowed:
        raise ValueError(
            f"{key}={value!r} is not supported; expected "
            f"{' or '.join(map(repr, allowed))}."
        )


def _divide(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ValueError(
            f"{hidden_size=} is not a multiple of {num_heads=}; correct the config or "
            "give head_dim."
        )
    return hidden_size // num_heads


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
