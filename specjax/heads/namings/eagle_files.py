"""Reads a folder with an EAGLE-3 or P-EAGLE head: of the naming of EAGLE and SpecForge, or of
`speculators`.

Files differ in names, and say little of what their reader must know: which hidden states of the
target are captured is stored in four ways or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from specjax.heads.equations import eagle3
from specjax.heads.equations.eagle3 import FLAT_PREFIX, MASK_HIDDEN, NUMBERED_PREFIX, Eagle3Config
from specjax.heads.namings import head_files
from specjax.heads.namings.head_files import FoundHead, Head, Tensors
from specjax.models import hf_config
from specjax.models.base import Json, ModelConfig
from specjax.models.config_values import (
    flag,
    is_int,
    optional_number,
    require,
    shown,
    size,
    token_id,
)

# In names of `architectures`, and of the key speculators_model_type.
KIND, PARALLEL_KIND = "eagle3", "peagle"
# Names of the mask token of P-EAGLE: that of training libraries, and those that vLLM reads.
MASK_KEYS = ("mask_token_id", *hf_config.MASK_KEYS)
AUX_KEY, OUTPUTS_KEY = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"


def is_eagle3(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds an EAGLE-3 or P-EAGLE head.

    Some have the class of a whole model, and only draft_vocab_size tells them from one.
    """
    if (kind := raw.get("speculators_model_type")) is not None:
        return kind in (KIND, PARALLEL_KIND)
    names = " ".join(map(str, head_files.classes_of(raw))).lower()
    return KIND in names or PARALLEL_KIND in names or "draft_vocab_size" in raw


