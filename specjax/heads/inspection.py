"""Says what a folder holds, and whether it drafts for a target, without reading its weights."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.drafters.other_vocabulary import recoding
from specjax.heads import kinds
from specjax.heads.namings import mtp_files
from specjax.heads.namings.newest_state_files import MEDUSA_FILES
from specjax.models.base import Model, ModelConfig
from specjax.models.int8_reading import Int8Matrix, stored_parts
from specjax.models.loading import resolve_folder
from specjax.models.opened_folders import open_model
from specjax.models.tensor_checks import check_tensors
from specjax.models.weight_files import open_folder
from specjax.paged import kv_cache


def inspect(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    aux_layer_ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Returns what a folder or a hub name holds, by name, ready for JSON.

    Names and shapes of all tensors are checked, values are not read.

    Args:
      target: what it would draft for; without one, a head's tensors cannot be checked.
      aux_layer_ids: as for `load_drafter`.

    Raises:
      FileNotFoundError: there is no such folder, or a file is absent.
      ValueError: a file is corrupt, it is nothing that specjax loads, or it does not fit the
        target; the message says why.
    """
    folder = resolve_folder(source)
    kind = kinds.kind_in(folder)
    of_target = None if target is None else _target_in(resolve_folder(target))
    found: dict[str, Any] = {"folder": str(folder)}
    if kind is not None and not _is_within_model(folder, kind):
        return found | _of_head(folder, kind, of_target, aux_layer_ids)
    if aux_layer_ids is not None:
        raise ValueError(f"{aux_layer_ids=} is for a head over a target; leave it out.")
    of_model, notes = _of_model(folder, of_target)
    if kind is not None:
        notes.append(f"has a layer that drafts for the model itself: method {kind.method!r}")
    return found | of_model | ({"notes": notes} if notes else {})


def _is_within_model(folder: Path, kind: kinds.HeadKind) -> bool:
    return kind.method == mtp_files.METHOD and mtp_files.is_in_model(folder)


def _target_in(folder: Path) -> Model:
    kind = kinds.kind_in(folder)
    if kind is not None and not _is_within_model(folder, kind):
        raise ValueError(
            f"the target {folder} holds a head of method {kind.method!r}, which drafts for another "
            "model; name the model."
        )
    return open_model(folder, folder.name)[0]


def _of_model(folder: Path, target: Model | None) -> tuple[dict[str, Any], list[str]]:
    """Returns what is said of a model, and notes."""
    model, tensors, notes = open_model(folder, folder.name)
    config, tokenizer = model.config, model.tokenizer
    check_tensors(folder, config, tensors)
    found = {
        "kind": "language model",
        "family": config.family,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "kv_numbers_per_token": kv_cache.numbers_per_token(config),
        "tokenizer": tokenizer is not None,
        "chat_template": tokenizer is not None and tokenizer.chat_template is not None,
    } | _of_tensors(tensors)
    if target is not None:
        by = recoding(target, model)
        count = target.config.vocab_size if by is None else by.num_said
        found |= {"target": target.name, "drafts_tokens": count}
        found["of_target_tokens"] = target.config.vocab_size
    return found, [*notes]


def _of_head(
    folder: Path,
    kind: kinds.HeadKind,
    target: Model | None,
    aux_layer_ids: Sequence[int] | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {"drafter": "head over a target", "method": kind.method}
    if target is None and aux_layer_ids is not None:
        raise ValueError(f"{aux_layer_ids=} needs the target whose layers they are; name it.")
    if target is None:
        found |= _of_tensors(open_folder(folder, MEDUSA_FILES))
        return found | {"notes": ["name its target to see whether it fits, and what it captures"]}
    read = kind.read(folder, target.config, None, aux_layer_ids)
    spec = kind.spec(read.config)
    found |= {
        "target": target.name,
        "captures": list(spec.taps),
        "vocabulary": getattr(read.config, "vocab_size", target.config.vocab_size),
        "of_target_tokens": target.config.vocab_size,
    } | _per_token(spec, target.config)
    most = getattr(read.config, "most_drafts", None)
    if most is not None:
        found["drafts_at_most"] = most
    return found | _of_tensors(open_folder(folder, MEDUSA_FILES)) | {"notes": list(read.notes)}


def _per_token(spec: Any, target: ModelConfig) -> dict[str, int]:
    """Returns the numbers that a head keeps per token: keys and values, and what it stores."""
    own = getattr(spec.config, "layers", None)
    kv = 0 if own is None else kv_cache.numbers_per_token(own)
    stored = spec.bytes_per_token(target, np.int8) - kv
    return {"kv_numbers_per_token": kv} | ({"stored_numbers_per_token": stored} if stored else {})


def _of_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the bytes in the files, and what is loaded in bfloat16 where that is more."""
    bytes_of: collections.Counter[str] = collections.Counter()
    in_int8 = [each for each in tensors.values() if isinstance(each, Int8Matrix)]
    for tensor in tensors.values():
        for part in stored_parts(tensor):
            bytes_of[str(part.dtype)] += part.nbytes
    found = {
        "tensors": len(tensors),
        "bytes": sum(bytes_of.values()),
        "dtypes": [dtype for dtype, _ in bytes_of.most_common()],
    }
    if in_int8:
        found["stored_in_int8"] = len(in_int8)
        found["bytes_in_bfloat16"] = sum(2 * each.size for each in tensors.values())
    return found
