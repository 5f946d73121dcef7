"""Reads folders with Medusa heads, and with MLP speculators."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from specjax.config.speculation import MAX_DEPTH
from specjax.heads.equations import medusa, mlp_speculator
from specjax.heads.equations.medusa import OF_VLLM, PUBLISHED, SHARED_HEAD, MedusaConfig
from specjax.heads.equations.mlp_speculator import MlpSpeculatorConfig
from specjax.heads.namings import head_files, vllm_files
from specjax.heads.namings.head_files import FoundHead, Head, Tensors
from specjax.models.base import Json, ModelConfig
from specjax.models.config_values import flag, optional_number, shown, size

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
PREFIX, _MEDUSA_PREFIX = "speculator.", "medusa_heads."
_SHARED = f"{SHARED_HEAD}.weight"
_TIED = re.compile(r"\b(emb|head|ln|proj)\.(\d{1,6})\.(\w+)$")
_NOTE = "reads the last hidden state of the target, after the final norm"


def is_medusa(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds Medusa heads."""
    return raw.get("medusa_num_heads") is not None or raw.get("model_type") == "medusa"


def is_mlp_speculator(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds an MLP speculator."""
    return raw.get("model_type") == "mlp_speculator"


def read_medusa(
    folder: Path,
    target: ModelConfig,
    dtype: DTypeLike | None,
    aux_layer_ids: Sequence[int] | None = None,
) -> FoundHead:
    """Returns the Medusa heads in a folder, for a target; the tensors say how many they are.

    Args:
      dtype: of their weights; None: no weights are read.
      aux_layer_ids: None, as they read what the target's head reads.

    Raises:
      FileNotFoundError: config.json or the weights are absent.
      ValueError: the heads are for another target, a tensor or key is missing, impossible, or
        unknown, or aux_layer_ids is given.
    """
    head = head_files.open_head(folder, "Medusa heads", MEDUSA_FILES)
    with head_files.naming(head):
        head_files.check_reads_last(aux_layer_ids)
        head, config, naming = _parse_medusa(head, target)
    leaves = medusa.weights_of(config, naming)
    note = f"drafts at most {config.most_drafts} tokens, one for each head"
    params = head_files.read_weights(head, config, leaves, dtype)
    return FoundHead(config, params, (_NOTE, note))


def read_mlp_speculator(
    folder: Path,
    target: ModelConfig,
    dtype: DTypeLike | None,
    aux_layer_ids: Sequence[int] | None = None,
) -> FoundHead:
    """Returns the MLP speculator in a folder, for a target; arguments and errors as above."""
    head = head_files.open_head(folder, "an MLP speculator")
    with head_files.naming(head):
        head_files.check_reads_last(aux_layer_ids)
        config = _parse_mlp_speculator(head.raw, target)
    is_prefixed = any(name.startswith(PREFIX) for name in head.tensors)
    leaves = mlp_speculator.weights_of(config, PREFIX if is_prefixed else "")
    if config.is_tied:
        head = head._replace(tensors=_without_copies(head.tensors, is_read=dtype is not None))
    note = f"drafts at most {config.most_drafts} tokens"
    params = head_files.read_weights(head, config, leaves, dtype)
    return FoundHead(config, params, (_NOTE, note))


def _without_copies(tensors: Tensors, *, is_read: bool) -> Tensors:
    """Leaves out copies of tied weights: what torch.save writes has them under each name.

    Args:
      is_read: whether values are compared, too; else shapes alone.
    """
    kept = {}
    for name, tensor in tensors.items():
        first = _first_of(name)
        is_copy = first != name and first in tensors and tensors[first].shape == tensor.shape
        if not is_copy or (is_read and not np.array_equal(tensors[first], tensor)):
            kept[name] = tensor
    return kept


def _first_of(name: str) -> str:
    """Returns the name of the tensor that a tied one is equal to; proj.0 has a size of its own."""
    match = _TIED.search(name)
    if match is None:
        return name
    part, number, of_part = match.groups()
    first = min(int(number), 1 if part == "proj" else 0)
    return f"{name[: match.start()]}{part}.{first}.{of_part}"


def _parse_mlp_speculator(raw: Json, target: ModelConfig) -> MlpSpeculatorConfig:
    width = size(raw, "emb_dim")
    head_files.check_target(width, size(raw, "vocab_size"), target)
    return MlpSpeculatorConfig(
        target_hidden_size=width,
        target_vocab_size=target.vocab_size,
        aux_layers=(target.num_layers,),
        inner_size=size(raw, "inner_dim", 0, least=0) or width,
        most_drafts=size(raw, "n_predict", most=MAX_DEPTH),
        scale_input=flag(raw, "scale_input", False),
        is_tied=flag(raw, "tie_weights", False),
    )


def _parse_medusa(head: Head, target: ModelConfig) -> tuple[Head, MedusaConfig, tuple[str, str]]:
    """Returns the head as it is read, its config and the naming of its tensors."""
    raw = head.raw
    tensors = {name.removeprefix(_MEDUSA_PREFIX): each for name, each in head.tensors.items()}
    if len(tensors) != len(head.tensors):
        raise ValueError(f"two tensors have one name but for {_MEDUSA_PREFIX!r}; expected one.")
    head = head._replace(tensors=tensors)
    if optional_number(raw, "logit_scale") not in (None, 1.0):
        raise ValueError(f"logit_scale={shown(raw['logit_scale'])} is not supported; expected 1.")
    is_of_vllm = any(name.startswith("blocks.") for name in tensors)
    naming = OF_VLLM if is_of_vllm else PUBLISHED
    first = naming[0].format(head=0, block=0)
    width = head_files.shape_of(head, f"{first}.weight")[0]
    of_block = _numbers(naming[0] + ".weight", tensors)
    count = 1 + max(index for index, _ in of_block)
    num_blocks = 1 + max(place for _, place in of_block)
    if max(count, num_blocks) > MAX_DEPTH:
        raise ValueError(f"{count} heads of {num_blocks} blocks are more than {MAX_DEPTH}.")
    head = _with_shared(head, naming[1])
    matrices = [f"{naming[1].format(head=i, blocks=num_blocks)}.weight" for i in range(count)]
    head = vllm_files.with_offsets(head, target, (*matrices, _SHARED))
    maps = head_files.TARGET_IDS in head.tensors.keys() - tensors.keys()
    tensors = head.tensors
    shares_head = _SHARED in tensors and matrices[0] not in tensors
    matrix = _SHARED if shares_head else matrices[0]
    vocab = head_files.shape_of(head, matrix)[0] if matrix in tensors else target.vocab_size
    whole = target.vocab_size if maps else vocab
    head_files.check_target(width, size(raw, "vocab_size", whole), target)
    head_files.check_target(size(raw, "hidden_size", width), whole, target)
    if flag(raw, "medusa_fc_bias", False) and f"{first}.bias" not in tensors:
        raise ValueError(f"medusa_fc_bias=true, and there is no tensor '{first}.bias'.")
    config = MedusaConfig(
        target_hidden_size=width,
        target_vocab_size=whole,
        aux_layers=(target.num_layers,),
        most_drafts=count,
        num_blocks=num_blocks,
        has_bias=f"{first}.bias" in tensors,
        has_head=matrix in tensors,
        shares_head=shares_head,
        own_vocab_size=vocab if maps else None,
    )
    return head, config, naming


def _with_shared(head: Head, of_head: str) -> Head:
    """Returns a head whose one matrix, where config.json says that it has one, has its own name."""
    first = f"{of_head.format(head=0, blocks=0)}.weight"
    if not flag(head.raw, "original_lm_head", False) or first not in head.tensors:
        return head
    others = {name: tensor for name, tensor in head.tensors.items() if name != first}
    return head._replace(tensors=others | {_SHARED: head.tensors[first]})


def _numbers(pattern: str, names: Any) -> list[tuple[int, int]]:
    """Returns head and block of each name that fits a pattern."""
    parts = {"head": r"(\d{1,6})", "block": r"(\d{1,6})"}
    wanted = re.compile(re.escape(pattern).replace(r"\{", "{").replace(r"\}", "}").format(**parts))
    found = (wanted.fullmatch(name) for name in names)
    return [(int(match[1]), int(match[2])) for match in found if match]
