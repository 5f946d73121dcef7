"""Sizes and vocabularies of heads that are made to be trained for a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.config.checks import is_int
from specjax.models.base import ModelConfig, Params
from specjax.training.texts import Target

MAY_BE_0 = ("markov_rank",)


def read(kind: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a kind of drafter, as they are given or by default.

    Args:
      defaults: of all that the kind has, or functions from the options before one to its default.
        Where it is a number the option is a size, where it is True or False a flag; options of
        other defaults are checked by who uses them.

    Raises:
      ValueError: an option is unknown, no whole number of at least 1 (0 in MAY_BE_0), or no flag.
    """
    if unknown := sorted(set(options) - set(defaults)):
        raise ValueError(
            f"{', '.join(unknown)}: no option of {kind!r}; expected some of "
            f"{', '.join(sorted(defaults))}."
        )
    own: dict[str, Any] = {}
    for name, default in defaults.items():
        default = default(own) if callable(default) else default
        value, least = options.get(name, default), 0 if name in MAY_BE_0 else 1
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False (true or false in JSON).")
        if is_int(default) and (not is_int(value) or value < least):
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")
        own[name] = value
    return own


def mask_token(target: ModelConfig, mask: int | None) -> int:
    """Returns the token that stands for those to be drafted; None: the target's mask token, else
    its last token.

    Raises:
      ValueError: it is no token of the target.
    """
    last = target.vocab_size - 1
    if mask is None:
        mask = last if target.mask_token_id is None else target.mask_token_id
    if not is_int(mask) or not 0 <= mask <= last:
        raise ValueError(f"mask_token_id={mask!r} must be a token of the target, 0 to {last}.")
    return mask


def layer_defaults(target: ModelConfig, num_layers: int = 1) -> dict[str, Any]:
    """Returns the options of a head's layers by default, but for their number the target's."""
    sizes = "intermediate_size", "num_heads", "num_kv_heads"
    return {"num_layers": num_layers} | {name: getattr(target, name) for name in sizes}


def layers_like(
    target: ModelConfig, options: Mapping[str, Any], vocab_size: int, **others: Any
) -> ModelConfig:
    """Returns the config of a head's layers.

    Args:
      options: those of `layer_defaults`.
      vocab_size: tokens that the head can say.
      others: fields of ModelConfig.

    Raises:
      ValueError: heads cannot be shared.
    """
    sizes = {name: options[name] for name in layer_defaults(target)}
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ValueError(
            f"num_heads={sizes['num_heads']} must be a multiple of "
            f"num_kv_heads={sizes['num_kv_heads']}."
        )
    return ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=vocab_size,
        hidden_size=target.hidden_size,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        norm_eps=target.norm_eps,
        rope=target.rope,
        **sizes,
        **others,
    )


def captured_layers(target: ModelConfig, asked: Sequence[int] | None) -> tuple[int, ...]:
    """Returns layers of the target whose inputs a head reads.

    The default is 2, half of the layers, and the last but two, as published heads have them.

    Raises:
      ValueError: there is no such layer, or one is named twice.
    """
    depth = target.num_layers
    layers = tuple(asked) if asked else (min(2, depth), depth // 2, max(depth - 3, 0))
    if not asked:
        layers = tuple(sorted(set(layers)))
    is_right = all(is_int(each) and 0 <= each <= depth for each in layers)
    if not is_right or len(set(layers)) != len(layers):
        raise ValueError(
            f"aux_layers={layers!r} must be different layers from 0 to {depth}: the inputs of the "
            "target's layers and, last, its normed output."
        )
    return layers


def vocabulary(target: ModelConfig, asked: int | None) -> tuple[int, dict[str, bool]]:
    """Returns the tokens that a head can say, and the flags of its config that say which.

    Args:
      asked: a number of tokens; None: all, by the target's own head.

    Raises:
      ValueError: it is no number from 1 to the target's tokens.
    """
    if asked is None:
        return target.vocab_size, {"has_head": False, "maps_vocabulary": False}
    if not is_int(asked) or not 1 <= asked <= target.vocab_size:
        raise ValueError(
            f"draft_vocab_size={asked!r} must be a whole number from 1 to the target's "
            f"{target.vocab_size} tokens, or None for all of them."
        )
    return asked, {"has_head": True, "maps_vocabulary": asked < target.vocab_size}


def frequent_tokens(counts: np.ndarray, size: int) -> np.ndarray:
    """Returns the ids of the most frequent tokens, i32[size], ascending.

    Tokens of equal counts are taken in the order of their ids.

    Args:
      counts: i64[vocab], of each token in the text.
      size: number of tokens, at most vocab.
    """
    best = np.argsort(-counts, kind="stable")[:size]
    return np.sort(best).astype(np.int32)


def head_rows(target: Target, target_ids: Array | None) -> Array | None:
    """Returns the rows of the target's head for some tokens, f32[n, hidden_size].

    None where the family keeps no such matrix under its usual names.

    Args:
      target_ids: i32[n]; None: all tokens.
    """
    config = target.config
    name = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    table = target.params.get(name)
    if not isinstance(table, Array) or table.shape != (config.vocab_size, config.hidden_size):
        return None
    rows = table if target_ids is None else table[target_ids]
    return rows.astype(jnp.float32) / config.logits_divisor


def with_quiet_layers(params: Params) -> Params:
    """Returns a head's first weights with zeros in all that its layers add."""
    quiet = lambda layer: (
        layer | {name: jnp.zeros_like(layer[name]) for name in ("o_proj", "down_proj")}
    )
    return params | {"layers": tuple(map(quiet, params["layers"]))}


def with_vocabulary(params: Params, target: Target, target_ids: Array | None) -> Params:
    """Returns a head's first weights with the target's rows in its own head, if it has one."""
    if "lm_head" not in params:
        return params
    rows = head_rows(target, target_ids)
    params = params if rows is None else params | {"lm_head": rows}
    return params if target_ids is None else params | {"target_ids": target_ids}
