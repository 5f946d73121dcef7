"""MLP speculator: a recurrent MLP over the last hidden state before the root, and the tokens since.

Source: Wertheimer et al. 2024, arXiv:2404.19124, section 3, and the code of
foundation-model-stack/fms-extras, whose first weights are these: normal, of standard deviation
1 / sqrt(inner_size).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.heads.equations import mlp_speculator
from specjax.heads.equations.mlp_speculator import MlpSpeculatorConfig
from specjax.heads.specs import NewestStateDrafter
from specjax.models.base import ModelConfig, Params
from specjax.training.drafts import Drafts, Kind
from specjax.training.options import read
from specjax.training.texts import Along, Target


def configure(target: ModelConfig, options: dict[str, Any]) -> MlpSpeculatorConfig:
    """Returns the config of a speculator for a target.

    Args:
      options: most_drafts, tokens that it drafts at most (4); inner_size, width of its state (the
        target's); is_tied, whether all draft tokens share weights (False); scale_input, whether the
        target's hidden state is normed (True).
    """
    defaults = {"most_drafts": 4, "inner_size": target.hidden_size}
    defaults |= {"is_tied": False, "scale_input": True}
    return MlpSpeculatorConfig(
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        aux_layers=(target.num_layers,),
        **read("mlp_speculator", options, defaults),
    )


def propose(
    params: Params, config: MlpSpeculatorConfig, along: Along, depth: int, key: Array | None
) -> Drafts:
    """Returns the drafts after every token but the first; see `Propose`."""
    del key
    (last,), token_ids = along.taps, along.text.token_ids
    to_next = lambda x: jnp.roll(x, 1, axis=1)  # nothing reads what the first place gets
    state = mlp_speculator.begin(params, config, to_next(last), token_ids)
    hidden = [state]
    for s in range(1, depth):
        state = mlp_speculator.step(params, config, to_next(state), token_ids, s)
        hidden.append(state)
    score = lambda read, s: mlp_speculator.logits(params, config, read, s)
    return Drafts.after_each(along.text, tuple(hidden), score)


def begin(
    key: Array, config: MlpSpeculatorConfig, target: Target, target_ids: Array | None
) -> Params:
    """Returns the weights that training begins with; see `Kind.begin` and the module."""
    del target, target_ids
    return mlp_speculator.init(key, config, jnp.float32, config.inner_size**-0.5)


KIND = Kind(
    name="mlp_speculator",
    configure=configure,
    begin=begin,
    propose=propose,
    spec=NewestStateDrafter,
    is_kind_of=lambda spec: isinstance(getattr(spec, "config", None), MlpSpeculatorConfig),
)
