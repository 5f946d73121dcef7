"""Writes and reads a model as a Hugging Face folder, in bfloat16 or with matrices in int8."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike
from tokenizers import Tokenizer

from benchmarks.demo.pair import END_OF_TEXT, END_OF_TEXT_ID
from specjax.models import int8_config, int8_writing, unparsing
from specjax.models.base import ModelConfig, Params
from specjax.models.weight_files import open_weights
from specjax.models.weight_writing import Tensor, of_array, write_file

TEMPERATURE = 0.5  # so small a model strays at more

# Ours -> theirs. Matrices are [out, in] in both.
_LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}


def write_safetensors(
    path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Writes bfloat16 or float32 arrays in the safetensors container."""
    _write(path, {name: of_array(name, each) for name, each in tensors.items()}, metadata)


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> None:
    partial = path.with_suffix(".partial")
    write_file(partial, tensors, metadata)
    partial.replace(path)  # a reader sees the old file or the new one


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file in a folder that `save_model` wrote."""
    return open_weights(path)


def to_tensors(params: Params, dtype: DTypeLike = ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Returns the weights under their published names, rounded to a dtype."""
    named = {"model.embed_tokens": params["embed_tokens"], "model.norm": params["norm"]}
    for index, layer in enumerate(params["layers"]):
        for ours, theirs in _LAYER_NAMES.items():
            named[f"model.layers.{index}.{theirs}"] = layer[ours]
    return {f"{name}.weight": np.asarray(array).astype(dtype) for name, array in named.items()}


def from_tensors(tensors: dict[str, np.ndarray], num_layers: int) -> Params:
    """Returns float32 weights; the inverse of `to_tensors` but for the rounding."""
    get = lambda name: tensors[f"{name}.weight"].astype(np.float32)
    layer = lambda index: {
        ours: get(f"model.layers.{index}.{theirs}") for ours, theirs in _LAYER_NAMES.items()
    }
    return {
        "embed_tokens": get("model.embed_tokens"),
        "layers": tuple(layer(index) for index in range(num_layers)),
        "norm": get("model.norm"),
    }


def save_model(
    folder: Path,
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    stored: str | None = None,
) -> None:
    """Writes everything a loader of Llama checkpoints asks for.

    Args:
      stored: as of `specjax.save_pretrained`: "int8", or None for bfloat16.
    """
    int8_writing.check_stored(stored)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"license": "PSF-2.0 (training text: the Python standard library)"}
    raw = _config_json(config)
    if stored is None:
        write_safetensors(folder / "model.safetensors", to_tensors(params), metadata)
    else:
        whole = to_tensors(params, np.float32)  # rounded once, to int8
        in_bfloat16 = to_tensors(params)
        chosen = lambda name, each: (
            each if int8_writing.is_stored_so(name, each.shape) else in_bfloat16[name]
        )
        tensors = {name: of_array(name, chosen(name, each)) for name, each in whole.items()}
        raw |= {int8_config.KEY: int8_config.config_of(tensors)}
        _write(folder / "model.safetensors", int8_writing.in_int8(tensors), metadata)
    _write_json(folder / "config.json", raw)
    _write_json(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "temperature": TEMPERATURE,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": END_OF_TEXT_ID,
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def _config_json(config: ModelConfig) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": config.family,
        **unparsing.llama_skeleton(config),
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
