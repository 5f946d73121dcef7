"""config.json and generation_config.json, of transformers 4 and 5, to a ModelConfig."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from pathlib import Path
from typing import Any, TypeGuard

from specjax.config.sampling import SamplingParams
from specjax.models.base import ModelConfig, RopeConfig
from specjax.runtime.model_files import find_file, read_json

Json = dict[str, Any]

MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1  # of a dimension, and so of a token id or position

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
      ValueError: a file is not JSON, a value is not what its key means, or the model is
        not one that specjax runs.
    """
    folder = Path(folder)
    path = find_file(folder, "config.json")
    if path is None:
        raise FileNotFoundError(
            f"{folder} holds no config.json; give a folder in Hugging Face format "
            "(config.json and model.safetensors, as save_pretrained writes)."
        )
    raw = read_json(path)
    try:
        config = parse_config(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error!s:.1000}") from error
    generation_path = find_file(folder, "generation_config.json")
    if generation_path is None:
        return config, {}
    generation = read_json(generation_path)
    try:
        if generation.get("eos_token_id") is not None:
            eos = _token_ids(generation, config.vocab_size)
            config = dataclasses.replace(config, eos_token_ids=eos)
        return config, _sampling_defaults(generation)
    except ValueError as error:
        raise ValueError(f"{generation_path}: {error!s:.1000}") from error


def _sampling_defaults(generation: Json) -> dict[str, Any]:
    """Returns what a generation_config.json says of sampling."""
    defaults = {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}
    if _flag(generation, "do_sample", True):
        SamplingParams(
            **{key: value for key, value in defaults.items() if key != "do_sample"}
        ).validate()
    return defaults


def parse_config(raw: Json) -> ModelConfig:
    """Returns the ModelConfig that the contents of a config.json describe.

    Raises:
      ValueError: a model_type, option or quantisation that specjax does not run, or a
        value that is not what its key means.
    """
    family = _family(raw)
    if quantization := raw.get("quantization_config"):
        method = "unknown"
        if isinstance(quantization, dict):
            method = quantization.get("quant_method", method)
        raise ValueError(
            f"quantization_config asks for quantised weights ({method}), which are not "
            "read; use an export in BF16, F16 or F32."
        )
    try:
        return _gpt2(raw) if family == "gpt2" else _skeleton(raw, family)
    except KeyError as error:
        raise ValueError(
            f"key {error.args[0]!r} is missing, which every {family} config has; add it."
        ) from error


def _family(raw: Json) -> str:
    """Returns the model_type; refuses other heads on a known body (drafters)."""
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) for name in architectures
    ):
        raise ValueError(f"architectures={_shown(architectures)} must be a list of names.")
    supported = ", ".join(f"{k} ({v.class_name})" for k, v in _FAMILIES.items())
    by_class = {family.class_name: key for key, family in _FAMILIES.items()}
    model_type = raw.get("model_type") or by_class.get((architectures or [None])[0])
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise ValueError(
            f"model_type={_shown(model_type)} with architectures={_shown(architectures)} is not "
            f"supported; expected one of "
            f"{supported}."
        )
    if architectures and _FAMILIES[model_type].class_name not in architectures:
        raise ValueError(
            f"architectures={_shown(architectures)} is not supported as a language model; "
            f"expected one of "
            f"{supported}. A drafter's folder is loaded with specjax.load_drafter."
        )
    return model_type


