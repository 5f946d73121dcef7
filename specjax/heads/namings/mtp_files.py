"""Reads layers for multi-token prediction (MTP), from a target's own folder or one of their own.

MiMo-7B has its layer among the target's tensors. Files of `speculators` hold the layer alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from jax.typing import DTypeLike

from specjax.heads.equations import eagle
from specjax.heads.equations.eagle import MTP_PREFIX, EagleConfig
from specjax.heads.namings import head_files
from specjax.heads.namings.head_files import FoundHead, Head
from specjax.models.base import Json, ModelConfig, before_final_norm
from specjax.models.config_values import require, shown, size
from specjax.models.hf_config import read_config

METHOD = "mtp"
OWN_PREFIX = f"model.{MTP_PREFIX}"
_OWN_LAYERS = OWN_PREFIX.removesuffix("0.")
_NUMBER = re.compile(r"mtp_layers\.(\d{1,6})\.")
_DENSE = ("llama", "qwen2", "qwen3")  # layers of `speculators`
# Names of tensors, and whose they are.
_OTHERS = {
    r"\.(eh_proj|enorm|hnorm)\.": "DeepSeek and GLM",
    r"^(model\.)?mtp\.(fc|pre_fc_norm_\w+|norm|layers\.\d+)\.": "Qwen3-Next, Qwen3.5 and MiMo-V2",
    r"^(model\.)?(pre|post)_projection\.": "Gemma 4",
}


def is_in_model(folder: Path) -> bool:
    """Returns whether a folder with an MTP layer holds a model, too, of which it is a part."""
    try:
        read_config(folder)
    except ValueError:
        return False
    return True


def is_mtp(raw: Json, tensors: Collection[str]) -> bool:
    """Returns whether a folder holds an MTP layer that is read, alone or within its target.

    Args:
      raw: its config.json.
      tensors: the names in its files; none if they cannot be read.
    """
    if (kind := raw.get("speculators_model_type")) is not None:
        return kind == METHOD
    is_mimo = raw.get("model_type") == "mimo" or "MiMoForCausalLM" in head_files.classes_of(raw)
    return is_mimo and any(name.startswith(_OWN_LAYERS) for name in tensors)


def other_naming(tensors: Collection[str]) -> str | None:
    """Returns whose MTP layers a folder holds, if they are of a naming that is not read."""
    for pattern, family in _OTHERS.items():
        if any(re.search(pattern, name) for name in tensors):
            return family
    return None


def read_mtp(
    folder: Path,
    target: ModelConfig,
    dtype: DTypeLike | None,
    aux_layer_ids: Sequence[int] | None = None,
) -> FoundHead:
    """Returns the MTP layer in a folder, for a target; of the target's own tensors none is read.

    Args:
      dtype: of its weights; None: no weights are read.
      aux_layer_ids: None, as such a layer reads what the target's final norm reads.

    Raises:
      FileNotFoundError: config.json or the weights are absent.
      ValueError: the layer is for another target, a tensor or key is missing, impossible, or
        unknown, or aux_layer_ids is given.
    """
    head = head_files.open_head(folder, "an MTP layer")
    is_alone = head.raw.get("speculators_model_type") is not None
    prefix = MTP_PREFIX if is_alone else OWN_PREFIX
    if not is_alone:
        own = {name: tensor for name, tensor in head.tensors.items() if METHOD in name}
        head = head._replace(tensors=own)
    with head_files.naming(head):
        head_files.check_reads_last(aux_layer_ids)
        _check_count(head)
        if is_alone:
            _check_dense(head)
        config = _parse(head, target, prefix)
    config = dataclasses.replace(config, has_hidden_first=not is_alone)
    params = head_files.read_weights(head, config, eagle.weights_of(config, prefix), dtype)
    order = "hidden state first, as MiMo does"
    if is_alone:
        order = "embedding first, as speculators 0.6 and later do"
    hidden = "reads the last hidden state of the target, before the final norm"
    return FoundHead(config, params, (hidden, f"projects the {order}"))


def _parse(head: Head, target: ModelConfig, prefix: str) -> EagleConfig:
    own = head.own
    require(own, "hidden_act", ("silu", "swish"), "silu")
    require(own, "use_sliding_window", (False, None), False)
    head_files.check_sees_all(own)
    width = size(own, "hidden_size")
    head_files.check_target(width, size(own, "vocab_size", target.vocab_size), target)
    tables = head_files.whole_tables_of(head, target, width, "an MTP layer")
    return EagleConfig(
        layers=head_files.layers_of(head, prefix, num_layers=1, width=width, vocab=tables.vocab),
        target_vocab_size=target.vocab_size,
        aux_layers=(before_final_norm(target.num_layers),),
        is_mtp=True,
        has_embedding=tables.has_embedding,
        has_head=tables.has_head,
    )


def _check_count(head: Head) -> None:
    count = size(head.raw, "num_nextn_predict_layers", 1)
    found = (_NUMBER.search(name) for name in head.tensors)
    numbers = {int(match[1]) for match in found if match}
    if count != 1 or numbers - {0}:
        raise ValueError(
            f"there are {max(count, len(numbers))} MTP layers, and one is supported, which drafts "
            "any number of tokens."
        )


def _check_dense(head: Head) -> None:
    """Raises ValueError for layers of `speculators` with other equations."""
    kind = head.own.get("model_type")
    if kind not in _DENSE:
        raise ValueError(
            f"model_type={shown(kind)} of transformer_layer_config: MTP layers of experts, of "
            f"hybrids and of other norms are not supported; expected {', '.join(_DENSE)}."
        )
    if "FastMTPSpeculator" in head_files.classes_of(head.raw):
        raise ValueError(
            "FastMTPSpeculator, of versions of speculators under development, has other "
            "equations; convert the layer with speculators 0.6 or later."
        )
