"""Convolutions and the selector of DFlash2 in a config.json; `dflash_files` has the rest."""

from __future__ import annotations

from typing import Any

from specjax.heads.equations import dspark
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.namings import head_files
from specjax.heads.namings.head_files import Head
from specjax.heads.namings.head_layers import Body
from specjax.heads.namings.keys import Key
from specjax.models.base import Json, ModelConfig
from specjax.models.config_values import MAX_SIZE, optional_number, shown, size

NAME, CLASS = "dflash2", "DFlash2DraftModel"
# With the defaults of `speculators`; z-lab has them in `dflash_config`.
SIZES = (
    Key("conv_kernel_size", "conv_kernel_size", size, 2),
    Key("conv_group_size", "conv_group_size", size, 16),
    Key("selector_rank", "markov_rank", size, 256),
    Key("selector_top_k", "selector_top_k", size, 16),
)
SCALES = "input_embedding_scale", "output_multiplier", "final_logit_softcapping"


def is_dflash2(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds a DFlash2 head."""
    said = raw.get("speculators_model_type")
    return said == NAME or (said is None and CLASS in head_files.classes_of(raw))


def own_fields(
    head: Head, inner: Json, target: ModelConfig, body: Body, from_anchor: bool, block_size: int
) -> dict[str, Any]:
    """Returns what a DFlash2 head has besides a block, by the fields of DFlashConfig.

    Args:
      inner: its `dflash_config`, which counts before config.json itself.

    Raises:
      KeyError: a size is missing, and the head is not of `speculators`.
      ValueError: a value is impossible, or this is not supported.
    """
    own, found = head.raw | {key: value for key, value in inner.items() if value is not None}, {}
    most = {"conv_kernel_size": block_size, "selector_top_k": target.vocab_size}
    for key in SIZES:
        usual = key.default if head.is_of_speculators else None
        found[key.field] = size(own, key.name, usual, most=most.get(key.name, MAX_SIZE))
    groups, width = found["conv_group_size"], body.layers.hidden_size
    if width % groups:
        raise ValueError(f"conv_group_size={groups} must divide hidden_size={width}.")
    if from_anchor or body.tables["maps_vocabulary"]:
        raise ValueError(
            "a DFlash2 head with sample_from_anchor=true, or over a part of the vocabulary, is not "
            "supported; its training code has neither."
        )
    # The head reads the target's tables as the target does, and its own as they are.
    for name, ours in _scales(body.tables, target).items():
        theirs = optional_number(own, name, None if name == SCALES[-1] else 1.0)
        if theirs != ours:
            raise ValueError(
                f"{name}={shown(theirs)}, and the tables that the head uses have {ours} here; "
                "another one is not supported."
            )
    return found | {"markov_kind": dspark.SELECTOR}


def _scales(tables: dict[str, bool], target: ModelConfig) -> dict[str, float | None]:
    """Returns the factors of embeddings and logits, and the cap of logits, by their keys."""
    embedding = 1.0 if tables["has_embedding"] else target.embedding_multiplier
    logits = 1.0 if tables["has_head"] else 1.0 / target.logits_divisor
    cap = None if tables["has_head"] else target.logits_softcap
    return dict(zip(SCALES, (embedding, logits, cap)))


def scales(config: DFlashConfig, target: ModelConfig | None) -> Json:
    """Returns the factors and the cap that a config.json has to say, as they are not the usual.

    Args:
      target: None where it is not known: its tables are taken to have none.
    """
    if target is None:
        return {}
    tables = {"has_embedding": config.has_embedding, "has_head": config.has_head}
    return {key: each for key, each in _scales(tables, target).items() if each not in (None, 1.0)}
