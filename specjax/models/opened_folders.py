"""A folder in Hugging Face format as a model without its weights, and what its files say twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.models.base import Model, ModelConfig
from specjax.models.families import family_of
from specjax.models.hf_config import read_folder, with_eos_of
from specjax.models.weight_files import ADAPTER, open_folder
from specjax.runtime.model_files import find_file, read_json
from specjax.text.tokenization import Tokenizer

_SETTINGS, _SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_ROWS_COMPARED = 4096  # of an embedding and a head at a time


def open_model(folder: Path, name: str) -> tuple[Model, Mapping[str, np.ndarray], tuple[str, ...]]:
    """Returns the model of a folder without its weights, its tensors, and notes on what its files
    say that is not used.

    The config says what was resolved of facts in two places: docs/two-places.md has them.

    Raises:
      FileNotFoundError, ValueError: as of `load_model`; tensors are not checked.
    """
    read = read_folder(folder)
    # Read first, so that its errors come before those of the weights.
    tokenizer = Tokenizer.from_folder(folder)
    config, note = with_eos_of(read.config, tokenizer)
    tensors = open_folder(folder)
    notes = [*read.notes, *filter(None, [note, _adapter_note(folder)])]
    if lost := [one for one in read.other_eos_ids if one not in config.eos_token_ids]:
        notes.append(
            f"{folder}/config.json says eos_token_id={lost}, which generation_config.json does not "
            "name: a text does not end there."
        )
    if tokenizer is not None:
        notes += _tokenizer_notes(folder, config, tokenizer)
    if stores_own_head(config, tensors):
        config = dataclasses.replace(config, tie_word_embeddings=False)
        notes.append(
            f"{folder}/config.json says tie_word_embeddings: true, and the weights hold a head "
            "that is not the embedding: the stored head is used, as in transformers. Correct "
            "config.json."
        )
    model = Model(
        config=config,
        params={},
        tokenizer=tokenizer,
        name=name,
        generation_defaults=read.generation_defaults,
        folder=str(folder.resolve()),
    )
    return model, tensors, tuple(notes)


def stores_own_head(config: ModelConfig, tensors: Mapping[str, Any]) -> bool:
    """Whether weights hold a head that differs from the embedding, of a config that ties both."""
    if not config.tie_word_embeddings:
        return False
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    sources = family_of(config).sources(untied, tensors)
    if not isinstance(sources, dict):
        return False
    names = [getattr(sources.get(key), "name", "") for key in ("embed_tokens", "lm_head")]
    if any(name not in tensors for name in names):
        return False
    embedding, head = (tensors[name] for name in names)
    if embedding.shape != head.shape:
        return True
    for start in range(0, len(embedding.shape) and embedding.shape[0], _ROWS_COMPARED):
        rows = slice(start, start + _ROWS_COMPARED)
        if not np.array_equal(np.asarray(embedding[rows]), np.asarray(head[rows])):
            return True
    return False


def _tokenizer_notes(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    """Returns what a tokenizer's files say that the model does not, or that they say twice."""
    notes = []
    if tokenizer.vocab_size > config.vocab_size:
        notes.append(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens and the model "
            f"{config.vocab_size}; prompts with one of the others are refused."
        )
    files = {name: find_file(folder, name) for name in (_SETTINGS, _SPECIAL)}
    said = {name: read_json(path) if path else {} for name, path in files.items()}
    settings, special = said.values()
    most = settings.get("model_max_length")
    if isinstance(most, int) and 0 < most < config.max_position_embeddings:
        notes.append(
            f"{files[_SETTINGS]} says model_max_length={most}, and config.json a context of "
            f"{config.max_position_embeddings} tokens, which holds."
        )
    text = lambda value: value.get("content") if isinstance(value, dict) else value
    both = {key: (text(special[key]), text(settings[key])) for key in special if key in settings}
    differ = [key for key, (one, other) in both.items() if one and other and one != other]
    if differ:
        notes.append(
            f"{files[_SPECIAL]} says another {', '.join(differ)[:200]} than {_SETTINGS}, which is "
            "used."
        )
    return notes


def _adapter_note(folder: Path) -> str | None:
    """Returns what to say of an adapter beside a model, None where there is none."""
    if find_file(folder, ADAPTER) is None:
        return None
    return f"{folder} holds a model and {ADAPTER} of PEFT: the adapter is not applied."
