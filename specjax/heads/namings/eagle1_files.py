"""Reads a folder with an EAGLE head, whose weights are those of EAGLE-2 too.

Its config.json is that of a plain model, often with the class of one; its tensors tell it apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from jax.typing import DTypeLike

from specjax.heads.equations import eagle
from specjax.heads.equations.eagle import FIRST_PREFIX, EagleConfig
from specjax.heads.namings import head_files, vllm_files
from specjax.heads.namings.head_files import FoundHead, Head
from specjax.models import two_places
from specjax.models.base import Json, ModelConfig
from specjax.models.config_values import require, size

_CLASS = re.compile(r"eagle(?!-?3)", re.IGNORECASE)


def is_eagle(raw: Json, tensors: Collection[str]) -> bool:
    """Returns whether a folder holds an EAGLE head.

    Args:
      raw: its config.json.
      tensors: the names in its files; none if they cannot be read.
    """
    if any(_CLASS.search(one) for one in (*head_files.classes_of(raw), str(raw.get("model_type")))):
        return True
    first = f"{FIRST_PREFIX}self_attn.q_proj.weight"
    return raw.get("speculators_model_type") is None and {"fc.weight", first} <= {*tensors}


def read_eagle(
    folder: Path,
    target: ModelConfig,
    dtype: DTypeLike | None,
    aux_layer_ids: Sequence[int] | None = None,
) -> FoundHead:
    """Returns the head in a folder, for a target.

    Args:
      dtype: of its weights; None: no weights are read.
      aux_layer_ids: None, as such a head reads what the target's head reads.

    Raises:
      FileNotFoundError: config.json or the weights are absent.
      ValueError: the head is for another target, a tensor or key is missing, impossible, or
        unknown, or aux_layer_ids is given.
    """
    head = head_files.open_head(folder, "an EAGLE head")
    with head_files.naming(head):
        head, notes = vllm_files.plain_eagle(head)
        if head.raw.get("model_type") == two_places.EAGLE_TYPE:
            head = vllm_files.with_offsets(head, target, ("lm_head.weight",))
        config = _parse(head, target, aux_layer_ids)
    leaves = eagle.weights_of(config)
    note = "reads the last hidden state of the target, after the final norm"
    params = head_files.read_weights(head, config, leaves, dtype)
    return FoundHead(config, params, (note, *notes))


def _parse(head: Head, target: ModelConfig, aux_layer_ids: Sequence[int] | None) -> EagleConfig:
    own, tensors = head.own, head.tensors
    head_files.check_reads_last(aux_layer_ids)
    if "mask_hidden" in tensors or head.is_of_speculators:
        raise ValueError(
            "P-EAGLE over one hidden state, and EAGLE as `speculators` stores it, are not "
            "supported; give a head of the naming of EAGLE, or one of EAGLE-3 or P-EAGLE."
        )
    if f"{FIRST_PREFIX}input_layernorm.weight" in tensors:
        raise ValueError(
            f"there is a tensor '{FIRST_PREFIX}input_layernorm.weight', and the first layer of "
            "EAGLE has no such norm; use the file as it was published."
        )
    require(own, "hidden_act", ("silu", "swish"), "silu")
    head_files.check_sees_all(own)
    width = size(own, "hidden_size")
    head_files.check_target(width, size(own, "vocab_size", target.vocab_size), target)
    fc = head_files.shape_of(head, "fc.weight")
    if fc != (width, 2 * width):
        raise ValueError(
            f"fc.weight is {list(fc)}; expected {[width, 2 * width]}, for an embedding and one "
            "hidden state. Heads over several hidden states are EAGLE-3: their config.json says "
            "draft_vocab_size, or names the class LlamaForCausalLMEagle3."
        )
    if head.raw.get("model_type") == two_places.EAGLE_TYPE:
        tables = head_files.tables_of(head, target, width, ties_head=False)
    else:
        tables = head_files.whole_tables_of(head, target, width, "EAGLE")
    layers = head_files.layers_of(
        head,
        FIRST_PREFIX,
        num_layers=head_files.num_numbered_layers(tensors),
        width=width,
        vocab=tables.vocab,
    )
    return EagleConfig(
        layers=layers,
        target_vocab_size=target.vocab_size,
        aux_layers=(target.num_layers,),
        fc_bias="fc.bias" in tensors,
        has_embedding=tables.has_embedding,
        has_head=tables.has_head,
        maps_vocabulary=tables.maps_vocabulary,
    )
