"""EAGLE and MTP: heads over the last hidden state of a target, and the embedding of a token.

Source: Li et al. 2024, arXiv:2401.15077, section 3, and the published checkpoints; EAGLE-2
(arXiv:2406.16858) has the same weights and grows its trees. With the hidden state g that the
target's head reads at token j, and the embedding e of token j + 1:

    x = fc(concat(e, g))
    y = x + attention(x)                                  the first layer has no norm before
    r = y + mlp(post_attention_norm(y))                   more layers follow as in Llama
    logits = head(r)                                      of token j + 2; no norm: r is to be as g

The next draft token goes with r in place of g. Each layer keeps keys and values of its own.

A layer for multi-token prediction (MTP) is the same with five norms. Here g is the output of the
target's last layer before the final norm:

    x = fc(concat(hidden_norm(g), embed_norm(e)))         MiMo; `speculators` has e first
    y = x + attention(input_norm(x))
    r = norm(y + mlp(post_attention_norm(y)))

Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2, for the idea; the MiMo-7B report,
arXiv:2505.07608, and its published files for this layer. Its authors' server reads g before the
final norm and feeds r back. It also zeroes the first pair's embedding, which the published model
does not, and neither does this.
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

FIRST_PREFIX = "layers.0."
MTP_PREFIX = "mtp_layers.0."


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(OfLayers):
    """Static sizes and flags of an EAGLE head, or an MTP layer; hashable, a jit key.

    Attributes:
      layers: sizes of its layers, as wide as the target's.
      target_vocab_size: tokens of the target.
      aux_layers: the tap of what it reads alone: the target's normed output, or what its final
        norm reads, for MTP.
      is_mtp: whether it has the norms of MTP.
      has_hidden_first: whether fc reads the hidden state before the embedding.
      fc_bias: whether fc has one.
      has_embedding, has_head: whether it has its own; else those of the target are used.
      maps_vocabulary: whether its tokens have numbers of their own, see `target_ids`.
    """

    layers: ModelConfig
    target_vocab_size: int
    aux_layers: tuple[int, ...]
    is_mtp: bool = False
    has_hidden_first: bool = False
    fc_bias: bool = False
    has_embedding: bool = False
    has_head: bool = False
    maps_vocabulary: bool = False

    @property
    def target_hidden_size(self) -> int:
        return self.layers.hidden_size


def feature(params: Params, config: EagleConfig, taps: Sequence[Array]) -> Array:
    """Returns [..., hidden_size], the captured state."""
    del params, config
    (last,) = taps
    return last


def joined(params: Params, config: EagleConfig, embedded: Array, features: Array) -> Array:
    """Returns what the first layer adds to; args as of `eagle3.joined`."""
    if config.is_mtp:
        norm = functools.partial(rms_norm, eps=config.layers.norm_eps)
        embedded = norm(embedded, params["embed_norm"])
        features = norm(features, params["hidden_norm"])
    pair = [features, embedded] if config.has_hidden_first else [embedded, features]
    return blocks.project(jnp.concatenate(pair, axis=-1), params, "fc")


def forward(
    params: Params,
    config: EagleConfig,
    embedded: Array,
    x: Array,
    positions: Array,
    attend: Attend,
    caches: tuple[LayerCache, ...],
    first_layer: int = 0,
) -> tuple[Array, tuple[LayerCache, ...]]:
    """Runs some layers over pairs of a token and the feature of the token before it.

    Args and returns as of `eagle3.forward`; the embeddings are in x.
    """
    del embedded
    norm = functools.partial(rms_norm, eps=config.layers.norm_eps)
    run = head_parts.layer_runner(config.layers, positions, attend)
    new_caches = []
    for index, cache in enumerate(caches, first_layer):
        layer = params["layers"][index]
        normed = norm(x, layer["input_norm"]) if index or config.is_mtp else x
        x, cache = run(index, layer, cache, x, normed)
        new_caches.append(cache)
        if config.is_mtp:  # of one layer
            x = norm(x, params["norm"])
    return x, tuple(new_caches)


def next_feature(params: Params, config: EagleConfig, out: Array) -> Array:
    """Returns what the next draft token goes with, from r [..., hidden_size]."""
    del params, config
    return out


def normed_output(params: Params, config: EagleConfig, out: Array) -> Array:
    """Returns what the head reads, from r [..., hidden_size]."""
    del params, config
    return out


def own_logits(params: Params, config: EagleConfig, out: Array) -> Array:
    """Returns f32[num_tokens, vocab_size], from r; only with `has_head`."""
    del config
    return head_parts.own_logits(params, out)


def weights_of(config: EagleConfig, mtp_prefix: str = MTP_PREFIX) -> dict[str, Any]:
    """Returns a Weight per leaf.

    Args:
      mtp_prefix: of the names in the file, of an MTP layer.
    """
    own = config.layers
    d = own.hidden_size
    params = _mtp_weights(own, mtp_prefix) if config.is_mtp else _eagle_weights(own)
    params |= only_if(config.fc_bias, fc_bias=vector("fc.bias", d, "embed"))
    table = lambda name, rows: matrix(f"{name}.weight", (rows, d), ("vocab", "embed"))
    embedding = table("embed_tokens", config.target_vocab_size)
    params |= only_if(config.has_embedding, embed_tokens=embedding)
    return params | only_if(config.has_head, lm_head=table("lm_head", own.vocab_size))


def _eagle_weights(own: ModelConfig) -> dict[str, Any]:
    d = own.hidden_size
    layers = [layer_weights(own, f"layers.{index}.", d) for index in range(own.num_layers)]
    del layers[0]["input_norm"]
    return {"fc": matrix("fc.weight", (d, 2 * d), ("embed", None)), "layers": tuple(layers)}


def _mtp_weights(own: ModelConfig, prefix: str) -> dict[str, Any]:
    d = own.hidden_size
    norm = lambda name: vector(f"{prefix}{name}.weight", d, "embed", 1.0)
    return {
        "embed_norm": norm("token_layernorm"),
        "hidden_norm": norm("hidden_layernorm"),
        "fc": matrix(f"{prefix}input_proj.weight", (d, 2 * d), ("embed", None)),
        "layers": (layer_weights(own, prefix, d),),
        "norm": norm("final_layernorm"),
    }


abstract, init = head_parts.weight_functions(weights_of)


def draft_products(config: EagleConfig) -> int:
    """Returns the multiply-adds per draft token in products with weights, the head among them."""
    leaves = weights_of(config)
    return head_parts.draft_products(config, (leaves["fc"], leaves["layers"]))
