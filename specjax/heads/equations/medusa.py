"""Medusa: heads over the last hidden state of a target, one for each draft token.

Source: Cai et al. 2024, arXiv:2401.10774, section 3.1, and the published checkpoints. With the
hidden state g that the target's head reads at the token before the newest one, head i says draft
token i = 0, 1, ... whatever the drafts before it are:

    x = g
    x = x + silu(block_l(x))                for its residual blocks l
    logits = head_i(x)

Some have no matrices of their own: then head_i is the target's head. Those of vLLM may have one for
all, and say a part of the tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.heads.equations import head_parts
from specjax.heads.equations.head_parts import only_if
from specjax.models import blocks, weights
from specjax.models.base import Params
from specjax.models.layers import linear
from specjax.models.weights import matrix, vector

# Names of a block and of a head's matrix in files: of FasterDecoding, and of vLLM.
PUBLISHED, OF_VLLM = (
    ("{head}.{block}.linear", "{head}.{blocks}"),
    (
        "blocks.{head}.layers.{block}",
        "lm_heads.{head}",
    ),
)


SHARED_HEAD = "lm_head"  # of vLLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Static sizes and flags of Medusa heads; hashable, a jit key.

    Attributes:
      target_hidden_size: width of the target's hidden state.
      target_vocab_size: tokens of the target.
      aux_layers: the target's number of layers alone, which captures its normed output.
      most_drafts: number of heads.
      num_blocks: residual blocks of each.
      has_bias: whether blocks have one.
      has_head: whether they have matrices of their own; else the target's head is used.
      shares_head: whether these are one matrix, in place of one for each.
      own_vocab_size: tokens of the heads where they are a part of the target's, see `target_ids`.
    """

    target_hidden_size: int
    target_vocab_size: int
    aux_layers: tuple[int, ...]
    most_drafts: int
    num_blocks: int = 1
    has_bias: bool = True
    has_head: bool = True
    shares_head: bool = False
    own_vocab_size: int | None = None

    @property
    def hidden_size(self) -> int:
        return self.target_hidden_size

    @property
    def vocab_size(self) -> int:
        return self.own_vocab_size or self.target_vocab_size

    @property
    def maps_vocabulary(self) -> bool:
        return self.own_vocab_size is not None


def forward(params: Params, config: MedusaConfig, newest: Array, index: int) -> Array:
    """Returns x [n, hidden_size] of head `index` after its blocks, from g."""
    x = newest
    for place in range(config.num_blocks):
        x = x + jax.nn.silu(blocks.project(x, params["heads"][index]["blocks"][place], "block"))
    return x


def own_logits(params: Params, config: MedusaConfig, x: Array, index: int) -> Array:
    """Returns f32[n, vocab_size] of head `index`, from its x; not with the target's head."""
    owner = params if config.shares_head else params["heads"][index]
    return linear(x, owner["lm_head"], jnp.float32)


def weights_of(config: MedusaConfig, naming: tuple[str, str] = PUBLISHED) -> dict[str, Any]:
    """Returns a Weight per leaf, those of each head in a tuple.

    Args:
      naming: of a block and of a head's matrix in the file.
    """
    d, vocab = config.target_hidden_size, config.vocab_size
    has_own = config.has_head and not config.shares_head
    of_block, of_head = naming

    def block(head: int, place: int) -> dict[str, Any]:
        name = of_block.format(head=head, block=place)
        leaves: dict[str, Any] = {"block": matrix(f"{name}.weight", (d, d), ("embed", None))}
        return leaves | only_if(config.has_bias, block_bias=vector(f"{name}.bias", d, "embed"))

    def head(index: int) -> dict[str, Any]:
        name = of_head.format(head=index, blocks=config.num_blocks)
        leaves = {"blocks": tuple(block(index, place) for place in range(config.num_blocks))}
        table = matrix(f"{name}.weight", (vocab, d), ("vocab", "embed"))
        return leaves | only_if(has_own, lm_head=table)

    shared = matrix(f"{SHARED_HEAD}.weight", (vocab, d), ("vocab", "embed"))
    heads = tuple(head(index) for index in range(config.most_drafts))
    return {"heads": heads} | only_if(config.shares_head, lm_head=shared)


abstract, init = head_parts.weight_functions(weights_of)


def draft_products(config: MedusaConfig) -> int:
    """Returns the multiply-adds per draft token in products with weights, the head among them."""
    own = weights.num_weights(weights_of(config)["heads"]) // config.most_drafts
    if config.has_head and not config.shares_head:
        return own
    return own + config.vocab_size * config.target_hidden_size
