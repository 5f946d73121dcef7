"""A DFlash head over Llama 3.1 8B, with the five layers of published ones and blocks of 8."""

import dataclasses

from specjax.configs.models import llama_3_1_8b
from specjax.models.dflash import DFlashConfig


def get_config() -> DFlashConfig:
    """Returns five layers that see each other's masks, with the target's embedding and head."""
    target = llama_3_1_8b.get_config()
    layers = dataclasses.replace(target, num_layers=5, qk_norm=True)
    return DFlashConfig(
        layers=layers,
        target_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=(2, 9, 16, 23, 30),
        block_size=8,
        mask_token_id=0,
        causal_layers=(False,) * layers.num_layers,
    )
