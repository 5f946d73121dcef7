"""EAGLE-3: a head over hidden states of three layers of a target, and the embedding of a token.

Source: Li et al. 2025, arXiv:2503.01840, section 3, and the published checkpoints. With the hidden
states h of the captured layers at token j, and the embedding e of token j + 1:

    g = fc(concat(h))                                     the feature of token j
    x = concat(input_norm(e), hidden_norm(g))             what the first layer attends with
    y = g + attention(x)                                  or hidden_norm(g) + ...
    r = y + mlp(post_attention_norm(y))                   more layers follow as in Llama
    logits = head(norm(r))                                of token j + 2

The next draft token goes with r, or with norm(r), in place of g. Each layer keeps keys and values
of its own.

P-EAGLE drafts all tokens in one pass. Masks follow the newest pair, at the next positions, and see
it, all pairs before, and the masks before. Each is the pair of

    e = embedding(mask token)
    g = fc(m)                                             m is learned, the same for all masks

and r of mask i says the draft token i + 1. Source: Hui et al. 2026, arXiv:2602.01469, section 3,
and the published code of vllm-project/speculators, SpecForge and vLLM.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.heads.equations import head_parts
from specjax.heads.equations.head_parts import OfLayers, layer_weights, only_if
from specjax.models import blocks
from specjax.models.base import Attend, LayerCache, ModelConfig, Params
from specjax.models.layers import rms_norm
from specjax.models.weights import matrix, vector

FLAT_PREFIX, NUMBERED_PREFIX = "midlayer.", "layers.0."
MASK_HIDDEN = "mask_hidden"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(OfLayers):
    """Static sizes and flags of an EAGLE-3 head; hashable, a jit key.

    Attributes:
      layers: sizes of its layers and of its head, whose vocabulary may be a part of the target's.
      target_hidden_size: width of the captured hidden states.
      target_vocab_size: tokens of the target.
      aux_layers: layers of the target whose inputs are captured, from 0 on; the target's number
        of layers captures its normed output.
      norm_before_fc: whether one norm over all captured states comes before fc.
      has_fc_norms: whether each captured state has a norm of its own before fc.
      norm_before_residual: whether the first layer adds to the normed feature.
      norm_output: whether the next draft token goes with norm(r).
      has_embedding, has_head: whether it has its own; else those of the target are used.
      maps_vocabulary: whether its tokens have numbers of their own, see `target_ids`.
      mask_token_id: of P-EAGLE, stands for the tokens that are to be drafted; None: it drafts token
        by token.
    """

    layers: ModelConfig
    target_hidden_size: int
    target_vocab_size: int
    aux_layers: tuple[int, ...]
    norm_before_fc: bool = False
    has_fc_norms: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    has_embedding: bool = False
    has_head: bool = True
    maps_vocabulary: bool = False
    mask_token_id: int | None = None

    @property
    def takes_masks(self) -> bool:
        """Whether it drafts all tokens of a step in one pass, over masks."""
        return self.mask_token_id is not None

    @property
    def fc_width(self) -> int:
        return len(self.aux_layers) * self.target_hidden_size


def feature(params: Params, config: Eagle3Config, taps: Sequence[Array]) -> Array:
    """Returns [..., hidden_size] from the captured states, [..., target_hidden_size] each."""
    norm = functools.partial(rms_norm, eps=config.layers.norm_eps)
    if config.has_fc_norms:
        taps = [norm(tap, weight) for tap, weight in zip(taps, params["fc_norms"], strict=True)]
    together = jnp.concatenate(taps, axis=-1)
    if config.norm_before_fc:
        together = norm(together, params["fc_input_norm"])
    return blocks.project(together, params, "fc")


def mask_feature(params: Params, config: Eagle3Config) -> Array:
    """Returns [hidden_size], the feature of a mask; only with `takes_masks`."""
    return feature(params, config, jnp.split(params["mask_hidden"], len(config.aux_layers)))


def joined(params: Params, config: Eagle3Config, embedded: Array, features: Array) -> Array:
    """Returns what the first layer adds to, of pairs of a token and a feature, [..., hidden_size].

    Args:
      embedded: [..., hidden_size], of the tokens.
      features: [..., hidden_size], `feature` of the token before each; of a draft token,
        `next_feature` of what `forward` returned there.
    """
    del params, config, embedded
    return features


def forward(
    params: Params,
    config: Eagle3Config,
    embedded: Array,
    x: Array,
    positions: Array,
    attend: Attend,
    caches: tuple[LayerCache, ...],
    first_layer: int = 0,
) -> tuple[Array, tuple[LayerCache, ...]]:
    """Runs some layers over pairs of a token and the feature of the token before it.

    Args:
      embedded: [..., hidden_size], of the tokens.
      x: [..., hidden_size], `joined`, or what the layers before returned.
      positions: i32[...]; scores depend on their differences alone.
      attend: as for the forward of a family.
      caches: one per layer that is run.
      first_layer: of these.

    Returns:
      x after them [..., hidden_size], which is r after the last layer, and the new caches.
    """
    norm = functools.partial(rms_norm, eps=config.layers.norm_eps)
    run = head_parts.layer_runner(config.layers, positions, attend)
    new_caches = []
    for index, cache in enumerate(caches, first_layer):
        layer = params["layers"][index]
        if index == 0:
            normed = norm(x, layer["hidden_norm"])
            x = normed if config.norm_before_residual else x
            normed = jnp.concatenate([norm(embedded, layer["input_norm"]), normed], axis=-1)
        else:
            normed = norm(x, layer["input_norm"])
        x, cache = run(index, layer, cache, x, normed)
        new_caches.append(cache)
    return x, tuple(new_caches)


def next_feature(params: Params, config: Eagle3Config, out: Array) -> Array:
    """Returns what the next draft token goes with, from r [..., hidden_size]."""
    return normed_output(params, config, out) if config.norm_output else out


def normed_output(params: Params, config: Eagle3Config, out: Array) -> Array:
    """Returns what the head reads, from r [..., hidden_size]."""
    return rms_norm(out, params["norm"], config.layers.norm_eps)


def own_logits(params: Params, config: Eagle3Config, out: Array) -> Array:
    """Returns f32[num_tokens, vocab_size], from r; only with `has_head`."""
    return head_parts.own_logits(params, normed_output(params, config, out))


def weights_of(config: Eagle3Config, first_prefix: str = FLAT_PREFIX) -> dict[str, Any]:
    """Returns a Weight per leaf of floating point.

    Args:
      first_prefix: of the names of the first layer in the file.
    """
    own = config.layers
    d = own.hidden_size
    params: dict[str, Any] = {"fc": matrix("fc.weight", (d, config.fc_width), ("embed", None))}
    params |= only_if(config.fc_bias, fc_bias=vector("fc.bias", d, "embed"))
    params |= only_if(
        config.norm_before_fc,
        fc_input_norm=vector("input_norm.weight", config.fc_width, None, 1.0),
    )
    params |= only_if(
        config.has_fc_norms,
        fc_norms=tuple(
            vector(f"fc_norm.{place}.weight", config.target_hidden_size, None, 1.0)
            for place in range(len(config.aux_layers))
        ),
    )
    params |= only_if(config.takes_masks, mask_hidden=vector(MASK_HIDDEN, config.fc_width, None))
    first = layer_weights(own, first_prefix, 2 * d)
    first["hidden_norm"] = vector(f"{first_prefix}hidden_norm.weight", d, None, 1.0)
    others = (layer_weights(own, f"layers.{index}.", d) for index in range(1, own.num_layers))
    params["layers"] = (first, *others)
    params["norm"] = vector("norm.weight", d, "embed", 1.0)
    table = lambda name, rows: matrix(f"{name}.weight", (rows, d), ("vocab", "embed"))
    embedding = table("embed_tokens", config.target_vocab_size)
    params |= only_if(config.has_embedding, embed_tokens=embedding)
    return params | only_if(config.has_head, lm_head=table("lm_head", own.vocab_size))


abstract, init = head_parts.weight_functions(weights_of)


def draft_products(config: Eagle3Config) -> int:
    """Returns the multiply-adds per draft token in products with weights, the head among them."""
    return head_parts.draft_products(config, weights_of(config)["layers"])
