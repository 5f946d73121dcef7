"""The shape of Llama 3.2 1B: a draft model for the larger ones of its vocabulary."""

from specjax.models.base import ModelConfig, RopeConfig


def get_config() -> ModelConfig:
    """Returns the base model's config."""
    return ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0, kind="llama3", factor=32.0),
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128001,),
    )
