"""Sizes of DFlash and DSpark heads that are made to be trained for a target."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.config.speculation import MAX_DEPTH
from specjax.heads.equations import dspark
from specjax.heads.equations.dflash import DFlashConfig
from specjax.models.base import ModelConfig
from specjax.training.options import (
    LAYER_OPTIONS,
    captured_layers,
    check_names,
    flag_option,
    layers_like,
    mask_option,
    size_option,
    vocabulary,
)

TOKENS_PER_ROOT = 8
OF_BLOCKS = "block_size", "mask_token_id", "is_causal", "samples_from_anchor", "tokens_per_root"
OF_DFLASH = "aux_layers", "draft_vocab_size", "qk_norm", *LAYER_OPTIONS, *OF_BLOCKS
OF_DSPARK = "markov_rank", "markov_kind", "has_confidence", "confidence_reads_token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedConfig(DFlashConfig):
    """The config of a head that learns.

    Attributes:
      tokens_per_root: of a text, for each root that is drawn from it in a step.
    """

    tokens_per_root: int = TOKENS_PER_ROOT

    @property
    def served(self) -> DFlashConfig:
        """The config of the head as it drafts."""
        fields = dataclasses.fields(DFlashConfig)
        return DFlashConfig(**{field.name: getattr(self, field.name) for field in fields})


def configure_dflash(target: ModelConfig, options: dict[str, Any]) -> LearnedConfig:
    """Returns the config of a DFlash head for a target.

    Args:
      options: block_size, tokens of a block, the root among them (16); mask_token_id, the token
        whose embedding stands for those that are to be drafted, best one that no text has (the
        target's mask token, else the last token of its vocabulary, which is seldom more than
        padding); num_layers (5); intermediate_size, num_heads and num_kv_heads (the target's);
        qk_norm (True); aux_layers, layers of the target whose inputs are read (as many as the head
        has, evenly from the second to the last but two); is_causal, whether a token of a block sees
        only those before it (False); samples_from_anchor, whether the root's row drafts, too
        (False); draft_vocab_size, see `vocabulary`; tokens_per_root, see LearnedConfig (8).

    Raises:
      ValueError: an option is unknown or impossible.
    """
    check_names("dflash", options, OF_DFLASH)
    return _config(target, {"block_size": 16, "num_layers": 5} | options)


def configure_dspark(target: ModelConfig, options: dict[str, Any]) -> LearnedConfig:
    """Returns the config of a DSpark head for a target.

    Args:
      options: those of DFlash, of which block_size is 7, num_layers is 2 and samples_from_anchor
        is True by default; markov_rank (256, or the target's width if that is less; 0: no Markov
        head); markov_kind, "vanilla", "gated" or "rnn" ("vanilla"); has_confidence (True);
        confidence_reads_token (True, if there is a Markov head).

    Raises:
      ValueError: an option is unknown or impossible.
    """
    check_names("dspark", options, (*OF_DFLASH, *OF_DSPARK))
    options = {"block_size": 7, "num_layers": 2, "samples_from_anchor": True} | options
    rank = 0
    if options.get("markov_rank") != 0:
        rank = size_option(options, "markov_rank", min(256, target.hidden_size))
    kinds = dspark.VANILLA, dspark.GATED, dspark.RNN
    kind = options.get("markov_kind", dspark.VANILLA)
    if kind not in kinds:
        raise ValueError(f"markov_kind={kind!r} must be one of {', '.join(kinds)}.")
    reads_token = flag_option(options, "confidence_reads_token", rank > 0)
    if reads_token and not rank:
        raise ValueError("confidence_reads_token=True needs a Markov head; raise markov_rank.")
    more = {"has_confidence": flag_option(options, "has_confidence", True)}
    more["confidence_reads_token"] = more["has_confidence"] and reads_token
    config = _config(target, options, markov_rank=rank, markov_kind=kind, **more)
    if rank and kind == dspark.RNN and not config.samples_from_anchor:
        raise ValueError(
            "markov_kind='rnn' with samples_from_anchor=False is not supported; leave it out."
        )
    return config


def _config(target: ModelConfig, options: dict[str, Any], **more: Any) -> LearnedConfig:
    vocab, tables = vocabulary(target, options.get("draft_vocab_size"))
    qk_norm = flag_option(options, "qk_norm", True)
    layers = layers_like(target, options, vocab, qk_norm=qk_norm)
    from_anchor = flag_option(options, "samples_from_anchor", False)
    least, most = (1, MAX_DEPTH) if from_anchor else (2, MAX_DEPTH + 1)
    block_size = size_option(options, "block_size", most)
    if not least <= block_size <= most:
        raise ValueError(f"{block_size=} must be from {least} to {most}.")
    aux = options.get("aux_layers") or _spread(target.num_layers, layers.num_layers)
    return LearnedConfig(
        layers=layers,
        target_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=captured_layers(target, aux),
        block_size=block_size,
        mask_token_id=mask_option(target, options),
        causal_layers=(flag_option(options, "is_causal", False),) * layers.num_layers,
        samples_from_anchor=from_anchor,
        tokens_per_root=size_option(options, "tokens_per_root", TOKENS_PER_ROOT),
        **tables,
        **more,
    )


def _spread(depth: int, count: int) -> tuple[int, ...]:
    """Returns layers of a target of `depth` layers, evenly from the input of layer 2 to that of
    the last but one; fewer than `count` where there are not so many."""
    last = max(depth - 2, min(2, depth))
    steps = [2 + index * (last - 2) / max(count - 1, 1) for index in range(count)]
    return tuple(sorted({min(round(step), depth) for step in steps}))
