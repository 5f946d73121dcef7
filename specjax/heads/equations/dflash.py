"""DFlash: a few layers that fill a block of masks in one pass, over hidden states of a target.

Source: the published code of z-lab/dflash and vllm-project/speculators, and their checkpoints. With
the hidden states h of the captured layers at token j,

    c_j = hidden_norm(fc(concat(h)))                      the context of token j

and for the block of the newest token and block_size - 1 masks, at positions s, s + 1, ...

    x = embedding(token s, mask, mask, ...)
    y = input_norm(x)                                     of each layer, which adds to x
        attention(queries of y; keys and values of c_0 ... c_{s-1} and of y)
        mlp(post_attention_norm(x))                       as in Llama
    logits = head(norm(x))                                of row i: of the token at s + i

Contexts go through each layer's key and value matrices, and not through its input_norm. The tokens
of a block see each other in both directions, but in layers that are causal. The first row is the
token that is known; in heads that sample from it, row i says the token at s + i + 1. In layers with
a window that are not causal, a whole block sees the contexts that its first row sees: in published
code each row sees one less than the row before, or all of them one more (speculators, in training).

DSpark adds a Markov head, which reads the token before each draft token, and a confidence head: see
`dspark`. DFlash2 adds convolutions over the tokens of a block, and a selector among likely tokens:
see `dflash2`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.heads.equations import dflash2, dspark, head_parts
from specjax.heads.equations.head_parts import OfLayers, layer_weights, only_if
from specjax.models import blocks
from specjax.models.base import Attend, LayerCache, ModelConfig, Params
from specjax.models.layers import linear, rms_norm, rotate
from specjax.models.weights import matrix, vector


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig(OfLayers):
    """Static sizes and flags of a DFlash head; hashable, a jit key.

    Attributes:
      layers: sizes of its layers and of its head, whose vocabulary may be a part of the target's.
      target_vocab_size: tokens of the target.
      target_hidden_size: width of the captured hidden states.
      aux_layers: layers of the target whose inputs are captured, from 0 on; the target's number
        of layers captures its normed output.
      block_size: tokens of a block, the newest token of the text among them.
      mask_token_id: stands for the tokens that are to be drafted.
      causal_layers: for each layer, whether a token of a block sees only those before it.
      samples_from_anchor: whether the first row of a block drafts, too.
      has_embedding, has_head: whether it has its own; else those of the target are used.
      maps_vocabulary: whether its tokens have numbers of their own, see `target_ids`.
      markov_rank: width of the Markov head; 0: none.
      markov_kind: how it reads the token before, and what else: see `dspark`.
      has_confidence: whether it has a confidence head.
      confidence_reads_token: whether that reads the Markov head's embedding of the token before.
      conv_kernel_size: taps of the convolutions over a block; 0: it has none.
      conv_group_size: channels that share a kernel.
      selector_top_k: tokens of a row that a Markov head of the kind `selector` chooses among.
    """

    layers: ModelConfig
    target_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    causal_layers: tuple[bool, ...]
    samples_from_anchor: bool = False
    has_embedding: bool = False
    has_head: bool = False
    maps_vocabulary: bool = False
    markov_rank: int = 0
    markov_kind: str = dspark.VANILLA
    has_confidence: bool = False
    confidence_reads_token: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 1
    selector_top_k: int = 0

    @property
    def markov_reads_normed(self) -> bool:
        """Whether the Markov head reads the normed output of each row that drafts."""
        return self.markov_rank > 0 and self.markov_kind != dspark.VANILLA

    @property
    def conv_groups(self) -> int:
        return self.hidden_size // self.conv_group_size

    @property
    def fc_width(self) -> int:
        return len(self.aux_layers) * self.target_hidden_size

    @property
    def first_row(self) -> int:
        """The row of a block that says its first draft token."""
        return 0 if self.samples_from_anchor else 1

    @property
    def most_drafts(self) -> int:
        return self.block_size - self.first_row

    @property
    def is_whole(self) -> bool:
        """Whether a block is computed whole, however few draft tokens are asked for."""
        return not all(self.causal_layers)

    def num_rows(self, num_drafts: int) -> int:
        """Returns the rows of a block that are computed for so many draft tokens.

        Rows that come later change nothing where all layers are causal. Otherwise a block is whole,
        as in training.
        """
        if self.is_whole:
            return self.block_size
        return min(num_drafts + self.first_row, self.block_size)


def context(params: Params, config: DFlashConfig, taps: Sequence[Array]) -> Array:
    """Returns c [..., hidden_size] from the captured states, [..., target_hidden_size] each."""
    joined = linear(jnp.concatenate(taps, axis=-1), params["fc"])
    return rms_norm(joined, params["hidden_norm"], config.layers.norm_eps)


def context_keys(
    params: Params, config: DFlashConfig, contexts: Array, positions: Array
) -> list[tuple[Array, Array]]:
    """Returns keys and values of contexts, [num_tokens, kv_heads, head_dim] each, per layer.

    Args:
      contexts: [num_tokens, hidden_size], from `context`.
      positions: i32[num_tokens].
    """
    own = config.layers
    tables = blocks.rotary_tables(own, positions)
    found = []
    for layer, table in zip(params["layers"], tables, strict=True):
        k, v = (
            blocks.project(contexts, layer, name).reshape(*positions.shape, -1, own.head_dim)
            for name in ("k_proj", "v_proj")
        )
        if own.qk_norm:
            k = rms_norm(k, layer["k_norm"], own.norm_eps)
        found.append((k if table is None else rotate(k, table), v))
    return found


def forward(
    params: Params,
    config: DFlashConfig,
    embedded: Array,
    positions: Array,
    attend: Attend,
    caches: tuple[LayerCache, ...],
    width: int,
) -> tuple[Array, tuple[LayerCache, ...]]:
    """Runs all layers over blocks, whose contexts are in the caches.

    Args:
      embedded: [num_blocks * width, hidden_size], of the newest token and of masks.
      positions: i32[num_blocks * width].
      attend: as for the forward of a family.
      caches: one per layer.
      width: tokens of a block, static.

    Returns:
      x [num_blocks * width, hidden_size] before the last norm, and the new caches.
    """
    around = {"around": dflash2.around(config, width)} if config.conv_kernel_size else {}
    run = head_parts.layer_runner(config.layers, positions, attend, **around)
    x, new_caches = embedded, []
    for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        normed = rms_norm(x, layer["input_norm"], config.layers.norm_eps)
        x, cache = run(index, layer, cache, x, normed)
        new_caches.append(cache)
    return x, tuple(new_caches)


def normed_output(params: Params, config: DFlashConfig, out: Array) -> Array:
    """Returns what the head reads, from x [..., hidden_size]."""
    return rms_norm(out, params["norm"], config.layers.norm_eps)


def own_logits(params: Params, config: DFlashConfig, out: Array) -> Array:
    """Returns f32[num_tokens, vocab_size] by its own head; only with `has_head`."""
    return head_parts.own_logits(params, normed_output(params, config, out))


def weights_of(config: DFlashConfig) -> dict[str, Any]:
    """Returns a Weight per leaf of floating point."""
    own = config.layers
    d = own.hidden_size
    prefixes = [f"layers.{index}." for index in range(own.num_layers)]
    layers = (
        layer_weights(own, prefix, d) | dflash2.layer_weights(config, prefix) for prefix in prefixes
    )
    table = lambda name, rows: matrix(f"{name}.weight", (rows, d), ("vocab", "embed"))
    params = {
        "fc": matrix("fc.weight", (d, config.fc_width), ("embed", None)),
        "hidden_norm": vector("hidden_norm.weight", d, "embed", 1.0),
        "layers": tuple(layers),
        "norm": vector("norm.weight", d, "embed", 1.0),
    }
    embedding = table("embed_tokens", config.target_vocab_size)
    params |= only_if(config.has_embedding, embed_tokens=embedding)
    params |= dspark.weights_of(config) | dflash2.selector_weights(config)
    return params | only_if(config.has_head, lm_head=table("lm_head", own.vocab_size))


abstract, init = head_parts.weight_functions(weights_of)


def draft_products(config: DFlashConfig) -> int:
    """Returns the multiply-adds per token of a block in products with weights, the head's too."""
    products = head_parts.draft_products(config, weights_of(config)["layers"])
    return products + dspark.draft_products(config) + dflash2.draft_products(config)
