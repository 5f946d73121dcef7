"""The shapes of the target and of the draft model that are trained together."""

from typing import Any

from specjax.models.base import ModelConfig, RopeConfig

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0

_SHARED: dict[str, Any] = dict(
    architecture="llama",
    family="llama",
    vocab_size=VOCAB_SIZE,
    head_dim=64,
    max_position_embeddings=2048,
    rope=RopeConfig(theta=10000.0),
    tie_word_embeddings=True,
    eos_token_ids=(END_OF_TEXT_ID,),
)

# A step of a small model on CPU costs a fixed sum per layer besides reading its
# weights. So the target is large enough for reading to take most of a step, and the
# draft has two layers: fewer cannot copy a name from the context (one layer finds the
# place, the next reads what followed).
TARGET = ModelConfig(
    hidden_size=384,
    intermediate_size=896,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    **_SHARED,
)
DRAFT = ModelConfig(
    hidden_size=128,
    intermediate_size=384,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    **_SHARED,
)
