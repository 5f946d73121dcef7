"""A draft model: a small model of the target's vocabulary, taught what the target says.

Its draft token s after a root is what it says after the text and s draft tokens. So along a text
it says one thing at each token, whichever root that is drafted from.

Source: Zhou et al. 2023, arXiv:2310.08461, section 3.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.drafters.base import DrafterSpec
from specjax.drafters.spec import ModelDrafter
from specjax.models.base import ModelConfig, Params
from specjax.models.dense import sequence_hidden
from specjax.models.families import family_of
from specjax.training.drafts import Drafts, Kind
from specjax.training.options import read
from specjax.training.texts import QUERIES_AT_ONCE, Along, Target


def configure(target: ModelConfig, options: dict[str, Any]) -> ModelConfig:
    """Returns the config of a model of the Llama type for a target.

    Args:
      options: hidden_size (half of the target's); num_layers (2); intermediate_size (3
        hidden_size); head_dim (the target's); num_heads (hidden_size / head_dim); num_kv_heads
        (num_heads); qk_norm, whether queries and keys are normed (False); tie_word_embeddings,
        whether embedding and head share a matrix (True).
    """
    defaults = {
        "hidden_size": max(target.hidden_size // 2, 1),
        "num_layers": 2,
        "intermediate_size": lambda own: 3 * own["hidden_size"],
        "head_dim": target.head_dim,
        "num_heads": lambda own: max(own["hidden_size"] // own["head_dim"], 1),
        "num_kv_heads": lambda own: own["num_heads"],
        "qk_norm": False,
        "tie_word_embeddings": True,
    }
    own = read("draft_model", options, defaults)
    num_heads, num_kv_heads, head_dim = own["num_heads"], own["num_kv_heads"], own["head_dim"]
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"{num_heads=} must be a multiple of {num_kv_heads=}, and {head_dim=} even."
        )
    return ModelConfig(
        architecture="llama",
        family="qwen3" if own["qk_norm"] else "llama",
        vocab_size=target.vocab_size,
        **own,
        max_position_embeddings=target.max_position_embeddings,
        norm_eps=target.norm_eps,
        rope=target.rope,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )


def propose(
    params: Params, config: ModelConfig, along: Along, depth: int, key: Array | None
) -> Drafts:
    """Returns the drafts after every token but the first; see `Propose`.

    Args:
      config: of any family.
    """
    del key
    text = along.text
    (said,) = sequence_hidden(
        params, config, text.token_ids, text.is_text, queries_at_once=QUERIES_AT_ONCE
    )
    score = lambda read, s: family_of(config).logits(params, config, read, None)
    return Drafts.after_each(text, (said,) * depth, score)


def begin(key: Array, config: ModelConfig, target: Target, target_ids: Array | None) -> Params:
    """Returns the weights that training begins with, random ones; see `Kind.begin`."""
    del target, target_ids
    return family_of(config).init(key, config, jnp.float32)


def _is_draft_model(spec: DrafterSpec) -> bool:
    """Returns whether a drafter is a model that drafts token by token, of the whole vocabulary."""
    return isinstance(spec, ModelDrafter) and spec.said is None and not spec.takes_masks


KIND = Kind(
    name="draft_model",
    configure=configure,
    begin=begin,
    propose=propose,
    spec=ModelDrafter,
    is_kind_of=_is_draft_model,
    taps=lambda config: (),
)