def read_eagle3(
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
    head = _with_flat_mask(head_files.open_head(folder, "an EAGLE-3 head"))
    with head_files.naming(head):
        config, notes = _parse(head, target, aux_layer_ids)
    leaves = eagle3.weights_of(config, _prefix(head.tensors))
    return FoundHead(config, head_files.read_weights(head, config, leaves, dtype), tuple(notes))


def _parse(
    head: Head, target: ModelConfig, aux_layer_ids: Sequence[int] | None
) -> tuple[Eagle3Config, list[str]]:
    raw, own, tensors = head.raw, head.own, head.tensors
    require(own, "hidden_act", ("silu", "swish"), "silu")
    if optional_number(raw, "logit_scale") not in (None, 1.0):
        raise ValueError(f"logit_scale={shown(raw['logit_scale'])} is not supported; expected 1.")
    _check_norms(raw, tensors)
    head_files.check_sees_all(own)
    notes: list[str] = []
    width = size(own, "hidden_size")
    _check_not_over_one_state(head, width)
    head_files.check_target(
        size(raw, "target_hidden_size", target.hidden_size),
        size(own, "vocab_size", target.vocab_size),
        target,
    )
    tables = head_files.tables_of(head, target, width)
    prefix = _prefix(tensors)
    layers = head_files.layers_of(
        head,
        prefix,
        num_layers=head_files.num_numbered_layers(
            tensors, starts=1 if prefix == FLAT_PREFIX else 0
        ),
        width=width,
        vocab=tables.vocab,
    )
    ids, source, are_outputs = _aux_ids(raw, target.num_layers, aux_layer_ids)
    aux, note = head_files.captured_layers(head, target, ids, source, are_outputs=are_outputs)
    notes.append(note)
    mask = _mask_token_id(head, target)
    if mask is not None:
        notes.append(f"P-EAGLE: drafts all tokens in one pass, with token {mask} as their mask")
    # vLLM's reader of such files takes true; the library that writes them writes it always.
    default = head.is_of_speculators
    if raw.get("norm_before_residual") is None and default:
        notes.append("adds to the normed feature, for lack of norm_before_residual in config.json")
    return (
        Eagle3Config(
            layers=layers,
            target_hidden_size=target.hidden_size,
            target_vocab_size=target.vocab_size,
            aux_layers=aux,
            norm_before_fc="input_norm.weight" in tensors,
            has_fc_norms="fc_norm.0.weight" in tensors,
            fc_bias="fc.bias" in tensors,
            norm_before_residual=flag(raw, "norm_before_residual", default),
            norm_output=flag(raw, "norm_output", False),
            has_embedding=tables.has_embedding,
            has_head=tables.has_head,
            maps_vocabulary=tables.maps_vocabulary,
            mask_token_id=mask,
        ),
        notes,
    )


def _with_flat_mask(head: Head) -> Head:
    """Returns a head whose mask state is a vector; files have it as [1, 1, width] or [1, width]."""
    mask = head.tensors.get(MASK_HIDDEN)
    if mask is None:
        return head
    if any(size != 1 for size in mask.shape[:-1]):
        raise ValueError(
            f"{head.path.parent}: {MASK_HIDDEN} is {list(mask.shape)}; expected one state, "
            "[1, 1, width]."
        )
    tensors = {**head.tensors, MASK_HIDDEN: mask.reshape(-1)}
    return head._replace(kind="a P-EAGLE head", tensors=tensors)


def _mask_token_id(head: Head, target: ModelConfig) -> int | None:
    """Returns the mask token of P-EAGLE; None: the head drafts token by token.

    Raises:
      ValueError: config.json and the tensors disagree, or the token is unclear or none of the
        target's.
    """
    raw = head.raw
    said = {key: token_id(key, raw.get(key), target.vocab_size) for key in MASK_KEYS}
    said = {key: token for key, token in said.items() if token is not None}
    has_mask = MASK_HIDDEN in head.tensors
    kinds = (*head_files.classes_of(raw), raw.get("speculators_model_type"))
    is_said = any(PARALLEL_KIND in str(kind).lower() for kind in kinds)
    if not has_mask:
        if said or is_said or flag(raw, "parallel_drafting", False):
            raise ValueError(
                f"it describes P-EAGLE, and there is no tensor {MASK_HIDDEN!r}; use both files as "
                "they were published."
            )
        return None
    if not flag(raw, "parallel_drafting", True):
        raise ValueError(
            f"parallel_drafting=false, and there is a tensor {MASK_HIDDEN!r}, of P-EAGLE; use both "
            "files as they were published."
        )
    if len({*said.values()}) != 1:
        raise ValueError(
            f"the mask token is {shown(said) if said else 'missing'}; add it as {MASK_KEYS[0]!r}, "
            "the token that the head was trained with."
        )
    return next(iter(said.values()))


def _check_not_over_one_state(head: Head, width: int) -> None:
    """Raises ValueError where masks and fc are those of a head with the equations of EAGLE."""
    mask, fc = (head.tensors.get(name) for name in (MASK_HIDDEN, "fc.weight"))
    if mask is None or fc is None:
        return
    if mask.shape == (width,) and fc.shape == (width, 2 * width):
        raise ValueError(
            "P-EAGLE over one hidden state (fc.weight reads an embedding and a state) is not "
            "supported; give a head over several hidden states, or one of EAGLE."
        )


def _check_norms(raw: Json, tensors: Tensors) -> None:
    """Raises ValueError where config.json and the tensors disagree about norms before fc."""
    stored = {
        "norm_before_fc": "input_norm.weight" in tensors,
        "fc_norm": "fc_norm.0.weight" in tensors,
    }
    for key, is_there in stored.items():
        if flag(raw, key, is_there) and not is_there:
            raise ValueError(f"{key}=true, and its tensor is missing; use the file as published.")
    if all(stored.values()):
        raise ValueError("tensors input_norm.* and fc_norm.* exclude each other; expected one.")


def _aux_ids(raw: Json, depth: int, aux_layer_ids: Sequence[int] | None) -> tuple[Any, str, bool]:
    """Returns the layers that are captured, where that is said, and whether outputs are named.

    Published files say them as inputs of layers at the top, as outputs of layers inside
    `eagle_config` or, as DeepSpec does, at the top, or not at all: then they are 2, the middle one,
    and the last but two.
    """
    nested = raw.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if aux_layer_ids is not None:
        return aux_layer_ids, "aux_layer_ids", False
    places = (
        (raw.get(AUX_KEY), AUX_KEY, False),
        (nested.get(AUX_KEY), f"eagle_config.{AUX_KEY}", True),
        (raw.get(OUTPUTS_KEY), OUTPUTS_KEY, True),
    )
    said = [place for place in places if place[0] is not None]
    if not said:
        default = (2, depth // 2, depth - 3)
        return default, "the default, for lack of a word in config.json", False
    for ids, key, names_outputs in said[1:]:
        if _inputs(ids, names_outputs) != _inputs(said[0][0], said[0][2]):
            raise ValueError(
                f"{said[0][1]}={said[0][0]!r:.100} and {key}={ids!r:.100} capture different "
                "layers; give aux_layer_ids=[...] (inputs of layers, from 0), or use the file as "
                "published."
            )
    return said[0]


def _inputs(ids: Any, names_outputs: bool) -> Any:
    """Returns ids of captured layers as inputs of layers; what is no list of ints as it is."""
    if not isinstance(ids, list) or not all(map(is_int, ids)):
        return ids
    return [number + names_outputs for number in ids]


def _prefix(tensors: Tensors) -> str:
    is_flat = any(name.startswith(FLAT_PREFIX) for name in tensors)
    return FLAT_PREFIX if is_flat else NUMBERED_PREFIX
