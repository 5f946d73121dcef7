"""Layers for multi-token prediction (MTP), in a target's own folder or one of their own.

MiMo-7B has its layer among the target's tensors. Files of `speculators` hold the layer alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from specjax.heads.equations import eagle
from specjax.heads.equations.eagle import MTP_PREFIX, EagleConfig
from specjax.heads.namings import head_files, head_layers, head_writing
from specjax.heads.namings.head_files import NESTED, Head, Parsed, Reader
from specjax.heads.namings.head_writing import BIASES_OF_ALL, Kind, Naming, OfTarget
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


def _is_alone(head: Head) -> bool:
    return head.raw.get("speculators_model_type") is not None


def _without_model(head: Head) -> Head:
    """Returns the files without the target's own tensors."""
    if _is_alone(head):
        return head
    own = {name: tensor for name, tensor in head.tensors.items() if METHOD in name}
    return head._replace(tensors=own)


def _parse(head: Head, target: ModelConfig) -> Parsed:
    is_alone = _is_alone(head)
    _check_count(head)
    if is_alone:
        _check_dense(head)
    require(head.own, "use_sliding_window", (False, None), False)
    prefix = MTP_PREFIX if is_alone else OWN_PREFIX
    layers, tables = head_layers.body_of(head, target, prefix, 1, ties_head=False, is_whole=True)
    config = EagleConfig(
        layers=layers,
        target_vocab_size=target.vocab_size,
        aux_layers=(before_final_norm(target.num_layers),),
        is_mtp=True,
        has_hidden_first=not is_alone,
        **tables,
    )
    order = "hidden state first, as MiMo does"
    if is_alone:
        order = "embedding first, as speculators 0.6 and later do"
    hidden = "reads the last hidden state of the target, before the final norm"
    leaves = eagle.weights_of(config, prefix)
    return Parsed(head, config, leaves, (hidden, f"projects the {order}"))


read_mtp = Reader("an MTP layer", _parse, prepare=_without_model)


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


def _raw(config: EagleConfig, target: OfTarget) -> Json:
    layers = head_writing.layers_json(config, "qwen3" if config.layers.qk_norm else "llama")
    own = {"num_nextn_predict_layers": 1}
    return head_writing.speculators_json(METHOD, "MTPDraftModel", 1, target, own, layers)


MTP = Kind(
    METHOD,
    "MTP",
    {
        "speculators": Naming(
            _raw,
            eagle.weights_of,
            (),
            given={
                "has_hidden_first": False,
                "fc_bias": False,
                "layers.layer_windows": (),
                **BIASES_OF_ALL,
                "layers.mlp_bias": False,
            },
            nested=NESTED,
        ),
    },
)
