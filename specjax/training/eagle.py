"""EAGLE and MTP: heads over the target's last hidden state, trained as EAGLE-3 is.

The loss is that of the draft tokens alone: EAGLE's paper adds a distance of hidden states.
Sources: Li et al. 2024, arXiv:2401.15077, section 3; DeepSeek-AI 2024, arXiv:2412.19437, section
2.2; the equations are in `specjax.heads.equations.eagle`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.drafters.base import DrafterSpec
from specjax.heads.equations import eagle
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.specs import EagleDrafter
from specjax.models.base import ModelConfig, Params, before_final_norm
from specjax.training import eagle3
from specjax.training.drafts import Kind
from specjax.training.options import layer_defaults, layers_like, read, with_quiet_layers
from specjax.training.texts import Target


def configure(target: ModelConfig, options: dict[str, Any]) -> EagleConfig:
    """Returns the config of an EAGLE head for a target.

    Args:
      options: num_layers (1), intermediate_size, num_heads and num_kv_heads (the target's).
    """
    own = read("eagle", options, layer_defaults(target))
    return EagleConfig(
        layers=layers_like(target, own, target.vocab_size),
        target_vocab_size=target.vocab_size,
        aux_layers=(target.num_layers,),
    )


def configure_mtp(target: ModelConfig, options: dict[str, Any]) -> EagleConfig:
    """Returns the config of an MTP layer for a target, in the order of `speculators`.

    Args:
      options: intermediate_size, num_heads and num_kv_heads (the target's).
    """
    defaults = layer_defaults(target)
    num_layers = {"num_layers": defaults.pop("num_layers")}
    own = read("mtp", options, defaults) | num_layers
    return EagleConfig(
        layers=layers_like(target, own, target.vocab_size),
        target_vocab_size=target.vocab_size,
        aux_layers=(before_final_norm(target.num_layers),),
        is_mtp=True,
    )


def begin(key: Array, config: EagleConfig, target: Target, target_ids: Array | None) -> Params:
    """Returns the weights that training begins with; see `Kind.begin`.

    What layers add begins at zero, and fc passes the target's state on: the first drafts are about
    what the target said at the token before.
    """
    del target, target_ids
    params = with_quiet_layers(eagle.init(key, config, jnp.float32))
    width = config.hidden_size
    passed = slice(0, width) if config.has_hidden_first else slice(width, 2 * width)
    return params | {"fc": params["fc"].at[:, passed].set(jnp.eye(width))}


def _is_eagle(spec: DrafterSpec, is_mtp: bool = False) -> bool:
    own = spec.config if isinstance(spec, EagleDrafter) else None
    return isinstance(own, EagleConfig) and own.is_mtp == is_mtp


KIND = Kind(
    name="eagle",
    configure=configure,
    begin=begin,
    propose=eagle3.propose,
    spec=EagleDrafter,
    is_kind_of=_is_eagle,
)
KIND_OF_MTP = KIND._replace(
    name="mtp",
    configure=configure_mtp,
    is_kind_of=functools.partial(_is_eagle, is_mtp=True),
)
