"""Medusa: heads over the last hidden state before the root, which know no draft token.

Source: Cai et al. 2024, arXiv:2401.10774, section 3.1: blocks begin at zero and heads as the
target's own, so that before any training each head says what the target said at the token before.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.heads.equations import medusa
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.specs import NewestStateDrafter
from specjax.models.base import ModelConfig, Params
from specjax.training.drafts import Drafts, Kind
from specjax.training.options import head_rows, read
from specjax.training.texts import Along, Target

DEFAULTS = {"most_drafts": 5, "num_blocks": 1, "has_head": True, "has_bias": True}


def configure(target: ModelConfig, options: dict[str, Any]) -> MedusaConfig:
    """Returns the config of heads for a target.

    Args:
      options: most_drafts, the number of heads (5); num_blocks, residual blocks of each (1);
        has_head, whether each has a matrix of its own (True), or uses the target's; has_bias,
        whether blocks have one (True).
    """
    return MedusaConfig(
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        aux_layers=(target.num_layers,),
        **read("medusa", options, DEFAULTS),
    )


def propose(
    params: Params, config: MedusaConfig, along: Along, depth: int, key: Array | None
) -> Drafts:
    """Returns the drafts after every token but the first; see `Propose`."""
    del key
    (last,) = along.taps
    newest = [jnp.roll(last, 1 + s, axis=1) for s in range(depth)]  # of the token before the root
    hidden = tuple(medusa.forward(params, config, each, s) for s, each in enumerate(newest))

    def score(read: Array, s: int) -> Array:
        if not config.has_head:
            return along.target.logits(read)
        return medusa.own_logits(params, config, read, s)

    return Drafts.after_each(along.text, hidden, score)


def begin(key: Array, config: MedusaConfig, target: Target, target_ids: Array | None) -> Params:
    """Returns the weights that training begins with; see `Kind.begin` and the module.

    Where the target keeps no such matrix under a usual name, heads begin at random.
    """
    del target_ids
    params = medusa.init(key, config, jnp.float32)
    rows = head_rows(target, None) if config.has_head else None

    def first(head: Params) -> Params:
        quiet = head | {"blocks": jax.tree.map(jnp.zeros_like, head["blocks"])}
        # Each its own copy: what is donated may be given once.
        return quiet if rows is None else quiet | {"lm_head": jnp.array(rows)}

    return params | {"heads": tuple(map(first, params["heads"]))}


KIND = Kind(
    name="medusa",
    configure=configure,
    begin=begin,
    propose=propose,
    spec=NewestStateDrafter,
    is_kind_of=lambda spec: isinstance(getattr(spec, "config", None), MedusaConfig),
)
