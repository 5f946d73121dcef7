"""Reads config.json and generation_config.json of transformers 4 and 5 into a ModelConfig."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.config.sampling import OF_MODEL, SamplingParams
from specjax.models import int8_config
from specjax.models.base import Json, ModelConfig
from specjax.models.config_values import MAX_LAYERS as MAX_LAYERS
from specjax.models.config_values import MAX_SIZE as MAX_SIZE
from specjax.models.config_values import flag, shown, token_id, token_ids
from specjax.models.families import class_names, family_of_type
from specjax.models.unread_keys import Reading, unread, unread_in_generation
from specjax.models.weight_files import ADAPTER, adapter_hint
from specjax.runtime.model_files import find_file, is_of_orbax, read_json

# Names of the mask token of a parallel draft model, PARD's own first.
MASK_KEYS = "pard_token", "ptd_token_id"
# Classes that are language models, by a name that is unknown: `model_type` says which, and the
# tensors must be those. Classifiers and heads over a target have other names.
_MAY_BE_MODEL = re.compile(
    r"(?!.*(eagle|medusa|speculator|dflash|dspark|draft|mtp|reward|value|embedding))"
    r"\w*(ForCausalLM|LMHeadModel|Model)",
    re.IGNORECASE,
).fullmatch
SAMPLING_KEYS = ("do_sample", *OF_MODEL)


class FolderConfig(NamedTuple):
    """What the JSON files of a folder say.

    Attributes:
      notes: on what they say that is not used.
      other_eos_ids: what config.json says ends a text, and generation_config.json does not.
    """

    config: ModelConfig
    generation_defaults: dict[str, Any]
    notes: tuple[str, ...]
    other_eos_ids: tuple[int, ...] = ()


def read_config(folder: str | Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns a folder's config and its sampling defaults; errors as of `read_folder`."""
    return read_folder(folder)[:2]


def read_folder(folder: str | Path) -> FolderConfig:
    """Returns a folder's config, its sampling defaults, and notes on what is not used.

    `eos_token_id` of generation_config.json overrides the one of config.json.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: a file is not JSON, a value is invalid for its key, or specjax does not
        support the model.
    """
    folder = Path(folder)
    path = find_file(folder, "config.json")
    if path is None:
        raise _without_config(folder)
    raw = Reading(read_json(path))
    try:
        config = parse_config(raw)
        if not flag(raw, "is_causal", True):
            raise ValueError(
                "is_causal=false: each token sees those after it, as in models of embeddings; "
                "expected a language model, whose tokens see those before them."
            )
    except ValueError as error:
        raise ValueError(f"{path}: {error!s:.1000}") from error
    notes = []
    if left := unread(raw, raw.asked):
        notes.append(_unused(path, left, f"a {config.family} model"))
    own_class = class_names().get(raw.get("model_type") or "")
    if raw.get("auto_map") and own_class and own_class not in (raw.get("architectures") or ()):
        notes.append(
            f"{path} names a class of its own code (auto_map), which is not run: the model is read "
            f"as {config.family}."
        )
    generation_path = find_file(folder, "generation_config.json")
    if generation_path is None:
        return FolderConfig(config, {}, tuple(notes))
    generation = read_json(generation_path)
    context = config.max_position_embeddings
    if left := unread_in_generation(generation, (*SAMPLING_KEYS, "eos_token_id"), context):
        notes.append(_unused(generation_path, left, "specjax"))
    try:
        others = ()
        if generation.get("eos_token_id") is not None:
            eos = token_ids(generation, config.vocab_size)
            others = tuple(one for one in config.eos_token_ids if one not in eos)
            config = dataclasses.replace(config, eos_token_ids=eos)
        return FolderConfig(config, sampling_defaults(generation), tuple(notes), others)
    except ValueError as error:
        raise ValueError(f"{generation_path}: {error!s:.1000}") from error


def _unused(path: Path, keys: Sequence[str], reader: str) -> str:
    return (
        f"{path} has keys that {reader} does not read: {', '.join(keys)[:600]}. They are not used."
    )


def _without_config(folder: Path) -> FileNotFoundError:
    """Returns the error for a folder without config.json."""
    if is_of_orbax(folder):
        return FileNotFoundError(
            f"{folder} holds no config.json but an Orbax checkpoint; load it with "
            "specjax.load_orbax."
        )
    if find_file(folder, ADAPTER) is not None:
        return FileNotFoundError(adapter_hint(folder))
    return FileNotFoundError(
        f"{folder} holds no config.json; give a folder in Hugging Face format "
        "(config.json and model.safetensors, as save_pretrained writes)."
    )


