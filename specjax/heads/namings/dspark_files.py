"""The Markov head and the confidence head of DSpark in a folder; `dflash_files` has the rest."""

from __future__ import annotations

from typing import Any

from specjax.heads.equations import dspark
from specjax.heads.equations.dspark import CONFIDENCE, MARKOV
from specjax.heads.namings import head_files
from specjax.heads.namings.head_files import Head
from specjax.heads.namings.keys import Key
from specjax.models.base import Json
from specjax.models.config_values import shown, size

NAME = "dspark"  # in names of classes, of which there are several
# Of training alone, in files of SpecForge.
KEYS_OF_TRAINING = "attention_mode", "confidence_head_alpha"
PARTS = MARKOV, "confidence_head."  # of names of tensors


def is_dspark(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds a DSpark head."""
    return raw.get("speculators_model_type") == NAME or any(
        NAME in str(one).lower() for one in head_files.classes_of(raw)
    )


def _rank(raw: Json, name: str, stored: int) -> int:
    """Returns the width of a Markov head; null says that there is none."""
    return size(raw, name, 0, least=0) if name in raw else stored


# Tensors tell them all.
KEYS = (
    Key("markov_rank", "markov_rank", _rank),
    Key("markov_head_type", "markov_kind", lambda raw, name, stored: raw.get(name) or stored),
    Key("enable_confidence_head", "has_confidence"),
    Key("confidence_head_with_markov", "confidence_reads_token"),
)


def own_fields(head: Head, raw: Json, from_anchor: bool, width: int) -> dict[str, Any]:
    """Returns what a DSpark head has besides a block, by the fields of DFlashConfig.

    Args:
      raw: config.json and what stands in its `dflash_config`.

    Raises:
      ValueError: config.json and the tensors disagree, or this is not supported.
    """
    found = _stored(head, width)
    for key in KEYS:
        if key.field not in found:
            continue
        value, where = found[key.field]
        if key.read(raw, key.name, value) != value:
            raise ValueError(
                f"{key.name}={shown(raw[key.name])}, and {where}; they must agree: use both files "
                "as they were published."
            )
    fields = {field: value for field, (value, _) in found.items()}
    if fields.get("markov_kind") == dspark.RNN and not from_anchor:
        raise ValueError(
            "a recurrent Markov head with sample_from_anchor=false is not supported; training code "
            "differs in whether its state begins with the anchor."
        )
    if fields.get("confidence_reads_token") and not fields["markov_rank"]:
        raise ValueError(
            f"{CONFIDENCE}weight reads a token's embedding, and there is no Markov head."
        )
    return fields


def _stored(head: Head, width: int) -> dict[str, tuple[Any, str]]:
    """Returns what tensors tell of a DSpark head, by field, and what tells it."""
    tensors, table, name = head.tensors, f"{MARKOV}markov_w1.weight", f"{CONFIDENCE}weight"
    has_confidence = name in tensors
    found: dict[str, tuple[Any, str]] = {"markov_rank": (0, f"there is no tensor {table!r}")}
    if table in tensors:
        rank = head_files.shape_of(head, table)[1]
        has = lambda kind: f"{MARKOV}{dspark.MATRICES[kind]}.weight" in tensors
        kind = next(filter(has, dspark.MATRICES), dspark.VANILLA)
        found["markov_rank"] = rank, f"{table} has {rank} columns"
        found["markov_kind"] = kind, f"the tensors are of a {kind} head"
    found["has_confidence"] = (
        has_confidence,
        f"there is {'a' if has_confidence else 'no'} tensor {name!r}",
    )
    if has_confidence:
        shape = head_files.shape_of(head, name)
        found["confidence_reads_token"] = shape[1] != width, f"{name} is {list(shape)}"
    return found
