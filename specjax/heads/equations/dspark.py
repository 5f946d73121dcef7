"""DSpark: what a DFlash head may have besides its block, to read the token before each draft token.

A Markov head adds w2 @ z to the logits of draft token k. With e = w1[token before it], and the
block's normed output h at its row, z is

    vanilla   e
    gated     sigmoid(gate(concat(h, e))) * e
    rnn       tanh(o),  where  f, c, o = joint(concat(s, e, h))  and  s' = f' s + (1 - f') tanh(c)
              with f' = sigmoid(f); s is 0 before the first draft token, and s' goes to the next
    selector  projection(h) * e; what it adds, and to which tokens alone, is in `dflash2`

A confidence head estimates how often draft token k is accepted, given those before it:

    sigmoid(proj(concat(h, e)))     or of h alone

Source: the published code of deepseek-ai/DeepSpec and vllm-project/speculators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.models import blocks, weights
from specjax.models.base import Params
from specjax.models.layers import along_last_axis, linear
from specjax.models.weights import matrix, vector

if TYPE_CHECKING:
    from specjax.heads.equations.dflash import DFlashConfig

MARKOV, CONFIDENCE = "markov_head.", "confidence_head.proj."  # of the names in a file
VANILLA, GATED, RNN, SELECTOR = "vanilla", "gated", "rnn", "selector"
# The matrix that a kind of Markov head has besides w1 and w2.
MATRICES = {GATED: "gate_proj", RNN: "joint_proj"}


def markov_embedding(params: Params, token_ids: Array) -> Array:
    """Returns e [..., markov_rank] of the tokens before those that are drafted; i32[...]."""
    return params["markov_w1"][token_ids]


def markov_step(
    params: Params, config: DFlashConfig, embedded: Array, normed: Array | None, state: Array | None
) -> tuple[Array, Array | None]:
    """Returns z [..., markov_rank] of the next draft token, and the state after it.

    Args:
      embedded: [..., markov_rank], from `markov_embedding`.
      normed: h [..., hidden_size]; None for vanilla heads.
      state: s [..., markov_rank]; None for heads that have none.
    """
    if config.markov_kind == VANILLA:
        return embedded, None
    assert normed is not None
    if config.markov_kind == SELECTOR:
        return blocks.project(normed, params, "hidden_projection") * embedded, None
    if config.markov_kind == GATED:
        read = jnp.concatenate([normed, embedded], axis=-1)
        return jax.nn.sigmoid(blocks.project(read, params, "gate_proj")) * embedded, None
    assert state is not None
    read = jnp.concatenate([state, embedded, normed], axis=-1)
    kept, new, out = jnp.split(blocks.project(read, params, "joint_proj"), 3, axis=-1)
    kept = jax.nn.sigmoid(kept)
    return jnp.tanh(out), kept * state + (1.0 - kept) * jnp.tanh(new)


def markov_logits(table: Array, latent: Array) -> Array:
    """Returns what the Markov head adds to the logits, f32[num_tokens, vocab_size].

    Args:
      table: `markov_w2` [vocab_size, markov_rank], or a slice of its tokens.
      latent: z [num_tokens, markov_rank].
    """
    return linear(latent, table, jnp.float32)


def confidence(
    params: Params, config: DFlashConfig, normed: Array, embedded: Array | None
) -> Array:
    """Returns f32[...], how likely the next draft token is accepted; see `confidence_logits`."""
    return jax.nn.sigmoid(confidence_logits(params, config, normed, embedded))


def confidence_logits(
    params: Params, config: DFlashConfig, normed: Array, embedded: Array | None
) -> Array:
    """Returns f32[...], the logits of `confidence`; only with `has_confidence`.

    Args:
      normed: h [..., hidden_size].
      embedded: e [..., markov_rank]; read by heads with `confidence_reads_token` alone.
    """
    read = normed
    if config.confidence_reads_token:
        assert embedded is not None
        read = jnp.concatenate([normed, embedded.astype(normed.dtype)], axis=-1)
    score = linear(read, params["confidence"], jnp.float32)
    score += along_last_axis(params["confidence_bias"].astype(jnp.float32), score)
    return score[..., 0]


def weights_of(config: DFlashConfig) -> dict[str, Any]:
    """Returns a Weight per leaf of what a DFlash head has not."""
    return _markov_weights(config) | _confidence_weights(config)


def _confidence_weights(config: DFlashConfig) -> dict[str, Any]:
    if not config.has_confidence:
        return {}
    width = config.hidden_size + config.markov_rank * config.confidence_reads_token
    return {
        "confidence": matrix(f"{CONFIDENCE}weight", (1, width), (None, None)),
        "confidence_bias": vector(f"{CONFIDENCE}bias", 1, None),
    }


def _markov_weights(config: DFlashConfig) -> dict[str, Any]:
    rank, width = config.markov_rank, config.hidden_size
    if not rank or config.markov_kind == SELECTOR:
        return {}
    table = lambda name, rows: matrix(f"{MARKOV}{name}.weight", (rows, rank), ("vocab", None))
    params = {
        "markov_w1": table("markov_w1", config.target_vocab_size),
        "markov_w2": table("markov_w2", config.vocab_size),
    }
    kind = config.markov_kind
    shape = {GATED: (rank, width + rank), RNN: (3 * rank, 2 * rank + width)}.get(kind)
    if shape is None:
        return params
    name = MATRICES[kind]
    of_file = f"{MARKOV}{name}"
    return params | {
        name: matrix(f"{of_file}.weight", shape, (None, None)),
        f"{name}_bias": vector(f"{of_file}.bias", shape[0], None),
    }


def draft_products(config: DFlashConfig) -> int:
    """Returns the multiply-adds per draft token in products with these weights."""
    leaves = weights_of(config)
    leaves.pop("markov_w1", None)  # looked up
    return weights.num_weights(leaves)
