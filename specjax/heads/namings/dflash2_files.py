"""Convolutions and the selector of DFlash2 in a config.json; `dflash_files` has the rest."""

from __future__ import annotations

from typing import Any

from specjax.heads.equations import dspark
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.namings import head_files
from specjax.heads.namings.head_files import Head, Tables
from specjax.models.base import Json, ModelConfig
from specjax.models.config_values import MAX_SIZE, optional_number, shown, size

NAME, _CLASS = "dflash2", "DFlash2DraftModel"
# Sizes, with the defaults of `speculators`; z-lab has them in `dflash_config`.
_SIZES = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
_SCALES = "input_embedding_scale", "output_multiplier", "final_logit_softcapping"
KEYS = *_SIZES, *_SCALES


def is_dflash2(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds a DFlash2 head."""
    said = raw.get("speculators_model_type")
    return said == NAME or (said is None and _CLASS in head_files.classes_of(raw))


def own_fields(
    head: Head, said: Json, target: ModelConfig, tables: Tables, from_anchor: bool, block_size: int
) -> dict[str, Any]:
    """Returns what a DFlash2 head has besides a block, by the fields of DFlashConfig.

    Raises:
      KeyError: a size is missing, and the head is not of `speculators`.
      ValueError: a value is impossible, or this is not supported.
    """
    own, found = head.raw | {key: value for key, value in said.items() if value is not None}, {}
    for key, default in _SIZES.items():
        most = {"conv_kernel_size": block_size, "selector_top_k": target.vocab_size}
        usual = default if head.is_of_speculators else None
        found[key] = size(own, key, usual, most=most.get(key, MAX_SIZE))
    width = size(head.own, "hidden_size")
    if width % found["conv_group_size"]:
        raise ValueError(
            f"conv_group_size={found['conv_group_size']} must divide hidden_size={width}."
        )
    if from_anchor or tables.maps_vocabulary:
        raise ValueError(
            "a DFlash2 head with sample_from_anchor=true, or over a part of the vocabulary, is not "
            "supported; its training code has neither."
        )
    _check_scales(own, tables, target)
    found["markov_rank"] = found.pop("selector_rank")
    return found | {"markov_kind": dspark.SELECTOR}


def _check_scales(own: Json, tables: Tables, target: ModelConfig) -> None:
    """Raises ValueError where embeddings or logits are scaled otherwise than the target's are.

    The head reads the target's tables as the target does, and its own as they are.
    """
    of_tables = _scales(tables.has_embedding, tables.has_head, target)
    for key, ours in of_tables.items():
        theirs = optional_number(own, key, None if key == _SCALES[-1] else 1.0)
        if theirs != ours:
            raise ValueError(
                f"{key}={shown(theirs)}, and the tables that the head uses have {ours} here; "
                "another one is not supported."
            )


def _scales(has_embedding: bool, has_head: bool, target: ModelConfig) -> dict[str, float | None]:
    """Returns the factors of embeddings and logits, and the cap of logits, by their keys."""
    embedding = 1.0 if has_embedding else target.embedding_multiplier
    logits = 1.0 if has_head else 1.0 / target.logits_divisor
    cap = None if has_head else target.logits_softcap
    return dict(zip(_SCALES, (embedding, logits, cap)))


def scales(config: DFlashConfig, target: ModelConfig | None) -> Json:
    """Returns the factors and the cap that a config.json has to say, as they are not the usual.

    Args:
      target: None where it is not known: its tables are taken to have none.
    """
    if target is None:
        return {}
    found = _scales(config.has_embedding, config.has_head, target)
    return {key: value for key, value in found.items() if value not in (None, 1.0)}


def sizes(config: DFlashConfig) -> Json:
    """Returns the sizes of convolutions and selector, by their keys."""
    values = (
        config.conv_kernel_size,
        config.conv_group_size,
        config.markov_rank,
        config.selector_top_k,
    )
    return dict(zip(_SIZES, values, strict=True))
