"""Shapes of published heads over known models, by name, for plans that need no weights."""

from __future__ import annotations

import dataclasses

from specjax.configs.models import SHAPES, plain_name
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle3 import Eagle3Config

_LLAMA = SHAPES["llama-3.1-8b"]
_LAYERS_OF_DFLASH = 5

# Of the sizes of the published one: one layer, which reads three hidden states and says 32,000
# of the target's tokens.
LLAMA_EAGLE3 = Eagle3Config(
    layers=dataclasses.replace(_LLAMA, num_layers=1, vocab_size=32_000),
    target_vocab_size=_LLAMA.vocab_size,
    target_hidden_size=_LLAMA.hidden_size,
    aux_layers=(2, 16, 29),
    maps_vocabulary=True,
)
# Five layers, as published ones have, that see each other's masks, and blocks of 8, with the
# target's embedding and head.
LLAMA_DFLASH = DFlashConfig(
    layers=dataclasses.replace(_LLAMA, num_layers=_LAYERS_OF_DFLASH, qk_norm=True),
    target_vocab_size=_LLAMA.vocab_size,
    target_hidden_size=_LLAMA.hidden_size,
    aux_layers=(2, 9, 16, 23, 30),
    block_size=8,
    mask_token_id=0,
    causal_layers=(False,) * _LAYERS_OF_DFLASH,
)
HEADS: dict[str, Eagle3Config | DFlashConfig] = {
    "llama-3.1-8b-eagle3": LLAMA_EAGLE3,
    "llama-3.1-8b-dflash": LLAMA_DFLASH,
}


def known_head(name: str) -> Eagle3Config | DFlashConfig | None:
    """Returns the head of a name, as "llama-3.1-8b-eagle3"; None if it is none of `HEADS`."""
    return next((own for key, own in HEADS.items() if plain_name(key) == plain_name(name)), None)
