"""Writes and reads a model as a Hugging Face folder with bfloat16 safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer

from specjax.demo.pair import END_OF_TEXT, END_OF_TEXT_ID
from specjax.models import unparsing
from specjax.models.base import ModelConfig, Params
from specjax.models.weight_writing import of_array, write_file

_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}

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
    partial = path.with_suffix(".partial")
    write_file(partial, {name: of_array(name, each) for name, each in tensors.items()}, metadata)
    partial.replace(path)  # a reader sees the old file or the new one


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file written by `write_safetensors`."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(data[begin:end], _DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def to_tensors(params: Params) -> dict[str, np.ndarray]:
    """Returns the weights under their published names, rounded to bfloat16."""
    named = {"model.embed_tokens": params["embed_tokens"], "model.norm": params["norm"]}
    for index, layer in enumerate(params["layers"]):
        for ours, theirs in _LAYER_NAMES.items():
            named[f"model.layers.{index}.{theirs}"] = layer[ours]
    return {
        f"{name}.weight": np.asarray(array).astype(ml_dtypes.bfloat16)
        for name, array in named.items()
    }


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


def save_model(folder: Path, params: Params, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Writes everything a loader of Llama checkpoints asks for."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"license": "PSF-2.0 (training text: the Python standard library)"}
    write_safetensors(folder / "model.safetensors", to_tensors(params), metadata)
    _write_json(folder / "config.json", _config_json(config))
    _write_json(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "temperature": 0.8,
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
