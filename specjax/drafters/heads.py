"""The kinds of heads over a target, and which of them a folder holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from specjax.drafters.base import DrafterSpec
from specjax.drafters.dflash_files import is_dflash, read_dflash
from specjax.drafters.eagle_files import is_eagle3, read_eagle3
from specjax.drafters.head_files import FoundHead
from specjax.drafters.spec import DFlashDrafter, Eagle3Drafter
from specjax.models.base import Json, ModelConfig
from specjax.models.loading import resolve_folder
from specjax.runtime.model_files import find_file, read_json


class HeadKind(NamedTuple):
    """A kind of head.

    Attributes:
      method: as `SpeculationConfig.method` names it.
      is_kind_of: whether a config.json is that of such a head.
      read: (folder, target's config, dtype, aux_layer_ids) -> FoundHead.
      spec: FoundHead.config -> the drafter's spec.
    """

    method: str
    is_kind_of: Callable[[Json], bool]
    read: Callable[..., FoundHead]
    spec: Callable[[Any], DrafterSpec]


KINDS = (
    HeadKind("dflash", is_dflash, read_dflash, DFlashDrafter),
    HeadKind("eagle3", is_eagle3, read_eagle3, Eagle3Drafter),
)


def check_method(source: Any, method: str | None) -> None:
    """Raises ValueError where a config names a kind of head, and a folder holds something else.

    Args:
      source: of a drafter; what is no name or path of a folder is not checked.
      method: of the config.
    """
    named = next((kind for kind in KINDS if kind.method == method), None)
    if named is None or not isinstance(source, str | os.PathLike):
        return
    found = kind_in(resolve_folder(source))
    if found is not named:
        holds = f"a head of method {found.method!r}" if found else "no head over a target"
        raise ValueError(
            f"method={method!r} is named, and {source} holds {holds}; leave the method out, or "
            "name the folder of such a head."
        )


def check_fits(spec: DrafterSpec, target: ModelConfig) -> None:
    """Raises ValueError where a head was made for another target than this."""
    if not isinstance(spec, DFlashDrafter | Eagle3Drafter):
        return
    config, deepest = spec.config, max(spec.config.aux_layers)
    made_for = config.target_hidden_size, config.target_vocab_size
    if made_for != (target.hidden_size, target.vocab_size) or deepest > target.num_layers:
        raise ValueError(
            f"the head is for a target of {made_for[0]} hidden numbers, {made_for[1]} tokens and "
            f"at least {deepest} layers; this one has {target.hidden_size}, {target.vocab_size} "
            f"and {target.num_layers}. Load the head that was trained for it."
        )


def kind_in(folder: Path) -> HeadKind | None:
    """Returns the kind of head that a folder holds; None for a model, or nothing."""
    config = find_file(folder, "config.json")
    raw = {} if config is None else read_json(config)
    return next((kind for kind in KINDS if kind.is_kind_of(raw)), None)
