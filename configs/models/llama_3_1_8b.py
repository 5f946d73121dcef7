"""The shape of Llama 3.1 8B."""

from specjax.models.base import ModelConfig, RopeConfig


def get_config() -> ModelConfig:
    """Returns the base model's config; the instruct model ends at other tokens too."""
    return ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0, kind="llama3", factor=8.0),
        bos_token_id=128000,
        eos_token_ids=(128001,),
    )
