"""Shapes of published models by name, for plans and benchmarks that need no weights.

Sizes are those of the base model's config.json on the Hugging Face Hub. Where they were read:
Llama, Qwen and Mistral 7B in litgpt 2685705 (litgpt/config.py, which links each file); Mistral Nemo
and Small, and Granite 3.3, in copies of their files in public repositories. The number of weights
that follows is the published one of each (tests/specjax/test_project.py).
"""

from __future__ import annotations

import re
from typing import Any

from specjax.models.base import ModelConfig, RopeConfig


def _llama3(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, **more: Any
) -> ModelConfig:
    head_dim, factor = more.pop("head_dim", 128), more.pop("factor", 8.0)
    return ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=head_dim,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0, kind="llama3", factor=factor),
        bos_token_id=128000,
        eos_token_ids=(128001,),  # of the instruct models others, too
        **more,
    )


def _qwen(
    family: str,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    heads: tuple[int, int],
    **more: Any,
) -> ModelConfig:
    is_third = family == "qwen3"
    sizes: dict[str, Any] = dict(vocab_size=151936, head_dim=128, norm_eps=1e-6)
    return ModelConfig(
        architecture="llama",
        family=family,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        max_position_embeddings=40960 if is_third else more.pop("context", 131072),
        rope=RopeConfig(theta=1000000.0),
        qkv_bias=not is_third,
        qk_norm=is_third,
        bos_token_id=151643,
        eos_token_ids=(151645,) if is_third else (151643,),
        **(sizes | more),
    )


def _mistral(
    vocab_size: int, hidden_size: int, intermediate_size: int, num_layers: int, **more: Any
) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        family="mistral",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=more["context"],
        norm_eps=1e-5,
        rope=RopeConfig(theta=more["theta"]),
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def _granite(hidden_size: int, intermediate_size: int, logits_divisor: float) -> ModelConfig:
    head_dim = hidden_size // 32
    return ModelConfig(
        architecture="llama",
        family="granite",
        vocab_size=49159,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=40,
        num_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        rope=RopeConfig(theta=10000000.0),
        tie_word_embeddings=True,
        embedding_multiplier=12.0,
        attention_scale=1 / head_dim,
        residual_multiplier=0.22,
        logits_divisor=logits_divisor,
        bos_token_id=0,
        eos_token_ids=(0,),
    )


def _bench(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int
) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=32000,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2,
        head_dim=64,
        max_position_embeddings=4096,
    )


_TIED: dict[str, Any] = dict(tie_word_embeddings=True)
_LARGE_2_5: dict[str, Any] = dict(vocab_size=152064)
_LARGER_2_5: dict[str, Any] = dict(vocab_size=152064, norm_eps=1e-5)

# By the name on the Hub, without words such as Instruct, Base and dates.
PUBLISHED = {
    "meta-llama/llama-3.1-8b": _llama3(4096, 14336, 32, 32),
    "meta-llama/llama-3.1-70b": _llama3(8192, 28672, 80, 64),
    "meta-llama/llama-3.1-405b": _llama3(16384, 53248, 126, 128),
    "meta-llama/llama-3.2-1b": _llama3(2048, 8192, 16, 32, head_dim=64, factor=32.0, **_TIED),
    "meta-llama/llama-3.2-3b": _llama3(3072, 8192, 28, 24, factor=32.0, **_TIED),
    "meta-llama/llama-3.3-70b": _llama3(8192, 28672, 80, 64),
    "qwen/qwen2.5-0.5b": _qwen(
        "qwen2", 896, 4864, 24, (14, 2), head_dim=64, context=32768, **_TIED
    ),
    "qwen/qwen2.5-1.5b": _qwen("qwen2", 1536, 8960, 28, (12, 2), **_TIED),
    "qwen/qwen2.5-3b": _qwen("qwen2", 2048, 11008, 36, (16, 2), context=32768, **_TIED),
    "qwen/qwen2.5-7b": _qwen("qwen2", 3584, 18944, 28, (28, 4), **_LARGE_2_5),
    "qwen/qwen2.5-14b": _qwen("qwen2", 5120, 13824, 48, (40, 8), **_LARGER_2_5),
    "qwen/qwen2.5-32b": _qwen("qwen2", 5120, 27648, 64, (40, 8), **_LARGER_2_5),
    "qwen/qwen2.5-72b": _qwen("qwen2", 8192, 29568, 80, (64, 8), **_LARGER_2_5),
    "qwen/qwen3-0.6b": _qwen("qwen3", 1024, 3072, 28, (16, 8), **_TIED),
    "qwen/qwen3-1.7b": _qwen("qwen3", 2048, 6144, 28, (16, 8), **_TIED),
    "qwen/qwen3-4b": _qwen("qwen3", 2560, 9728, 36, (32, 8), **_TIED),
    "qwen/qwen3-8b": _qwen("qwen3", 4096, 12288, 36, (32, 8)),
    "qwen/qwen3-14b": _qwen("qwen3", 5120, 17408, 40, (40, 8)),
    "qwen/qwen3-32b": _qwen("qwen3", 5120, 25600, 64, (64, 8)),
    "mistralai/mistral-7b-v0.3": _mistral(32768, 4096, 14336, 32, theta=1e6, context=32768),
    # "128k" in its model card; its first config.json says 1,024,000.
    "mistralai/mistral-nemo": _mistral(131072, 5120, 14336, 40, theta=1e6, context=131072),
    "mistralai/mistral-small-24b": _mistral(131072, 5120, 32768, 40, theta=1e8, context=32768),
    "ibm-granite/granite-3.3-2b": _granite(2048, 8192, 8.0),
    "ibm-granite/granite-3.3-8b": _granite(4096, 12800, 16.0),
}

SHAPES: dict[str, ModelConfig] = {
    # The 60M-parameter Llama shape that benchmarks run with random weights, and the draft model
    # beside it, an eighth of its matmuls.
    "bench_60m": _bench(512, 1536, 8, 8),
    "bench_60m_draft": _bench(256, 768, 2, 4),
    **{name.partition("/")[2]: config for name, config in PUBLISHED.items()},
}

_SAME_SHAPE = re.compile(r"-(instruct|base|chat|hf)(?=-|$)|-(2407|2501)$|(?<![^/])meta-(?=llama-3)")


def known_shape(name: str) -> ModelConfig | None:
    """Returns the shape of a name, as "llama-3.1-8b" or "meta-llama/Llama-3.1-8B-Instruct".

    None if it is none of `SHAPES`. Underscores and dots stand for each other and for dashes.
    """
    plain = plain_name(_SAME_SHAPE.sub("", name.lower()))
    names = PUBLISHED if "/" in name else SHAPES
    return next((config for own, config in names.items() if plain_name(own) == plain), None)


def plain_name(name: str) -> str:
    """Returns a name with dashes in place of dots and underscores."""
    return re.sub("[._]", "-", name)
