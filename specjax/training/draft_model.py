"""A draft model: a small model of the target's vocabulary, taught what the target says.

Its draft token s after a root is what it says after the text and s draft tokens. So along a text
it says one thing at each token, whichever root that is drafted from.

Source: Zhou et al. 2023, arXiv:2310.08461, section 3.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters.base import DrafterSpec
from specjax.drafters.spec import ModelDrafter
from specjax.models.base import Model, ModelConfig, Params
from specjax.models.dense import sequence_hidden
from specjax.models.families import family_of
from specjax.training.drafts import Drafts, Kind
from specjax.training.options import check_names, flag_option, size_option
from specjax.training.roots import after_first
from specjax.training.texts import QUERIES_AT_ONCE, Target, TargetStates, TextBatch

OPTIONS = (
    "hidden_size",
    "num_layers",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "qk_norm",
    "tie_word_embeddings",
)


def configure(target: ModelConfig, options: dict[str, Any]) -> ModelConfig:
    """Returns the config of a model of the Llama type for a target.

    Args:
      options: hidden_size (half of the target's); num_layers (2); intermediate_size (3
        hidden_size); head_dim (the target's); num_heads (hidden_size / head_dim); num_kv_heads
        (num_heads); qk_norm, whether queries and keys are normed (False); tie_word_embeddings,
        whether embedding and head share a matrix (True).

    Raises:
      ValueError: an option is unknown, or no size or flag, or heads cannot be shared.
    """
    check_names("draft_model", options, OPTIONS)
    width = size_option(options, "hidden_size", max(target.hidden_size // 2, 1))
    head_dim = size_option(options, "head_dim", target.head_dim)
    num_heads = size_option(options, "num_heads", max(width // head_dim, 1))
    num_kv_heads = size_option(options, "num_kv_heads", num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"{num_heads=} must be a multiple of {num_kv_heads=}, and {head_dim=} even."
        )
    is_normed = flag_option(options, "qk_norm", False)
    return ModelConfig(
        architecture="llama",
        family="qwen3" if is_normed else "llama",
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=size_option(options, "intermediate_size", 3 * width),
        num_layers=size_option(options, "num_layers", 2),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=target.max_position_embeddings,
        norm_eps=target.norm_eps,
        rope=target.rope,
        qk_norm=is_normed,
        tie_word_embeddings=flag_option(options, "tie_word_embeddings", True),
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )


def propose(
    params: Params,
    config: ModelConfig,
    target: Target,
    text: TextBatch,
    states: TargetStates,
    depth: int,
    key: Array | None,
) -> Drafts:
    """Returns the drafts after every token but the first; see `Propose`.

    Args:
      config: of any family.
    """
    del target, states, key
    roots, is_root = after_first(text)
    (said,) = sequence_hidden(
        params,
        config,
        text.token_ids,
        text.is_text,
        queries_at_once=QUERIES_AT_ONCE,
    )
    logits = family_of(config).logits
    score = lambda read, s: logits(params, config, read, None)
    return Drafts(roots, is_root, (said,) * depth, score, has_all_roots=True, is_aligned=True)


def begin(key: Array, config: ModelConfig, target: Target, target_ids: Array | None) -> Params:
    """Returns the weights that training begins with, random ones; see `Kind.begin`."""
    del target, target_ids
    return family_of(config).init(key, config, jnp.float32)


def given(model: Model, target: ModelConfig) -> tuple[ModelConfig, Params]:
    """Returns config and weights of a model that is to go on learning, copies in float32.

    Raises:
      ValueError: its vocabulary is not the target's.
    """
    if model.config.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model has {model.config.vocab_size} tokens, and the target "
            f"{target.vocab_size}; give one of the target's vocabulary."
        )
    return model.config, jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), model.params)


def _is_draft_model(spec: DrafterSpec) -> bool:
    """Returns whether a drafter is a model that drafts token by token, of the whole vocabulary."""
    return isinstance(spec, ModelDrafter) and spec.said is None and not spec.takes_masks


KIND = Kind(
    name="draft_model",
    configure=configure,
    begin=begin,
    taps=lambda config: (),
    propose=propose,
    spec=ModelDrafter,
    is_kind_of=_is_draft_model,
)
