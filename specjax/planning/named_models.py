"""Models and drafters of plans, by name and without their weights."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from specjax.checkpoints.any_model import config_of
from specjax.config.names import (
    BY_NAME,
    DEMO,
    DEMO_FOLDERS,
    DEMO_HEADS,
    DRAFTERS,
    MATCHING,
    NO_DRAFTER,
    SELF_DRAFTING,
    suggestion,
)
from specjax.configs.heads import HEADS, known_head
from specjax.configs.models import SHAPES, known_shape
from specjax.drafters.self_drafter import SelfDrafter
from specjax.drafters.spec import (
    DrafterSpec,
    HistoryDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from specjax.heads import kinds
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.specs import DFlashDrafter, EagleDrafter
from specjax.models.base import ModelConfig
from specjax.models.hf_config import read_config
from specjax.models.loading import resolve_folder

DEMO_NAMES = {"demo": "demo-draft"}
NGRAM, HISTORY = MATCHING
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HEAD_SPECS = {Eagle3Config: EagleDrafter, DFlashConfig: DFlashDrafter}


def find_config(source: str | os.PathLike[str], also: Sequence[str] = (DEMO,)) -> ModelConfig:
    """Returns the config of a folder, a demo name, a name of `SHAPES` or one on the Hub.

    Of a name on the Hugging Face Hub ("org/name") config.json is read from the Hub's cache on
    disk; else it is the known shape of that name; else config.json is fetched. No weights are.

    Args:
      also: names that an error lists beside folders and shapes.

    Raises:
      FileNotFoundError: no config has this name.
    """
    name = os.fspath(source)
    is_there = Path(name).expanduser().exists() or name in DEMO_FOLDERS
    is_of_hub = not is_there and _HUB_NAME.fullmatch(name) is not None
    if is_of_hub and (folder := _folder_of_hub(name, fetch=False)) is not None:
        return read_config(folder)[0]
    shape = None if is_there and "/" in name else known_shape(name)
    if shape is not None:
        return shape
    if is_of_hub and (folder := _folder_of_hub(name, fetch=True)) is not None:
        return read_config(folder)[0]
    if not is_there:
        reached = ", and its config.json could not be fetched from the Hub" if is_of_hub else ""
        raise FileNotFoundError(
            f"{name!r} is no folder with a config.json, and no known shape{reached}"
            f"{suggestion(name, [*SHAPES, *also])}; expected a folder, "
            f"{', '.join(map(repr, also))}, or one of {', '.join(SHAPES)}."
        )
    return config_of(source)


def _folder_of_hub(name: str, *, fetch: bool) -> Path | None:
    """Returns a folder on disk with the config.json of a repository on the Hub.

    None without huggingface_hub, where it is not in the Hub's cache, or cannot be fetched.
    """
    try:
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(name, "config.json", local_files_only=not fetch)
    except Exception:  # of several kinds, with no base class of their own
        return None
    return Path(path).parent


def find_drafter(
    source: str | os.PathLike[str] | None,
    target: ModelConfig | None = None,
    aux_layer_ids: Sequence[int] | None = None,
) -> DrafterSpec:
    """Returns the drafter of a name, of which no weights are read.

    Args:
      source: None, "none", "ngram", "history", "self-int8", "self-int4", the folder of a head over
        the target or its name on the Hub, a name of `HEADS`, or what `find_config`
        finds.
      target: that it drafts for; None: heads are not looked for, and a draft model keeps its own
        vocabulary.
      aux_layer_ids: layers of the target whose inputs a head in a folder captures, whatever its
        files say.

    Raises:
      FileNotFoundError: there is no such name or folder.
      ValueError: the files are not those of a drafter for this target, or aux_layer_ids is given
        for another drafter.
    """
    name = NO_DRAFTER if source is None else os.fspath(source)
    folder = resolve_folder(name) if name in DEMO_HEADS else Path(name).expanduser()
    if _HUB_NAME.fullmatch(name) and not folder.exists():
        folder = _folder_of_hub(name, fetch=known_shape(name) is None) or folder
    is_folder = name not in (NO_DRAFTER, *BY_NAME) and folder.is_dir()
    if target is not None and is_folder and (kind := kinds.kind_in(folder)) is not None:
        return kind.spec(kind.read(folder, target, None, aux_layer_ids).config)
    if aux_layer_ids is not None:
        raise ValueError(
            f"{aux_layer_ids=} is for the folder of a head over the target, and the drafter is "
            f"{name!r}; leave it out."
        )
    if name == NO_DRAFTER:
        return NoDrafter()
    if name == NGRAM:
        return NgramDrafter()
    if name == HISTORY:
        return HistoryDrafter()
    if name in SELF_DRAFTING:
        return SelfDrafter.named(name)
    if (head := known_head(name)) is not None:
        spec = _HEAD_SPECS[type(head)](head)
        if target is not None:
            kinds.check_fits(spec, target)
        return spec
    own = find_config(DEMO_NAMES.get(name, name), [*DRAFTERS, *HEADS])
    if target is not None:
        # A draft model of another vocabulary is rewritten in the target's.
        own = dataclasses.replace(own, vocab_size=target.vocab_size)
    return ModelDrafter(own)
