"""A target that writes a given text, at the cost that it has when it writes its own.

Every step computes what the model computes, logits included. Then the logit of the token that the
script has for a position is raised above all others. So drafts of any text are verified at the
target's real cost, and how many are accepted depends on the text and the drafter alone.

The script is a leaf of the weights, one token per position: a new text is new weights, and
compiles nothing. A position without a token is the model's own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.models.base import Family, Model, ModelConfig, Params
from specjax.models.families import FAMILIES, family_of, register

SCRIPT = "script"
OWN = -1  # in a script: the model's own choice
# A token travels from the forward to the logits as digits beside the hidden state. Each is exact
# in every floating-point dtype.
_BASE = 128
_POWERS = tuple(_BASE**place for place in range(3))
_RAISED = 1e4  # above any logit


def forced(model: Model, length: int) -> Model:
    """Returns the model with a script of `length` positions, empty at first.

    It runs on one device, and allows as many positions. `with_text` gives it a text.
    """
    family = _forced_family(family_of(model.config).name)
    config = dataclasses.replace(
        model.config,
        architecture=family.name,
        max_position_embeddings=max(length, model.config.max_position_embeddings),
    )
    params = {**model.params, SCRIPT: jnp.full(length, OWN, jnp.int32)}
    return dataclasses.replace(model, config=config, params=params, name=f"{model.name}, forced")


def with_text(params: Params, token_ids: Sequence[int]) -> Params:
    """Returns the weights with a text to write: after token i comes token i + 1.

    Args:
      params: of a `forced` model.
      token_ids: the whole text from position 0 on, prompt included.

    Raises:
      ValueError: it is longer than the script.
    """
    length = params[SCRIPT].shape[0]
    if len(token_ids) > length + 1:
        raise ValueError(
            f"a text of {len(token_ids)} tokens does not fit a script of {length} positions; "
            "make the target with a longer one."
        )
    script = np.full(length, OWN, np.int32)
    script[: len(token_ids) - 1] = token_ids[1:]
    return {**params, SCRIPT: jnp.asarray(script)}


@functools.cache
def _forced_family(name: str) -> Family:
    """Returns the family that runs the one of a name, and then raises the script's logits."""
    inner = FAMILIES[name]

    def init(key: Array, config: ModelConfig, *arguments: Any, **options: Any) -> Params:
        own = inner.init(key, config, *arguments, **options)
        return {**own, SCRIPT: jnp.full(config.max_position_embeddings, OWN, jnp.int32)}

    def forward(
        params: Params,
        config: ModelConfig,
        token_ids: Array,
        positions: Array,
        attend: Any,
        caches: Any,
        tensor_axis: Any = None,
        **options: Any,
    ) -> Any:
        if tensor_axis is not None:
            raise NotImplementedError("a forced text runs on one device; leave the mesh out.")
        hidden, *others = inner.forward(
            _own(params), config, token_ids, positions, attend, caches, None, **options
        )
        return (_with_token(hidden, params[SCRIPT][positions]), *others)

    def logits(
        params: Params, config: ModelConfig, hidden: Array, tensor_axis: Any = None
    ) -> Array:
        hidden, token = _parted(hidden)
        scores = inner.logits(_own(params), config, hidden, tensor_axis)
        is_next = jax.nn.one_hot(token, scores.shape[-1], dtype=bool)
        return jnp.where(is_next, _RAISED, scores)

    family = dataclasses.replace(
        inner,
        name=f"forced {name}",
        model_types={},
        axes=lambda config: {**inner.axes(config), SCRIPT: (None,)},
        init=init,
        forward=forward,
        logits=logits,
        embed=lambda params, *arguments: inner.embed(_own(params), *arguments),
        unparse=None,
    )
    register(family)
    return family


def _own(params: Params) -> Params:
    return {name: leaf for name, leaf in params.items() if name != SCRIPT}


def _with_token(hidden: Array, token: Array) -> Array:
    """Returns [..., size + digits]: hidden states, and a token i32[...] or OWN, in digits."""
    digits = jnp.stack([(token - OWN) // power % _BASE for power in _POWERS], axis=-1)
    return jnp.concatenate([hidden, digits.astype(hidden.dtype)], axis=-1)


def _parted(hidden: Array) -> tuple[Array, Array]:
    """Returns what `_with_token` was given."""
    size = hidden.shape[-1] - len(_POWERS)
    digits = hidden[..., size:].astype(jnp.int32)
    parts = [digits[..., place] * power for place, power in enumerate(_POWERS)]
    return hidden[..., :size], functools.reduce(jnp.add, parts) + OWN
