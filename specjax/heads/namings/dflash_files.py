"""Reads a folder with a DFlash, DFlash2 or DSpark head, of any library that writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from specjax.config.speculation import MAX_DEPTH
from specjax.heads.equations import dflash, dflash2, dspark
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.dspark import CONFIDENCE, MARKOV
from specjax.heads.namings import dflash2_files, head_files
from specjax.heads.namings.dflash2_files import is_dflash2
from specjax.heads.namings.head_files import FoundHead, Head
from specjax.models.base import Json, ModelConfig
from specjax.models.config_values import (
    MAX_LAYERS,
    flag,
    layer_windows,
    require,
    shown,
    size,
    token_id,
)

DFLASH_CLASSES = "DFlashDraftModel", "DFlashSpeculator"
DSPARK = "dspark"  # in names of classes, of which there are several
OWN_KEY = "dflash_config"
AUX_KEY, OUTPUTS_KEY = "aux_hidden_state_layer_ids", "target_layer_ids"
_PROJECTOR = "projector_type"  # the kind of head, as SpecForge names it
_KNOWN = (
    "attention_sink_bias",
    "block_size",
    "causal",
    "mask_token_id",
    _PROJECTOR,
    OUTPUTS_KEY,
    "sample_from_anchor",
    "swa_window_size",
    "use_swa",
)
# Of DSpark: at the top, or as SpecForge has them, which adds settings of training.
_MARKOV_KEYS = (
    "confidence_head_with_markov",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
)
# At the top or in OWN_KEY, of every kind.
_BLOCK_KEYS = "block_size", "mask_token_id", "sample_from_anchor"
_KNOWN_OF_DSPARK = *_MARKOV_KEYS, "attention_mode", "confidence_head_alpha"
# Parts of a tensor's name, and the kind of head that has them.
_PARTS_OF_DSPARK = dict.fromkeys((MARKOV, "confidence_head."), "DSpark")
_PARTS_OF_DFLASH2 = dict.fromkeys((*dflash2.CONVOLUTIONS, dflash2.CANDIDATES), "DFlash2")
_OTHERS = {
    "correction_head.": "DSpark with a correction head",
    "logit_head.": "DSpark of an earlier naming",
}


def is_dflash(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds a DFlash head."""
    return (
        raw.get("speculators_model_type") == "dflash"
        or is_dflash2(raw)
        or any(one in DFLASH_CLASSES for one in head_files.classes_of(raw))
    )


