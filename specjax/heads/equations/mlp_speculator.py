"""MLP speculator: a recurrent MLP over the last hidden state of a target, and its newest tokens.

Source: Wertheimer et al. 2024, arXiv:2404.19124, section 3, and the code of
foundation-model-stack/fms-extras. With the hidden state g that the target's head reads at the token
before the newest one, and N(x) = x / sqrt(mean(x^2) + 1e-6):

    s = g, or N(g) / sqrt(2) with scale_input
    s = gelu(N(a proj_i(s) + b emb_i(t)) * scale_i + shift_i)       for draft token i = 0, 1, ...
    logits = head_i(s)

t is the token before the one that is drafted. a and b keep the variance of s: a = 1, b =
sqrt((1 - w^2) inner_size / 2) / w, with w = 0.5^(0.5 / most_drafts). With tied weights all i share
theirs, but for the first proj, which reads g.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.heads.equations import head_parts
from specjax.models import weights
from specjax.models.base import Params
from specjax.models.layers import along_last_axis, linear
from specjax.models.weights import matrix, vector

EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpSpeculatorConfig:
    """Static sizes and flags of an MLP speculator; hashable, a jit key.

    Attributes:
      target_hidden_size: width of the target's hidden state.
      target_vocab_size: tokens of the target, and of the speculator.
      aux_layers: the target's number of layers alone, which captures its normed output.
      inner_size: width of s.
      most_drafts: tokens that it drafts at most.
      scale_input: whether g is normed.
      is_tied: whether all draft tokens share their weights.
    """

    target_hidden_size: int
    target_vocab_size: int
    aux_layers: tuple[int, ...]
    inner_size: int
    most_drafts: int
    scale_input: bool = False
    is_tied: bool = False

    @property
    def hidden_size(self) -> int:
        return self.inner_size

    @property
    def vocab_size(self) -> int:
        return self.target_vocab_size

    @property
    def has_head(self) -> bool:
        return True

    @property
    def maps_vocabulary(self) -> bool:
        return False


def begin(params: Params, config: MlpSpeculatorConfig, newest: Array, token_ids: Array) -> Array:
    """Returns s [..., inner_size] of the first draft token.

    Args:
      newest: [..., target_hidden_size], g.
      token_ids: i32[...], of the newest tokens.
    """
    state = _normed(newest) / math.sqrt(2) if config.scale_input else newest
    return step(params, config, state, token_ids, 0)


def step(
    params: Params, config: MlpSpeculatorConfig, state: Array, token_ids: Array, index: int
) -> Array:
    """Returns s [..., inner_size] of draft token `index`, from that of the one before.

    Args:
      token_ids: i32[...], of the tokens before those that are drafted.
    """
    at = 0 if config.is_tied else index
    keeps = 0.5 ** (0.5 / config.most_drafts)
    adds = math.sqrt((1 - keeps**2) * config.inner_size / 2)
    state = linear(state, params["proj"][min(index, 1) if config.is_tied else index])
    state = state + (adds / keeps) * params["emb"][at][token_ids].astype(state.dtype)
    scale, shift = (along_last_axis(params[name][at], state) for name in ("scale", "shift"))
    state = _normed(state) * scale + shift
    return jax.nn.gelu(state, approximate=False)


def logits(params: Params, config: MlpSpeculatorConfig, state: Array, index: int) -> Array:
    """Returns f32[n, target_vocab_size] of draft token `index`, from its s."""
    return linear(state, params["head"][0 if config.is_tied else index], jnp.float32)


def _normed(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPS)).astype(x.dtype)


def weights_of(config: MlpSpeculatorConfig, prefix: str = "") -> dict[str, Any]:
    """Returns a Weight per leaf, those of each draft token in a tuple.

    Args:
      prefix: of the names in the file.
    """
    inner, vocab = config.inner_size, config.target_vocab_size
    count = config.most_drafts
    own = range(1 if config.is_tied else count)
    table = lambda name, axes: tuple(
        matrix(f"{prefix}{name}.{index}.weight", (vocab, inner), axes) for index in own
    )
    norm = lambda name, start: tuple(
        vector(f"{prefix}ln.{index}.{name}", inner, "embed", start) for index in own
    )
    widths = [config.target_hidden_size, *[inner] * (count - 1)]
    return {
        "emb": table("emb", ("vocab", "embed")),
        "proj": tuple(
            matrix(f"{prefix}proj.{index}.weight", (inner, width), ("embed", None))
            for index, width in enumerate(widths[:2] if config.is_tied else widths)
        ),
        "head": table("head", ("vocab", "embed")),
        "scale": norm("weight", 1.0),
        "shift": norm("bias", 0.0),
    }


abstract, init = head_parts.weight_functions(weights_of)


def draft_products(config: MlpSpeculatorConfig) -> int:
    """Returns the multiply-adds per draft token in products with weights, the mean of all."""
    untied = weights_of(dataclasses.replace(config, is_tied=False))
    return weights.num_weights((untied["proj"], untied["head"])) // config.most_drafts
