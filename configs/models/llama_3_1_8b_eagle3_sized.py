"""A stand-in of the size of an EAGLE-3 drafter for Llama 3.1 8B; there are no weights for it.

For sizing: one decoder layer of the 8B's shape and one matrix over its vocabulary. The real
one reads the target's hidden states and shares its embeddings, and its head covers part of
the vocabulary; this one embeds and scores with the same matrix of its own.
"""

import dataclasses

from specjax.configs.models import llama_3_1_8b
from specjax.models.base import ModelConfig


def get_config() -> ModelConfig:
    """Returns one layer of the 8B with a tied vocabulary matrix."""
    target = llama_3_1_8b.get_config()
    return dataclasses.replace(target, num_layers=1, tie_word_embeddings=True)
