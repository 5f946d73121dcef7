"""Checks the tensors of a folder against those that its model needs, by name, shape and dtype."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.base import ModelConfig
from specjax.models.families import family_of
from specjax.models.weight_files import IDLE, TIED
from specjax.runtime.stack_level import of_the_caller

_MOST_NAMES_LISTED = 10
_LAYER = re.compile(r"^(.*?\.)\d+\.")  # the first number in a tensor's name is its layer's
# Tensors that only a layer for multi-token prediction has.
_OF_PREDICTION = {"eh_proj.weight", "enorm.weight", "hnorm.weight"}
# Tensors that no forward of a model uses: tables that are computed, and what drafts for it.
_OF_OTHERS = re.compile(
    r"rotary_emb\.\w+$|(^|\.)(mtp|nextn|eh_proj|enorm|hnorm|medusa_head|(pre|post)_projection)"
)


def check_tensors(
    folder: str | os.PathLike[str], config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> None:
    """Raises ValueError where tensors are missing, of another shape, or left over in a layer.

    Args:
      tensors: of `folder`, of which no value is read.
    """
    check_sources(family_of(config).sources(config, tensors), tensors, config, Path(folder))


def check_sources(
    sources: Any, tensors: Mapping[str, np.ndarray], config: ModelConfig, folder: Path
) -> None:
    """Raises ValueError unless the files have exactly the tensors that the model needs.

    Args:
      sources: of the model, as `Family.sources` gives them.
    """
    needed = dict(each for source in jax.tree.leaves(sources) for each in source.tensors())
    missing = [name for name in needed if name not in tensors]
    if missing:
        hint = ""
        if TIED in missing:
            hint = (
                " A model whose head is its embedding says tie_word_embeddings: true "
                "in config.json."
            )
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(needed)} tensors of a "
            f"{config.family} model with {config.num_layers} layers: "
            f"{_listed(missing)}. Give the folder of a whole {config.family} model, or "
            f"correct its config.json.{hint}"
        )
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in needed.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise ValueError(
            f"{folder} holds {len(wrong)} tensors of other shapes than its config.json "
            f"says: {_listed(wrong)}. Weights and config.json are of different models."
        )
    _check_dtypes(tensors, needed, folder)
    _check_layers_left_out(tensors, needed, config, folder)
    left_over = [*_unused_in_layers(tensors, needed)]
    if left_over:
        raise ValueError(
            f"{folder} holds {len(left_over)} tensors in layers of a {config.family} "
            f"model that has no use for them: {_listed(left_over)}. Leaving them out "
            "would change the output; correct the options in config.json "
            "(attention_bias, mlp_bias) or give a supported model."
        )
    _check_outside_layers(tensors, needed, config, folder)


def _check_dtypes(
    tensors: Mapping[str, np.ndarray], needed: Mapping[str, Any], folder: Path
) -> None:
    """Raises ValueError where a weight is stored as integers or booleans."""
    wrong = [
        f"{name} is {tensors[name].dtype}"
        for name in needed
        if not jnp.issubdtype(tensors[name].dtype, jnp.floating)
    ]
    if wrong:
        raise ValueError(
            f"{folder} holds {len(wrong)} weights that are not floating point: "
            f"{_listed(wrong)}. Of quantised weights, only matrices in int8 are read, "
            "where config.json says so; use an export in BF16, F16 or F32."
        )


def _check_layers_left_out(
    tensors: Mapping[str, np.ndarray],
    needed: Mapping[str, Any],
    config: ModelConfig,
    folder: Path,
) -> None:
    """Raises ValueError where the file has more whole layers than the config.

    Layers for multi-token prediction also follow the last one; they have an additional
    projection, are not run, and are accepted.
    """
    parts: dict[str, set[str]] = {}
    for name in tensors:
        if match := _LAYER.match(name):
            parts.setdefault(match[0], set()).add(name[match.end() :])
    usual = {name[match.end() :] for name in needed if (match := _LAYER.match(name))}
    matches = [match for name in needed if (match := _LAYER.match(name))]
    used, stems = ({match[group] for match in matches} for group in (0, 1))
    stem_of = lambda layer: layer[: layer.rindex(".", 0, -1) + 1]
    left_out = sorted(
        layer
        for layer, own in parts.items()
        if layer not in used
        and stem_of(layer) in stems
        and own & usual
        and not own & _OF_PREDICTION
    )
    if left_out:
        raise ValueError(
            f"{folder} holds {len(left_out)} layers more than the {config.num_layers} "
            f"that its config.json says: {_listed(left_out)}. Leaving them out would "
            "change the output; correct the number of layers."
        )


def _unused_in_layers(
    tensors: Mapping[str, np.ndarray], needed: Mapping[str, Any]
) -> Iterator[str]:
    """Yields names of tensors in the layers that run that the model neither needs nor may ignore.

    It may ignore what is IDLE. Layers past the last (multi-token prediction) are not run.
    """
    layers = {match[0] for name in needed if (match := _LAYER.match(name))}
    for name in tensors:
        match = _LAYER.match(name)
        if match and match[0] in layers and name not in needed and not IDLE.search(name):
            yield name


def _check_outside_layers(
    tensors: Mapping[str, np.ndarray],
    needed: Mapping[str, Any],
    config: ModelConfig,
    folder: Path,
) -> None:
    """Raises ValueError for a bias of the head, and warns of other tensors that are not used.

    Layers that predict more, heads over the model, and a copy of a tied embedding are used or said
    elsewhere.
    """
    stems = {match[1] for name in needed if (match := _LAYER.match(name))}
    known = {*needed, *([TIED] if config.tie_word_embeddings else [])}
    left = [
        name
        for name in tensors
        if name not in known
        and not ((match := _LAYER.match(name)) and match[1] in stems)
        and not _OF_OTHERS.search(name)
    ]
    if "lm_head.bias" in left:
        raise ValueError(
            f"{folder} holds lm_head.bias, which a {config.family} model does not have: leaving it "
            "out would change the output. Give a supported model."
        )
    if left:
        warnings.warn(
            f"{folder} holds {len(left)} tensors that a {config.family} model does not use: "
            f"{_listed(left)}.",
            stacklevel=of_the_caller(),
        )


def _listed(items: list[str]) -> str:
    shown = ", ".join(item[:200] for item in items[:_MOST_NAMES_LISTED])
    left = len(items) - _MOST_NAMES_LISTED
    return f"{shown} and {left} more" if left > 0 else shown