def _skeleton(raw: Json, family: str) -> ModelConfig:
    """The Llama skeleton and its family differences."""
    _require(raw, "hidden_act", ("silu", "swish"), "silu")
    implied = _FAMILIES[family]
    num_heads = _size(raw, "num_attention_heads")
    hidden_size = _size(raw, "hidden_size")
    num_layers = _size(raw, "num_hidden_layers", most=MAX_LAYERS)
    vocab_size = _size(raw, "vocab_size")
    num_kv_heads = _size(
        raw, "num_key_value_heads", implied.num_kv_heads or num_heads, is_zero_none=True
    )
    has_attention_bias = family in ("llama", "qwen3", "granite") and _flag(
        raw, "attention_bias", False
    )
    head_dim = _size(raw, "head_dim", 0, is_zero_none=True) or (
        128 if family == "qwen3" else _divide(hidden_size, num_heads)
    )
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"{num_heads=} must be a multiple of {num_kv_heads=}, and {head_dim=} "
            "even; correct the config."
        )
    is_granite = family == "granite"
    scalar = lambda key: _number(raw, key, 1.0) if is_granite else 1.0
    max_positions = _size(raw, "max_position_embeddings", implied.max_position_embeddings)
    return ModelConfig(
        architecture="llama",
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6, most=1.0),
        rope=_rope(raw, max_positions),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or has_attention_bias,
        o_bias=has_attention_bias,
        mlp_bias=family in ("llama", "granite") and _flag(raw, "mlp_bias", False),
        qk_norm=family == "qwen3",
        layer_windows=_layer_windows(raw, family, num_layers),
        embedding_multiplier=scalar("embedding_multiplier"),
        attention_scale=scalar("attention_multiplier") if is_granite else None,
        residual_multiplier=scalar("residual_multiplier"),
        logits_divisor=scalar("logits_scaling"),
        bos_token_id=_token_id("bos_token_id", raw.get("bos_token_id"), vocab_size),
        eos_token_ids=_token_ids(raw, vocab_size),
    )


def _gpt2(raw: Json) -> ModelConfig:
    tanh_gelu = ("gelu_new", "gelu_pytorch_tanh")
    _require(raw, "activation_function", tanh_gelu, "gelu_new")
    _require(raw, "scale_attn_by_inverse_layer_idx", (False,), False)
    _require(raw, "tie_word_embeddings", (True,), True)
    hidden_size, num_heads = _size(raw, "n_embd"), _size(raw, "n_head")
    vocab_size = _size(raw, "vocab_size")
    return ModelConfig(
        architecture="gpt2",
        family="gpt2",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "n_inner", 4 * hidden_size, is_zero_none=True),
        num_layers=_size(raw, "n_layer", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_divide(hidden_size, num_heads),
        max_position_embeddings=_size(raw, "n_positions"),
        norm_eps=_number(raw, "layer_norm_epsilon", 1e-5, most=1.0),
        tie_word_embeddings=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        attention_scale=None if _flag(raw, "scale_attn_weights", True) else 1.0,
        bos_token_id=_token_id("bos_token_id", raw.get("bos_token_id"), vocab_size),
        eos_token_ids=_token_ids(raw, vocab_size),
    )


def _rope(raw: Json, max_positions: int) -> RopeConfig:
    """Rope of `rope_parameters` (5.x), or `rope_scaling` and `rope_theta` (4.x)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"rope_parameters={_shown(scaling)} must be an object.")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ValueError(
            f"rope_parameters per layer type ({', '.join(scaling)}) are not supported; "
            "expected one set for all layers."
        )
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    holder = raw if scaling.get("rope_theta") is None else scaling
    # Frequencies are powers of it, and yarn divides by its logarithm.
    theta = _number(holder, "rope_theta", 10000.0, above=1.0)
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor={_shown(partial)} is not supported; expected 1.0.")
    original = _size(scaling, "original_max_position_embeddings", max_positions)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_number(scaling, "factor"))
    if kind == "llama3":
        low = _number(scaling, "low_freq_factor")
        high = _number(scaling, "high_freq_factor")
        if low >= high:
            raise ValueError(
                f"low_freq_factor={low} must be below high_freq_factor={high}; correct the config."
            )
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=_number(scaling, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )
    if kind == "yarn":
        if "factor" not in scaling:  # it may be null, not absent
            raise KeyError("factor")
        factor = _number(scaling, "factor", max_positions / original)
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=_number(scaling, "beta_fast", 32.0),
            beta_slow=_number(scaling, "beta_slow", 1.0),
            truncate=_flag(scaling, "truncate", True),
            attention_factor=_yarn_attention_factor(scaling, factor),
        )
    hint = (
        " Its frequencies depend on the current length, which would change keys that "
        "are already cached."
        if kind == "dynamic"
        else ""
    )
    raise ValueError(
        f"rope type {kind!r} is not supported; expected default, linear, llama3 or yarn.{hint}"
    )


def _yarn_attention_factor(scaling: Json, factor: float) -> float | None:
    """The factor on cos and sin, outright or by mscale; None: the paper's rule."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    mscale, mscale_all_dim = (
        _number(scaling, key) if scaling.get(key) else None for key in ("mscale", "mscale_all_dim")
    )
    if not (mscale and mscale_all_dim):
        return None
    stretch = math.log(factor) if factor > 1 else 0.0
    return (0.1 * mscale * stretch + 1.0) / (0.1 * mscale_all_dim * stretch + 1.0)


