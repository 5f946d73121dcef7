"""Reads a folder with an EAGLE-3 head: of the EAGLE and SpecForge naming, and of `speculators`.

Files differ in names, and say little of what their reader must know: which hidden states of the
target are captured is stored in three ways or not at all. Where tensors tell a size or a flag,
they decide. A wrong reading is silent, since verification corrects every draft: so every tensor and
every key is accounted for, or the folder is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specjax.models import eagle3, weights
from specjax.models.base import Json, ModelConfig, Params
from specjax.models.config_values import (
    MAX_LAYERS,
    flag,
    is_int,
    number,
    optional_number,
    require,
    rope,
    shown,
    size,
)
from specjax.models.eagle3 import FLAT_PREFIX, NUMBERED_PREFIX, Eagle3Config
from specjax.models.safetensors import open_folder
from specjax.runtime.model_files import find_file, read_json

Tensors = Mapping[str, np.ndarray]

# Names in `architectures`, and of the key speculators_model_type.
CLASSES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
KIND = "eagle3"
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
# Tensors of training, and tables that are computed.
_IDLE = re.compile(r"(^t2d$|^verifier_(norm|lm_head)\.weight$|rotary_emb\.\w+$)")
_LAYER = re.compile(r"^layers\.(\d+)\.")


class FoundHead(NamedTuple):
    """A head that was read, and what was decided for lack of a clear word in the file."""

    config: Eagle3Config
    params: Params
    notes: tuple[str, ...]


def is_eagle3(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds an EAGLE-3 head."""
    classes = raw.get("architectures")
    classes = classes if isinstance(classes, list) else []
    return raw.get("speculators_model_type") == KIND or any(one in CLASSES for one in classes)


def read_eagle3(
    folder: Path,
    target: ModelConfig,
    dtype: DTypeLike,
    aux_layer_ids: Sequence[int] | None = None,
) -> FoundHead:
    """Returns the head in a folder, for a target.

    Args:
      dtype: of its weights.
      aux_layer_ids: layers of the target whose inputs are captured, whatever the file says.

    Raises:
      FileNotFoundError: config.json or the weights are absent.
      ValueError: the head is for another target, or a tensor or key is missing, impossible, or
        unknown.
    """
    path = find_file(folder, "config.json")
    if path is None:
        raise FileNotFoundError(f"{folder} holds no config.json; give the folder of a drafter.")
    raw, tensors = read_json(path), open_folder(folder)
    try:
        config, notes = _parse(raw, tensors, target, aux_layer_ids)
    except KeyError as error:
        raise ValueError(
            f"{path}: key {error.args[0]!r} is missing, which every EAGLE-3 head has; add it."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error!s:.1000}") from error
    prefix = FLAT_PREFIX if _is_flat(tensors) else NUMBERED_PREFIX
    leaves = eagle3.weights_of(config, prefix)
    _check(leaves, tensors, config, folder)
    read = lambda weight: jax.device_put(weight.source.read(tensors, jnp.dtype(dtype)))
    params = weights.map_weights(read, leaves)
    if config.maps_vocabulary:
        params["target_ids"] = jax.device_put(_target_ids(tensors["d2t"], config, folder))
    return FoundHead(config, params, tuple(notes))