def is_dspark(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds a DSpark head."""
    return raw.get("speculators_model_type") == DSPARK or any(
        DSPARK in str(one).lower() for one in head_files.classes_of(raw)
    )


def read_dflash(
    folder: Path,
    target: ModelConfig,
    dtype: DTypeLike | None,
    aux_layer_ids: Sequence[int] | None = None,
) -> FoundHead:
    """Returns the head in a folder, for a target.

    Args:
      dtype: of its weights; None: no weights are read.
      aux_layer_ids: layers of the target whose inputs are captured, whatever the file says.

    Raises:
      FileNotFoundError: config.json or the weights are absent.
      ValueError: the head is for another target, or a tensor or key is missing, impossible, or
        unknown.
    """
    head = head_files.open_head(folder, "a DFlash head")
    if is_dspark(head.raw):
        head = head._replace(kind="a DSpark head")
    if is_dflash2(head.raw):
        head = head._replace(kind="a DFlash2 head")
    with head_files.naming(head):
        config, notes = _parse(head, target, aux_layer_ids)
    leaves = dflash.weights_of(config)
    return FoundHead(config, head_files.read_weights(head, config, leaves, dtype), tuple(notes))


def _parse(
    head: Head, target: ModelConfig, aux_layer_ids: Sequence[int] | None
) -> tuple[DFlashConfig, list[str]]:
    raw, own = head.raw, head.own
    _check_kind(head)
    said, has_markov = _said(raw), is_dspark(raw)
    require(own, "hidden_act", ("silu", "swish"), "silu")
    num_layers = size(own, "num_hidden_layers", most=MAX_LAYERS)
    width = size(own, "hidden_size")
    head_files.check_target(size(raw, "target_hidden_size", width), size(own, "vocab_size"), target)
    if (depth := raw.get("num_target_layers")) not in (None, target.num_layers):
        raise ValueError(
            f"num_target_layers={shown(depth)}, and this target has {target.num_layers} layers. "
            "Give the head that was trained for it."
        )
    tables = head_files.tables_of(head, target, width)
    windows = layer_windows(own, ["full_attention"] * num_layers)
    causal_layers = _causal_layers(raw, said, windows or (None,) * num_layers)
    layers = head_files.layers_of(
        head,
        "layers.0.",
        num_layers=num_layers,
        width=width,
        vocab=tables.vocab,
        layer_windows=windows,
    )
    ids, source, are_outputs = _aux_ids(raw, said, target.num_layers, num_layers, aux_layer_ids)
    aux, note = head_files.captured_layers(head, target, ids, source, are_outputs=are_outputs)
    block = _values(raw, said, _BLOCK_KEYS)
    from_anchor = flag(block, "sample_from_anchor", has_markov)
    if block.get("mask_token_id") is None:
        raise ValueError(f"mask_token_id is missing, at the top and in {OWN_KEY}; add it.")
    mask_token_id = token_id("mask_token_id", block["mask_token_id"], target.vocab_size)
    assert mask_token_id is not None
    block_size = size(
        block, "block_size", least=1 if from_anchor else 2, most=MAX_DEPTH + (not from_anchor)
    )
    _check_windows(windows, causal_layers, block_size)
    more = {}
    if has_markov:
        more = _of_dspark(head, _values(raw, said, _MARKOV_KEYS), from_anchor, width)
    elif is_dflash2(raw):
        more = dflash2_files.own_fields(head, said, target, tables, from_anchor, block_size)
    config = DFlashConfig(
        layers=layers,
        target_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=aux,
        block_size=block_size,
        mask_token_id=mask_token_id,
        causal_layers=causal_layers,
        samples_from_anchor=from_anchor,
        has_embedding=tables.has_embedding,
        has_head=tables.has_head,
        maps_vocabulary=tables.maps_vocabulary,
        **more,
    )
    masks = f"drafts blocks of {config.block_size} with token {mask_token_id} as their mask"
    notes = [note, masks]
    if has_markov and not config.markov_rank:
        notes.append("has no Markov head: each token is drafted as DFlash does")
    if config.has_confidence:
        notes.append(
            "has a confidence head, which ranks drafts over rows under max_drafts_per_step"
        )
    return config, notes


def _causal_layers(raw: Json, said: Json, windows: Sequence[int | None]) -> tuple[bool, ...]:
    """Returns for each layer whether a token of a block sees only those before it.

    What is_causal says holds for all layers, else `dflash_config.causal`, as servers have it.
    Otherwise it is those with a window, but where sliding_window_non_causal says that they are not:
    DFlash2 of `speculators` has that as its default.
    """
    for holder, key in ((raw, "is_causal"), (said, "causal")):
        if holder.get(key) is not None:
            return (flag(holder, key, False),) * len(windows)
    is_of_dflash2 = raw.get("speculators_model_type") == dflash2_files.NAME
    in_windows = not flag(raw, "sliding_window_non_causal", is_of_dflash2)
    return tuple(in_windows and window is not None for window in windows)


def _check_windows(
    windows: Sequence[int | None], causal_layers: Sequence[bool], block_size: int
) -> None:
    """Raises ValueError for a window that may hide a part of a block that sees itself whole."""
    most = 32 * math.ceil(block_size / 32)
    for window, is_causal in zip(windows, causal_layers):
        if window is not None and not is_causal and window <= most:
            raise ValueError(
                f"sliding_window={window} of layers that are not causal is not supported with "
                f"{block_size=}; expected more than {most}."
            )


def _values(raw: Json, said: Json, keys: Sequence[str]) -> Json:
    """Returns what config.json says of some keys, at the top or below it.

    A key that is null is kept if it has no other value.

    Raises:
      ValueError: both say something, and not the same.
    """
    found = {}
    for key in keys:
        values = [each[key] for each in (raw, said) if each.get(key) is not None]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"{key}={shown(values[0])}, and {OWN_KEY}.{key}={shown(values[1])}; they must "
                "agree: use the file as it was published."
            )
        if values or key in raw or key in said:
            found[key] = values[0] if values else None
    return found


def _of_dspark(head: Head, raw: Json, from_anchor: bool, width: int) -> dict[str, Any]:
    """Returns what a DSpark head has besides a block, by the fields of DFlashConfig.

    Args:
      raw: from `_values`.

    Raises:
      ValueError: config.json and the tensors disagree, or this is not supported.
    """
    markov = _markov(head, raw, from_anchor)
    name = f"{CONFIDENCE}weight"
    has_confidence = name in head.tensors
    if flag(raw, "enable_confidence_head", has_confidence) != has_confidence:
        raise ValueError(
            f"enable_confidence_head={shown(not has_confidence)}, and there is "
            f"{'a' if has_confidence else 'no'} tensor {name!r}; use both files as they were "
            "published."
        )
    if not has_confidence:
        return markov
    reads_token = head_files.shape_of(head, name)[1] != width
    if flag(raw, "confidence_head_with_markov", reads_token) != reads_token:
        raise ValueError(
            f"confidence_head_with_markov={shown(not reads_token)}, and {name} is "
            f"{list(head.tensors[name].shape)}; use both files as they were published."
        )
    if reads_token and not markov["markov_rank"]:
        raise ValueError(f"{name} reads a token's embedding, and there is no Markov head.")
    return markov | {"has_confidence": True, "confidence_reads_token": reads_token}


def _markov(head: Head, raw: Json, from_anchor: bool) -> dict[str, Any]:
    """Returns width and kind of a Markov head, by their fields; the width is 0 where there is none.

    Args:
      raw: from `_values`.

    Raises:
      ValueError: config.json and the tensors disagree, or the head is recurrent and its training
        code and its publisher's drafter begin with different rows.
    """
    said = size(raw, "markov_rank", 0, least=0)
    name = f"{MARKOV}markov_w1.weight"
    stored = head_files.shape_of(head, name)[1] if said or name in head.tensors else 0
    if "markov_rank" in raw and said != stored:
        raise ValueError(
            f"markov_rank={shown(raw['markov_rank'])}, and {name} has {stored} columns; they must "
            "agree."
        )
    has = lambda kind: stored and f"{MARKOV}{dspark.MATRICES[kind]}.weight" in head.tensors
    kind = next(filter(has, dspark.MATRICES), dspark.VANILLA)
    if stored and (named := raw.get("markov_head_type") or kind) != kind:
        raise ValueError(
            f"markov_head_type={shown(named)}, and the tensors are of a {kind} head; they must "
            "agree: use both files as they were published."
        )
    if kind == dspark.RNN and not from_anchor:
        raise ValueError(
            "a recurrent Markov head with sample_from_anchor=false is not supported; training code "
            "differs in whether its state begins with the anchor."
        )
    return {"markov_rank": stored, "markov_kind": kind}


def _check_kind(head: Head) -> None:
    """Raises ValueError for heads that are more than their kind."""
    said, others = head.kind.removeprefix("a ").removesuffix(" head"), _OTHERS
    for parts in (_PARTS_OF_DSPARK, _PARTS_OF_DFLASH2):
        if said not in parts.values():
            others = others | parts
    for name in head.tensors:
        for part, kind in others.items():
            if part in name:
                raise ValueError(
                    f"tensor {name!r:.200} is of {kind}, which is not supported in a config.json "
                    f"of {said}."
                )


def _said(raw: Json) -> Json:
    """Returns `dflash_config`, {} where there is none."""
    said = raw.get(OWN_KEY)
    if said is None:
        return {}
    if not isinstance(said, dict):
        raise ValueError(f"{OWN_KEY}={shown(said)} must be an object.")
    of_kind = dflash2_files.KEYS if is_dflash2(raw) else ()
    known = (*_KNOWN, *(_KNOWN_OF_DSPARK if is_dspark(raw) else of_kind))
    if unknown := sorted(set(said) - set(known)):
        raise ValueError(
            f"{OWN_KEY} has the keys {shown(unknown)}, which are not supported; expected some of "
            f"{', '.join(known)}."
        )
    require(said, _PROJECTOR, (None, DSPARK if is_dspark(raw) else "dflash"), None)
    for key in ("use_swa", "attention_sink_bias"):
        if said.get(key):
            raise ValueError(f"{OWN_KEY}.{key}={shown(said[key])} is not supported; leave it out.")
    return said


def _aux_ids(
    raw: Json, said: Json, depth: int, num_layers: int, aux_layer_ids: Sequence[int] | None
) -> tuple[Any, str, bool]:
    """Returns the layers that are captured, where that is said, and whether outputs are named."""
    if aux_layer_ids is not None:
        return aux_layer_ids, "aux_layer_ids", False
    if raw.get(AUX_KEY) is not None:
        return raw[AUX_KEY], AUX_KEY, False
    if said.get(OUTPUTS_KEY) is not None:
        return said[OUTPUTS_KEY], f"{OWN_KEY}.{OUTPUTS_KEY}", True
    if raw.get(OUTPUTS_KEY) is not None:
        return raw[OUTPUTS_KEY], OUTPUTS_KEY, True
    # As the published code has it: evenly from the second layer to the last but two.
    first, last = 1, depth - 3
    steps = (
        [depth // 2]
        if num_layers == 1
        else [
            round(first + index * (last - first) / (num_layers - 1)) for index in range(num_layers)
        ]
    )
    return steps, "the default, for lack of a word in config.json", True
