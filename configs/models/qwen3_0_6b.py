"""The shape of Qwen3 0.6B."""

from specjax.models.base import ModelConfig, RopeConfig


def get_config() -> ModelConfig:
    """Returns the chat model's config."""
    return ModelConfig(
        architecture="llama",
        family="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1000000.0),
        tie_word_embeddings=True,
        qk_norm=True,
        bos_token_id=151643,
        eos_token_ids=(151645,),
    )