def _parse(
    raw: Json, tensors: Tensors, target: ModelConfig, aux_layer_ids: Sequence[int] | None
) -> tuple[Eagle3Config, list[str]]:
    is_nested = isinstance(raw.get("transformer_layer_config"), dict)
    own = raw["transformer_layer_config"] if is_nested else raw
    require(own, "hidden_act", ("silu", "swish"), "silu")
    if optional_number(raw, "logit_scale") not in (None, 1.0):
        raise ValueError(f"logit_scale={shown(raw['logit_scale'])} is not supported; expected 1.")
    if "mask_hidden" in tensors:
        raise ValueError("tensor 'mask_hidden' is of P-EAGLE, which is not supported.")
    notes: list[str] = []
    width = size(own, "hidden_size")
    target_width = size(raw, "target_hidden_size", target.hidden_size)
    said_vocab = size(own, "vocab_size", target.vocab_size)
    if target_width != target.hidden_size or said_vocab != target.vocab_size:
        raise ValueError(
            f"the head is for a target of {target_width} hidden numbers and {said_vocab} tokens; "
            f"this target has {target.hidden_size} and {target.vocab_size}. Give the head that was "
            "trained for it."
        )
    has_head = "lm_head.weight" in tensors
    vocab = tensors["lm_head.weight"].shape[0] if has_head else target.vocab_size
    draft_vocab = size(raw, "draft_vocab_size", vocab)
    if draft_vocab != vocab:
        raise ValueError(
            f"draft_vocab_size={draft_vocab}, and "
            + (f"lm_head.weight has {vocab} rows" if has_head else "there is no lm_head.weight")
            + "; they must agree."
        )
    maps = "d2t" in tensors and vocab != target.vocab_size
    if vocab < target.vocab_size and not maps:
        raise ValueError(
            f"the head says {vocab} of {target.vocab_size} tokens, and no tensor 'd2t' says which; "
            "use the file as it was published."
        )
    layers = _layers(own, tensors, width, vocab)
    has_embedding = "embed_tokens.weight" in tensors
    if width != target.hidden_size and not (has_embedding and has_head):
        raise ValueError(
            f"hidden_size={width} is not the target's {target.hidden_size}, so that it cannot use "
            "the target's embedding and head; expected embed_tokens.weight and lm_head.weight."
        )
    aux = _aux_layers(raw, tensors, target, aux_layer_ids, notes)
    # vLLM's reader of such files takes true; the library that writes them writes it always.
    default = is_nested
    if raw.get("norm_before_residual") is None and is_nested:
        notes.append("norm_before_residual is not in config.json; taken to be true")
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
            has_embedding=has_embedding,
            has_head=has_head,
            maps_vocabulary=maps,
        ),
        notes,
    )


def _layers(own: Json, tensors: Tensors, width: int, vocab: int) -> ModelConfig:
    """Returns the sizes of the head's layers; tensors decide where they tell."""
    prefix = FLAT_PREFIX if _is_flat(tensors) else NUMBERED_PREFIX
    numbers = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    num_layers = max(1, len(numbers | {0}) if _is_flat(tensors) else len(numbers))
    if num_layers > MAX_LAYERS:
        raise ValueError(f"{num_layers} layers are more than {MAX_LAYERS}.")
    num_heads = size(own, "num_attention_heads")
    num_kv_heads = size(own, "num_key_value_heads", num_heads)
    q_name = f"{prefix}self_attn.q_proj.weight"
    if q_name not in tensors:
        raise ValueError(
            f"there is no tensor {q_name!r}; expected an EAGLE-3 head, whose first layer is "
            f"{FLAT_PREFIX}* or {NUMBERED_PREFIX}*."
        )
    head_dim = tensors[q_name].shape[0] // num_heads
    if num_heads % num_kv_heads or head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"{num_heads=} must be a multiple of {num_kv_heads=}, and {head_dim=} even."
        )
    most = size(own, "max_position_embeddings", 2048)
    has = lambda name: f"{prefix}{name}" in tensors
    return ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=size(own, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=most,
        norm_eps=number(own, "rms_norm_eps", 1e-6, most=1.0),
        rope=rope(own, most),
        qkv_bias=has("self_attn.q_proj.bias"),
        o_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.gate_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight"),
    )


