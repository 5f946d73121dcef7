"""Which functions run a config: the one list of model files."""

from __future__ import annotations

from specjax.models import gpt2, llama
from specjax.models.base import Architecture, ModelConfig

ARCHITECTURES = {"llama": llama.ARCHITECTURE, "gpt2": gpt2.ARCHITECTURE}


def architecture_of(config: ModelConfig) -> Architecture:
    """Returns the functions that run `config`."""
    return ARCHITECTURES[config.architecture]
