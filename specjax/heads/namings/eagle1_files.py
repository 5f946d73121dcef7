"""EAGLE heads in folders, whose weights are those of EAGLE-2 too.

Their config.json is that of a plain model, often with the class of one; tensors tell them apart.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection

from specjax.heads.equations import eagle
from specjax.heads.equations.eagle import FIRST_PREFIX, EagleConfig
from specjax.heads.namings import head_files, head_layers, head_writing, vllm_files
from specjax.heads.namings.head_files import Head, Parsed, Reader
from specjax.heads.namings.head_writing import Kind, Naming, OfTarget
from specjax.models import two_places
from specjax.models.base import Json, ModelConfig

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


def _parse(head: Head, target: ModelConfig) -> Parsed:
    notes = ["reads the last hidden state of the target, after the final norm"]
    is_of_vllm = head.raw.get("model_type") == two_places.EAGLE_TYPE
    if is_of_vllm:
        head, left_out = vllm_files.plain_eagle(head)
        head = vllm_files.with_offsets(head, target, ("lm_head.weight",))
        notes += [f"{', '.join(left_out)} are not used, as in vLLM"] if left_out else []
    tensors = head.tensors
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
    num_layers = head_layers.num_numbered_layers(tensors)
    layers, tables = head_layers.body_of(
        head, target, FIRST_PREFIX, num_layers, ties_head=False, is_whole=not is_of_vllm
    )
    fc, width = head_files.shape_of(head, "fc.weight"), layers.hidden_size
    if fc != (width, 2 * width):
        raise ValueError(
            f"fc.weight is {list(fc)}; expected {[width, 2 * width]}, for an embedding and one "
            "hidden state. Heads over several hidden states are EAGLE-3: their config.json says "
            "draft_vocab_size, or names the class LlamaForCausalLMEagle3."
        )
    config = EagleConfig(
        layers=layers,
        target_vocab_size=target.vocab_size,
        aux_layers=(target.num_layers,),
        fc_bias="fc.bias" in tensors,
        **tables,
    )
    return Parsed(head, config, eagle.weights_of(config), notes)


read_eagle = Reader("an EAGLE head", _parse)


def _raw(config: EagleConfig, target: OfTarget, class_name: str) -> Json:
    del target
    return head_writing.layers_json(config, "llama") | {
        "architectures": [class_name],
        "bias": config.fc_bias,  # for lack of it, some readers take true
        "attention_bias": False,
        "qkv_bias": config.layers.qkv_bias,
    }


_GIVEN = {
    "has_hidden_first": False,
    "maps_vocabulary": False,
    "layers.qk_norm": False,
    "layers.o_bias": False,
    "layers.mlp_bias": False,
    "layers.layer_windows": (),
}
# SGLang drops tables of such a head for the target's, and adds biases to all of attention.
_GIVEN_BY_SGLANG = {
    "has_embedding": False,
    "has_head": False,
    "layers.num_layers": 1,
    "layers.qkv_bias": False,
}

EAGLE = Kind(
    "eagle",
    "EAGLE",
    {
        "eagle": Naming(
            functools.partial(_raw, class_name="LlamaForCausalLM"),
            eagle.weights_of,
            ("vLLM",),
            given=_GIVEN,
        ),
        "sglang": Naming(
            functools.partial(_raw, class_name="LlamaForCausalLMEagle"),
            eagle.weights_of,
            ("SGLang",),
            given=_GIVEN | _GIVEN_BY_SGLANG,
        ),
    },
)