def _layer_windows(raw: Json, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Returns a window per layer, () when no layer has one."""
    window = raw.get("sliding_window", 4096 if family in (*_QWEN, "mistral") else None)
    first = num_layers
    if family == "mistral" and window is not None:
        first = 0
    if family in _QWEN and _flag(raw, "use_sliding_window", False):
        first = _size(raw, "max_window_layers", 28, least=0)
    types = raw.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"layer_types={_shown(types)} must be a list of names.")
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types has {len(types)} entries and unknown types {unknown[:10]}; "
            f"expected {num_layers} of sliding_attention or full_attention."
        )
    if "sliding_attention" not in types:
        return ()
    if not _is_int(window) or not 1 <= window <= MAX_SIZE:
        raise ValueError(
            f"layers slide but sliding_window={_shown(window)}; expected a positive number of "
            "tokens, or full_attention in layer_types."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _require(raw: Json, key: str, allowed: tuple, default: Any) -> None:
    value = raw.get(key, default)
    if value not in allowed:
        raise ValueError(
            f"{key}={_shown(value)} is not supported; expected {' or '.join(map(repr, allowed))}."
        )


def _divide(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ValueError(
            f"{hidden_size=} is not a multiple of {num_heads=}; correct the config or "
            "give head_dim."
        )
    return hidden_size // num_heads


def _token_ids(raw: Json, vocab_size: int) -> tuple[int, ...]:
    """Returns the eos_token_id of a config, one or several."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    checked = [_token_id("eos_token_id", each, vocab_size) for each in ids]
    return tuple(each for each in checked if each is not None)


def _token_id(key: str, value: Any, vocab_size: int) -> int | None:
    if value is None:
        return None
    if not _is_int(value) or not 0 <= value < vocab_size:
        raise ValueError(
            f"{key}={_shown(value)} is no token; expected a whole number from 0 to "
            f"{vocab_size - 1}, as {vocab_size=}."
        )
    return value


def _size(
    raw: Json,
    key: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = MAX_SIZE,
    is_zero_none: bool = False,
) -> int:
    """Returns a whole number; null is as good as absent where there is a default."""
    value = raw[key] if default is None else raw.get(key)
    if default is not None and (value is None or (is_zero_none and value == 0)):
        return default
    if not _is_int(value) or not least <= value <= most:
        raise ValueError(
            f"{key}={_shown(value)} must be a whole number from {least} to {most}; "
            "correct the config."
        )
    return value


def _number(
    raw: Json,
    key: str,
    default: float | None = None,
    *,
    above: float = 0.0,
    most: float = 1e30,
) -> float:
    """Returns a number that is above a limit, and finite; null as in `_size`."""
    value = raw[key] if default is None else raw.get(key)
    if default is not None and value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not above < value <= most:
        raise ValueError(
            f"{key}={_shown(value)} must be a number above {above:g} and at most "
            f"{most:g}; correct the config."
        )
    return float(value)


def _flag(raw: Json, key: str, default: bool) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key}={_shown(value)} must be true or false.")
    return value


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """Returns a value for a message; a hostile one may be long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 77 digits"
    return reprlib.repr(value)