def _aux_layers(
    raw: Json,
    tensors: Tensors,
    target: ModelConfig,
    aux_layer_ids: Sequence[int] | None,
    notes: list[str],
) -> tuple[int, ...]:
    """Returns the target's layers whose inputs are captured.

    Published files say them as inputs of layers at the top, as outputs of layers inside
    `eagle_config`, or not at all: then they are 2, the middle one, and the last but two.
    """
    depth = target.num_layers
    nested = raw.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if aux_layer_ids is not None:
        ids, source = aux_layer_ids, "aux_layer_ids"
    elif raw.get(AUX_KEY) is not None:
        ids, source = raw[AUX_KEY], AUX_KEY
    elif nested.get(AUX_KEY) is not None:
        ids, source = nested[AUX_KEY], f"eagle_config.{AUX_KEY}"
    else:
        ids, source = (2, depth // 2, depth - 3), "the default, for lack of a word in config.json"
    if not isinstance(ids, list | tuple) or not ids or not all(map(is_int, ids)):
        raise ValueError(f"{source}={shown(ids)} must be a list of layers.")
    layers = tuple(one + 1 for one in ids) if source.startswith("eagle_config") else tuple(ids)
    if any(not 0 <= layer <= depth for layer in layers):
        raise ValueError(
            f"{source}={shown(list(ids))} must name inputs of layers from 0 to {depth}, the "
            "target's number of layers; pass aux_layer_ids= to say others."
        )
    needed = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else None
    if needed is not None and needed != len(layers) * target.hidden_size:
        raise ValueError(
            f"fc.weight takes {needed} numbers, and the {len(layers)} captured layers {layers} of "
            f"{target.hidden_size} numbers give {len(layers) * target.hidden_size}; pass "
            "aux_layer_ids= with as many layers as the head was trained with."
        )
    notes.append(f"captures the inputs of layers {', '.join(map(str, layers))} ({source})")
    return layers


def _is_flat(tensors: Tensors) -> bool:
    return any(name.startswith(FLAT_PREFIX) for name in tensors)


def _check(leaves: Any, tensors: Tensors, config: Eagle3Config, folder: Path) -> None:
    """Raises ValueError unless the file has exactly the tensors that the head needs."""
    needed = dict(
        each for leaf in jax.tree.leaves(weights.sources_of(leaves)) for each in leaf.tensors()
    )
    if missing := [name for name in needed if name not in tensors]:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(needed)} tensors of an EAGLE-3 head: "
            f"{_listed(missing)}. Give the folder of a whole head."
        )
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in needed.items()
        if tensors[name].shape != shape
    ]
    wrong += [
        f"{name} is {tensors[name].dtype}, expected floating point"
        for name in needed
        if not jnp.issubdtype(tensors[name].dtype, jnp.floating)
    ]
    if wrong:
        raise ValueError(
            f"{folder} holds {len(wrong)} tensors that are not those of its config.json: "
            f"{_listed(wrong)}."
        )
    known = {*needed, *(["d2t"] if config.layers.vocab_size <= config.target_vocab_size else [])}
    unknown = [name for name in tensors if name not in known and not _IDLE.search(name)]
    if unknown:
        raise ValueError(
            f"{folder} holds {len(unknown)} tensors that an EAGLE-3 head of its config.json has no "
            f"use for: {_listed(unknown)}. Leaving them out would change the drafts."
        )


def _target_ids(offsets: np.ndarray, config: Eagle3Config, folder: Path) -> np.ndarray:
    """Returns the target's number of each of the head's tokens, i32[vocab], from d2t."""
    count, most = config.layers.vocab_size, config.target_vocab_size
    if offsets.shape != (count,) or not np.issubdtype(offsets.dtype, np.integer):
        raise ValueError(
            f"{folder}: d2t is {offsets.dtype}{list(offsets.shape)}, expected a whole number for "
            f"each of the head's {count} tokens."
        )
    ids = np.arange(count, dtype=np.int64) + offsets.astype(np.int64)
    if ids.min() < 0 or ids.max() >= most or len(np.unique(ids)) != count:
        raise ValueError(
            f"{folder}: d2t must lead to {count} different tokens below {most}: it holds what is "
            "added to the head's number of a token."
        )
    return ids.astype(np.int32)


def _listed(names: Sequence[str], most: int = 10) -> str:
    text = ", ".join(name[:200] for name in names[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text
