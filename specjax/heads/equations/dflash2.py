"""DFlash2: convolutions over the tokens of a DFlash block, and a selector among likely tokens.

A convolution stands around attention and another around the MLP of each layer. With the branch's
normed input y, token i of a block, and a group of neighbouring channels that share a kernel,

    kernel(side, tap)  = base(side, tap) + projection(y_i)(side, tap, group)      side 0 or 1
    conv(side, x)_i    = sum over taps of kernel(side, tap) * x_{i - tap}
    branch             : x + conv(1, branch(conv(0, y)))

Both sides take their kernels from y. What lies before the first token of a block counts as 0, so
that nothing is kept between blocks, and contexts go through no convolution.

The candidate selector is a Markov head (see `dspark`) of the kind `selector`. Of each draft token's
`selector_top_k` likeliest tokens t alone, the logits are

    logits(t) + z . successor[t]        with z = projection(h) * predecessor[token before]

and all others cannot be drafted.

Source: the published code of z-lab/dflash, vllm-project/speculators and vLLM, where they agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from specjax.heads.equations.dspark import SELECTOR
from specjax.heads.equations.head_parts import Around
from specjax.models.base import Params
from specjax.models.layers import linear
from specjax.models.weights import Source, Weight, matrix

if TYPE_CHECKING:
    from specjax.heads.equations.dflash import DFlashConfig

CONVOLUTIONS = "attention_conv", "mlp_conv"  # of the names in a file
CANDIDATES = "candidate_selector."


def around(config: DFlashConfig, width: int) -> Around:
    """Returns what convolves input and output of a branch, for `head_parts.layer_runner`.

    Args:
      width: tokens of each block, as many for all. Arrays are [num_blocks * width, hidden_size].
    """

    def prepare(
        layer: Params, branch: str, normed: Array
    ) -> tuple[Array, Callable[[Array], Array]]:
        base = layer[f"{branch}_conv_base"]
        kernels = linear(normed, layer[f"{branch}_conv_proj"])
        kernels = kernels.reshape(-1, width, 2, config.conv_kernel_size, config.conv_groups)
        convolve = lambda side, x: _convolve(x, base[side], kernels[:, :, side])
        return convolve(0, normed), lambda out: convolve(1, out)

    return prepare


def _convolve(x: Array, base: Array, dynamic: Array) -> Array:
    """Returns x [num_blocks * width, hidden_size], convolved over the tokens of each block.

    Args:
      base: [taps, hidden_size].
      dynamic: [num_blocks, width, taps, groups].
    """
    blocks, width, taps, groups = dynamic.shape
    grouped = x.reshape(blocks, width, groups, -1)
    kernel = base.reshape(1, 1, taps, groups, -1) + dynamic[..., None]
    padded = jnp.pad(grouped, ((0, 0), (taps - 1, 0), (0, 0), (0, 0)))
    ago = (padded[:, taps - 1 - tap :][:, :width] for tap in range(taps))
    # The taps' products, added.
    out = jnp.stack([kernel[:, :, tap] * before for tap, before in enumerate(ago)]).sum(axis=0)
    return out.reshape(x.shape)


def candidate_logits(table: Array, latent: Array, token_ids: Array) -> Array:
    """Returns what the selector adds to the logits of candidates, f32[num_tokens, candidates].

    Args:
      table: successor [vocab_size, rank].
      latent: z [num_tokens, rank].
      token_ids: i32[num_tokens, candidates].
    """
    exact = jnp.float32
    return jnp.einsum("nr,ncr->nc", latent.astype(exact), table[token_ids].astype(exact))


def layer_weights(config: DFlashConfig, prefix: str) -> dict[str, Weight]:
    """Returns a Weight per leaf of the convolutions of a layer, none where it has none.

    Args:
      prefix: of the names in the file, as "layers.0.".
    """
    taps, d = config.conv_kernel_size, config.hidden_size
    if not taps:
        return {}
    leaves, shape = {}, (2 * taps * config.conv_groups, d)
    for conv in CONVOLUTIONS:
        base = f"{prefix}{conv}.base_kernel"
        leaves[f"{conv}_base"] = Weight((2, taps, d), (None,) * 3, Source(base, (2, taps, d)))
        projection = f"{prefix}{conv}.kernel_projection.weight"
        leaves[f"{conv}_proj"] = matrix(projection, shape, (None, None))
    return leaves


def selector_weights(config: DFlashConfig) -> dict[str, Any]:
    """Returns a Weight per leaf of the selector, none where there is none."""
    if config.markov_kind != SELECTOR:
        return {}
    rank, vocab = config.markov_rank, config.target_vocab_size
    table = lambda name: matrix(f"{CANDIDATES}{name}_codebook", (vocab, rank), ("vocab", None))
    projection = f"{CANDIDATES}hidden_projection.weight"
    return {
        "markov_w1": table("predecessor"),
        "markov_w2": table("successor"),
        "hidden_projection": matrix(projection, (rank, config.hidden_size), (None, None)),
    }


def draft_products(config: DFlashConfig) -> int:
    """Returns the multiply-adds per draft token in products with the selector's weights."""
    if config.markov_kind != SELECTOR:
        return 0
    return config.markov_rank * (config.hidden_size + config.selector_top_k)
