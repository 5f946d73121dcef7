"""The 60M-parameter Llama shape that benchmarks run with random weights."""

from specjax.models.base import ModelConfig


def get_config() -> ModelConfig:
    """Returns hidden 512, 8 layers, 8 query and 4 key heads of 64, 32,000 words, an untied head."""
    return ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
    )