def with_eos_of(config: ModelConfig, tokenizer: Any) -> tuple[ModelConfig, str | None]:
    """Returns a config whose texts end at its tokenizer's eos_token too, as those of vLLM do.

    Args:
      tokenizer: specjax.text.tokenization.Tokenizer, or None.

    Returns:
      The config, and a note where the model has no such token.
    """
    if tokenizer is None:
        return config, None
    own = tokenizer.eos_token_id
    if own is None or own in config.eos_token_ids:
        return config, None
    if own >= config.vocab_size:
        note = (
            f"the tokenizer's eos_token {tokenizer.eos_token!r:.50} is token {own}, and the model "
            f"has {config.vocab_size} tokens: it ends no text. The tokenizer may be of another "
            "model."
        )
        return config, note
    return dataclasses.replace(config, eos_token_ids=(*config.eos_token_ids, own)), None


def sampling_defaults(generation: Json) -> dict[str, Any]:
    """Returns the sampling parameters that a generation_config.json sets.

    Raises:
      ValueError: a value is none that its parameter can have.
    """
    defaults = {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}
    flag(generation, "do_sample", True)
    SamplingParams().filled(defaults)
    return defaults


def parse_config(raw: Json) -> ModelConfig:
    """Returns the ModelConfig that the contents of a config.json describe.

    Raises:
      ValueError: a model_type, option or quantisation that specjax does not support, or a
        value that is invalid for its key.
    """
    model_type = _model_type(raw)
    family = family_of_type(model_type)
    assert family is not None
    int8_config.strategies(raw)  # refuses weights in few bits that are not read
    try:
        config = family.parse(raw | {"model_type": model_type})
    except KeyError as error:
        raise ValueError(
            f"key {error.args[0]!r} is missing, which every {model_type} config has; add it."
        ) from error
    mask = _mask_token_id(raw, config.vocab_size)
    return config if mask is None else dataclasses.replace(config, mask_token_id=mask)


def _mask_token_id(raw: Json, vocab_size: int) -> int | None:
    """Returns the mask token of a parallel draft model, None for other models."""
    if raw.get("pard2") or raw.get("spd_type") == "pard2":
        raise ValueError(
            "PARD-2 drafts from the target's hidden states, which is not supported; use a PARD "
            "model."
        )
    said = {key: token_id(key, raw.get(key), vocab_size) for key in MASK_KEYS}
    masks = {each for each in said.values() if each is not None}
    if len(masks) > 1:
        differ = " and ".join(f"{key}={token}" for key, token in said.items())
        raise ValueError(f"{differ} are two mask tokens; keep the one it was trained with.")
    return next(iter(masks), None)


def _model_type(raw: Json) -> str:
    """Returns the model_type; refuses classes other than language models (such as drafters)."""
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) for name in architectures
    ):
        raise ValueError(f"architectures={shown(architectures)} must be a list of names.")
    known = class_names()
    supported = ", ".join(f"{key} ({name})" for key, name in known.items())
    # Older exports spell classes in other capitals.
    by_class = {name.lower(): key for key, name in known.items()}
    classes = [name.lower() for name in architectures]
    model_type = raw.get("model_type") or by_class.get((classes or [""])[0])
    if not isinstance(model_type, str) or model_type not in known:
        raise ValueError(
            f"model_type={shown(model_type)} with architectures={shown(architectures)} is not "
            f"supported; expected one of {supported}. A program adds a family of its own with "
            "specjax.models.register; docs/adding-a-model.md says how."
        )
    if not classes or known[model_type].lower() in classes:
        return model_type
    others = [by_class[name] for name in classes if name in by_class]
    if others:
        raise ValueError(
            f"architectures={shown(architectures)} is the class of model_type={others[0]!r}, and "
            f"model_type={model_type!r} has {known[model_type]}: they are of two families. "
            "Correct the one that is wrong."
        )
    if not all(map(_MAY_BE_MODEL, classes)):
        raise ValueError(
            f"architectures={shown(architectures)} is not supported as a language model; "
            f"expected one of "
            f"{supported}. A drafter's folder is loaded with specjax.load_drafter."
        )
    return model_type
