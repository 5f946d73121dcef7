"""The draft model beside bench_60m: an eighth of its matmuls, random weights."""

from specjax.models.base import ModelConfig


def get_config() -> ModelConfig:
    """Returns hidden 256, 2 layers, 4 query and 2 key heads of 64, the vocabulary of bench_60m."""
    return ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=32000,
        hidden_size=256,
        intermediate_size=768,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    )
