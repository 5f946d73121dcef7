"""The EAGLE-3 head over Llama 3.1 8B, of the sizes of the published one."""

import dataclasses

from specjax.configs.models import llama_3_1_8b
from specjax.models.eagle3 import Eagle3Config


def get_config() -> Eagle3Config:
    """Returns one layer that reads three hidden states and says 32,000 of the target's tokens."""
    target = llama_3_1_8b.get_config()
    return Eagle3Config(
        layers=dataclasses.replace(target, num_layers=1, vocab_size=32_000),
        target_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=(2, 16, 29),
        maps_vocabulary=True,
    )
