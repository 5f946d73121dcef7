"""Sizes of DFlash and DSpark heads that are made to be trained for a target."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.config.speculation import MAX_DEPTH
from specjax.heads.equations import dspark
from specjax.heads.equations.dflash import DFlashConfig
from specjax.models.base import ModelConfig
from specjax.training.options import (
    captured_layers,
    layer_defaults,
    layers_like,
    mask_token,
    read,
    vocabulary,
)

TOKENS_PER_ROOT = 8


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
    """
    return _config(target, read("dflash", options, _defaults(target, 5)))


def configure_dspark(target: ModelConfig, options: dict[str, Any]) -> LearnedConfig:
    """Returns the config of a DSpark head for a target.

    Args:
      options: those of DFlash, of which block_size is 7, num_layers is 2 and samples_from_anchor
        is True by default; markov_rank (256, or the target's width if that is less; 0: no Markov
        head); markov_kind, "vanilla", "gated" or "rnn" ("vanilla"); has_confidence (True);
        confidence_reads_token (True, if there is a Markov head).
    """
    of_markov = {
        "markov_rank": min(256, target.hidden_size),
        "markov_kind": dspark.VANILLA,
        "has_confidence": True,
        "confidence_reads_token": lambda own: own["markov_rank"] > 0,
    }
    blocks = {"block_size": 7, "samples_from_anchor": True}
    own = read("dspark", options, _defaults(target, 2) | blocks | of_markov)
    rank, kind = own["markov_rank"], own["markov_kind"]
    kinds = dspark.VANILLA, dspark.GATED, dspark.RNN
    if kind not in kinds:
        raise ValueError(f"markov_kind={kind!r} must be one of {', '.join(kinds)}.")
    if own["confidence_reads_token"] and not rank:
        raise ValueError("confidence_reads_token=True needs a Markov head; raise markov_rank.")
    if rank and kind == dspark.RNN and not own["samples_from_anchor"]:
        raise ValueError(
            "markov_kind='rnn' with samples_from_anchor=False is not supported; leave it out."
        )
    own["confidence_reads_token"] &= own["has_confidence"]
    return _config(target, own, **{name: own[name] for name in of_markov})


def _defaults(target: ModelConfig, num_layers: int) -> dict[str, Any]:
    return layer_defaults(target, num_layers) | {
        "aux_layers": None,
        "draft_vocab_size": None,
        "qk_norm": True,
        "block_size": 16,
        "mask_token_id": None,
        "is_causal": False,
        "samples_from_anchor": False,
        "tokens_per_root": TOKENS_PER_ROOT,
    }


def _config(target: ModelConfig, own: dict[str, Any], **more: Any) -> LearnedConfig:
    vocab, tables = vocabulary(target, own["draft_vocab_size"])
    layers = layers_like(target, own, vocab, qk_norm=own["qk_norm"])
    from_anchor, block_size = own["samples_from_anchor"], own["block_size"]
    least, most = (1, MAX_DEPTH) if from_anchor else (2, MAX_DEPTH + 1)
    if not least <= block_size <= most:
        raise ValueError(f"{block_size=} must be from {least} to {most}.")
    aux = own["aux_layers"] or _spread(target.num_layers, layers.num_layers)
    return LearnedConfig(
        layers=layers,
        target_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=captured_layers(target, aux),
        block_size=block_size,
        mask_token_id=mask_token(target, own["mask_token_id"]),
        causal_layers=(own["is_causal"],) * layers.num_layers,
        samples_from_anchor=from_anchor,
        tokens_per_root=own["tokens_per_root"],
        **tables,
        **more,
    )


def _spread(depth: int, count: int) -> tuple[int, ...]:
    """Returns layers of a target of `depth` layers, evenly from the input of layer 2 to that of
    the last but one; fewer than `count` where there are not so many."""
    last = max(depth - 2, min(2, depth))
    steps = [2 + index * (last - 2) / max(count - 1, 1) for index in range(count)]
    return tuple(sorted({min(round(step), depth) for step in steps}))
